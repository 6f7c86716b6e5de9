"""Lower bounds of the iteration time of groupings: by prices for all at once, and by a linear
program for one.

The linear program: everything in :mod:`pipeline.planning.planner.predictor` except the measured
speeds is linear, because an iteration is a longest path through starts and ends. The program allows
fractional GPUs and replaces each measured speed by the smallest concave curve above it. The time of
a stage is then a convex function of the GPUs, bounded from below by tangents. No placement of the
grouping has a smaller value, and the fractional GPUs are a good start for the search.

The prices: each kind of GPU gets a price such that all GPUs together cost 1. In ``T`` seconds a
pool does its stages one after the other, for which it needs GPUs of some minimum price. If the
prices of a grouping's pools exceed 1, none of its placements ends in ``T``. The price is bounded
from below by letting each stage of a pool spend all of it on the GPUs that suit the stage best.
Waiting between stages of different pools is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from pipeline.planning.planner.predictor import Predictor, in_separate_pools, is_time_shared
from pipeline.planning.planner.problem import PoolStages, pools_of_jobs, pools_of_stages

Array = np.ndarray

MAX_SPEED_LINES = 6
"""Number of lines that bound the speed of a stage on a kind of GPU from above."""
INITIAL_TANGENTS = 24
"""Number of initial tangents that bound the time of a stage from below: with so many, programs are
rarely solved again."""
TOLERANCE = 0.01
"""Tangents are added until the program's times are this close to the true ones, relative."""
MAX_ROUNDS = 3


@dataclass(frozen=True)
class RelaxedSolution:
    """The optimum of the relaxation."""

    bound_s: float
    """No placement of the grouping has a shorter iteration; infinite if there is none."""
    gpus: Array
    """Fractional GPUs, float64 ``[pools, kinds]``."""


class LinearRelaxation:
    """Solves relaxations of one problem; parts independent of the grouping are built once."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        problem = self.problem = predictor.problem
        self._gpus = np.array([kind.gpus for kind in problem.kinds], dtype=np.float64)
        count, kinds = len(problem.stages), len(problem.kinds)
        self._lines = [
            [upper_lines(predictor.best[s][k]) for k in range(kinds)] for s in range(count)
        ]
        everything = self._gpus.astype(np.int64)[:, None]
        self._least = np.array(
            [predictor.duration(s, everything, 0 * everything)[0] for s in range(count)]
        )

    def solve(
        self,
        pools: PoolStages,
        chunks: Sequence[int] | None = None,
        enough_s: float = float("inf"),
    ) -> RelaxedSolution:
        """Return the relaxation of a grouping, over some numbers of chunks (default: all).

        The more these differ, the looser the bound: each gets the smallest overhead of all, and the
        shortest pieces. A bound above ``enough_s`` is not improved.
        """
        kinds, stages = len(self.problem.kinds), len(self.problem.stages)
        if not np.all(np.isfinite(self._least)):
            return RelaxedSolution(float("inf"), np.zeros((len(pools), kinds)))
        program = _Program(self, pools, chunks or self.problem.chunks)
        value, x = program.run()
        for _ in range(MAX_ROUNDS):
            if x is None:
                return RelaxedSolution(float("inf"), np.zeros((len(pools), kinds)))
            speeds = x[program.speed]
            times = x[program.time] * program.unit
            wrong = [
                s for s in range(stages) if speeds[s] > 0 and times[s] * speeds[s] < 1 - TOLERANCE
            ]
            if not wrong or value > enough_s * (1 + 1e-6):
                break
            for s in wrong:
                program.add_tangent(s, speeds[s])
            value, x = program.run()
        if x is None:
            return RelaxedSolution(float("inf"), np.zeros((len(pools), kinds)))
        # A solver's optimum is off by its own tolerance; the bound must hold.
        return RelaxedSolution(value * (1 - 1e-6), x[program.gpus].reshape(len(pools), kinds))


def concave_hull(rates: Array) -> list[int]:
    """Return the numbers of GPUs, ascending, at the corners of the smallest concave curve above
    rates ``[gpus + 1]``, which never fall."""
    points = np.flatnonzero(np.diff(rates, prepend=-1.0) > 0)
    points = np.unique(np.concatenate([[0], points, [len(rates) - 1]]))
    corners: list[int] = []
    for i in points:
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (rates[b] - rates[a]) * (i - a) > (rates[i] - rates[a]) * (b - a):
                break
            corners.pop()
        corners.append(int(i))
    return corners


def upper_lines(rates: Array) -> Array:
    """Return lines ``[n, 2]`` (slope, height at zero) on or above rates ``[gpus + 1]``, at most
    :data:`MAX_SPEED_LINES`."""
    corners = concave_hull(rates)
    if len(corners) == 1:
        return np.array([[0.0, rates[0]]])
    left, right = np.array(corners[:-1]), np.array(corners[1:])
    slope = (rates[right] - rates[left]) / (right - left)
    lines = np.stack([slope, rates[left] - slope * left], axis=1)
    if len(lines) > MAX_SPEED_LINES:
        lines = lines[
            np.unique(np.linspace(0, len(lines) - 1, MAX_SPEED_LINES).round().astype(int))
        ]
    return lines


class _Program:
    """Builds and solves the linear program of one grouping, times in units of ``unit`` seconds."""

    def __init__(
        self, relaxation: LinearRelaxation, pools: PoolStages, chunks: Sequence[int]
    ) -> None:
        self._of = relaxation
        problem = relaxation.problem
        stages, kinds = len(problem.stages), len(problem.kinds)
        self.unit = float(relaxation._least.max())
        self.home = pools_of_stages(pools)
        sizes = {
            "gpus": len(pools) * kinds,
            "part": stages * kinds,
            "speed": stages,
            "time": stages,
            "start": stages,
            "end": stages,
            "total": 1,
        }
        edges = np.cumsum([0, *sizes.values()])
        spans = [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
        self.gpus, self.part, self.speed, self.time, self.start, self.end, self.total = spans
        self.size = int(edges[-1])
        self.rows: list[Array] = []
        self.limits: list[float] = []
        self._capacity(kinds)
        self._speeds(kinds)
        for s in range(stages):
            fastest = 1 / relaxation._least[s]
            for speed in np.geomspace(fastest / 64, fastest, INITIAL_TANGENTS):
                self.add_tangent(s, float(speed))
        self._flow(pools, chunks)

    def run(self) -> tuple[float, Array | None]:
        """Return the optimum in seconds, and its location."""
        cost = np.zeros(self.size)
        cost[self.total] = 1.0
        solved = linprog(cost, A_ub=np.array(self.rows), b_ub=self.limits, method="highs-ds")
        if not solved.success:
            return float("inf"), None
        return float(solved.fun) * self.unit, solved.x

    def add_tangent(self, stage: int, speed: float) -> None:
        """``time >= 2 / v - speed / v**2``: the tangent of ``1 / speed`` at ``v``."""
        row = np.zeros(self.size)
        scale = 1 / speed / self.unit
        row[self.time.start + stage] = -1.0
        row[self.speed.start + stage] = -scale / speed
        self._add(row, -2 * scale)

    def _add(self, row: Array, limit: float) -> None:
        self.rows.append(row)
        self.limits.append(limit)

    def _capacity(self, kinds: int) -> None:
        for k in range(kinds):
            row = np.zeros(self.size)
            row[self.gpus.start + k : self.gpus.stop : kinds] = 1.0
            self._add(row, float(self._of._gpus[k]))
        names = [kind.name for kind in self._of.problem.kinds]
        for together, most in self._of.problem.shared:
            row = np.zeros(self.size)
            for name in together:
                row[self.gpus.start + names.index(name) : self.gpus.stop : kinds] = 1.0
            self._add(row, float(most))

    def _speeds(self, kinds: int) -> None:
        for s, per_kind in enumerate(self._of._lines):
            for k, lines in enumerate(per_kind):
                for slope, height in lines:
                    row = np.zeros(self.size)
                    row[self.part.start + s * kinds + k] = 1.0
                    for p in self.home[s]:
                        row[self.gpus.start + p * kinds + k] = -slope
                    self._add(row, height)
            # speed <= sum of the parts; and, since a mixture keeps a share m of the sum unless one
            # kind alone is quicker, speed <= m sum + (1 - m) (the quickest kind alone).
            # A stage that does not mix has a share of 0.
            problem = self._of.problem
            mixing = problem.mixing if problem.stages[s].divisible else 0.0
            alone = max(float(table[-1]) for table in self._of.predictor.best[s])
            for share in {1.0, mixing}:
                row = np.zeros(self.size)
                row[self.speed.start + s] = 1.0
                first = self.part.start + s * kinds
                row[first : first + kinds] = -share
                self._add(row, (1 - share) * alone)

    def _flow(self, pools: PoolStages, chunks: Sequence[int]) -> None:
        """Add the longest path of :meth:`Predictor.predict_batch`, each ``max`` as several rows."""
        problem, predictor = self._of.problem, self._of.predictor
        index = {stage.name: s for s, stage in enumerate(problem.stages)}
        groups = {s: group for group in predictor.groups for s in group}
        piped = len(pools) > 1
        fewest, most = (min(chunks), max(chunks)) if piped else (0, 1)
        slow = {
            s: float(predictor.num_transfers(group, self.home, fewest))
            * max(problem.stages[i].chunk_s for i in group)
            / self.unit
            for s, group in groups.items()
        }
        free: dict[int, int] = {}
        for group in predictor.groups:
            # One stage represents its group, because they begin and end together.
            head = group[0]
            for terms in self._group_times(group):
                self._after(self.start, head, terms, head, self.end, slow[head])
            for pool in sorted({p for s in group for p in self.home[s]}):
                change = predictor.min_switch_s(group, pools[pool]) / self.unit
                if pool in free:
                    self._after(self.end, free[pool], [], head, self.start, change)
                elif change:
                    row = np.zeros(self.size)
                    row[self.start.start + head] = -1.0
                    self._add(row, -change)
                free[pool] = head
            for s in group:
                for name in problem.stages[s].after:
                    other = groups[index[name]]
                    if other == group:
                        continue
                    passed = in_separate_pools(self.home, index[name], s)
                    if not (passed and problem.stages[s].streams):
                        self._after(self.end, other[0], [], head, self.start, 0.0)
                    else:
                        ahead = self._least_lead(other, chunks) if piped else 1.0
                        for terms in self._group_times(other, ahead):
                            least = slow[other[0]] / most
                            self._after(self.start, other[0], terms, head, self.start, least)
                    for terms in self._group_times(group, 1 / most):
                        self._after(self.end, other[0], terms, head, self.end, slow[head] / most)
        moved = predictor.min_sync_s(pools) / self.unit
        for group in predictor.groups:
            last = moved if predictor.source in group else 0.0
            self._after(self.end, group[0], [], 0, self.total, last)

    def _least_lead(self, group: Sequence[int], chunks: Sequence[int]) -> float:
        """Return the minimum share of a group's time until its first micro-batch is ready."""
        stage = self._of.problem.stages[group[0]]
        if is_time_shared(group, self.home):
            return 1 / max(chunks)
        shares = [{0: 1 / m, **stage.lead.get(m, {})} for m in chunks]
        return min(
            share for each in shares for gpus, share in each.items() if gpus or 1 not in each
        )

    def _group_times(
        self, group: Sequence[int], part: float = 1.0
    ) -> list[list[tuple[int, float]]]:
        """Return weighted sums of stage times, the largest of which is a part of a group's time."""
        if len(group) == 1:
            return [[(group[0], part)]]
        share = 1 / (2 * self._of.problem.cycle_steps)
        return [
            [(s, part * (mine if self.home[s] == places else other)) for s in group]
            for places in sorted({self.home[s] for s in group})
            for mine, other in ((1.0, share), (0.5 + share, 0.5))
        ]

    def _after(
        self,
        source_span: slice,
        source: int,
        times: Sequence[tuple[int, float]],
        target: int,
        target_span: slice,
        more: float,
    ) -> None:
        """Add the row ``target >= source + weighted times + more``."""
        row = np.zeros(self.size)
        row[source_span.start + source] += 1.0
        for s, weight in times:
            row[self.time.start + s] += weight
        row[target_span.start + target] -= 1.0
        if np.any(row):
            self._add(row, -more)


NUM_BUDGETS, MIN_BUDGET = 256, 1 / 512
"""Number of budgets of a pool, and the smallest one."""
NUM_TIMES = 200
EXPENSIVE_KIND_SHARE = 0.8
"""Share of all prices that falls on a kind that is made expensive."""


def price_bounds(predictor: Predictor, groupings: Sequence[PoolStages]) -> Array:
    """Return seconds that no placement of each grouping goes below, float64 ``[groupings]``."""
    stages, sizes = predictor.problem.stages, [kind.gpus for kind in predictor.problem.kinds]
    everything = np.array(sizes)[:, None]
    least = np.array(
        [predictor.duration(s, everything, 0 * everything)[0] for s in range(len(stages))]
    )
    found = np.full(len(groupings), least.max())
    if not np.isfinite(found).all():
        return found
    members = np.arange(1 << len(stages))[:, None] >> np.arange(len(stages)) & 1
    switches = np.array([_switches(predictor, np.flatnonzero(row)) for row in members])
    # The empty pool pads groupings with few pools; it costs nothing.
    every = [
        (n, less) for n, grouping in enumerate(groupings) for less in _without_overlap(grouping)
    ]
    of, pools = np.array([n for n, _ in every]), np.zeros((len(every), len(stages)), np.int64)
    for row, (_, grouping) in zip(pools, every, strict=True):
        row[: len(grouping)] = [sum(1 << s for s in pool) for pool in grouping]
    times = np.geomspace(least.max(), least.sum() + switches.max(), NUM_TIMES)
    budgets = np.concatenate([[0.0], np.geomspace(MIN_BUDGET, 1, NUM_BUDGETS)])
    for prices in _prices(predictor, least):
        spent = np.stack([_seconds(predictor, s, prices, budgets) for s in range(len(stages))])
        needed = members @ spent + switches[:, None]
        costs = np.zeros((len(members), NUM_TIMES))
        for row, seconds in zip(costs[1:], needed[1:], strict=True):
            # The first sufficient budget: the pool needs more than the previous one.
            first = np.searchsorted(-seconds, -times * (1 + 1e-9))
            row[:] = np.where(first < len(budgets), budgets[np.maximum(first, 1) - 1], 2.0)
        enough = np.sum([costs[pools[:, p]] for p in range(len(stages))], axis=0) <= 1
        last = np.where(enough.any(1), enough.argmax(1), NUM_TIMES) - 1
        np.maximum.at(found, of, np.where(last >= 0, times[last], 0.0))
    return found


def _without_overlap(pools: PoolStages) -> Iterator[PoolStages]:
    """Yield groupings that need no more than one with overlapping pools: without the stages that
    are in several pools, and with one pool of each job alone."""
    together = pools_of_jobs(pools)
    if len(together) == len(pools):
        yield pools
        return
    home = pools_of_stages(pools)
    yield tuple(tuple(s for s in pool if len(home[s]) == 1) for pool in pools)
    for n in range(max(map(len, together))):
        yield tuple(pools[job[min(n, len(job) - 1)]] for job in together)


def _prices(predictor: Predictor, least: Array) -> Iterator[Array]:
    """Yield prices of one GPU of each kind ``[kinds]``: equal ones, by the value for a stage or for
    all, and each kind expensive in turn."""
    kinds = predictor.problem.kinds
    value = np.array([[table[-1] for table in row] for row in predictor.best]) * least[:, None]
    shares = [
        np.ones(len(kinds)),
        value.sum(0),
        *value,
        *(EXPENSIVE_KIND_SHARE * np.eye(len(kinds)) + 0.1),
    ]
    sizes = np.array([kind.gpus for kind in kinds])
    for share in np.unique(np.maximum(shares, 1e-9), axis=0):
        yield share / share.sum() / sizes


def _seconds(predictor: Predictor, stage: int, prices: Array, budgets: Array) -> Array:
    """Return the minimum seconds of a stage for each budget, on the (fractional) GPUs that suit it
    best."""
    pieces = []
    for price, rates in zip(prices, predictor.best[stage], strict=True):
        corners = concave_hull(rates)
        for a, b in zip(corners[:-1], corners[1:], strict=True):
            pieces.append(((rates[b] - rates[a]) / ((b - a) * price), (b - a) * price))
    pieces.sort(reverse=True)
    gain, cost = np.array(pieces).T
    speed = np.interp(budgets, np.cumsum([0, *cost]), np.cumsum([0, *(gain * cost)]))
    return 1 / np.maximum(speed, 1e-30)


def _switches(predictor: Predictor, pool: Array) -> float:
    """Return the minimum seconds in which a pool of these stages changes between them."""
    members = [int(s) for s in pool]
    here = [[s for s in group if s in members] for group in predictor.groups]
    return sum(predictor.min_switch_s(group, members) for group in here if group)
