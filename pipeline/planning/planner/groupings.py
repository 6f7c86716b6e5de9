"""The ways to divide the stages of a problem over pools, and which of them are alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from pipeline.planning.planner.problem import Pools, Problem, jobs

Array = np.ndarray


def groupings(problem: Problem) -> list[Pools]:
    """All ways to divide the stages over pools, fewest pools first; then those where pools overlap:
    the first stages of a job, if they may, have a part of its GPUs each."""
    most = sum(kind.gpus for kind in problem.kinds)
    apart = list(_divided(range(len(problem.stages))))
    overlapping = {
        tuple(sorted(itertools.chain(*parts)))
        for pools in apart
        for parts in itertools.product(*([(pool,), *_split(problem, pool)] for pool in pools))
        if any(len(part) > 1 for part in parts)
    }
    every = [*apart, *sorted(overlapping, key=lambda pools: (len(pools), pools))]
    names = {kind.name for kind in problem.kinds}
    least = min((n for kinds, n in problem.most_jobs if names <= set(kinds)), default=most)
    return [pools for pools in every if len(pools) <= most and len(jobs(pools)) <= least]


def _divided(stages: Sequence[int]) -> Iterator[Pools]:
    """All ways to divide some stages, fewest pools first."""
    codes: list[tuple[int, ...]] = [(0,)]
    for _ in stages[1:]:
        codes = [(*code, i) for code in codes for i in range(max(code) + 2)]
    for code in sorted(codes, key=lambda code: (max(code), code)):
        yield tuple(
            tuple(s for s, pool in zip(stages, code, strict=True) if pool == number)
            for number in range(max(code) + 1)
        )


def _split(problem: Problem, pool: tuple[int, ...]) -> Iterator[Pools]:
    """The ways to have the first stages of a pool side by side, and the others on all of it."""
    cycle = [problem.stages[s].cycle for s in pool]
    for cut in range(1, len(pool)):
        if not problem.stages[pool[cut - 1]].beside:
            return
        if cycle[cut] is None or cycle[cut] != cycle[cut - 1]:
            for parts in itertools.islice(_divided(pool[:cut]), 1, None):
                yield tuple((*part, *pool[cut:]) for part in parts)


class Neighbours:
    """Which groupings are the same but for the pool of one stage."""

    def __init__(self, every: Sequence[Pools]) -> None:
        self._every = list(every)
        stages = len(set(itertools.chain(*self._every[0])))
        # A bit for each two stages: whether they share a pool.
        bits = np.zeros((stages, stages), np.int64)
        first, second = np.triu_indices(stages, 1)
        bits[first, second] = bits[second, first] = 1 << np.arange(len(first))
        members = np.zeros((len(self._every), stages, stages), bool)
        for row, pools in zip(members, self._every, strict=True):
            for number, pool in enumerate(pools):
                row[list(pool), number] = True
        shared = (members[:, first] & members[:, second]).any(2)
        self._codes = shared @ (1 << np.arange(len(first), dtype=np.int64))
        self._of_stage = bits.sum(1)
        self._places = {pools: place for place, pools in enumerate(self._every)}

    def of(self, pools: Pools) -> list[Pools]:
        """In the order of all."""
        apart = self._codes ^ self._codes[self._places[pools]]
        near = ((apart[:, None] & ~self._of_stage) == 0).any(1)
        return [self._every[place] for place in np.flatnonzero(near & (apart != 0))]


def divisions(total: int, counts: Sequence[Array], idle: bool) -> Array:
    """All ways to give ``total`` GPUs to pools: int ``[n, pools]``; some to none if ``idle``.

    Args:
        counts: by pool, the numbers that it can have.
    """
    out = np.zeros((1, 0), np.int64)
    for able in counts:
        left = total - out.sum(1)
        row, column = np.nonzero(able[None] <= left[:, None])
        out = np.concatenate([out[row], able[column][:, None]], axis=1)
    return out if idle else out[out.sum(1) == total]
