"""Search for the best placement: every grouping of stages into pools, every division of the GPUs.

Every grouping has a fast lower bound, and promising ones are relaxed to a linear program
(:mod:`pipeline.planning.planner.bounds`), which gives a better bound and a fractional division to
start from. A grouping whose bound is above the best placement is skipped; from seven stages on
there are more groupings than can be explored. A division is improved by moving GPUs between pools.
Small problems are then enumerated, branch by branch, so that their result is exact; for others the
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
    """Return all ways to divide the stages over pools, fewest pools first; then those with
    overlapping pools, in which the first stages of a job use a part of its GPUs each."""
    most = sum(kind.gpus for kind in problem.kinds)
    separate = list(_divided(range(len(problem.stages))))
    overlapping = {
        tuple(sorted(itertools.chain(*parts)))
        for pools in separate
        for parts in itertools.product(*([(pool,), *_split(problem, pool)] for pool in pools))
        if any(len(part) > 1 for part in parts)
    }
    every = [*separate, *sorted(overlapping, key=lambda pools: (len(pools), pools))]
    names = {kind.name for kind in problem.kinds}
    least = min((n for kinds, n in problem.most_jobs if names <= set(kinds)), default=most)
    return [pools for pools in every if len(pools) <= most and len(pools_of_jobs(pools)) <= least]


def _divided(stages: Sequence[int]) -> Iterator[PoolStages]:
    """Yield all ways to divide some stages, fewest pools first."""
    codes: list[tuple[int, ...]] = [(0,)]
    for _ in stages[1:]:
        codes = [(*code, i) for code in codes for i in range(max(code) + 2)]
    for code in sorted(codes, key=lambda code: (max(code), code)):
        yield tuple(
            tuple(s for s, pool in zip(stages, code, strict=True) if pool == number)
            for number in range(max(code) + 1)
        )


def _split(problem: PlacementProblem, pool: tuple[int, ...]) -> Iterator[PoolStages]:
    """Yield the ways to run the first stages of a pool side by side and the others on all of it."""
    cycle = [problem.stages[s].cycle for s in pool]
    for cut in range(1, len(pool)):
        if not problem.stages[pool[cut - 1]].beside:
            return
        if cycle[cut] is None or cycle[cut] != cycle[cut - 1]:
            for parts in itertools.islice(_divided(pool[:cut]), 1, None):
                yield tuple((*part, *pool[cut:]) for part in parts)


class GroupingNeighbors:
    """Finds the groupings that differ only in the pool of one stage."""

    def __init__(self, every: Sequence[PoolStages]) -> None:
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

    def neighbors_of(self, pools: PoolStages) -> list[PoolStages]:
        """Return the neighbours of a grouping, in the order of all groupings."""
        difference = self._codes ^ self._codes[self._places[pools]]
        near = ((difference[:, None] & ~self._of_stage) == 0).any(1)
        return [self._every[place] for place in np.flatnonzero(near & (difference != 0))]


def enumerate_divisions(total: int, counts: Sequence[Array], idle: bool) -> Array:
    """Return all ways to give ``total`` GPUs to pools, int ``[n, pools]``; with unused ones if
    ``idle``.

    Args:
        counts: the numbers that each pool can have.
    """
    out = np.zeros((1, 0), np.int64)
    for possible_counts in counts:
        left = total - out.sum(1)
        row, column = np.nonzero(possible_counts[None] <= left[:, None])
        out = np.concatenate([out[row], possible_counts[column][:, None]], axis=1)
    return out if idle else out[out.sum(1) == total]


def gpu_moves(pools: int, sizes: Array, *, idle: bool) -> Array:
    """Return changes of a division, ``[moves, pools, kinds]``: GPUs of a kind from pool to pool.

    With ``idle``, GPUs may also become unused or used. A GPU of one kind may be exchanged for one
    of another.

    Args:
        sizes: GPUs of each kind.
    """
    kinds = len(sizes)
    places = [*range(pools), *([None] if idle else [])]
    out = []
    for k, most in enumerate(sizes):
        for size in move_sizes(int(most)):
            for a, b in itertools.permutations(places, 2):
                move = np.zeros((pools, kinds), dtype=np.int64)
                if a is not None:
                    move[a, k] = -size
                if b is not None:
                    move[b, k] = size
                out.append(move)
    for a, b in itertools.combinations(range(pools), 2):
        for k, j in itertools.permutations(range(kinds), 2):
            for size in move_sizes(int(min(sizes[k], sizes[j]))):
                move = np.zeros((pools, kinds), dtype=np.int64)
                move[a, k], move[b, k], move[a, j], move[b, j] = -size, size, size, -size
                out.append(move)
    return np.array(out, np.int64).reshape(-1, pools, kinds)


def move_sizes(most: int) -> list[int]:
    """Return how many GPUs are moved at once: small numbers, then growing steps."""
    sizes = {1, 2, 3, 4, 5, 6, 7, *(2**i for i in range(3, 13)), *(3 * 2**i for i in range(2, 11))}
    return sorted(size for size in sizes if size <= most)


def divisions_without_kind(state: Array) -> Array:
    """Return the division without a kind, in one pool or in all: ``[n, pools, kinds]``.

    Avoiding a queue or interruptions only helps if a kind is not used at all.
    """
    out = []
    for k in np.flatnonzero(state.any(0)):
        for pools in (slice(None), *np.flatnonzero(state[:, k])):
            changed = state.copy()
            changed[pools, k] = 0
            out.append(changed)
    return np.array(out, np.int64).reshape(-1, *state.shape)


EXACT_GPUS, EXACT_GROUPINGS = 16, 52
"""Problems up to this size, and of up to five stages, are always enumerated."""
EXACT_DIVISIONS = 200_000
"""Other problems are enumerated if the largest grouping has at most this many divisions; with more
groupings fewer."""
MAX_RELAXED_GROUPINGS = 250
"""Maximum number of relaxed groupings: all of six stages."""
MAX_KIND_ASSIGNMENTS = 4096
"""Maximum number of assignments of kinds to pools that are tried; if there are more, a sample."""
SINGLE_KIND_STARTS = 8
"""Number of divisions that are improved if pools must be of one kind."""
PROMISING_FACTOR, STARTS_PER_GROUPING, FINAL_GROUPINGS = 1.05, 16, 2
"""If pools may mix kinds, single-kind divisions are improved if they cost less than this factor of
the best one, this number divided by the number of kinds for each grouping, and at the end for this
many groupings again."""
BATCH_SIZE = 8192
"""Number of divisions that are evaluated at once."""
EQUAL_COST_FACTOR = 1 + 1e-9
"""Costs within this factor count as equal."""


@dataclass(frozen=True)
class PlacementSolution:
    """The best placement of one grouping, with its prediction and bound."""

    placement: Placement
    prediction: PlacementPrediction
    cost: float
    """Cost in the unit of the objective."""
    bound: float
    """No placement of the whole problem costs less than this."""
    exact: bool
    """True if it is proven that no placement costs less than the best solution."""

    @property
    def gap(self) -> float:
        """The relative difference between cost and bound."""
        return self.cost / self.bound - 1 if self.bound > 0 else 0.0


def solve(
    problem: PlacementProblem, objective: Objective | None = None, alternatives: int = 1
) -> list[PlacementSolution]:
    """Return the best placements, best first, each with another grouping of the stages.

    Raises:
        PlanError: a stage can run nowhere, or the stages cannot be placed together.
    """
    _check(problem)
    search = _Search(problem, objective or IterationTime())
    every = enumerate_groupings(problem)
    quick = price_bounds(search.predictor, every)
    bounds = {p: search.bound(float(b)) for p, b in zip(every, quick, strict=True)}
    found, relaxed = search.explore(bounds, alternatives)
    exact = search.is_small(len(every))
    if found and not exact:
        search.split_by_kind(found)
    if exact:
        for pools in sorted(bounds, key=lambda pools: (bounds[pools], len(pools), pools)):
            if bounds[pools] <= _worst(found, 1):
                search.enumerate_exact(pools, found)
    if not found:
        raise PlanError(
            "no placement fits: the stages need more GPUs together than there are; "
            "loosen the pins, or give the plan more partitions"
        )
    best = sorted(found.items(), key=lambda item: (item[1].cost, len(item[0]), item[0]))
    least = best[0][1].cost
    bound = least if exact else search.tighten_bound(bounds, relaxed, least)
    return [search.solution(pools, f, bound, exact) for pools, f in best[:alternatives]]


@dataclass(frozen=True)
class _Found:
    cost: float
    gpus: Array
    """Integers ``[pools, kinds]``."""
    chunks: int


def _worst(found: dict[PoolStages, _Found], wanted: int) -> float:
    """Return the cost that a new grouping must stay below."""
    costs = sorted(f.cost for f in found.values())
    return costs[wanted - 1] if len(costs) >= wanted else math.inf


class _Search:
    def __init__(self, problem: PlacementProblem, objective: Objective) -> None:
        self.problem = problem
        self.objective = objective
        self.predictor = Predictor(problem)
        self.relaxation = LinearRelaxation(self.predictor)
        self._sizes = np.array([kind.gpus for kind in problem.kinds])
        tables = [table for row in self.predictor.tables for table in row]
        several = len(problem.kinds) > 1
        # If more GPUs never slow a stage down, idle ones only help if GPUs have a cost.
        self._idle = (
            not isinstance(objective, IterationTime)
            or problem.mixes is not None
            or bool(problem.shared or problem.most_jobs)
            or any(any(stage.switch_s.values()) for stage in problem.stages)
            or any(problem.sync_s.values())
            or any(np.any(np.diff(table) < 0) for table in tables)
            or (several and (problem.mixing < 1 or any(np.any(t[1:] == 0) for t in tables)))
        )
        self._moves: dict[int, Array] = {}
        self._counts: dict[tuple[tuple[int, ...], int, bool], Array] = {}

    def bound(self, total_s: float) -> float:
        return (
            self.objective.lower_bound(self.problem, total_s)
            if math.isfinite(total_s)
            else math.inf
        )

    def explore(
        self, bounds: dict[PoolStages, float], alternatives: int
    ) -> tuple[dict[PoolStages, _Found], set[PoolStages]]:
        """Explore the promising groupings and improve their ``bounds``.

        The next grouping is the most promising neighbour of the best one, else the most promising
        of all. Groupings that cannot be among the best are skipped; with many stages there are more
        than can be explored.

        Returns:
            The best division of each grouping, and the groupings that were relaxed.
        """
        found: dict[PoolStages, _Found] = {}
        order = sorted(bounds, key=lambda pools: (bounds[pools], len(pools), pools))
        waiting, seen = dict.fromkeys(order), set[PoolStages]()
        neighbours, near = GroupingNeighbors(order), iter(list[PoolStages]())
        best: PoolStages | None = None
        while waiting and len(seen) < MAX_RELAXED_GROUPINGS:
            worst = _worst(found, alternatives)
            leader = min(found, key=lambda pools: found[pools].cost, default=None)
            if leader != best:
                best = leader
                near = iter(neighbours.neighbors_of(best) if best else [])
            pools = next((p for p in near if p in waiting), None) or next(iter(waiting))
            del waiting[pools]
            if not (math.isfinite(bounds[pools]) and bounds[pools] <= worst):
                continue
            seen.add(pools)
            enough_s = worst if isinstance(self.objective, IterationTime) else math.inf
            relaxed = self.relaxation.solve(pools, enough_s=enough_s)
            bounds[pools] = max(bounds[pools], self.bound(relaxed.bound_s))
            if math.isfinite(bounds[pools]) and bounds[pools] <= worst:
                self.improve(pools, relaxed, found)
        return found, seen

    def is_small(self, groupings: int) -> bool:
        """Return True if a problem with this many groupings is enumerated."""
        if int(self._sizes.sum()) <= EXACT_GPUS and groupings <= EXACT_GROUPINGS:
            return True
        divisions = 1.0
        for k, size in enumerate(self._sizes):
            ways = np.eye(1, size + 1)[0]
            for s, stage in enumerate(self.problem.stages):
                each = np.zeros(size + 1)
                each[self.counts((s,), k, whole=not stage.beside)] = 1.0
                ways = np.convolve(ways, each)[: size + 1]
            divisions *= float(ways.sum() if self._idle else ways[-1])
        return divisions * max(1.0, groupings / EXACT_GROUPINGS) <= EXACT_DIVISIONS

    def counts(self, stages: tuple[int, ...], kind: int, *, whole: bool) -> Array:
        """Return the numbers of GPUs of a kind that a pool can have, ascending, with 0.

        Args:
            stages: the stages that work on them alone.
            whole: whether it is a job of its own, which has whole nodes.
        """
        key = (stages, kind, whole)
        if key not in self._counts:
            entry, possible_counts = self.problem.kinds[kind], np.arange(self._sizes[kind] + 1)
            for s in stages:
                if self.problem.stages[s].divisible:
                    possible_counts = possible_counts[
                        (possible_counts == 0)
                        | (self.predictor.tables[s][kind][possible_counts] > 0)
                    ]
            if whole and not self.problem.may_mix(stages):
                possible_counts = possible_counts[
                    entry.round_to_job_size(possible_counts) == possible_counts
                ]
            self._counts[key] = possible_counts
        return self._counts[key]

    def possible_counts(self, pools: PoolStages, kind: int) -> list[Array]:
        """Return the numbers of GPUs of a kind that each pool can have."""
        home = pools_of_stages(pools)
        own = [tuple(s for s in pool if len(home[s]) == 1) for pool in pools]
        return [self.counts(o, kind, whole=o == pool) for o, pool in zip(own, pools, strict=True)]

    def solution(
        self, pools: PoolStages, found: _Found, bound: float, exact: bool
    ) -> PlacementSolution:
        gpus = tuple(tuple(int(n) for n in pool) for pool in found.gpus)
        placement = Placement(pools, gpus, found.chunks)
        return PlacementSolution(
            placement, self.predictor.predict(placement), found.cost, bound, exact
        )

    def costs(
        self,
        pools: PoolStages,
        gpus: Sequence[Array],
        chunks: int | Array,
        allocated: Sequence[Array],
    ) -> Array:
        predicted = self.predictor.predict_batch(pools, gpus, chunks, allocated)
        with np.errstate(invalid="ignore"):
            costs = self.objective.cost(
                self.problem, predicted.total_s, gpus_by_job(pools, allocated)
            )
        return np.where(np.isfinite(predicted.total_s), costs, np.inf)

    def best_chunks(
        self, pools: PoolStages, gpus: Sequence[Array], allocated: Sequence[Array]
    ) -> tuple[Array, Array]:
        """Return the lowest costs over all numbers of chunks ``[n]``, and these numbers ``[n]``."""
        options = self._chunks(pools)
        count = gpus[0].shape[1]
        many = [np.tile(pool, len(options)) for pool in gpus]
        also = [np.tile(pool, len(options)) for pool in allocated]
        chunk_counts = np.repeat(options, count)
        costs = self.costs(pools, many, chunk_counts, also).reshape(len(options), count)
        least = costs.argmin(0)
        return costs[least, np.arange(count)], options[least]

    def tighten_bound(
        self, bounds: dict[PoolStages, float], relaxed: set[PoolStages], least: float
    ) -> float:
        """Return the smallest bound of all groupings; decisive ``relaxed`` ones are bounded
        separately for each number of chunks."""
        tight = min([least, *(loose for pools, loose in bounds.items() if pools not in relaxed)])
        for pools in sorted(relaxed, key=lambda pools: bounds[pools]):
            each = [loose := bounds[pools]]
            if loose < tight and len(pools) > 1:
                chunk_counts = (self.relaxation.solve(pools, (m,)) for m in self.problem.chunks)
                each.append(min(self.bound(relaxed.bound_s) for relaxed in chunk_counts))
            tight = min(tight, max(each))
        return tight

    def improve(
        self, pools: PoolStages, relaxed: RelaxedSolution, found: dict[PoolStages, _Found]
    ) -> None:
        """Descend from near the relaxation by moves of GPUs between two pools."""
        for start in self._starts(pools, relaxed.gpus, _worst(found, 1)):
            self._improve(pools, start, found)

    def split_by_kind(self, found: dict[PoolStages, _Found]) -> None:
        """Improve the best groupings again from divisions that give all pools, or all but one, a
        single kind: if pools may mix, moves from the relaxation rarely lead there."""
        for pools in sorted(found, key=lambda pools: found[pools].cost)[:FINAL_GROUPINGS]:
            if len(self._sizes) == 1 or not all(map(self.problem.may_mix, pools)):
                continue
            gpus, starts, every = found[pools].gpus.astype(float), [], pools_of_jobs(pools)
            for free in (None, *every):
                like = [job for job in every if job != free]
                starts += self._of_one_kind(pools, gpus, like)[:1]
            for _, state in sorted(starts, key=lambda start: start[0])[:2]:
                self._improve(pools, state, found)

    def _improve(self, pools: PoolStages, state: Array, found: dict[PoolStages, _Found]) -> None:
        chunks, cost = None, math.inf
        while True:
            here = [pool[:, None] for pool in state]
            costs, chosen = self.best_chunks(pools, here, here)
            if chunks is not None and (chosen[0] == chunks or not costs[0] < cost):
                break
            chunks, cost = int(chosen[0]), float(costs[0])
            state, cost = self._descend(pools, state, chunks, cost)
        if math.isfinite(cost):
            self._keep(pools, _Found(cost, state, int(chunks or 1)), found)

    def enumerate_exact(self, pools: PoolStages, found: dict[PoolStages, _Found]) -> None:
        """Enumerate every division, kind by kind, and skip branches that cannot be better.

        A branch has divided some kinds. It is bounded with all GPUs of the other kinds given to
        every pool at once and free of charge.
        """
        order = np.argsort(-self._sizes, kind="stable")
        count = len(pools)
        self._branch(pools, order, 0, np.zeros((1, count, len(self._sizes)), np.int64), found)

    def _branch(
        self,
        pools: PoolStages,
        order: Array,
        depth: int,
        states: Array,
        found: dict[PoolStages, _Found],
    ) -> None:
        kind = order[depth]
        last = depth + 1 == len(order)
        parts = enumerate_divisions(
            int(self._sizes[kind]), self.possible_counts(pools, int(kind)), self._idle
        )
        if not len(parts):
            return
        rest = np.zeros(len(order), np.int64)
        rest[order[depth + 1 :]] = self._sizes[order[depth + 1 :]]
        step = max(1, BATCH_SIZE // len(parts))
        for first in range(0, len(states), step):
            some = np.repeat(states[first : first + step], len(parts), axis=0)
            some[:, :, kind] = np.tile(parts, (len(some) // len(parts), 1))
            allocated = [some[:, pool].T for pool in range(len(pools))]
            gpus = [pool + rest[:, None] for pool in allocated]
            costs, chunks = self.best_chunks(pools, gpus, allocated)
            if last:
                i = int(np.argmin(costs))
                if costs[i] < _worst(found, 1):
                    self._keep(pools, _Found(float(costs[i]), some[i], int(chunks[i])), found)
                continue
            good = np.flatnonzero(costs * EQUAL_COST_FACTOR < _worst(found, 1))
            good = good[np.argsort(costs[good], kind="stable")]
            if len(good):
                self._branch(pools, order, depth + 1, some[good], found)

    def _descend(
        self, pools: PoolStages, state: Array, chunks: int, cost: float
    ) -> tuple[Array, float]:
        if len(pools) not in self._moves:
            self._moves[len(pools)] = gpu_moves(len(pools), self._sizes, idle=self._idle)
        while True:
            options = state[None] + self._moves[len(pools)]
            if self._idle:
                options = np.concatenate([options, divisions_without_kind(state)])
            keep = (options >= 0).all((1, 2)) & (options.sum(1) <= self._sizes).all(1)
            options = options[keep]
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

    def _chunks(self, pools: PoolStages) -> Array:
        return np.array(self.problem.chunks if len(pools) > 1 else (1,))

    def _starts(self, pools: PoolStages, gpus: Array, least: float) -> Sequence[Array]:
        """Return initial divisions ``[pools, kinds]``.

        If pools must be of one kind: the best ways to give each a kind, which pools of that kind
        and mixing pools share as the relaxation shares all GPUs.
        """
        every = pools_of_jobs(pools)
        like = [job for job in every if not self._may_mix(pools, job)]
        near = self._round(pools, gpus)
        one = self._of_one_kind(pools, gpus, like or every)
        if like:
            # Some cannot run, but are only a few moves away from others that can.
            return [*(state for _, state in one), near]
        # A descent takes longer with more kinds.
        some = one[: max(1, STARTS_PER_GROUPING // len(self._sizes))]
        return [near, *(state for cost, state in some if cost < PROMISING_FACTOR * least)]

    def _of_one_kind(
        self, pools: PoolStages, gpus: Array, like: Sequence[tuple[int, ...]]
    ) -> list[tuple[float, Array]]:
        """Return the best divisions in which each job of ``like`` has a single kind, with their
        costs."""
        gpus, kinds = np.maximum(gpus, 0.0), len(self._sizes)
        if kinds ** len(like) <= MAX_KIND_ASSIGNMENTS:
            choices = np.array(list(itertools.product(range(kinds), repeat=len(like))))
        else:
            choices = np.random.default_rng(0).integers(0, kinds, (MAX_KIND_ASSIGNMENTS, len(like)))
        parts = np.tile(gpus, (len(choices), 1, 1))
        for i, job in enumerate(like):
            for p in job:
                parts[:, p] = 0.0
                parts[np.arange(len(choices)), p, choices[:, i]] = max(gpus[p].sum(), 1e-3)
        shares = parts / np.maximum(parts.sum(1, keepdims=True), 1e-9)
        states = np.floor(shares * self._sizes + 1e-6).astype(np.int64)
        states = np.maximum(states, parts > 0)
        for k in range(len(self._sizes)):
            for p, counts in enumerate(self.possible_counts(pools, k)):
                states[:, p, k] = counts[np.searchsorted(counts, states[:, p, k], "right") - 1]
        over = np.maximum(states.sum(1) - self._sizes, 0)
        largest = states.argmax(1)
        for k in range(len(self._sizes)):
            states[np.arange(len(choices)), largest[:, k], k] -= over[:, k]
            for job in (job for job in like if len(job) > 1 and not self._may_mix(pools, job)):
                # The pools of a job have whole nodes together.
                allocated, most = (
                    states[:, job, k].sum(1),
                    np.array(job)[states[:, job, k].argmax(1)],
                )
                states[np.arange(len(choices)), most, k] -= allocated - self.problem.kinds[
                    k
                ].round_to_job_size(allocated)
        states = states[(states >= 0).all((1, 2))]
        allocated = [states[:, p].T for p in range(len(pools))]
        costs, _ = self.best_chunks(pools, allocated, allocated)
        best = np.argsort(costs, kind="stable")[:SINGLE_KIND_STARTS]
        return [(float(costs[i]), states[i]) for i in best]

    def _round(self, pools: PoolStages, gpus: Array) -> Array:
        """Round fractional GPUs ``[pools, kinds]`` to possible numbers; each kind is used as
        far."""
        gpus = np.maximum(gpus, 0.0)
        out = np.zeros(gpus.shape, np.int64)
        for k, most in enumerate(self._sizes):
            counts = self.possible_counts(pools, k)
            at = [
                int(np.searchsorted(possible_counts, n + 1e-6, "right")) - 1
                for possible_counts, n in zip(counts, gpus[:, k], strict=True)
            ]
            out[:, k] = [possible_counts[i] for possible_counts, i in zip(counts, at, strict=True)]
            aim = round(float(gpus[:, k].sum())) if self._idle else int(most)
            spare = min(aim, int(most)) - int(out[:, k].sum())
            for p in np.argsort(out[:, k] - gpus[:, k], kind="stable"):
                more = counts[p][at[p] + 1 :] - out[p, k]
                if len(more) and more[0] <= spare:
                    out[p, k] += more[0]
                    spare -= int(more[0])
        return out

    def _keep(self, pools: PoolStages, new: _Found, found: dict[PoolStages, _Found]) -> None:
        if pools not in found or new.cost < found[pools].cost:
            found[pools] = replace(new, gpus=new.gpus.copy())


def gpus_by_job(pools: PoolStages, gpus: Sequence[Array]) -> list[Array]:
    """Return the GPUs of each job, int ``[kinds, n]``; overlapping pools are one job."""
    together = pools_of_jobs(pools)
    if len(together) == len(pools):
        return list(gpus)
    return [np.sum([gpus[p] for p in job], axis=0) for job in together]


def _check(problem: PlacementProblem) -> None:
    for stage in problem.stages:
        if not any(problem.rate_table(stage, k).max() > 0 for k in range(len(problem.kinds))):
            pinned = problem.allowed.get(stage.name)
            where = f" on {', '.join(sorted(pinned))}" if pinned else ""
            raise PlanError(
                f"stage {stage.name!r} can run nowhere{where}: it needs more memory than any "
                "number of these GPUs has together, or no profile says it ran"
            )
