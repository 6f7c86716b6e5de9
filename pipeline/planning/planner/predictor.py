"""The predictor of iteration times: exact for the model below, and vectorised over placements.

The batch of an iteration is divided into ``m`` equal chunks. A stage that takes ``t`` seconds alone
on its pool takes ``t / m`` for each chunk. It starts when its first input exists and its pool is
free, works at a constant rate, and waits if its input is slower. Intervals between chunks never
become shorter from stage to stage, so only a stage's start or its last input can determine its end:
finish = max(start + t, finish of the last input + t / m).

The first chunk of a stage without inputs may take longer than ``t / m`` (``PlacementStage.lead``),
because samples that are decoded together end with the longest of them. If such a stage shares its
pool, it produces one chunk after another, so more chunks take longer (``PlacementStage.again``).
Between stages of the same pool, the output is passed on as a whole.

If each stage is a job of its own (``PlacementProblem.are_jobs``), a pool is the job of one stage.
It also waits while the jobs of other stages use so many devices that too few are left.

The next iteration begins in all pools at once, when all stages are done and the new weights have
arrived. A pool loads its next stage as soon as it is free.

Planner, forecast and simulator all use :meth:`Predictor.predict_batch`; the tests compare it with a
recurrence that computes every chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.planning.planner.problem import Placement, PlacementProblem, PoolStages

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
        self.tables = [
            [problem.rate_table(stage, k) for k in range(len(kinds))] for stage in problem.stages
        ]
        """Rates ``[gpus + 1]`` by stage and kind."""
        endpoints = [self._index[name] for name in problem.sync or () if name in self._index]
        self.sync_edge = (endpoints[0], endpoints[1]) if len(endpoints) == 2 else None
        """The stages that produce and that load the weights; None if no weights are sent."""
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
        *,
        factors: Array | None = None,
        delays_s: Array | None = None,
        free: Sequence[Array] | None = None,
        weights_s: float = 0.0,
    ) -> PlacementPrediction:
        """Return predictions for many allocations of the same pools.

        Args:
            pools: indices of the stages of each pool.
            gpus: GPUs by pool, int ``[kinds, n]``.
            chunks: chunks per iteration, one number or int ``[n]``.
            factors: factors of the stages' times on each kind ``[stages, kinds, n]``; 1 by default.
            delays_s: seconds by which each stage takes longer ``[stages, n]``; 0 by default.
            free: time ``[n]`` from which a pool is free, by pool; 0 by default.
            weights_s: time at which the weights arrive at the stage that loads them.
        """
        stages, count = self.problem.stages, gpus[0].shape[1]
        pool_of = {s: p for p, pool in enumerate(pools) for s in pool}
        free = [np.zeros(count) for _ in pools] if free is None else list(free)
        start, finish, first_chunk, busy = np.zeros((4, len(stages), count))
        for s, stage in enumerate(stages):
            p = pool_of[s]
            is_shared = len(pools[p]) > 1
            factor = None if factors is None else factors[s]
            busy[s] = work = self.duration(s, gpus[p], factor)
            begin, last_input = np.zeros(count), np.zeros(count)
            if self.sync_edge is not None and s == self.sync_edge[1]:
                begin = begin + weights_s
            for name in stage.after:
                source = self._index[name]
                is_streamed = stage.streams and pool_of[source] != p
                begin = np.maximum(begin, first_chunk[source] if is_streamed else finish[source])
                last_input = np.maximum(last_input, finish[source])
            begin = np.maximum(begin, free[p] + (self.switch_time(s, gpus[p]) if is_shared else 0))
            for earlier in range(s) if self.problem.are_jobs else ():
                both = [self.problem.devices_used(i, gpus[pool_of[i]]) for i in (s, earlier)]
                waits = ~self.problem.fits(both)
                begin = np.maximum(begin, np.where(waits, finish[earlier], 0.0))
            if is_shared and stage.again:
                work = work * (1 + (chunks - 1) * stage.again)
            duration = work if delays_s is None else work + delays_s[s]
            lead: float | Array = 1 / chunks
            if stage.lead and not is_shared:
                lead = stage.first_chunk_share(chunks, gpus[p].sum(0))
            start[s], first_chunk[s] = begin, begin + work * lead
            finish[s] = np.maximum(begin + duration, last_input + duration / chunks)
            free[p] = finish[s]
        total, sync_s = finish.max(0), np.zeros(count)
        if self.sync_edge is not None:
            source, target = (pool_of[s] for s in self.sync_edge)
            if source != target:
                pairs = (gpus[source] > 0)[:, None] & (gpus[target] > 0)[None]
                sync_s = np.where(pairs, self._sync_s[..., None], 0.0).max((0, 1))
            # Weights are sent as soon as they are trained, while other stages may still run.
            total = np.maximum(total, finish[self.sync_edge[0]] + sync_s)
        total = np.where(self.problem.is_allowed(pools, gpus), total, np.inf)
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
            last = finish_s.max() if self.sync_edge is None else finish_s[self.sync_edge[0]]
            weights_arrivals.append(float((last + prediction.sync_s).max()))
        return (weights_arrivals[-1] - weights_arrivals[STEADY_ITERATIONS - 1]) / STEADY_ITERATIONS

    def duration(self, stage: int, gpus: Array, factors: Array | None = None) -> Array:
        """Return the seconds of a stage alone on GPUs ``[kinds, n]``; infinite if it cannot run.

        The arguments are as in :meth:`predict_batch`.
        """
        kind_rates = np.stack([table[n] for table, n in zip(self.tables[stage], gpus, strict=True)])
        cannot_run = ((gpus > 0) & (kind_rates == 0)).any(0)
        if factors is not None:
            kind_rates = kind_rates / factors
        if self.problem.stages[stage].divisible:
            is_mixed = (kind_rates > 0).sum(0) > 1
            rate = kind_rates.sum(0) * np.where(is_mixed, self.problem.mixing, 1.0)
            rate = np.where(cannot_run, 0.0, rate)
        else:
            rate = kind_rates.max(0)
        with np.errstate(divide="ignore"):
            return np.asarray(1.0 / rate)

    def switch_time(self, stage: int, gpus: Array) -> Array:
        """Return the seconds ``[n]`` in which a pool with GPUs ``[kinds, n]`` loads a stage."""
        return np.where(gpus > 0, self._switch_s[stage][:, None], 0.0).max(0)
