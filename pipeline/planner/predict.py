"""How long an iteration takes under a placement. Exact for the model below, and vectorised.

An iteration is passed on in ``m`` equal micro-batches. A stage of duration ``t`` (alone, on its
pool) takes ``t / m`` for each. It starts when its first input is there and its pool is free, works
at a constant rate, and waits where its input comes slower. Since stages only ever slow down on the
way (the gaps between their outputs never shrink), the last output is bound either by the start or
by the last input:

    finish = max(start + t, finish of the last input + t / m)

The test of this module checks that against the recurrence over all micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.planner.problem import Placement, Problem

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
        self._names = [stage.name for stage in problem.stages]
        self._tables = [
            [problem.table(stage, k) for k in range(len(problem.kinds))] for stage in problem.stages
        ]
        self._switch = np.array(
            [
                [stage.switch_s.get(kind.name, 0.0) for kind in problem.kinds]
                for stage in problem.stages
            ]
        )
        self._sync = np.array(
            [
                [problem.sync_s.get((a.name, b.name), 0.0) for b in problem.kinds]
                for a in problem.kinds
            ]
        )

    def one(self, placement: Placement) -> Prediction:
        """The prediction for a placement, with arrays of shape ``[]`` and ``[stages]``."""
        gpus = [np.array(pool)[:, None] for pool in placement.gpus]
        many = self.many(placement.pools, gpus, placement.chunks)
        return Prediction(*(value[..., 0] for value in vars(many).values()))

    def many(
        self, pools: Sequence[Sequence[int]], gpus: Sequence[Array], chunks: int
    ) -> Prediction:
        """Predictions for many allocations of the same pools.

        Args:
            pools: stage numbers of each pool.
            gpus: by pool int ``[kinds, n]``.
            chunks: micro-batches per iteration.
        """
        count = gpus[0].shape[1]
        pool_of = {stage: i for i, pool in enumerate(pools) for stage in pool}
        stages = self.problem.stages
        busy = np.stack([self.duration(s, gpus[pool_of[s]]) for s in range(len(stages))])
        piped = len(pools) > 1
        start, finish = np.zeros((2, len(stages), count))
        first = np.zeros((len(stages), count))
        free = [np.zeros(count) for _ in pools]
        used: list[int | None] = [None] * len(pools)
        index = {name: i for i, name in enumerate(self._names)}
        s = 0
        while s < len(stages):
            group = self._group(s)
            mine = [pool_of[member] for member in group]
            begin, last = np.zeros(count), np.zeros(count)
            for member in group:
                for name in stages[member].after:
                    source = index[name]
                    if source in group:
                        continue
                    streamed = stages[member].streams and pool_of[source] != pool_of[member]
                    begin = np.maximum(begin, first[source] if streamed else finish[source])
                    last = np.maximum(last, finish[source])
            for pool in set(mine):
                shared = len(pools[pool]) > 1
                change = (
                    self._switching(group[mine.index(pool)], gpus[pool])
                    if shared and used[pool] != s
                    else 0.0
                )
                begin = np.maximum(begin, free[pool] + change)
            time = self._group_time(group, mine, busy)
            if piped:
                time = time + chunks * max(stages[member].chunk_s for member in group)
            piece = time / chunks
            end = np.maximum(begin + time, last + piece)
            for member, pool in zip(group, mine, strict=True):
                start[member], finish[member], first[member] = begin, end, begin + piece
                free[pool], used[pool] = end, s
            s += len(group)
        total = finish.max(0)
        moved = self._moving(pool_of, gpus, index)
        return Prediction(total + moved, start, finish, busy, moved)

    def duration(self, stage: int, gpus: Array) -> Array:
        """Seconds of a stage alone on GPUs ``[kinds, n]``; infinite where it cannot run."""
        rate, kinds = np.zeros(gpus.shape[1]), np.zeros(gpus.shape[1], dtype=np.int64)
        for table, number in zip(self._tables[stage], gpus, strict=True):
            part = table[number]
            rate += part
            kinds += part > 0
        rate = np.where(kinds > 1, rate * self.problem.mixing, rate)
        # The quickest kind alone is never given up for a mixture that loses more than it adds.
        alone = np.max([t[n] for t, n in zip(self._tables[stage], gpus, strict=True)], axis=0)
        rate = np.maximum(rate, alone)
        with np.errstate(divide="ignore"):
            return 1.0 / rate

    def _group(self, s: int) -> list[int]:
        stages = self.problem.stages
        if stages[s].cycle is None:
            return [s]
        group = [s]
        while group[-1] + 1 < len(stages) and stages[group[-1] + 1].cycle == stages[s].cycle:
            group.append(group[-1] + 1)
        return group

    def _group_time(self, group: list[int], pools: list[int], busy: Array) -> Array:
        """A cycle in one pool takes turns; over pools, two halves of the batch swap places.

        Then every step takes as long as the slower side, and the first half of the first step has
        nothing to overlap with.
        """
        if len(group) == 1:
            return busy[group[0]]
        sums = {pool: np.zeros(busy.shape[1]) for pool in pools}
        for member, pool in zip(group, pools, strict=True):
            sums[pool] = sums[pool] + busy[member]
        slowest = np.max(list(sums.values()), axis=0)
        whole = np.sum(list(sums.values()), axis=0)
        return slowest + (whole - slowest) / (2 * self.problem.cycle_steps)

    def _switching(self, stage: int, gpus: Array) -> Array:
        return np.where(gpus > 0, self._switch[stage][:, None], 0.0).max(0)

    def _moving(
        self, pool_of: dict[int, int], gpus: Sequence[Array], index: dict[str, int]
    ) -> Array:
        count = gpus[0].shape[1]
        if self.problem.sync is None or any(name not in index for name in self.problem.sync):
            return np.zeros(count)
        source, target = (pool_of[index[name]] for name in self.problem.sync)
        if source == target:
            return np.zeros(count)
        pairs = (gpus[source] > 0)[:, None] & (gpus[target] > 0)[None]
        return np.where(pairs, self._sync[..., None], 0.0).max((0, 1))
