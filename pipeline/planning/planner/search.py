"""Finding the best placement: every grouping of stages into pools, every division of the GPUs.

Every grouping has a quick bound (:mod:`pipeline.planning.planner.bounds`) that nothing in it goes
below. The promising ones are relaxed to a linear program (:mod:`pipeline.planning.planner.bounds`):
a better bound, and a fractional division to start from. One whose bound is above what has been
found is left out; of seven stages and more there are more groupings than are looked at. A division
is improved by moving GPUs between pools. Small problems are then counted out, branch by branch, so
that their answer is exact; for the others the least bound tells how far it can be from the best.
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
    """All ways to divide the stages over pools, fewest pools first; then those where pools overlap:
    the first stages of a job, if they may, have a part of its GPUs each."""
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
    """All ways to divide some stages, fewest pools first."""
    codes: list[tuple[int, ...]] = [(0,)]
    for _ in stages[1:]:
        codes = [(*code, i) for code in codes for i in range(max(code) + 2)]
    for code in sorted(codes, key=lambda code: (max(code), code)):
        yield tuple(
            tuple(s for s, pool in zip(stages, code, strict=True) if pool == number)
            for number in range(max(code) + 1)
        )


def _split(problem: PlacementProblem, pool: tuple[int, ...]) -> Iterator[PoolStages]:
    """The ways to have the first stages of a pool side by side, and the others on all of it."""
    cycle = [problem.stages[s].cycle for s in pool]
    for cut in range(1, len(pool)):
        if not problem.stages[pool[cut - 1]].beside:
            return
        if cycle[cut] is None or cycle[cut] != cycle[cut - 1]:
            for parts in itertools.islice(_divided(pool[:cut]), 1, None):
                yield tuple((*part, *pool[cut:]) for part in parts)


class GroupingNeighbors:
    """Which groupings are the same but for the pool of one stage."""

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
        """In the order of all."""
        difference = self._codes ^ self._codes[self._places[pools]]
        near = ((difference[:, None] & ~self._of_stage) == 0).any(1)
        return [self._every[place] for place in np.flatnonzero(near & (difference != 0))]


def enumerate_divisions(total: int, counts: Sequence[Array], idle: bool) -> Array:
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


def gpu_moves(pools: int, sizes: Array, *, idle: bool) -> Array:
    """Changes of a division ``[moves, pools, kinds]``: GPUs of a kind from pool to pool.

    With idle GPUs allowed also from and to none; and a GPU of one kind for one of another.

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
    """How many GPUs are moved at once: few, and ever larger jumps."""
    sizes = {1, 2, 3, 4, 5, 6, 7, *(2**i for i in range(3, 13)), *(3 * 2**i for i in range(2, 11))}
    return sorted(size for size in sizes if size <= most)


def divisions_without_kind(state: Array) -> Array:
    """The division without a kind, in one pool or in all: ``[n, pools, kinds]``.

    A queue or losses may be worth avoiding, but only altogether.
    """
    out = []
    for k in np.flatnonzero(state.any(0)):
        for pools in (slice(None), *np.flatnonzero(state[:, k])):
            changed = state.copy()
            changed[pools, k] = 0
            out.append(changed)
    return np.array(out, np.int64).reshape(-1, *state.shape)


EXACT_GPUS, EXACT_GROUPINGS = 16, 52
"""Problems up to this size, and of up to five stages, are always counted out."""
EXACT_DIVISIONS = 200_000
"""Others are when there are no more divisions of the largest grouping than this; of more groupings
fewer."""
MAX_RELAXED_GROUPINGS = 250
"""Groupings that are relaxed: all of six stages."""
MAX_KIND_ASSIGNMENTS = 4096
"""Ways to give pools a kind each that are looked at; of more so many drawn ones."""
SINGLE_KIND_STARTS = 8
"""Divisions that are improved where pools must be of one kind."""
PROMISING_FACTOR, STARTS_PER_GROUPING, FINAL_GROUPINGS = 1.05, 16, 2
"""Where pools may mix, divisions that give each a kind are improved if they cost less than so many
times the best found, so many over the number of kinds of each grouping; and in the end once more
those of so many groupings."""
BATCH_SIZE = 8192
"""Divisions looked at at once."""
EQUAL_COST_FACTOR = 1 + 1e-9
"""Costs nearer than this are the same."""


@dataclass(frozen=True)
class PlacementSolution:
    """The best placement found of one grouping."""

    placement: Placement
    prediction: PlacementPrediction
    cost: float
    """In the unit of the objective."""
    bound: float
    """No placement of the whole problem costs less."""
    exact: bool
    """Whether it is proven that none costs less than the best solution."""

    @property
    def gap(self) -> float:
        """How much more than the bound it costs, relative."""
        return self.cost / self.bound - 1 if self.bound > 0 else 0.0


def solve(
    problem: PlacementProblem, objective: Objective | None = None, alternatives: int = 1
) -> list[PlacementSolution]:
    """The best placements, best first; each with another grouping of the stages.

    Raises:
        PlanError: a stage can run nowhere, or the stages cannot be placed together.
    """
    _check(problem)
    search = _Search(problem, objective or IterationTime())
    every = enumerate_groupings(problem)
    quick = price_bounds(search.predictor, every)
    bounds = {p: search.bound(float(b)) for p, b in zip(every, quick, strict=True)}
    found, relaxed = search.look(bounds, alternatives)
    exact = search.is_small(len(every))
    if found and not exact:
        search.part_kinds(found)
    if exact:
        for pools in sorted(bounds, key=lambda pools: (bounds[pools], len(pools), pools)):
            if bounds[pools] <= _worst(found, 1):
                search.count_out(pools, found)
    if not found:
        raise PlanError(
            "no placement fits: the stages need more GPUs together than there are; "
            "loosen the pins, or give the plan more partitions"
        )
    best = sorted(found.items(), key=lambda item: (item[1].cost, len(item[0]), item[0]))
    least = best[0][1].cost
    bound = least if exact else search.tighten(bounds, relaxed, least)
    return [search.solution(pools, f, bound, exact) for pools, f in best[:alternatives]]


@dataclass(frozen=True)
class _Found:
    cost: float
    gpus: Array
    """Int ``[pools, kinds]``."""
    chunks: int


def _worst(found: dict[PoolStages, _Found], wanted: int) -> float:
    """The cost a new grouping must stay below to be of interest."""
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
        # Where more GPUs make no stage slower, leaving some idle helps if they cost something.
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

    def look(
        self, bounds: dict[PoolStages, float], alternatives: int
    ) -> tuple[dict[PoolStages, _Found], set[PoolStages]]:
        """What is found in the groupings that could be good, whose ``bounds`` are made better.

        The next one is the most promising of those that differ from the best so far in the pool of
        one stage, else of all. Those that cannot be among the wanted ones are left out; of many
        stages there are more than can be looked at.

        Returns:
            The best of each grouping, and the groupings that were relaxed.
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
        """Whether the problem, with so many groupings, is counted out."""
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
        """Numbers of GPUs of a kind that a pool can have, ascending; 0 too.

        Args:
            stages: that work on them alone.
            whole: whether it is a job of its own, which has whole nodes.
        """
        key = (stages, kind, whole)
        if key not in self._counts:
            entry, able = self.problem.kinds[kind], np.arange(self._sizes[kind] + 1)
            for s in stages:
                if self.problem.stages[s].divisible:
                    able = able[(able == 0) | (self.predictor.tables[s][kind][able] > 0)]
            if whole and not self.problem.may_mix(stages):
                able = able[entry.round_to_job_size(able) == able]
            self._counts[key] = able
        return self._counts[key]

    def able(self, pools: PoolStages, kind: int) -> list[Array]:
        """By pool: numbers of GPUs of a kind that it can have."""
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
        self, pools: PoolStages, gpus: Sequence[Array], chunks: int | Array, held: Sequence[Array]
    ) -> Array:
        predicted = self.predictor.predict_batch(pools, gpus, chunks, held)
        with np.errstate(invalid="ignore"):
            costs = self.objective.cost(self.problem, predicted.total_s, gpus_by_job(pools, held))
        return np.where(np.isfinite(predicted.total_s), costs, np.inf)

    def best_chunks(
        self, pools: PoolStages, gpus: Sequence[Array], held: Sequence[Array]
    ) -> tuple[Array, Array]:
        """The least costs over all grains ``[n]``, and the grains ``[n]``."""
        options = self._chunks(pools)
        count = gpus[0].shape[1]
        many = [np.tile(pool, len(options)) for pool in gpus]
        also = [np.tile(pool, len(options)) for pool in held]
        grains = np.repeat(options, count)
        costs = self.costs(pools, many, grains, also).reshape(len(options), count)
        least = costs.argmin(0)
        return costs[least, np.arange(count)], options[least]

    def tighten(
        self, bounds: dict[PoolStages, float], relaxed: set[PoolStages], least: float
    ) -> float:
        """The least bound of all groupings; the ``relaxed`` ones that decide are bounded grain by
        grain."""
        tight = min([least, *(loose for pools, loose in bounds.items() if pools not in relaxed)])
        for pools in sorted(relaxed, key=lambda pools: bounds[pools]):
            each = [loose := bounds[pools]]
            if loose < tight and len(pools) > 1:
                grains = (self.relaxation.solve(pools, (m,)) for m in self.problem.chunks)
                each.append(min(self.bound(relaxed.bound_s) for relaxed in grains))
            tight = min(tight, max(each))
        return tight

    def improve(
        self, pools: PoolStages, relaxed: RelaxedSolution, found: dict[PoolStages, _Found]
    ) -> None:
        """Steepest descent from near the relaxation, by moves of GPUs between two pools."""
        for start in self._starts(pools, relaxed.gpus, _worst(found, 1)):
            self._improve(pools, start, found)

    def part_kinds(self, found: dict[PoolStages, _Found]) -> None:
        """Once more for the best groupings, from divisions that give all pools, or all but one, a
        kind each: where pools may mix, moves from the relaxation seldom lead there."""
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
        grains, cost = None, math.inf
        while True:
            here = [pool[:, None] for pool in state]
            costs, chosen = self.best_chunks(pools, here, here)
            if grains is not None and (chosen[0] == grains or not costs[0] < cost):
                break
            grains, cost = int(chosen[0]), float(costs[0])
            state, cost = self._descend(pools, state, grains, cost)
        if math.isfinite(cost):
            self._keep(pools, _Found(cost, state, int(grains or 1)), found)

    def count_out(self, pools: PoolStages, found: dict[PoolStages, _Found]) -> None:
        """Look at every division, kind by kind, leaving out branches that cannot be better.

        A branch has some kinds divided. It is judged with all GPUs of the other kinds given to
        every pool at once, and nothing charged for them.
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
        parts = enumerate_divisions(int(self._sizes[kind]), self.able(pools, int(kind)), self._idle)
        if not len(parts):
            return
        rest = np.zeros(len(order), np.int64)
        rest[order[depth + 1 :]] = self._sizes[order[depth + 1 :]]
        step = max(1, BATCH_SIZE // len(parts))
        for first in range(0, len(states), step):
            some = np.repeat(states[first : first + step], len(parts), axis=0)
            some[:, :, kind] = np.tile(parts, (len(some) // len(parts), 1))
            held = [some[:, pool].T for pool in range(len(pools))]
            gpus = [pool + rest[:, None] for pool in held]
            costs, chunks = self.best_chunks(pools, gpus, held)
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
        """Divisions ``[pools, kinds]`` to begin with.

        Where pools must be of one kind: the best of all ways to give each a kind of its own, shared
        by the pools of that kind, and by those that may mix, as the relaxation shares all GPUs.
        """
        every = pools_of_jobs(pools)
        like = [job for job in every if not self._may_mix(pools, job)]
        near = self._round(pools, gpus)
        one = self._of_one_kind(pools, gpus, like or every)
        if like:
            # Some cannot run as they are, but are few moves from others that can.
            return [*(state for _, state in one), near]
        # A descent takes the longer the more kinds there are.
        some = one[: max(1, STARTS_PER_GROUPING // len(self._sizes))]
        return [near, *(state for cost, state in some if cost < PROMISING_FACTOR * least)]

    def _of_one_kind(
        self, pools: PoolStages, gpus: Array, like: Sequence[tuple[int, ...]]
    ) -> list[tuple[float, Array]]:
        """The best divisions in which each of the jobs ``like`` has a kind of its own, with their
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
            for p, counts in enumerate(self.able(pools, k)):
                states[:, p, k] = counts[np.searchsorted(counts, states[:, p, k], "right") - 1]
        over = np.maximum(states.sum(1) - self._sizes, 0)
        largest = states.argmax(1)
        for k in range(len(self._sizes)):
            states[np.arange(len(choices)), largest[:, k], k] -= over[:, k]
            for job in (job for job in like if len(job) > 1 and not self._may_mix(pools, job)):
                # Its pools have whole nodes together.
                held, most = states[:, job, k].sum(1), np.array(job)[states[:, job, k].argmax(1)]
                states[np.arange(len(choices)), most, k] -= held - self.problem.kinds[
                    k
                ].round_to_job_size(held)
        states = states[(states >= 0).all((1, 2))]
        held = [states[:, p].T for p in range(len(pools))]
        costs, _ = self.best_chunks(pools, held, held)
        best = np.argsort(costs, kind="stable")[:SINGLE_KIND_STARTS]
        return [(float(costs[i]), states[i]) for i in best]

    def _round(self, pools: PoolStages, gpus: Array) -> Array:
        """Possible numbers near fractional GPUs ``[pools, kinds]``; each kind used as far."""
        gpus = np.maximum(gpus, 0.0)
        out = np.zeros(gpus.shape, np.int64)
        for k, most in enumerate(self._sizes):
            counts = self.able(pools, k)
            at = [
                int(np.searchsorted(able, n + 1e-6, "right")) - 1
                for able, n in zip(counts, gpus[:, k], strict=True)
            ]
            out[:, k] = [able[i] for able, i in zip(counts, at, strict=True)]
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
    """By job int ``[kinds, n]``: the GPUs of its pools, of which those that overlap are one."""
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
