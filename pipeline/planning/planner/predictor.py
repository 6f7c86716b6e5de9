"""The predictor of iteration times: exact for the model below, and vectorised.

An iteration is divided into ``m`` equal micro-batches. A stage of duration ``t`` (alone, on its
pool) takes ``t / m`` for each. It starts when its first input exists and its pool is free, works at
a constant rate, and waits if its input is slower. Because stages only slow down along the way (the
gaps between their outputs never shrink), the last output is bound either by the start or by the
last input: finish = max(start + t, finish of the last input + t / m).

A stage without inputs may be ready with its first micro-batch later than that
(``PlacementStage.lead``): samples that are decoded together end with the longest of them. If it
shares its pool, it produces micro-batches one after another, so more of them take longer
(``PlacementStage.again``).

A stage in several pools begins when all of them are free. Stages that share a pool with it pass
their output on as a whole.

An iteration ends when all stages are done and the new weights have arrived; then the next one
begins in all pools at once. A pool that changes to a stage loads it as soon as the pool is free.

The test of this module compares it with the recurrence over all micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.planning.planner.problem import (
    Placement,
    PlacementProblem,
    PoolStages,
    pools_of_jobs,
    pools_of_stages,
)

Array = np.ndarray
STEADY_ITERATIONS = 32
"""Number of iterations before the time between iterations is measured, and over which it is
averaged."""


@dataclass(frozen=True)
class PlacementPrediction:
    """The predicted times of placements; every array has the shape of the allocations."""

    total_s: Array
    """Duration of an iteration; infinite if a stage cannot run."""
    start_s: Array
    """Start of each stage, ``[stages, ...]``."""
    finish_s: Array
    """End of each stage, ``[stages, ...]``."""
    busy_s: Array
    """Seconds of work of each stage, ``[stages, ...]``."""
    sync_s: Array
    """Seconds to transfer the weights."""


class Predictor:
    """Predicts times for one problem, with tables that are built once."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self._index = {stage.name: s for s, stage in enumerate(problem.stages)}
        kinds = problem.kinds
        self._most = np.array([kind.gpus for kind in kinds])[:, None]
        self.tables = [
            [problem.rate_table(stage, k) for k in range(len(kinds))] for stage in problem.stages
        ]
        """Rates ``[gpus + 1]`` by stage and kind."""
        self.best = [[np.maximum.accumulate(table) for table in row] for row in self.tables]
        """Best rate of any number of GPUs up to ``[gpus + 1]``, by stage and kind."""
        self.groups = lockstep_groups(problem)
        """Stage numbers that work in lockstep, in order; most groups have one stage."""
        self._edges = [
            (self._index[name], s) for s, stage in enumerate(problem.stages) for name in stage.after
        ]
        ends = problem.sync
        known = ends is not None and all(name in self._index for name in ends)
        self.source = self._index[ends[0]] if ends and known else None
        """The stage that produces the weights; None if no weights move."""
        self.target = self._index[ends[1]] if ends and known else None
        """The stage that loads the weights."""
        self._switch = np.array(
            [[stage.switch_s.get(kind.name, 0.0) for kind in kinds] for stage in problem.stages]
        )
        self._sync = np.array(
            [[problem.sync_s.get((a.name, b.name), 0.0) for b in kinds] for a in kinds]
        )

    def predict(self, placement: Placement) -> PlacementPrediction:
        """Return the prediction for one placement, with arrays of shape ``[]`` and ``[stages]``."""
        gpus = [np.array(pool)[:, None] for pool in placement.gpus]
        many = self.predict_batch(placement.pools, gpus, placement.num_chunks)
        return PlacementPrediction(*(value[..., 0] for value in vars(many).values()))

    def predict_batch(
        self,
        pools: PoolStages,
        gpus: Sequence[Array],
        chunks: int | Array,
        counted_gpus: Sequence[Array] | None = None,
        free: Sequence[Array] | None = None,
        weights_s: float = 0.0,
    ) -> PlacementPrediction:
        """Return predictions for many allocations of the same pools.

        Args:
            pools: stage numbers of each pool.
            gpus: GPUs by pool, int ``[kinds, n]``.
            chunks: micro-batches per iteration, one number or int ``[n]``.
            counted_gpus: by pool int ``[kinds, n]``, the GPUs whose switching and transfers count,
                and that must be of one kind if pools do not mix; all by default. With fewer than
                ``gpus`` the prediction is a lower bound for every allocation between the two.
            free: time ``[n]`` at which each pool is free; 0 by default.
            weights_s: time at which the weights arrive at the stage that loads them.
        """
        problem, count = self.problem, gpus[0].shape[1]
        counted_gpus = gpus if counted_gpus is None else counted_gpus
        home, stages = pools_of_stages(pools), problem.stages
        on = {places: self._together(places, gpus, counted_gpus) for places in set(home.values())}
        busy = np.stack([self.duration(s, *on[home[s]]) for s in range(len(stages))])
        start, finish, first = np.zeros((3, len(stages), count))
        free = [np.zeros(count) for _ in pools] if free is None else list(free)
        for group in self.groups:
            begin, last = np.zeros(count), np.zeros(count)
            if self.target in group:
                begin = begin + weights_s
            for member in group:
                for name in stages[member].after:
                    source = self._index[name]
                    if source in group:
                        continue
                    streamed = stages[member].streams and in_separate_pools(home, source, member)
                    begin = np.maximum(begin, first[source] if streamed else finish[source])
                    last = np.maximum(last, finish[source])
            here = {place for member in group for place in home[member]}
            for pool in here:
                ready = free[pool]
                if not set(pools[pool]) <= set(group):
                    mine = [s for s in group if pool in home[s]]
                    ready = ready + self._switching(mine, counted_gpus[pool])
                begin = np.maximum(begin, ready)
            work = self._group_time(group, home, busy)
            overhead = max(stages[member].chunk_s for member in group)
            more = self.num_transfers(group, home, chunks) * overhead
            shared = is_time_shared(group, home)
            if shared and stages[group[0]].again:
                work = work * (1 + (chunks - 1) * stages[group[0]].again)
            time = work + more
            end = np.maximum(begin + time, last + time / chunks)
            ahead: float | Array = 1 / chunks
            if stages[group[0]].lead and not shared:
                most, own = on[home[group[0]]]
                # Fewer GPUs may finish their first part earlier, but none before its share.
                is_fixed = (most == own).all(0)
                ahead = np.where(
                    is_fixed, stages[group[0]].first_chunk_share(chunks, own.sum(0)), ahead
                )
            ready = begin + work * ahead + more / chunks
            for member in group:
                start[member], finish[member], first[member] = begin, end, ready
            for pool in here:
                free[pool] = end
        moved = self._moving(home, counted_gpus)
        total = finish.max(0)
        if self.source is not None:
            # Weights move as soon as they are trained, while other stages may still run.
            total = np.maximum(total, finish[self.source] + moved)
        for job in pools_of_jobs(pools):
            if not problem.may_mix([s for p in job for s in pools[p]]):
                own = np.sum([counted_gpus[p] for p in job], axis=0)
                total = np.where(problem.is_single_job(own), total, np.inf)
        if problem.shared:
            total = np.where(
                problem.exceeds_shared_gpus(np.sum(list(counted_gpus), axis=0)), np.inf, total
            )
        if problem.most_jobs:
            total = np.where(problem.exceeds_job_limits(pools, counted_gpus), np.inf, total)
        return PlacementPrediction(total, start, finish, busy, moved)

    def steady_period_s(self, placement: Placement, stale: int) -> float:
        """Return the seconds per iteration if rollouts use weights that are ``stale`` iterations
        old, and every pool begins the next iteration as soon as it is free.

        A pool finishes one iteration before it starts the next, so waiting in one is not filled
        with work of another.
        """
        pools, arrived = placement.pools, list[float]()
        gpus = [np.array(pool)[:, None] for pool in placement.gpus]
        free = [np.zeros(1) for _ in pools]
        for i in range(2 * STEADY_ITERATIONS):
            weights_s = arrived[i - 1 - stale] if i > stale else 0.0
            found = self.predict_batch(
                pools, gpus, placement.num_chunks, free=free, weights_s=weights_s
            )
            free = [found.finish_s[list(pool)].max(0) for pool in pools]
            last = found.finish_s.max() if self.source is None else found.finish_s[self.source]
            arrived.append(float((last + found.sync_s).max()))
        return (arrived[-1] - arrived[STEADY_ITERATIONS - 1]) / STEADY_ITERATIONS

    def _together(
        self, places: Sequence[int], gpus: Sequence[Array], allocated: Sequence[Array]
    ) -> tuple[Array, Array]:
        """Return the GPUs of some pools, and the counted ones among them, ``[kinds, n]`` each."""
        if len(places) == 1:
            return gpus[places[0]], allocated[places[0]]
        own = np.sum([allocated[p] for p in places], axis=0)
        # GPUs that are not assigned yet may be counted for several pools.
        return np.minimum(
            np.sum([gpus[p] for p in places], axis=0), np.maximum(own, self._most)
        ), own

    def num_transfers(
        self, group: Sequence[int], home: Mapping[int, Sequence[int]], chunks: int | Array
    ) -> int | Array:
        """Return the number of micro-batches that a group exchanges with other pools.

        It is ``chunks`` if the group streams, 1 if it only passes on the whole, and 0 if all its
        inputs and outputs stay in its pool.
        """
        passed = [
            (a, b)
            for a, b in self._edges
            if (a in group) != (b in group) and in_separate_pools(home, a, b)
        ]
        if any(self.problem.stages[target].streams for _, target in passed):
            return chunks
        return min(1, len(passed))

    def duration(self, stage: int, gpus: Array, allocated: Array | None = None) -> Array:
        """Return the seconds of a stage alone on GPUs ``[kinds, n]``; infinite if it cannot run.

        With fewer ``allocated`` GPUs it is a lower bound for any number of each kind in between.
        """
        allocated = gpus if allocated is None else allocated
        parts = self.rates(stage, gpus, allocated)
        rate, fastest = parts.sum(0), parts.max(0)
        if not self.problem.stages[stage].divisible:
            rate = fastest
        else:
            mixed = rate * np.where((parts > 0).sum(0) > 1, self.problem.mixing, 1.0)
            # All GPUs of a pool work; of unassigned ones a kind may be left out.
            rate = np.where((gpus == allocated).all(0), mixed, np.maximum(mixed, fastest))
            rate = np.where(((allocated > 0) & (parts == 0)).any(0), 0.0, rate)
        with np.errstate(divide="ignore"):
            return 1.0 / rate

    def rates(self, stage: int, gpus: Array, allocated: Array) -> Array:
        """Return iterations per second of a stage on its GPUs of each kind ``[kinds, n]``; with
        fewer ``allocated`` GPUs the best rate of any number up to ``gpus``."""
        kinds = zip(self.tables[stage], self.best[stage], gpus, allocated, strict=True)
        return np.stack([np.where(n == own, t[n], best[n]) for t, best, n, own in kinds])

    def min_switch_s(self, group: Sequence[int], pool: Sequence[int]) -> float:
        """Return the minimum seconds in which a pool changes to a group; 0 if it has no other
        stages."""
        if set(pool) <= set(group):
            return 0.0
        mine = [s for s in group if s in pool]
        usable = [
            k
            for k in range(len(self.problem.kinds))
            if all(np.any(self.tables[s][k] > 0) for s in mine)
        ]
        return float(min((self._switch[mine, k].sum() for k in usable), default=0.0))

    def min_sync_s(self, pools: PoolStages) -> float:
        """Return the minimum seconds to transfer the weights."""
        ends = self._sync_ends(pools_of_stages(pools))
        if ends is None:
            return 0.0
        source, target = (
            [k for k in range(len(self.problem.kinds)) if np.any(self.tables[s][k] > 0)]
            for s in (self._index[name] for name in self.problem.sync or ())
        )
        return float(min((self._sync[a, b] for a in source for b in target), default=0.0))

    def _group_time(
        self, group: Sequence[int], home: Mapping[int, tuple[int, ...]], busy: Array
    ) -> Array:
        """Return the time of a cycle: in one pool its stages take turns; over pools, two halves of
        each micro-batch alternate.

        A step then takes as long as the slowest side, or as both halves need for all sides, two at
        a time. Once per micro-batch a half has nothing to overlap with.
        """
        if len(group) == 1:
            return busy[group[0]]
        sums: dict[tuple[int, ...], Array] = {}
        for member in group:
            places = home[member]
            sums[places] = sums.get(places, 0.0) + busy[member]
        slowest = np.max(list(sums.values()), axis=0)
        whole = np.sum(list(sums.values()), axis=0)
        with np.errstate(invalid="ignore"):
            alone = 2 * self.problem.cycle_steps
            overlapped = np.maximum(
                slowest + (whole - slowest) / alone, whole / 2 + slowest / alone
            )
        return np.where(np.isfinite(whole), overlapped, np.inf)

    def _switching(self, stages: Sequence[int], gpus: Array) -> Array:
        each = self._switch[list(stages)].sum(0)
        return np.where(gpus > 0, each[:, None], 0.0).max(0)

    def _sync_ends(
        self, home: Mapping[int, tuple[int, ...]]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        if self.source is None or self.problem.sync is None:
            return None
        source, target = (self._index[name] for name in self.problem.sync)
        return (home[source], home[target]) if in_separate_pools(home, source, target) else None

    def _moving(self, home: Mapping[int, tuple[int, ...]], gpus: Sequence[Array]) -> Array:
        ends = self._sync_ends(home)
        if ends is None:
            return np.zeros(gpus[0].shape[1])
        source, target = (self._together(places, gpus, gpus)[1] > 0 for places in ends)
        pairs = source[:, None] & target[None]
        return np.where(pairs, self._sync[..., None], 0.0).max((0, 1))


def in_separate_pools(home: Mapping[int, Sequence[int]], a: int, b: int) -> bool:
    """Return True if two stages share no pool."""
    return not set(home[a]) & set(home[b])


def is_time_shared(group: Sequence[int], home: Mapping[int, Sequence[int]]) -> bool:
    """Return True if other stages of its pools run between the parts of a group. Stages that use
    the whole job do not count, because they run after all parts."""
    here = {place for member in group for place in home[member]}
    others = [places for s, places in home.items() if s not in group and here & set(places)]
    return any(len(places) <= max(len(home[s]) for s in group) for places in others)


def lockstep_groups(problem: PlacementProblem) -> list[tuple[int, ...]]:
    """Return stage numbers by cycle: neighbours of the same cycle together, all others alone."""
    groups: list[tuple[int, ...]] = []
    for s, stage in enumerate(problem.stages):
        if groups and stage.cycle is not None:
            before = groups[-1]
            if problem.stages[before[-1]].cycle == stage.cycle:
                groups[-1] = (*before, s)
                continue
        groups.append((s,))
    return groups
