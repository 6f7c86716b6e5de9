"""The search for the best placement: every grouping of stages into pools, on a grid of divisions.

A *grouping* assigns stages to pools (five stages have 52); a *division* assigns GPUs to the pools
of a grouping. All groupings are enumerated. If there are few divisions, all of them are compared
too, so the result is optimal for the predicted times. Otherwise the first grid is coarse: each kind
of GPU is divided into a few equal parts. The best divisions of the best groupings are then refined
by transfers of 1, 2, 4, ... GPUs between two pools, until no transfer is an improvement.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipeline.planning.planner.predictor import PlacementPrediction, Predictor
from pipeline.planning.planner.problem import (
    IterationTime,
    Objective,
    Placement,
    PlacementProblem,
    PoolStages,
    TimeToFinish,
)
from rlinf.errors import PlanError

Array = np.ndarray
EXACT_ROWS = 200_000
"""Maximum number of divisions of all groupings, times numbers of chunks, that are all compared."""
COARSE_ROWS = 1024
"""Maximum number of divisions in the coarse grid of a grouping, if there are few groupings."""
COARSE_GROUPINGS = 60
"""With more groupings than this, the coarse grids have proportionally fewer divisions."""
MAX_PARTS = 64
"""Maximum number of parts into which the coarse grid divides a kind."""
MAX_GROWTH = 4
"""Unfinished divisions of a coarse grid may be this many times more than ``COARSE_ROWS``."""
MAX_STARTS = 8
"""Number of divisions of a grouping that are kept."""
REFINEMENTS = ((60, 1, False), (3, MAX_STARTS, True))
"""Rounds of refinement: number of groupings, best first; number of divisions of each from which
refinement starts; and whether pools may also exchange GPUs of different kinds."""
BATCH_ROWS = 16_384
"""Number of divisions that are evaluated together."""
EQUAL_COST_FACTOR = 1 + 1e-9
"""Costs within this factor count as equal."""


@dataclass(frozen=True)
class PlacementSolution:
    """The best placement found for one grouping, with its prediction."""

    placement: Placement
    prediction: PlacementPrediction
    cost: float
    """Cost in the unit of the objective."""
    is_optimal: bool
    """True if the best solution was compared with all placements, not only with those of a grid."""


def solve(
    problem: PlacementProblem, objective: Objective | None = None, max_solutions: int = 1
) -> list[PlacementSolution]:
    """Return at most ``max_solutions`` placements, best first, with different groupings of stages.

    Raises:
        PlanError: a stage cannot run on any kind, or the stages cannot be placed together.
    """
    _check_problem(problem)
    search = _Search(problem, objective or IterationTime())
    if problem.are_jobs:
        return search.choose_jobs(max_solutions)
    groupings = enumerate_groupings(problem)
    search.coarse_rows = min(COARSE_ROWS, COARSE_ROWS * COARSE_GROUPINGS // len(groupings))
    is_exact = search.count_rows(groupings) <= EXACT_ROWS
    best = {pools: search.compare_grid(pools, is_exact=is_exact) for pools in groupings}
    best = {pools: divisions for pools, divisions in best.items() if divisions}
    if not is_exact:
        for count, starts, exchanges in REFINEMENTS:
            promising = sorted(best, key=lambda pools: best[pools][0].cost)
            for pools in promising[: max(count, max_solutions)]:
                refined = search.refine(pools, best[pools][:starts], exchanges=exchanges)
                best[pools] = [refined, *best[pools][1:]]
    if not best:
        raise PlanError(
            "no placement fits: the stages need more GPUs together than there are; "
            "loosen the pins, or give the plan more partitions"
        )
    order = sorted(best, key=lambda pools: (best[pools][0].cost, len(pools), pools))
    return [
        search.solution(pools, search.release_idle(pools, best[pools][0]), is_optimal=is_exact)
        for pools in order[:max_solutions]
    ]


def enumerate_groupings(problem: PlacementProblem) -> list[PoolStages]:
    """Return all groupings of the stages into pools, fewest pools first."""
    rows: list[tuple[int, ...]] = [(0,)]  # the pool number of each stage
    for _ in problem.stages[1:]:
        rows = [(*row, pool) for row in rows for pool in range(max(row) + 2)]
    names, total = {kind.name for kind in problem.kinds}, sum(k.gpus for k in problem.kinds)
    max_pools = min([total, *(n for kinds, n in problem.most_jobs if names <= set(kinds))])
    return [
        tuple(
            tuple(s for s, pool in enumerate(row) if pool == number)
            for number in range(max(row) + 1)
        )
        for row in sorted(rows, key=lambda row: (max(row), row))
        if max(row) < max_pools
    ]


def enumerate_divisions(total: int, counts: Sequence[Array]) -> Array:
    """Return all divisions of at most ``total`` GPUs over pools, int ``[n, pools]``.

    Args:
        counts: the allowed numbers of GPUs of each pool.
    """
    divisions = np.zeros((1, 0), np.int64)
    for possible in counts:
        row, column = np.nonzero(possible[None] <= (total - divisions.sum(1))[:, None])
        divisions = np.concatenate([divisions[row], possible[column][:, None]], axis=1)
    return divisions


def gpu_moves(pools: int, sizes: Array, *, exchanges: bool) -> Array:
    """Return transfers of 1, 2, 4, ... GPUs of a kind between two pools, or between a pool and the
    unused GPUs, as changes ``[moves, pools, kinds]`` of a division.

    Args:
        pools: number of pools.
        sizes: number of GPUs of each kind.
        exchanges: include exchanges of GPUs of two kinds between two pools.
    """
    changes: list[tuple[int, tuple[tuple[int, int, int], ...]]] = [
        (size, ((source, k, -1), (target, k, 1)))
        for k, size in enumerate(sizes)
        for source, target in itertools.permutations(range(pools + 1), 2)
    ]
    if exchanges:
        changes += [
            (min(sizes[k], sizes[j]), ((a, k, -1), (b, k, 1), (b, j, -1), (a, j, 1)))
            for a, b in itertools.combinations(range(pools), 2)
            for k, j in itertools.permutations(range(len(sizes)), 2)
        ]
    moves = []
    for size, change in changes:
        # The last row is that of the unused GPUs.
        move = np.zeros((pools + 1, len(sizes)), np.int64)
        for pool, kind, sign in change:
            move[pool, kind] += sign
        moves += [move[:pools] << i for i in range(int(size).bit_length())]
    return np.array(moves)


@dataclass(frozen=True, order=True)
class _Division:
    """The GPUs of each pool of a grouping, with the best number of chunks and the cost."""

    cost: float
    gpus: Array = field(compare=False)
    """Integers ``[pools, kinds]``."""
    chunks: int = field(compare=False)


class _Search:
    def __init__(self, problem: PlacementProblem, objective: Objective) -> None:
        self.problem, self.objective = problem, objective
        self.predictor = Predictor(problem)
        self._sizes = np.array([kind.gpus for kind in problem.kinds])
        self._counts: dict[tuple[PoolStages, int], list[Array]] = {}
        """Cache: the numbers of GPUs of a kind that the pools of a grouping can have."""
        self.coarse_rows = COARSE_ROWS
        """Maximum number of divisions in a coarse grid."""

    def solution(
        self, pools: PoolStages, division: _Division, *, is_optimal: bool
    ) -> PlacementSolution:
        """Return a division as a solution, with its prediction."""
        gpus = tuple(tuple(int(n) for n in pool) for pool in division.gpus)
        placement = Placement(pools, gpus, division.chunks)
        prediction = self.predictor.predict(placement)
        return PlacementSolution(placement, prediction, division.cost, is_optimal)

    def choose_jobs(self, max_solutions: int) -> list[PlacementSolution]:
        """Return the best jobs of all stages, then those in which one stage has another kind or
        number of GPUs.

        The best job of each stage alone is the best for all, unless stages that run at the same
        time need more GPUs than there are. Then jobs are changed, one at a time, while this is an
        improvement.
        """
        problem = self.problem
        candidates = [self._job_candidates(s) for s in range(len(problem.stages))]
        pools = tuple((s,) for s in range(len(candidates)))
        best = self._divisions(pools, np.stack([options[0] for options in candidates])[None])[0]
        while True:
            jobs, variants = best.gpus, list[_Division]()
            for s, options in enumerate(candidates):
                states = np.repeat(jobs[None], len(options), axis=0)
                states[:, s] = options
                for k in range(len(problem.kinds)):
                    others = states[(options[:, k] > 0) & (options != jobs[s]).any(1)]
                    variants += self._divisions(pools, others)[:1]
            improved = min(variants, default=best)
            if improved.cost * EQUAL_COST_FACTOR >= best.cost:
                break
            best = improved
        solution = self.solution(pools, best, is_optimal=False)
        prediction, index = solution.prediction, {s.name: i for i, s in enumerate(problem.stages)}
        waits = any(
            prediction.start_s[s]
            > max((prediction.finish_s[index[n]] for n in stage.after), default=0)
            for s, stage in enumerate(problem.stages)
        )
        is_optimal = not waits and not isinstance(self.objective, TimeToFinish)
        variants = [other for other in sorted(variants) if other.cost > best.cost]
        others = [self.solution(pools, other, is_optimal=False) for other in variants]
        return [replace(solution, is_optimal=is_optimal), *others][:max_solutions]

    def _job_candidates(self, s: int) -> Array:
        """Return the possible jobs of a stage, int ``[n, kinds]``, best first if it runs alone."""
        stage, kinds = replace(self.problem.stages[s], after=()), len(self.problem.kinds)
        jobs = [
            np.flatnonzero(rates > 0)[:, None] * np.eye(kinds, dtype=np.int64)[k]
            for k, rates in enumerate(self.predictor.tables[s])
        ]
        states = np.concatenate(jobs)[:, None]
        alone = _Search(replace(self.problem, stages=[stage]), self.objective)
        prices = states[:, 0] @ np.array([kind.price for kind in self.problem.kinds])
        costs = alone._costs(((0,),), states, np.ones(len(states), np.int64))
        seconds = self.predictor.duration(s, states[:, 0].T)
        # Costs that differ only by rounding errors are equal.
        return np.asarray(states[np.lexsort((seconds, prices, costs.round(12))), 0])

    def count_rows(self, groupings: Sequence[PoolStages]) -> float:
        """Return the number of divisions of all groupings, times their numbers of chunks."""
        total = 0.0
        for pools in groupings:
            rows = float(len(self._chunk_choices(pools)))
            for k, size in enumerate(self._sizes):
                # The number of divisions by their sum, one pool after the other.
                ways = np.eye(1, size + 1)[0]
                for counts in self._possible_counts(pools, k):
                    possible = np.zeros(size + 1)
                    possible[counts] = 1.0
                    ways = np.convolve(ways, possible)[: size + 1]
                rows *= ways.sum()
            total += rows
            if total > EXACT_ROWS:
                return math.inf
        return total

    def compare_grid(self, pools: PoolStages, *, is_exact: bool) -> list[_Division]:
        """Return the best divisions of a grid, best first: of all divisions if ``is_exact``."""
        best: list[_Division] = []
        grid = self._exact_grid(pools) if is_exact else iter([self._coarse_grid(pools)])
        for states in grid:
            best = sorted([*best, *self._divisions(pools, states)])[:MAX_STARTS]
        return best

    def refine(
        self, pools: PoolStages, divisions: Sequence[_Division], *, exchanges: bool
    ) -> _Division:
        """Return the best division that transfers of GPUs make of some divisions."""
        states = np.array([division.gpus for division in divisions])
        chunks = np.array([division.chunks for division in divisions])
        costs = np.array([division.cost for division in divisions])
        moves = gpu_moves(len(pools), self._sizes, exchanges=exchanges)
        active = np.arange(len(divisions))
        while len(active):
            options = states[active, None] + moves
            valid = (options >= 0).all((2, 3)) & (options.sum(2) <= self._sizes).all(2)
            row, column = np.nonzero(valid)
            found = np.full(valid.shape, np.inf)
            found[row, column] = self._costs(pools, options[row, column], chunks[active][row])
            best = found.argmin(1)
            new_costs = found[np.arange(len(active)), best]
            better = new_costs * EQUAL_COST_FACTOR < costs[active]
            states[active[better]] = options[np.arange(len(active)), best][better]
            costs[active[better]] = new_costs[better]
            active = active[better]
            if not len(active):
                # Another number of chunks may be better now.
                new_costs, new_chunks = self._best_chunks(pools, states)
                active = np.flatnonzero(new_costs * EQUAL_COST_FACTOR < costs)
                costs, chunks = (
                    np.minimum(costs, new_costs),
                    np.where(new_costs * EQUAL_COST_FACTOR < costs, new_chunks, chunks),
                )
        i = int(costs.argmin())
        return _Division(float(costs[i]), states[i], int(chunks[i]))

    def release_idle(self, pools: PoolStages, division: _Division) -> _Division:
        """Return the division without GPUs that do not lower the cost."""
        for pool, kind in np.ndindex(division.gpus.shape):
            counts = np.arange(int(division.gpus[pool, kind]) + 1)
            states = np.repeat(division.gpus[None], len(counts), axis=0)
            states[:, pool, kind] = counts
            costs = self._costs(pools, states, np.full(len(counts), division.chunks))
            fewest = int(np.argmax(costs <= division.cost * EQUAL_COST_FACTOR))
            division = replace(division, cost=float(costs[fewest]), gpus=states[fewest])
        return division

    def _exact_grid(self, pools: PoolStages) -> Iterator[Array]:
        """Yield batches of all divisions, int ``[n, pools, kinds]``."""
        divisions = [
            enumerate_divisions(int(size), self._possible_counts(pools, k))
            for k, size in enumerate(self._sizes)
        ]
        total = math.prod(map(len, divisions))
        for first in range(0, total, BATCH_ROWS):
            rows = np.arange(first, min(total, first + BATCH_ROWS))
            indices = np.unravel_index(rows, [len(table) for table in divisions])
            columns = [table[i] for table, i in zip(divisions, indices, strict=True)]
            yield np.stack(columns, axis=2)

    def _coarse_grid(self, pools: PoolStages) -> Array:
        """Return divisions ``[n, pools, kinds]`` in which kinds are divided into equal parts: as
        many parts as give at most ``coarse_rows`` divisions; a random sample if even whole kinds
        give more."""
        states, parts = self._divide_into(pools, 1), 2
        while parts <= MAX_PARTS and len(states) < self.coarse_rows / 2:
            finer = self._divide_into(pools, parts, limit=self.coarse_rows)
            if not len(finer):
                break
            states, parts = finer, 2 * parts
        return states

    def _divide_into(self, pools: PoolStages, parts: int, limit: int | None = None) -> Array:
        """Return divisions of each kind into equal ``parts``, at least one GPU in each pool; none
        if there are more than ``limit``."""
        states: Array = np.zeros((1, len(pools), 0), np.int64)
        must_not_mix = [p for p, pool in enumerate(pools) if not self.problem.may_mix(pool)]
        rng = np.random.default_rng(0)
        for k, size in enumerate(self._sizes):
            grid = np.unique(np.arange(parts + 1) * size // parts)
            rounded = [
                np.unique(counts[np.searchsorted(counts, grid, "right") - 1])
                for counts in self._possible_counts(pools, k)
            ]
            divisions = enumerate_divisions(int(size), rounded)
            if limit is not None and len(states) * len(divisions) > MAX_GROWTH * limit:
                return states[:0]
            if len(states) * len(divisions) > MAX_GROWTH * self.coarse_rows:
                rows = max(1, MAX_GROWTH * self.coarse_rows // len(divisions))
                states = states[rng.permutation(len(states))[:rows]]
            row = np.repeat(np.arange(len(states)), len(divisions))
            added = np.tile(divisions, (len(states), 1))
            used = np.any(states > 0, axis=2)[row]
            is_mixed = np.any((used & (added > 0))[:, must_not_mix], axis=1)
            states = np.concatenate([states[row], added[:, :, None]], axis=2)[~is_mixed]
        return states[np.any(states > 0, axis=2).all(1)]

    def _possible_counts(self, pools: PoolStages, kind: int) -> list[Array]:
        """Return the numbers of GPUs of a kind that each pool can have, ascending, with 0."""
        key = (pools, kind)
        if key not in self._counts:
            self._counts[key] = [self._pool_counts(pool, kind) for pool in pools]
        return self._counts[key]

    def _pool_counts(self, stages: Sequence[int], kind: int) -> Array:
        counts = np.arange(self._sizes[kind] + 1)
        for s in stages:
            if self.problem.stages[s].divisible:
                counts = counts[(counts == 0) | (self.predictor.tables[s][kind][counts] > 0)]
        if not self.problem.may_mix(stages):
            counts = counts[self.problem.kinds[kind].round_to_job_size(counts) == counts]
        return counts

    def _chunk_choices(self, pools: PoolStages) -> Array:
        return np.array(self.problem.chunks if len(pools) > 1 else (1,))

    def _best_chunks(self, pools: PoolStages, states: Array) -> tuple[Array, Array]:
        """Return the lowest costs over all numbers of chunks, and these numbers, ``[n]`` each."""
        options = self._chunk_choices(pools)
        tiled = np.tile(states, (len(options), 1, 1))
        costs = self._costs(pools, tiled, np.repeat(options, len(states)))
        costs = costs.reshape(len(options), len(states))
        best = costs.argmin(0)
        return costs[best, np.arange(len(states))], options[best]

    def _divisions(self, pools: PoolStages, states: Array) -> list[_Division]:
        """Return the best of some divisions ``[n, pools, kinds]`` that can run, best first."""
        costs, chunks = self._best_chunks(pools, states)
        return [
            _Division(float(costs[i]), states[i], int(chunks[i]))
            for i in np.argsort(costs, kind="stable")[:MAX_STARTS]
            if math.isfinite(costs[i])
        ]

    def _costs(self, pools: PoolStages, states: Array, chunks: Array) -> Array:
        """Return the costs ``[n]`` of divisions ``[n, pools, kinds]``, infinite if impossible."""
        gpus = [states[:, p].T for p in range(len(pools))]
        prediction = self.predictor.predict_batch(pools, gpus, chunks)
        total_s = prediction.total_s
        with np.errstate(invalid="ignore"):
            costs = self.objective.cost(self.problem, total_s, prediction.busy_s, gpus)
        return np.where(np.isfinite(total_s), costs, np.inf)


def _check_problem(problem: PlacementProblem) -> None:
    for stage in problem.stages:
        if not any(problem.rate_table(stage, k).max() > 0 for k in range(len(problem.kinds))):
            raise PlanError(
                f"stage {stage.name!r} can run nowhere: it needs more memory than any "
                "number of these GPUs has together, or no profile has a successful measurement"
            )
