"""The ways to divide the stages of a problem over pools, and which of them are alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.planning.planner.problem import Problem

Pools = tuple[tuple[int, ...], ...]


def groupings(problem: Problem) -> list[Pools]:
    """All ways to divide the stages over pools, fewest pools first."""
    count = len(problem.stages)
    most = sum(kind.gpus for kind in problem.kinds)
    codes: list[tuple[int, ...]] = [(0,)]
    for _ in range(1, count):
        codes = [(*code, i) for code in codes for i in range(max(code) + 2)]
    return [
        tuple(tuple(s for s in range(count) if code[s] == pool) for pool in range(max(code) + 1))
        for code in sorted(codes, key=lambda code: (max(code), code))
        if max(code) < most
    ]


class Neighbours:
    """Which groupings are the same but for the pool of one stage."""

    def __init__(self, every: Sequence[Pools]) -> None:
        self._every = list(every)
        stages = sum(map(len, self._every[0]))
        # A bit for each two stages: whether they share a pool.
        bits = np.zeros((stages, stages), np.int64)
        first, second = np.triu_indices(stages, 1)
        bits[first, second] = bits[second, first] = 1 << np.arange(len(first))
        members = np.zeros((len(self._every), stages), np.int64)
        for row, pools in zip(members, self._every, strict=True):
            for number, pool in enumerate(pools):
                row[list(pool)] = number
        shared = members[:, first] == members[:, second]
        self._codes = shared @ (1 << np.arange(len(first), dtype=np.int64))
        self._of_stage = bits.sum(1)
        self._places = {pools: place for place, pools in enumerate(self._every)}

    def of(self, pools: Pools) -> list[Pools]:
        """In the order of all."""
        apart = self._codes ^ self._codes[self._places[pools]]
        near = ((apart[:, None] & ~self._of_stage) == 0).any(1)
        return [self._every[place] for place in np.flatnonzero(near & (apart != 0))]
