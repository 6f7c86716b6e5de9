"""How long an iteration takes under a placement. Exact for the model below, and vectorised.

An iteration is passed on in ``m`` equal micro-batches. A stage of duration ``t`` (alone, on its
pool) takes ``t / m`` for each. It starts when its first input is there and its pool is free, works
at a constant rate, and waits where its input comes slower. Since stages only ever slow down on the
way (the gaps between their outputs never shrink), the last output is bound either by the start or
by the last input:

    finish = max(start + t, finish of the last input + t / m)

A stage that takes nothing may be ready with its first micro-batch later than that (``Stage.lead``):
samples that are decoded side by side end when the longest of them does. One that shares its pool
makes micro-batches one after another, so more of them take longer (``Stage.again``).

An iteration ends when all stages are done and the new weights have arrived; the next one then
begins in all pools at once. A pool that changes to a stage brings it in as soon as it is free.

The test of this module checks that against the recurrence over all micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.planning.planner.problem import Placement, Problem

Array = np.ndarray


@dataclass(frozen=True)
class Prediction:
    """What a placement gives; every array has the shape of the allocations asked about."""

    total_s: Array
    """Duration of an iteration; infinite where a stage cannot run."""
    start_s: Array
    """``[stages, ...]`` when each stage begins."""
    finish_s: Array
    """``[stages, ...]`` when each stage ends."""
    busy_s: Array
    """``[stages, ...]`` how long each stage computes."""
    sync_s: Array
    """Bringing the weights over."""


class Predictor:
    """Predictions for one problem; tables are made once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._index = {stage.name: s for s, stage in enumerate(problem.stages)}
        kinds = problem.kinds
        self.tables = [
            [problem.table(stage, k) for k in range(len(kinds))] for stage in problem.stages
        ]
        """By stage and kind: rates ``[gpus + 1]``."""
        self.best = [[np.maximum.accumulate(table) for table in row] for row in self.tables]
        """By stage and kind: the most that any number of GPUs up to ``[gpus + 1]`` gives."""
        self.groups = cycles(problem)
        """Stage numbers that work in lockstep, in order; most groups hold one stage."""
        self._edges = [
            (self._index[name], s) for s, stage in enumerate(problem.stages) for name in stage.after
        ]
        ends = problem.sync
        known = ends is not None and all(name in self._index for name in ends)
        self.source = self._index[ends[0]] if ends and known else None
        """The stage that makes the weights; None where none are moved."""
        self._switch = np.array(
            [[stage.switch_s.get(kind.name, 0.0) for kind in kinds] for stage in problem.stages]
        )
        self._sync = np.array(
            [[problem.sync_s.get((a.name, b.name), 0.0) for b in kinds] for a in kinds]
        )

    def one(self, placement: Placement) -> Prediction:
        """The prediction for a placement, with arrays of shape ``[]`` and ``[stages]``."""
        gpus = [np.array(pool)[:, None] for pool in placement.gpus]
        many = self.many(placement.pools, gpus, placement.chunks)
        return Prediction(*(value[..., 0] for value in vars(many).values()))

    def many(
        self,
        pools: Sequence[Sequence[int]],
        gpus: Sequence[Array],
        chunks: int | Array,
        held: Sequence[Array] | None = None,
    ) -> Prediction:
        """Predictions for many allocations of the same pools.

        Args:
            pools: stage numbers of each pool.
            gpus: by pool int ``[kinds, n]``.
            chunks: micro-batches per iteration, one number or int ``[n]``.
            held: by pool int ``[kinds, n]``, the GPUs whose switching and transfers count, and
                that must be of one kind where pools do not mix; all by default. With fewer than
                ``gpus`` the prediction is a lower bound for every allocation between the two.
        """
        problem, count = self.problem, gpus[0].shape[1]
        held = gpus if held is None else held
        pool_of = {stage: i for i, pool in enumerate(pools) for stage in pool}
        stages = problem.stages
        busy = np.stack([self.duration(s, gpus[p], held[p]) for s, p in sorted(pool_of.items())])
        start, finish, first = np.zeros((3, len(stages), count))
        free = [np.zeros(count) for _ in pools]
        for group in self.groups:
            begin, last = np.zeros(count), np.zeros(count)
            for member in group:
                for name in stages[member].after:
                    source = self._index[name]
                    if source in group:
                        continue
                    streamed = stages[member].streams and pool_of[source] != pool_of[member]
                    begin = np.maximum(begin, first[source] if streamed else finish[source])
                    last = np.maximum(last, finish[source])
            here = {pool_of[member] for member in group}
            for pool in here:
                ready = free[pool]
                if not set(pools[pool]) <= set(group):
                    mine = [s for s in group if pool_of[s] == pool]
                    ready = ready + self._switching(mine, held[pool])
                begin = np.maximum(begin, ready)
            work = self._group_time(group, pool_of, busy)
            overhead = max(stages[member].chunk_s for member in group)
            more = self.passes(group, pool_of, chunks) * overhead
            shared = any(not set(pools[pool]) <= set(group) for pool in here)
            if shared and stages[group[0]].again:
                work = work * (1 + (chunks - 1) * stages[group[0]].again)
            time = work + more
            end = np.maximum(begin + time, last + time / chunks)
            ahead: float | Array = 1 / chunks
            if stages[group[0]].lead and not shared:
                ahead = stages[group[0]].ahead(chunks, gpus[pool_of[group[0]]].sum(0))
            ready = begin + work * ahead + more / chunks
            for member in group:
                start[member], finish[member], first[member] = begin, end, ready
            for pool in here:
                free[pool] = end
        moved = self._moving(pool_of, held)
        total = finish.max(0)
        if self.source is not None:
            # Weights move as soon as they are trained, beside stages that end later.
            total = np.maximum(total, finish[self.source] + moved)
        for members, own in zip(pools, held, strict=True):
            if not problem.may_mix(members):
                broken = [kind.whole(n) != n for kind, n in zip(problem.kinds, own, strict=True)]
                total = np.where(((own > 0).sum(0) > 1) | np.any(broken, 0), np.inf, total)
        return Prediction(total, start, finish, busy, moved)

    def passes(
        self, group: Sequence[int], pool_of: Mapping[int, int], chunks: int | Array
    ) -> int | Array:
        """Micro-batches that a group takes from or gives to other pools.

        ``chunks`` where it streams, 1 where it only hands over the whole, 0 where all that it
        takes and gives stays in its pool.
        """
        passed = [
            (a, b)
            for a, b in self._edges
            if (a in group) != (b in group) and pool_of[a] != pool_of[b]
        ]
        if any(self.problem.stages[target].streams for _, target in passed):
            return chunks
        return min(1, len(passed))

    def duration(self, stage: int, gpus: Array, held: Array | None = None) -> Array:
        """Seconds of a stage alone on GPUs ``[kinds, n]``; infinite where it cannot run.

        With fewer ``held``: not more than on any number of GPUs of each kind between the two.
        """
        held = gpus if held is None else held
        parts = self.rates(stage, gpus, held)
        rate, fastest = parts.sum(0), parts.max(0)
        if not self.problem.stages[stage].divisible:
            rate = fastest
        else:
            mixed = rate * np.where((parts > 0).sum(0) > 1, self.problem.mixing, 1.0)
            # All of a pool work; of what is not settled yet a kind could be left out.
            rate = np.where((gpus == held).all(0), mixed, np.maximum(mixed, fastest))
            rate = np.where(((held > 0) & (parts == 0)).any(0), 0.0, rate)
        with np.errstate(divide="ignore"):
            return 1.0 / rate

    def rates(self, stage: int, gpus: Array, held: Array) -> Array:
        """Iterations per second of a stage on its GPUs of each kind ``[kinds, n]``; with fewer
        ``held`` the most that a number up to ``gpus`` gives."""
        kinds = zip(self.tables[stage], self.best[stage], gpus, held, strict=True)
        return np.stack([np.where(n == own, t[n], best[n]) for t, best, n, own in kinds])

    def least_switch(
        self, group: Sequence[int], pools: Sequence[Sequence[int]], pool: int
    ) -> float:
        """Seconds that a pool needs at least to change to a group; 0 if it holds nothing else."""
        if set(pools[pool]) <= set(group):
            return 0.0
        mine = [s for s in group if s in pools[pool]]
        usable = [
            k
            for k in range(len(self.problem.kinds))
            if all(np.any(self.tables[s][k] > 0) for s in mine)
        ]
        return float(min((self._switch[mine, k].sum() for k in usable), default=0.0))

    def least_sync(self, pools: Sequence[Sequence[int]]) -> float:
        """Seconds that bringing the weights over takes at least."""
        ends = self._sync_ends({s: i for i, pool in enumerate(pools) for s in pool})
        if ends is None:
            return 0.0
        source, target = (
            [k for k in range(len(self.problem.kinds)) if np.any(self.tables[s][k] > 0)]
            for s in (self._index[name] for name in self.problem.sync or ())
        )
        return float(min((self._sync[a, b] for a in source for b in target), default=0.0))

    def _group_time(self, group: Sequence[int], pool_of: dict[int, int], busy: Array) -> Array:
        """A cycle in one pool takes turns; over pools, two halves of each micro-batch swap places.

        A step then takes as long as the slowest side, or as both halves need for their way through
        all sides, two at a time. Once per micro-batch a half has nothing to overlap with.
        """
        if len(group) == 1:
            return busy[group[0]]
        sums: dict[int, Array] = {}
        for member in group:
            pool = pool_of[member]
            sums[pool] = sums.get(pool, 0.0) + busy[member]
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

    def _sync_ends(self, pool_of: dict[int, int]) -> tuple[int, int] | None:
        if self.source is None or self.problem.sync is None:
            return None
        source, target = (pool_of[self._index[name]] for name in self.problem.sync)
        return None if source == target else (source, target)

    def _moving(self, pool_of: dict[int, int], gpus: Sequence[Array]) -> Array:
        ends = self._sync_ends(pool_of)
        if ends is None:
            return np.zeros(gpus[0].shape[1])
        source, target = ends
        pairs = (gpus[source] > 0)[:, None] & (gpus[target] > 0)[None]
        return np.where(pairs, self._sync[..., None], 0.0).max((0, 1))


def cycles(problem: Problem) -> list[tuple[int, ...]]:
    """Stage numbers by cycle: neighbours of the same cycle together, all others alone."""
    groups: list[tuple[int, ...]] = []
    for s, stage in enumerate(problem.stages):
        if groups and stage.cycle is not None:
            before = groups[-1]
            if problem.stages[before[-1]].cycle == stage.cycle:
                groups[-1] = (*before, s)
                continue
        groups.append((s,))
    return groups
