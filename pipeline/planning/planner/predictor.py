"""The predictor of iteration times: exact for the model below, and vectorised over placements.

The batch of an iteration is divided into ``m`` equal chunks. A stage that takes ``t`` seconds alone
on its pool takes ``t / m`` for each chunk. It starts when its first input exists and its pool is
free, works at a constant rate, and waits if its input is slower. Intervals between chunks never
become shorter from stage to stage, so only a stage's start or its last input can determine its end:
finish = max(start + t, finish of the last input + t / m).

The first chunk of a stage without inputs may take longer than ``t / m`` (``PlacementStage.lead``),
because samples that are decoded together end with the longest of them. If such a stage shares its
pool, it produces one chunk after another, so more chunks take longer (``PlacementStage.again``).

A stage in several pools begins when all of them are free. Between stages of the same pool, the
output is passed on as a whole.

The next iteration begins in all pools at once, when all stages are done and the new weights have
arrived. A pool loads its next stage as soon as it is free.

The tests compare the predictor with a recurrence that computes every chunk.
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
"""Number of warm-up iterations, and of iterations over which the period is averaged."""


@dataclass(frozen=True)
class PlacementPrediction:
    """The predicted times of placements with the same pools; the last dimension of every array is
    the placement."""

    total_s: Array
    """Duration of an iteration; infinite if a stage cannot run."""
    start_s: Array
    """Start of each stage, in seconds after the start of the iteration, ``[stages, ...]``."""
    finish_s: Array
    """End of each stage, ``[stages, ...]``."""
    busy_s: Array
    """Seconds of work of each stage, ``[stages, ...]``."""
    sync_s: Array
    """Seconds to transfer the weights."""


class Predictor:
    """Predicts iteration times for the placements of one problem."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self._index = {stage.name: s for s, stage in enumerate(problem.stages)}
        kinds = problem.kinds
        self._kind_gpus = np.array([kind.gpus for kind in kinds])[:, None]
        self.tables = [
            [problem.rate_table(stage, k) for k in range(len(kinds))] for stage in problem.stages
        ]
        """Rates ``[gpus + 1]`` by stage and kind."""
        self.best_rates = [[np.maximum.accumulate(table) for table in row] for row in self.tables]
        """Highest rate on 0 to ``n`` GPUs, ``[gpus + 1]``, by stage and kind."""
        self.lockstep_groups = lockstep_groups(problem)
        """Indices of stages that run in lockstep, in order; most groups have one stage."""
        self._edges = [
            (self._index[name], s) for s, stage in enumerate(problem.stages) for name in stage.after
        ]
        endpoints = [self._index[name] for name in problem.sync or () if name in self._index]
        self.sync_source = endpoints[0] if len(endpoints) == 2 else None
        """The stage that produces the weights; None if no weights are sent."""
        self.sync_target = endpoints[1] if len(endpoints) == 2 else None
        """The stage that loads the weights."""
        self._switch_s = np.array(
            [[stage.switch_s.get(kind.name, 0.0) for kind in kinds] for stage in problem.stages]
        )
        self._sync_s = np.array(
            [[problem.sync_s.get((a.name, b.name), 0.0) for b in kinds] for a in kinds]
        )

    def predict(self, placement: Placement) -> PlacementPrediction:
        """Return the prediction for one placement, with arrays of shape ``[]`` and ``[stages]``."""
        gpus = [np.array(pool)[:, None] for pool in placement.gpus]
        batch = self.predict_batch(placement.pools, gpus, placement.num_chunks)
        return PlacementPrediction(*(value[..., 0] for value in vars(batch).values()))

    def predict_batch(
        self,
        pools: PoolStages,
        gpus: Sequence[Array],
        chunks: int | Array,
        assigned_gpus: Sequence[Array] | None = None,
        free: Sequence[Array] | None = None,
        weights_s: float = 0.0,
    ) -> PlacementPrediction:
        """Return predictions for many allocations of the same pools.

        Args:
            pools: indices of the stages of each pool.
            gpus: GPUs by pool, int ``[kinds, n]``.
            chunks: chunks per iteration, one number or int ``[n]``.
            assigned_gpus: GPUs that are certainly assigned; by default ``gpus``. Only these cost
                switching and transfers, and must be of one kind in a job that may not mix. If
                fewer, the prediction is a lower bound for all allocations from these to ``gpus``.
            free: time ``[n]`` from which a pool is free, by pool; 0 by default.
            weights_s: time at which the weights arrive at the stage that loads them.
        """
        problem, count = self.problem, gpus[0].shape[1]
        assigned_gpus = gpus if assigned_gpus is None else assigned_gpus
        stage_pools, stages = pools_of_stages(pools), problem.stages
        stage_gpus = [self._sum_pools(p, gpus, assigned_gpus) for p in stage_pools.values()]
        busy = np.stack([self.duration(s, *stage_gpus[s]) for s in range(len(stages))])
        start, finish, first_chunk = np.zeros((3, len(stages), count))
        free = [np.zeros(count) for _ in pools] if free is None else list(free)
        for group in self.lockstep_groups:
            begin, last_input = np.zeros(count), np.zeros(count)
            if self.sync_target in group:
                begin = begin + weights_s
            for member in group:
                for name in stages[member].after:
                    source = self._index[name]
                    if source in group:
                        continue
                    separate = in_separate_pools(stage_pools, source, member)
                    streamed = separate and stages[member].streams
                    begin = np.maximum(begin, first_chunk[source] if streamed else finish[source])
                    last_input = np.maximum(last_input, finish[source])
            group_pools = {p for member in group for p in stage_pools[member]}
            for pool in group_pools:
                pool_ready = free[pool]
                if not set(pools[pool]) <= set(group):
                    members = [s for s in group if pool in stage_pools[s]]
                    pool_ready = pool_ready + self._switch_time(members, assigned_gpus[pool])
                begin = np.maximum(begin, pool_ready)
            work = self._group_time(group, stage_pools, busy)
            chunk_overhead_s = max(stages[member].chunk_s for member in group)
            overhead_s = self.num_transfers(group, stage_pools, chunks) * chunk_overhead_s
            shared = is_time_shared(group, stage_pools)
            if shared and stages[group[0]].again:
                work = work * (1 + (chunks - 1) * stages[group[0]].again)
            duration = work + overhead_s
            end = np.maximum(begin + duration, last_input + duration / chunks)
            lead: float | Array = 1 / chunks
            if stages[group[0]].lead and not shared:
                upper, assigned = stage_gpus[group[0]]
                # On fewer GPUs the first chunk may be ready earlier, but not before ``1 / chunks``.
                is_fixed = (upper == assigned).all(0)
                lead = np.where(
                    is_fixed, stages[group[0]].first_chunk_share(chunks, assigned.sum(0)), lead
                )
            first_ready = begin + work * lead + overhead_s / chunks
            for member in group:
                start[member], finish[member], first_chunk[member] = begin, end, first_ready
            for pool in group_pools:
                free[pool] = end
        sync_s = self._sync_time(stage_pools, assigned_gpus)
        total = finish.max(0)
        if self.sync_source is not None:
            # Weights are sent as soon as they are trained, while other stages may still run.
            total = np.maximum(total, finish[self.sync_source] + sync_s)
        for job in pools_of_jobs(pools):
            if not problem.may_mix([s for p in job for s in pools[p]]):
                assigned = np.sum([assigned_gpus[p] for p in job], axis=0)
                total = np.where(problem.is_single_job(assigned), total, np.inf)
        if problem.shared:
            total = np.where(
                problem.exceeds_shared_gpus(np.sum(list(assigned_gpus), axis=0)), np.inf, total
            )
        if problem.most_jobs:
            total = np.where(problem.exceeds_job_limits(pools, assigned_gpus), np.inf, total)
        return PlacementPrediction(total, start, finish, busy, sync_s)

    def steady_period_s(self, placement: Placement, staleness: int) -> float:
        """Return the seconds per iteration if rollouts use weights of ``staleness`` iterations ago.

        Every pool begins the next iteration as soon as it has finished this one. While it waits
        in an iteration, it does not work on the next.
        """
        pools, weights_arrivals = placement.pools, list[float]()
        gpus = [np.array(pool)[:, None] for pool in placement.gpus]
        free = [np.zeros(1) for _ in pools]
        for i in range(2 * STEADY_ITERATIONS):
            weights_s = weights_arrivals[i - 1 - staleness] if i > staleness else 0.0
            prediction = self.predict_batch(
                pools, gpus, placement.num_chunks, free=free, weights_s=weights_s
            )
            finish_s = prediction.finish_s
            free = [finish_s[list(pool)].max(0) for pool in pools]
            last = finish_s.max() if self.sync_source is None else finish_s[self.sync_source]
            weights_arrivals.append(float((last + prediction.sync_s).max()))
        return (weights_arrivals[-1] - weights_arrivals[STEADY_ITERATIONS - 1]) / STEADY_ITERATIONS

    def _sum_pools(
        self, pools: Sequence[int], gpus: Sequence[Array], assigned_gpus: Sequence[Array]
    ) -> tuple[Array, Array]:
        """Return the sums over some pools: of GPUs, and of assigned GPUs, ``[kinds, n]`` each."""
        if len(pools) == 1:
            return gpus[pools[0]], assigned_gpus[pools[0]]
        assigned = np.sum([assigned_gpus[p] for p in pools], axis=0)
        # GPUs that are not assigned yet may be included in several pools.
        limit = np.maximum(assigned, self._kind_gpus)
        return np.minimum(np.sum([gpus[p] for p in pools], axis=0), limit), assigned

    def num_transfers(
        self, group: Sequence[int], stage_pools: Mapping[int, Sequence[int]], chunks: int | Array
    ) -> int | Array:
        """Return the number of transfers between a lockstep group and other pools.

        This is ``chunks`` if the group streams, 1 if it only exchanges the whole batch, and 0 if
        all inputs and outputs stay in the group's pool.
        """
        edges = [
            (a, b)
            for a, b in self._edges
            if (a in group) != (b in group) and in_separate_pools(stage_pools, a, b)
        ]
        if any(self.problem.stages[target].streams for _, target in edges):
            return chunks
        return min(1, len(edges))

    def duration(self, stage: int, gpus: Array, assigned_gpus: Array | None = None) -> Array:
        """Return the seconds of a stage alone on GPUs ``[kinds, n]``; infinite if it cannot run.

        With fewer ``assigned_gpus``, this is a lower bound for every allocation in between.
        """
        assigned_gpus = gpus if assigned_gpus is None else assigned_gpus
        kind_rates = self.rates(stage, gpus, assigned_gpus)
        rate, fastest_rate = kind_rates.sum(0), kind_rates.max(0)
        if not self.problem.stages[stage].divisible:
            rate = fastest_rate
        else:
            mixed_rate = rate * np.where((kind_rates > 0).sum(0) > 1, self.problem.mixing, 1.0)
            # All assigned GPUs work; kinds that are not assigned yet may be left out.
            upper_bound = np.maximum(mixed_rate, fastest_rate)
            rate = np.where((gpus == assigned_gpus).all(0), mixed_rate, upper_bound)
            rate = np.where(((assigned_gpus > 0) & (kind_rates == 0)).any(0), 0.0, rate)
        with np.errstate(divide="ignore"):
            return 1.0 / rate

    def rates(self, stage: int, gpus: Array, assigned_gpus: Array) -> Array:
        """Return the iterations per second of a stage on its GPUs of each kind ``[kinds, n]``. With
        fewer ``assigned_gpus``, this is the best rate of any number up to ``gpus``."""
        kinds = zip(self.tables[stage], self.best_rates[stage], gpus, assigned_gpus, strict=True)
        return np.stack([np.where(n == assigned, t[n], best[n]) for t, best, n, assigned in kinds])

    def min_switch_s(self, group: Sequence[int], pool: Sequence[int]) -> float:
        """Return the minimum seconds in which a pool loads the stages of a lockstep group; 0 if the
        pool has no other stages."""
        if set(pool) <= set(group):
            return 0.0
        members = [s for s in group if s in pool]
        usable = [
            k
            for k in range(len(self.problem.kinds))
            if all(np.any(self.tables[s][k] > 0) for s in members)
        ]
        return float(min((self._switch_s[members, k].sum() for k in usable), default=0.0))

    def min_sync_s(self, pools: PoolStages) -> float:
        """Return the minimum seconds to transfer the weights."""
        endpoints = self._sync_ends(pools_of_stages(pools))
        if endpoints is None:
            return 0.0
        source, target = (
            [k for k in range(len(self.problem.kinds)) if np.any(self.tables[s][k] > 0)]
            for s in (self._index[name] for name in self.problem.sync or ())
        )
        return float(min((self._sync_s[a, b] for a in source for b in target), default=0.0))

    def _group_time(
        self, group: Sequence[int], stage_pools: Mapping[int, tuple[int, ...]], busy: Array
    ) -> Array:
        """Return the seconds ``[n]`` of a lockstep group. In one pool its stages take turns; over
        several pools, two halves of each chunk alternate between the pools.

        With two halves, a step takes as long as the slowest pool or half of the sum over all pools,
        whichever is longer. Once per chunk, only one half is being processed.
        """
        if len(group) == 1:
            return busy[group[0]]
        pool_times: dict[tuple[int, ...], Array] = {}
        for member in group:
            pools = stage_pools[member]
            pool_times[pools] = pool_times.get(pools, 0.0) + busy[member]
        slowest = np.max(list(pool_times.values()), axis=0)
        total = np.sum(list(pool_times.values()), axis=0)
        with np.errstate(invalid="ignore"):
            num_halves = 2 * self.problem.cycle_steps
            overlapped = np.maximum(
                slowest + (total - slowest) / num_halves, total / 2 + slowest / num_halves
            )
        return np.where(np.isfinite(total), overlapped, np.inf)

    def _switch_time(self, stages: Sequence[int], gpus: Array) -> Array:
        """Return the seconds ``[n]`` in which a pool with these GPUs loads the stages."""
        total_s = self._switch_s[list(stages)].sum(0)
        return np.where(gpus > 0, total_s[:, None], 0.0).max(0)

    def _sync_ends(
        self, stage_pools: Mapping[int, tuple[int, ...]]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the pools that send and receive the weights; None: no weights are sent."""
        if self.sync_source is None or self.problem.sync is None:
            return None
        source, target = (self._index[name] for name in self.problem.sync)
        separate = in_separate_pools(stage_pools, source, target)
        return (stage_pools[source], stage_pools[target]) if separate else None

    def _sync_time(
        self, stage_pools: Mapping[int, tuple[int, ...]], gpus: Sequence[Array]
    ) -> Array:
        endpoints = self._sync_ends(stage_pools)
        if endpoints is None:
            return np.zeros(gpus[0].shape[1])
        source, target = (self._sum_pools(pools, gpus, gpus)[1] > 0 for pools in endpoints)
        pairs = source[:, None] & target[None]
        return np.where(pairs, self._sync_s[..., None], 0.0).max((0, 1))


def in_separate_pools(stage_pools: Mapping[int, Sequence[int]], a: int, b: int) -> bool:
    """Return True if two stages share no pool."""
    return not set(stage_pools[a]) & set(stage_pools[b])


def is_time_shared(group: Sequence[int], stage_pools: Mapping[int, Sequence[int]]) -> bool:
    """Return True if other stages in a group's pools run between the group's chunks. Stages on all
    pools of the job do not count, because they run after all chunks."""
    group_pools = {p for member in group for p in stage_pools[member]}
    max_pools = max(len(stage_pools[s]) for s in group)
    others = [pools for s, pools in stage_pools.items() if s not in group]
    return any(len(pools) <= max_pools and group_pools & set(pools) for pools in others)


def lockstep_groups(problem: PlacementProblem) -> list[tuple[int, ...]]:
    """Return the indices of stages in groups: adjacent stages of a cycle, or single stages."""
    groups: list[tuple[int, ...]] = []
    for s, stage in enumerate(problem.stages):
        if groups and stage.cycle is not None:
            previous = groups[-1]
            if problem.stages[previous[-1]].cycle == stage.cycle:
                groups[-1] = (*previous, s)
                continue
        groups.append((s,))
    return groups
