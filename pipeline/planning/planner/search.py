"""Search for the best placement: every grouping of stages into pools, every division of the GPUs.

A *grouping* assigns stages to pools; a *division* assigns GPUs to the pools of a grouping. Every
grouping has a fast lower bound. Promising groupings are relaxed to a linear program
(:mod:`pipeline.planning.planner.bounds`), which gives a better bound and a fractional division to
start from. A grouping whose bound is above the cost of the best placement is skipped. With seven
stages or more, there are more groupings than can be explored. A division is improved by moving GPUs
between pools. Small problems are then solved exactly by branch and bound; in large problems the
smallest bound limits the distance from the optimum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.planning.planner.bounds import LinearRelaxation, RelaxedSolution, price_bounds
from pipeline.planning.planner.predictor import PlacementPrediction, Predictor
from pipeline.planning.planner.problem import (
    IterationTime,
    Objective,
    Placement,
    PlacementProblem,
    PoolStages,
    pools_of_jobs,
    pools_of_stages,
)
from rlinf.errors import PlanError

Array = np.ndarray


def enumerate_groupings(problem: PlacementProblem) -> list[PoolStages]:
    """Return all groupings of the stages into pools, fewest pools first. At the end are groupings
    with overlapping pools: each of the first stages of a job uses a part of its GPUs."""
    total_gpus = sum(kind.gpus for kind in problem.kinds)
    disjoint = list(_partition(range(len(problem.stages))))
    overlapping = {
        tuple(sorted(itertools.chain(*parts)))
        for pools in disjoint
        for parts in itertools.product(*([(pool,), *_overlaps(problem, pool)] for pool in pools))
        if any(len(part) > 1 for part in parts)
    }
    groupings = [*disjoint, *sorted(overlapping, key=lambda pools: (len(pools), pools))]
    names = {kind.name for kind in problem.kinds}
    max_jobs = min((n for kinds, n in problem.most_jobs if names <= set(kinds)), default=total_gpus)
    groupings = [pools for pools in groupings if len(pools) <= total_gpus]
    return [pools for pools in groupings if len(pools_of_jobs(pools)) <= max_jobs]


def _partition(stages: Sequence[int]) -> Iterator[PoolStages]:
    """Yield all partitions of some stages into pools, fewest pools first."""
    rows: list[tuple[int, ...]] = [(0,)]  # the pool number of each stage
    for _ in stages[1:]:
        rows = [(*row, pool) for row in rows for pool in range(max(row) + 2)]
    for row in sorted(rows, key=lambda row: (max(row), row)):
        yield tuple(
            tuple(s for s, pool in zip(stages, row, strict=True) if pool == number)
            for number in range(max(row) + 1)
        )


def _overlaps(problem: PlacementProblem, pool: tuple[int, ...]) -> Iterator[PoolStages]:
    """Yield the ways to run the first stages of a pool side by side, and the others on all GPUs."""
    cycle = [problem.stages[s].cycle for s in pool]
    for split in range(1, len(pool)):
        if not problem.stages[pool[split - 1]].beside:
            return
        if cycle[split] is None or cycle[split] != cycle[split - 1]:
            for parts in itertools.islice(_partition(pool[:split]), 1, None):
                yield tuple((*part, *pool[split:]) for part in parts)


class GroupingNeighbors:
    """Finds the groupings that differ from a grouping only in the pool of one stage."""

    def __init__(self, groupings: Sequence[PoolStages]) -> None:
        self._groupings = list(groupings)
        num_stages = len(set(itertools.chain(*self._groupings[0])))
        # One bit per pair of stages, which is set if they share a pool.
        bits = np.zeros((num_stages, num_stages), np.int64)
        first, second = np.triu_indices(num_stages, 1)
        bits[first, second] = bits[second, first] = 1 << np.arange(len(first))
        members = np.zeros((len(self._groupings), num_stages, num_stages), bool)
        for row, pools in zip(members, self._groupings, strict=True):
            for number, pool in enumerate(pools):
                row[list(pool), number] = True
        shared = (members[:, first] & members[:, second]).any(2)
        self._codes = shared @ (1 << np.arange(len(first), dtype=np.int64))
        self._stage_bits = bits.sum(1)
        self._indices = {pools: index for index, pools in enumerate(self._groupings)}

    def neighbors_of(self, pools: PoolStages) -> list[PoolStages]:
        """Return the neighbours of a grouping, in the order of all groupings."""
        difference = self._codes ^ self._codes[self._indices[pools]]
        is_neighbor = ((difference[:, None] & ~self._stage_bits) == 0).any(1)
        return [self._groupings[index] for index in np.flatnonzero(is_neighbor & (difference != 0))]


def enumerate_divisions(total: int, counts: Sequence[Array], allows_idle: bool) -> Array:
    """Return all divisions of ``total`` GPUs over pools, int ``[n, pools]``; if ``allows_idle``,
    GPUs may be unused.

    Args:
        counts: the allowed numbers of GPUs of each pool.
    """
    divisions = np.zeros((1, 0), np.int64)
    for possible_counts in counts:
        remaining = total - divisions.sum(1)
        row, column = np.nonzero(possible_counts[None] <= remaining[:, None])
        divisions = np.concatenate([divisions[row], possible_counts[column][:, None]], axis=1)
    return divisions if allows_idle else divisions[divisions.sum(1) == total]


def gpu_moves(pools: int, sizes: Array, *, allows_idle: bool) -> Array:
    """Return the possible moves of GPUs as changes of a division, ``[moves, pools, kinds]``.

    GPUs of a kind move from pool to pool, or two pools exchange GPUs of two kinds. If
    ``allows_idle``, GPUs also move between a pool and the unused GPUs.

    Args:
        pools: number of pools.
        sizes: number of GPUs of each kind.
    """
    kinds = len(sizes)
    owners = [*range(pools), *([None] if allows_idle else [])]
    moves = []
    for k, max_size in enumerate(sizes):
        for size in move_sizes(int(max_size)):
            for source, target in itertools.permutations(owners, 2):
                move = np.zeros((pools, kinds), dtype=np.int64)
                if source is not None:
                    move[source, k] = -size
                if target is not None:
                    move[target, k] = size
                moves.append(move)
    for source, target in itertools.combinations(range(pools), 2):
        for k, j in itertools.permutations(range(kinds), 2):
            for size in move_sizes(int(min(sizes[k], sizes[j]))):
                move = np.zeros((pools, kinds), dtype=np.int64)
                move[source, k] = move[target, j] = -size
                move[source, j] = move[target, k] = size
                moves.append(move)
    return np.array(moves, np.int64).reshape(-1, pools, kinds)


def move_sizes(maximum: int) -> list[int]:
    """Return the numbers of GPUs that may move at once: all small numbers, then growing steps."""
    sizes = {1, 2, 3, 4, 5, 6, 7, *(2**i for i in range(3, 13)), *(3 * 2**i for i in range(2, 11))}
    return sorted(size for size in sizes if size <= maximum)


def divisions_without_kind(state: Array) -> Array:
    """Return the variants ``[n, pools, kinds]`` of a division ``[pools, kinds]`` in which one pool
    or all pools have no GPUs of a kind any more.

    A plan avoids a kind's queue and interruptions only if it does not use the kind at all.
    """
    divisions = []
    for k in np.flatnonzero(state.any(0)):
        for pools in (slice(None), *np.flatnonzero(state[:, k])):
            changed = state.copy()
            changed[pools, k] = 0
            divisions.append(changed)
    return np.array(divisions, np.int64).reshape(-1, *state.shape)


EXACT_GPUS, EXACT_GROUPINGS = 16, 52
"""Problems up to this number of GPUs and groupings (five stages have 52) are enumerated."""
EXACT_DIVISIONS = 200_000
"""Other problems are enumerated if the largest grouping has at most this many divisions. With more
than ``EXACT_GROUPINGS`` groupings, this limit is proportionally lower."""
MAX_RELAXED_GROUPINGS = 250
"""Maximum number of relaxed groupings; six stages have fewer groupings."""
MAX_KIND_ASSIGNMENTS = 4096
"""Maximum number of assignments of kinds to jobs; if there are more, a random sample is tried."""
SINGLE_KIND_DIVISIONS = 8
"""Number of single-kind divisions from which the search begins if jobs must not mix kinds."""
PROMISING_FACTOR, DIVISIONS_PER_GROUPING, FINAL_GROUPINGS = 1.05, 16, 2
"""If all jobs may mix kinds: the search of a grouping begins from at most
``DIVISIONS_PER_GROUPING / kinds`` single-kind divisions, which cost less than ``PROMISING_FACTOR``
times the best cost. At the end, the best ``FINAL_GROUPINGS`` groupings are searched again."""
BATCH_SIZE = 8192
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
    lower_bound: float
    """No placement of the problem costs less than this."""
    is_optimal: bool
    """True if it is proven that no placement costs less than the best solution."""

    @property
    def gap(self) -> float:
        """Relative distance of the cost from the lower bound."""
        return self.cost / self.lower_bound - 1 if self.lower_bound > 0 else 0.0


def solve(
    problem: PlacementProblem, objective: Objective | None = None, max_solutions: int = 1
) -> list[PlacementSolution]:
    """Return at most ``max_solutions`` placements, best first, with different groupings of stages.

    Raises:
        PlanError: a stage cannot run on any kind, or the stages cannot be placed together.
    """
    _check_problem(problem)
    search = _Search(problem, objective or IterationTime())
    groupings = enumerate_groupings(problem)
    quick_s = price_bounds(search.predictor, groupings)
    bounds = {p: search.cost_bound(float(s)) for p, s in zip(groupings, quick_s, strict=True)}
    divisions, relaxed = search.explore(bounds, max_solutions)
    enumerates = search.can_enumerate(len(groupings))
    if divisions and not enumerates:
        search.improve_single_kind(divisions)
    if enumerates:
        for pools in sorted(bounds, key=lambda pools: (bounds[pools], len(pools), pools)):
            if bounds[pools] <= _cost_to_beat(divisions, 1):
                search.enumerate_exact(pools, divisions)
    if not divisions:
        raise PlanError(
            "no placement fits: the stages need more GPUs together than there are; "
            "loosen the pins, or give the plan more partitions"
        )
    best = sorted(divisions.items(), key=lambda item: (item[1].cost, len(item[0]), item[0]))
    lowest = best[0][1].cost
    bound = lowest if enumerates else search.tighten_bound(bounds, relaxed, lowest)
    return [search.solution(pools, d, bound, enumerates) for pools, d in best[:max_solutions]]


@dataclass(frozen=True)
class _Division:
    """The GPUs of each pool of a grouping, with the best number of chunks and the cost."""

    cost: float
    gpus: Array
    """Integers ``[pools, kinds]``."""
    chunks: int


_Divisions = dict[PoolStages, _Division]
"""The best division of each grouping."""


def _cost_to_beat(divisions: _Divisions, n: int) -> float:
    """Return the cost of the ``n``-th best division, from 1; infinite if there are fewer."""
    costs = sorted(division.cost for division in divisions.values())
    return costs[n - 1] if len(costs) >= n else math.inf


class _Search:
    def __init__(self, problem: PlacementProblem, objective: Objective) -> None:
        self.problem = problem
        self.objective = objective
        self.predictor = Predictor(problem)
        self.relaxation = LinearRelaxation(self.predictor)
        self._kind_gpus = np.array([kind.gpus for kind in problem.kinds])
        tables = [table for row in self.predictor.tables for table in row]
        has_several_kinds = len(problem.kinds) > 1
        # If more GPUs never slow a stage down, idle GPUs help only if GPUs have a cost.
        self._allows_idle = (
            not isinstance(objective, IterationTime)
            or problem.mixes is not None
            or bool(problem.shared or problem.most_jobs)
            or any(any(stage.switch_s.values()) for stage in problem.stages)
            or any(problem.sync_s.values())
            or any(np.any(np.diff(table) < 0) for table in tables)
            or (has_several_kinds and problem.mixing < 1)
            or (has_several_kinds and any(np.any(table[1:] == 0) for table in tables))
        )
        self._moves: dict[int, Array] = {}
        """Cache: moves by number of pools."""
        self._counts: dict[tuple[tuple[int, ...], int, bool], Array] = {}
        """Cache: the results of :meth:`counts`, by its arguments."""

    def cost_bound(self, total_s: float) -> float:
        """Return a lower bound of the cost if an iteration takes at least ``total_s`` seconds."""
        return (
            self.objective.lower_bound(self.problem, total_s)
            if math.isfinite(total_s)
            else math.inf
        )

    def explore(
        self, bounds: dict[PoolStages, float], max_solutions: int
    ) -> tuple[_Divisions, set[PoolStages]]:
        """Search the divisions of the promising groupings, and improve their ``bounds`` in place.

        The next grouping is the neighbour of the best grouping with the lowest bound, or else the
        grouping with the lowest bound of all. Groupings that cannot be among the best
        ``max_solutions`` are skipped.

        Returns:
            The best division of each grouping, and the groupings that were relaxed.
        """
        divisions: _Divisions = {}
        order = sorted(bounds, key=lambda pools: (bounds[pools], len(pools), pools))
        remaining, explored = dict.fromkeys(order), set[PoolStages]()
        neighbours, near_leader = GroupingNeighbors(order), iter(list[PoolStages]())
        previous_leader: PoolStages | None = None
        while remaining and len(explored) < MAX_RELAXED_GROUPINGS:
            cost_limit = _cost_to_beat(divisions, max_solutions)
            leader = min(divisions, key=lambda pools: divisions[pools].cost, default=None)
            if leader != previous_leader:
                previous_leader = leader
                near_leader = iter(neighbours.neighbors_of(leader) if leader else [])
            pools = next((p for p in near_leader if p in remaining), None) or next(iter(remaining))
            del remaining[pools]
            if not (math.isfinite(bounds[pools]) and bounds[pools] <= cost_limit):
                continue
            explored.add(pools)
            enough_s = cost_limit if isinstance(self.objective, IterationTime) else math.inf
            relaxed = self.relaxation.solve(pools, enough_s=enough_s)
            bounds[pools] = max(bounds[pools], self.cost_bound(relaxed.bound_s))
            if math.isfinite(bounds[pools]) and bounds[pools] <= cost_limit:
                self.improve_from_relaxation(pools, relaxed, divisions)
        return divisions, explored

    def can_enumerate(self, groupings: int) -> bool:
        """Return True if a problem with this number of groupings is small enough to enumerate."""
        if int(self._kind_gpus.sum()) <= EXACT_GPUS and groupings <= EXACT_GROUPINGS:
            return True
        divisions = 1.0
        for k, size in enumerate(self._kind_gpus):
            ways = np.eye(1, size + 1)[0]
            for s, stage in enumerate(self.problem.stages):
                possible = np.zeros(size + 1)
                possible[self.counts((s,), k, whole_nodes=not stage.beside)] = 1.0
                ways = np.convolve(ways, possible)[: size + 1]
            divisions *= float(ways.sum() if self._allows_idle else ways[-1])
        return divisions * max(1.0, groupings / EXACT_GROUPINGS) <= EXACT_DIVISIONS

    def counts(self, stages: tuple[int, ...], kind: int, *, whole_nodes: bool) -> Array:
        """Return the numbers of GPUs of a kind that a pool can have, ascending, with 0.

        Args:
            stages: the pool's stages that are in no other pool.
            whole_nodes: True if the pool is a job of its own, which needs whole nodes.
        """
        key = (stages, kind, whole_nodes)
        if key not in self._counts:
            gpu_kind, counts = self.problem.kinds[kind], np.arange(self._kind_gpus[kind] + 1)
            for s in stages:
                if self.problem.stages[s].divisible:
                    counts = counts[(counts == 0) | (self.predictor.tables[s][kind][counts] > 0)]
            if whole_nodes and not self.problem.may_mix(stages):
                counts = counts[gpu_kind.round_to_job_size(counts) == counts]
            self._counts[key] = counts
        return self._counts[key]

    def possible_counts(self, pools: PoolStages, kind: int) -> list[Array]:
        """Return the numbers of GPUs of a kind that each pool can have."""
        stage_pools = pools_of_stages(pools)
        exclusive = [tuple(s for s in pool if len(stage_pools[s]) == 1) for pool in pools]
        pairs = zip(exclusive, pools, strict=True)
        return [self.counts(stages, kind, whole_nodes=stages == pool) for stages, pool in pairs]

    def solution(
        self, pools: PoolStages, division: _Division, lower_bound: float, is_optimal: bool
    ) -> PlacementSolution:
        """Return a division as a solution, with its prediction."""
        gpus = tuple(tuple(int(n) for n in pool) for pool in division.gpus)
        placement = Placement(pools, gpus, division.chunks)
        return PlacementSolution(
            placement, self.predictor.predict(placement), division.cost, lower_bound, is_optimal
        )

    def costs(
        self,
        pools: PoolStages,
        gpus: Sequence[Array],
        chunks: int | Array,
        assigned: list[Array],
    ) -> Array:
        """Return the costs ``[n]``, infinite if impossible; see :meth:`Predictor.predict_batch`."""
        predicted = self.predictor.predict_batch(pools, gpus, chunks, assigned)
        with np.errstate(invalid="ignore"):
            job_gpus = gpus_by_job(pools, assigned)
            costs = self.objective.cost(self.problem, predicted.total_s, job_gpus)
        return np.where(np.isfinite(predicted.total_s), costs, np.inf)

    def best_chunks(
        self, pools: PoolStages, gpus: Sequence[Array], assigned: Sequence[Array]
    ) -> tuple[Array, Array]:
        """Return the lowest costs over all numbers of chunks, and these numbers, ``[n]`` each."""
        options = self._chunk_choices(pools)
        num_divisions = gpus[0].shape[1]
        tiled_gpus = [np.tile(pool, len(options)) for pool in gpus]
        tiled_assigned = [np.tile(pool, len(options)) for pool in assigned]
        chunk_counts = np.repeat(options, num_divisions)
        costs = self.costs(pools, tiled_gpus, chunk_counts, tiled_assigned)
        costs = costs.reshape(len(options), num_divisions)
        best = costs.argmin(0)
        return costs[best, np.arange(num_divisions)], options[best]

    def tighten_bound(
        self, bounds: dict[PoolStages, float], relaxed: set[PoolStages], lowest_cost: float
    ) -> float:
        """Return the smallest bound of all groupings. To raise it, the ``relaxed`` groupings with
        the smallest bounds are relaxed again, separately for each number of chunks."""
        tightest = min([lowest_cost, *(bounds[pools] for pools in bounds.keys() - relaxed)])
        for pools in sorted(relaxed, key=lambda pools: bounds[pools]):
            bound = bounds[pools]
            if bound < tightest and len(pools) > 1:
                solutions = (self.relaxation.solve(pools, (m,)) for m in self.problem.chunks)
                bound = max(bound, min(self.cost_bound(solution.bound_s) for solution in solutions))
            tightest = min(tightest, bound)
        return tightest

    def improve_from_relaxation(
        self, pools: PoolStages, relaxed: RelaxedSolution, divisions: _Divisions
    ) -> None:
        """Improve divisions near the relaxation by moving GPUs between pools."""
        for state in self._initial_divisions(pools, relaxed.gpus, _cost_to_beat(divisions, 1)):
            self._improve_from(pools, state, divisions)

    def improve_single_kind(self, divisions: _Divisions) -> None:
        """Search the best groupings again, from divisions in which all jobs, or all but one, have a
        single kind. If jobs may mix kinds, moves from the relaxation rarely lead to these."""
        for pools in sorted(divisions, key=lambda pools: divisions[pools].cost)[:FINAL_GROUPINGS]:
            if len(self._kind_gpus) == 1 or not all(map(self.problem.may_mix, pools)):
                continue
            gpus, candidates, jobs = divisions[pools].gpus.astype(float), [], pools_of_jobs(pools)
            for mixed_job in (None, *jobs):
                single_kind_jobs = [job for job in jobs if job != mixed_job]
                candidates += self._single_kind_divisions(pools, gpus, single_kind_jobs)[:1]
            for _, state in sorted(candidates, key=lambda candidate: candidate[0])[:2]:
                self._improve_from(pools, state, divisions)

    def _improve_from(self, pools: PoolStages, state: Array, divisions: _Divisions) -> None:
        """Improve a division ``[pools, kinds]`` by moves and by the number of chunks; store it."""
        chunks, cost = None, math.inf
        while True:
            gpus = [pool[:, None] for pool in state]
            costs, best_chunks = self.best_chunks(pools, gpus, gpus)
            if chunks is not None and (best_chunks[0] == chunks or not costs[0] < cost):
                break
            chunks, cost = int(best_chunks[0]), float(costs[0])
            state, cost = self._descend(pools, state, chunks, cost)
        if math.isfinite(cost):
            self._keep(pools, _Division(cost, state, int(chunks or 1)), divisions)

    def enumerate_exact(self, pools: PoolStages, divisions: _Divisions) -> None:
        """Enumerate every division, kind by kind, and skip branches that cannot be better.

        In a branch some kinds are divided already. For the lower bound of a branch, every pool has
        all GPUs of the other kinds, at no cost.
        """
        order = np.argsort(-self._kind_gpus, kind="stable")
        empty = np.zeros((1, len(pools), len(self._kind_gpus)), np.int64)
        self._branch(pools, order, 0, empty, divisions)

    def _branch(
        self,
        pools: PoolStages,
        order: Array,
        depth: int,
        states: Array,
        divisions: _Divisions,
    ) -> None:
        """Divide the kind ``order[depth]`` for all ``states``, ``[n, pools, kinds]``."""
        kind = order[depth]
        last = depth + 1 == len(order)
        splits = enumerate_divisions(
            int(self._kind_gpus[kind]), self.possible_counts(pools, int(kind)), self._allows_idle
        )
        if not len(splits):
            return
        undivided = np.zeros(len(order), np.int64)
        undivided[order[depth + 1 :]] = self._kind_gpus[order[depth + 1 :]]
        step = max(1, BATCH_SIZE // len(splits))
        for first in range(0, len(states), step):
            children = np.repeat(states[first : first + step], len(splits), axis=0)
            children[:, :, kind] = np.tile(splits, (len(children) // len(splits), 1))
            assigned = [children[:, pool].T for pool in range(len(pools))]
            gpus = [pool + undivided[:, None] for pool in assigned]
            costs, chunks = self.best_chunks(pools, gpus, assigned)
            if last:
                i = int(np.argmin(costs))
                if costs[i] < _cost_to_beat(divisions, 1):
                    best = _Division(float(costs[i]), children[i], int(chunks[i]))
                    self._keep(pools, best, divisions)
                continue
            promising = np.flatnonzero(costs * EQUAL_COST_FACTOR < _cost_to_beat(divisions, 1))
            promising = promising[np.argsort(costs[promising], kind="stable")]
            if len(promising):
                self._branch(pools, order, depth + 1, children[promising], divisions)

    def _descend(
        self, pools: PoolStages, state: Array, chunks: int, cost: float
    ) -> tuple[Array, float]:
        """Make the best move of GPUs until none reduces the cost; return state and cost."""
        if len(pools) not in self._moves:
            self._moves[len(pools)] = gpu_moves(
                len(pools), self._kind_gpus, allows_idle=self._allows_idle
            )
        while True:
            options = state[None] + self._moves[len(pools)]
            if self._allows_idle:
                options = np.concatenate([options, divisions_without_kind(state)])
            is_valid = (options >= 0).all((1, 2)) & (options.sum(1) <= self._kind_gpus).all(1)
            options = options[is_valid]
            if not len(options):
                return state, cost
            gpus = [options[:, pool].T for pool in range(len(pools))]
            costs = self.costs(pools, gpus, chunks, gpus)
            i = int(np.argmin(costs))
            if not costs[i] * EQUAL_COST_FACTOR < cost:
                return state, cost
            state, cost = options[i], float(costs[i])

    def _may_mix(self, pools: PoolStages, job: Sequence[int]) -> bool:
        return self.problem.may_mix([s for p in job for s in pools[p]])

    def _chunk_choices(self, pools: PoolStages) -> Array:
        return np.array(self.problem.chunks if len(pools) > 1 else (1,))

    def _initial_divisions(self, pools: PoolStages, gpus: Array, lowest: float) -> Sequence[Array]:
        """Return initial divisions ``[pools, kinds]``: the rounded relaxation, and divisions with a
        single kind for each job that must not mix kinds. If all may mix, each job has a single kind
        in these, and they cost less than ``PROMISING_FACTOR * lowest``."""
        jobs = pools_of_jobs(pools)
        single_kind_jobs = [job for job in jobs if not self._may_mix(pools, job)]
        rounded = self._round(pools, gpus)
        candidates = self._single_kind_divisions(pools, gpus, single_kind_jobs or jobs)
        if single_kind_jobs:
            # Divisions that cannot run are included, because a few moves may make them valid.
            return [*(state for _, state in candidates), rounded]
        # With more kinds, improving one division takes longer.
        candidates = candidates[: max(1, DIVISIONS_PER_GROUPING // len(self._kind_gpus))]
        return [rounded, *(state for cost, state in candidates if cost < PROMISING_FACTOR * lowest)]

    def _single_kind_divisions(
        self, pools: PoolStages, gpus: Array, jobs: Sequence[tuple[int, ...]]
    ) -> list[tuple[float, Array]]:
        """Return the best divisions in which each of ``jobs`` has a single kind, with their costs.

        The GPUs of a kind are divided in proportion to the fractional ``gpus``.
        """
        gpus, kinds = np.maximum(gpus, 0.0), len(self._kind_gpus)
        if kinds ** len(jobs) <= MAX_KIND_ASSIGNMENTS:
            choices = np.array(list(itertools.product(range(kinds), repeat=len(jobs))))
        else:
            choices = np.random.default_rng(0).integers(0, kinds, (MAX_KIND_ASSIGNMENTS, len(jobs)))
        wanted_gpus = np.tile(gpus, (len(choices), 1, 1))
        for i, job in enumerate(jobs):
            for p in job:
                wanted_gpus[:, p] = 0.0
                wanted_gpus[np.arange(len(choices)), p, choices[:, i]] = max(gpus[p].sum(), 1e-3)
        shares = wanted_gpus / np.maximum(wanted_gpus.sum(1, keepdims=True), 1e-9)
        states = np.floor(shares * self._kind_gpus + 1e-6).astype(np.int64)
        states = np.maximum(states, wanted_gpus > 0)
        for k in range(len(self._kind_gpus)):
            for p, counts in enumerate(self.possible_counts(pools, k)):
                states[:, p, k] = counts[np.searchsorted(counts, states[:, p, k], "right") - 1]
        excess = np.maximum(states.sum(1) - self._kind_gpus, 0)
        largest = states.argmax(1)
        for k in range(len(self._kind_gpus)):
            states[np.arange(len(choices)), largest[:, k], k] -= excess[:, k]
            for job in (job for job in jobs if len(job) > 1 and not self._may_mix(pools, job)):
                # The pools of a job must have whole nodes together.
                job_gpus = states[:, job, k].sum(1)
                largest_pool = np.array(job)[states[:, job, k].argmax(1)]
                surplus = job_gpus - self.problem.kinds[k].round_to_job_size(job_gpus)
                states[np.arange(len(choices)), largest_pool, k] -= surplus
        states = states[(states >= 0).all((1, 2))]
        pool_gpus = [states[:, p].T for p in range(len(pools))]
        costs, _ = self.best_chunks(pools, pool_gpus, pool_gpus)
        best = np.argsort(costs, kind="stable")[:SINGLE_KIND_DIVISIONS]
        return [(float(costs[i]), states[i]) for i in best]

    def _round(self, pools: PoolStages, gpus: Array) -> Array:
        """Round fractional GPUs ``[pools, kinds]`` to possible numbers, with similar sums."""
        gpus = np.maximum(gpus, 0.0)
        rounded = np.zeros(gpus.shape, np.int64)
        for k, available in enumerate(self._kind_gpus):
            counts = self.possible_counts(pools, k)
            indices = [
                int(np.searchsorted(pool_counts, n + 1e-6, "right")) - 1
                for pool_counts, n in zip(counts, gpus[:, k], strict=True)
            ]
            rounded[:, k] = [counts[p][i] for p, i in enumerate(indices)]
            target = round(float(gpus[:, k].sum())) if self._allows_idle else int(available)
            unused = min(target, int(available)) - int(rounded[:, k].sum())
            for p in np.argsort(rounded[:, k] - gpus[:, k], kind="stable"):
                larger = counts[p][indices[p] + 1 :] - rounded[p, k]
                if len(larger) and larger[0] <= unused:
                    rounded[p, k] += larger[0]
                    unused -= int(larger[0])
        return rounded

    def _keep(self, pools: PoolStages, division: _Division, divisions: _Divisions) -> None:
        """Store a division if it is the best of its grouping."""
        if pools not in divisions or division.cost < divisions[pools].cost:
            divisions[pools] = replace(division, gpus=division.gpus.copy())


def gpus_by_job(pools: PoolStages, gpus: Sequence[Array]) -> list[Array]:
    """Return the GPUs of each job, int ``[kinds, n]``; overlapping pools are one job."""
    jobs = pools_of_jobs(pools)
    if len(jobs) == len(pools):
        return list(gpus)
    return [np.sum([gpus[p] for p in job], axis=0) for job in jobs]


def _check_problem(problem: PlacementProblem) -> None:
    for stage in problem.stages:
        if not any(problem.rate_table(stage, k).max() > 0 for k in range(len(problem.kinds))):
            pinned = problem.allowed.get(stage.name)
            kinds = f" on {', '.join(sorted(pinned))}" if pinned else ""
            raise PlanError(
                f"stage {stage.name!r} can run nowhere{kinds}: it needs more memory than any "
                "number of these GPUs has together, or no profile has a successful measurement"
            )
