"""Finding the best placement: every grouping of stages into pools, every division of the GPUs.

Where the divisions of a grouping can be counted out they are, so small problems are solved exactly.
Elsewhere a division is improved step by step, by moving GPUs between pools, from several starts;
how far the result can be from the best is then told by the lower bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.planner.bound import lower_bound
from pipeline.planner.predict import Prediction, Predictor
from pipeline.planner.problem import Placement, Problem
from rlinf.errors import PlanError

Array = np.ndarray
Objective = Callable[[Prediction, Sequence[Array], Problem], Array]
"""From predictions and the GPUs of each pool ``[kinds, n]`` to what is minimised ``[n]``."""

EXACT_BELOW = 60_000
"""Divisions of one grouping that are counted out."""
BLOCK = 20_000
"""Divisions looked at at once."""


@dataclass(frozen=True)
class Solution:
    """The best placement found."""

    placement: Placement
    prediction: Prediction
    value: float
    """What was minimised."""
    bound_s: float
    """No placement has a shorter iteration."""
    exact: bool
    """Whether all placements were looked at."""

    @property
    def gap(self) -> float:
        """How much longer than the bound the iteration is, relative."""
        return float(self.prediction.total_s) / self.bound_s - 1 if self.bound_s else 0.0


def iteration_time(prediction: Prediction, gpus: Sequence[Array], problem: Problem) -> Array:
    """Seconds of one iteration."""
    return prediction.total_s


def money(prediction: Prediction, gpus: Sequence[Array], problem: Problem) -> Array:
    """Cost of one iteration: all GPUs held, for its whole duration."""
    prices = np.array([kind.price for kind in problem.kinds])
    held = sum(prices @ pool for pool in gpus)
    return np.asarray(prediction.total_s * held / 3600)


def time_to(iterations: int) -> Objective:
    """Seconds until ``iterations`` are done, the wait in the queue and losses included.

    The run starts when the slowest of its pools has started. A pool that is lost comes back after
    the wait of its kind, and half an iteration is done again on average.
    """

    def objective(prediction: Prediction, gpus: Sequence[Array], problem: Problem) -> Array:
        waits = np.array([kind.wait_s for kind in problem.kinds])
        losses = np.array([kind.losses_per_hour for kind in problem.kinds]) / 3600
        held = [pool > 0 for pool in gpus]
        start = np.max([np.max(waits[:, None] * pool, axis=0) for pool in held], axis=0)
        working = iterations * prediction.total_s
        lost = sum(
            (losses[:, None] * (waits[:, None] + prediction.total_s / 2) * pool).sum(0)
            for pool in held
        )
        return np.asarray(start + working * (1 + lost))

    return objective


def solve(
    problem: Problem, objective: Objective = iteration_time, alternatives: int = 1
) -> list[Solution]:
    """The best placements, best first; each with another grouping or another grain of pools.

    Raises:
        PlanError: a stage can run nowhere, or the stages cannot be placed together.
    """
    _check(problem)
    predictor = Predictor(problem)
    bound = lower_bound(problem)
    found: list[Solution] = []
    exact = True
    for pools in groupings(problem):
        divisions = count_divisions(problem, len(pools))
        whole = divisions <= EXACT_BELOW
        exact &= whole
        best: Solution | None = None
        for chunks in problem.chunks if len(pools) > 1 else (1,):
            if whole:
                blocks = all_divisions(problem, len(pools))
                candidate = _best(predictor, pools, blocks, chunks, objective, bound)
            else:
                candidate = _improve(predictor, pools, chunks, objective, bound)
            if candidate and (best is None or candidate.value < best.value):
                best = candidate
        if best is not None:
            found.append(best)
    if not found:
        raise PlanError(
            "no placement fits: the stages need more GPUs together than there are; "
            "loosen the pins, or give the plan more partitions"
        )
    found.sort(key=lambda solution: solution.value)
    return [
        Solution(s.placement, s.prediction, s.value, s.bound_s, exact) for s in found[:alternatives]
    ]


def groupings(problem: Problem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to divide the stages over pools, fewest pools first."""
    count = len(problem.stages)
    most = sum(kind.gpus for kind in problem.kinds)
    codes: list[tuple[int, ...]] = [(0,)]
    for _ in range(1, count):
        codes = [(*code, i) for code in codes for i in range(max(code) + 2)]
    for code in sorted(codes, key=lambda code: (max(code), code)):
        if max(code) < most:
            yield tuple(
                tuple(s for s in range(count) if code[s] == pool) for pool in range(max(code) + 1)
            )


def count_divisions(problem: Problem, pools: int) -> int:
    """In how many ways the GPUs can be divided over pools, some left idle only when all fit."""
    return math.prod(math.comb(kind.gpus + pools - 1, pools - 1) for kind in problem.kinds)


def all_divisions(problem: Problem, pools: int) -> Iterator[list[Array]]:
    """Every division, in blocks: by pool int ``[kinds, n]``.

    More GPUs never slow a stage down, so no GPU is left out.
    """
    per_kind = [_compositions(kind.gpus, pools) for kind in problem.kinds]
    sizes = [len(parts) for parts in per_kind]
    total = math.prod(sizes)
    for start in range(0, total, BLOCK):
        numbers = np.arange(start, min(start + BLOCK, total))
        picks = np.unravel_index(numbers, sizes)
        chosen = [parts[pick] for parts, pick in zip(per_kind, picks, strict=True)]
        yield [np.stack([part[:, pool] for part in chosen]) for pool in range(pools)]


def _compositions(total: int, parts: int) -> Array:
    """All ways to write ``total`` as an ordered sum of ``parts`` numbers: ``[n, parts]``."""
    if parts == 1:
        return np.array([[total]])
    bars = np.array(list(itertools.combinations(range(total + parts - 1), parts - 1)))
    edges = np.concatenate(
        [np.full((len(bars), 1), -1), bars, np.full((len(bars), 1), total + parts - 1)], axis=1
    )
    return np.diff(edges, axis=1) - 1


def _best(
    predictor: Predictor,
    pools: tuple[tuple[int, ...], ...],
    blocks: Iterator[list[Array]],
    chunks: int,
    objective: Objective,
    bound: float,
) -> Solution | None:
    lowest, chosen = math.inf, None
    for gpus in blocks:
        values = objective(predictor.many(pools, gpus, chunks), gpus, predictor.problem)
        i = int(np.argmin(values))
        if values[i] < lowest:
            lowest, chosen = float(values[i]), [pool[:, i] for pool in gpus]
    if chosen is None:
        return None
    return _solution(predictor, pools, chosen, chunks, lowest, bound)


def _improve(
    predictor: Predictor,
    pools: tuple[tuple[int, ...], ...],
    chunks: int,
    objective: Objective,
    bound: float,
) -> Solution | None:
    """Steepest descent over moves of GPUs between two pools, with steps from large to small."""
    problem = predictor.problem
    count, kinds = len(pools), len(problem.kinds)
    lowest, chosen = math.inf, None
    moves = _moves(problem, count)
    for start in _starts(predictor, pools):
        state, value = start, math.inf
        while True:
            options = state[None] + moves
            options = options[(options >= 0).all((1, 2))]
            options = np.concatenate([state[None], options])
            gpus = [options[:, pool].T for pool in range(count)]
            values = objective(predictor.many(pools, gpus, chunks), gpus, problem)
            i = int(np.argmin(values))
            if not values[i] < value:
                break
            state, value = options[i], float(values[i])
        if value < lowest:
            lowest, chosen = value, state
    if chosen is None or kinds == 0:
        return None
    return _solution(predictor, pools, list(chosen), chunks, lowest, bound)


def _moves(problem: Problem, pools: int) -> Array:
    """Changes of a division ``[moves, pools, kinds]``: some GPUs of a kind from one to another."""
    out = []
    for k, kind in enumerate(problem.kinds):
        sizes = {1, 2, 3, 4, 5, 6, 7, *(2**i for i in range(3, 13)), kind.gpus // 3}
        for size in sorted(s for s in sizes if 0 < s <= kind.gpus):
            for a, b in itertools.permutations(range(pools), 2):
                move = np.zeros((pools, len(problem.kinds)), dtype=np.int64)
                move[a, k], move[b, k] = -size, size
                out.append(move)
    return np.array(out)


def _starts(predictor: Predictor, pools: tuple[tuple[int, ...], ...]) -> list[Array]:
    """Divisions to start from: in proportion to work, and kinds to the pools they suit best."""
    problem = predictor.problem
    sizes = np.array([kind.gpus for kind in problem.kinds])
    # Seconds of each pool's work on all GPUs of each kind alone.
    alone = np.zeros((len(pools), len(sizes)))
    for p, pool in enumerate(pools):
        for k in range(len(sizes)):
            only = np.zeros((len(sizes), 1), dtype=np.int64)
            only[k] = sizes[k]
            alone[p, k] = sum(float(predictor.duration(s, only)[0]) for s in pool)
    work = np.where(np.isfinite(alone), alone, 0.0)
    weights = np.where(work.sum(0) > 0, work / np.maximum(work.sum(0), 1e-300), 1 / len(pools))
    starts = [_round(weights, sizes)]
    # Kinds in order of size, each to the pool furthest from done that it suits.
    done = np.zeros(len(pools))
    given = np.zeros((len(pools), len(sizes)), dtype=np.int64)
    for k in np.argsort(-sizes):
        able = np.isfinite(alone[:, k])
        if not able.any():
            continue
        p = int(np.argmin(np.where(able, done, np.inf)))
        given[p, k] = sizes[k]
        done[p] += 1 / alone[p, k]
    starts.append(given)
    return starts


def _round(weights: Array, sizes: Array) -> Array:
    """Whole numbers near ``weights * sizes`` whose sums over pools are ``sizes``."""
    exact = weights * sizes
    out = np.floor(exact).astype(np.int64)
    for k in range(len(sizes)):
        order = np.argsort(out[:, k] - exact[:, k], kind="stable")
        out[order[: sizes[k] - out[:, k].sum()], k] += 1
    return out


def _solution(
    predictor: Predictor,
    pools: tuple[tuple[int, ...], ...],
    gpus: Sequence[Array],
    chunks: int,
    value: float,
    bound: float,
) -> Solution:
    placement = Placement(pools, tuple(tuple(int(n) for n in pool) for pool in gpus), chunks)
    return Solution(placement, predictor.one(placement), value, bound, exact=False)


def _check(problem: Problem) -> None:
    for stage in problem.stages:
        if not any(problem.table(stage, k).max() > 0 for k in range(len(problem.kinds))):
            pinned = problem.allowed.get(stage.name)
            where = f" on {', '.join(sorted(pinned))}" if pinned else ""
            raise PlanError(
                f"stage {stage.name!r} can run nowhere{where}: it needs more memory than any "
                "number of these GPUs has together, or no profile says it ran"
            )
