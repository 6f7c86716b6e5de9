"""Lower bounds of the iteration time of a grouping of stages into pools: fast bounds by prices for
all groupings, and a better bound by a linear program for one grouping.

The linear program: an iteration is a longest path through the starts and ends of stages, so all of
:mod:`pipeline.planning.planner.predictor` is linear except the measured speeds. The program allows
fractional GPUs and replaces measured speeds by the smallest concave curve above them. The time of a
stage is then a convex function of the GPUs, bounded from below by tangents. The optimum is a lower
bound for all placements of the grouping, and the search starts from its fractional GPUs.

The prices: each kind of GPU gets a price such that all GPUs together cost 1. To run its stages one
after the other in ``T`` seconds, a pool needs GPUs of some minimum total price. If the minimums of
all pools sum to more than 1, no placement of the grouping ends within ``T``. The minimum is bounded
from below by letting each stage spend the pool's whole budget on the GPUs that are best for it.
Waits between stages of different pools are ignored.
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
"""Maximum number of lines that bound the speed of a stage on a kind of GPU from above."""
INITIAL_TANGENTS = 24
"""Number of initial tangents that bound the time of a stage from below. With this number, a program
is rarely solved a second time."""
TOLERANCE = 0.01
"""Tangents are added until the relative error of the program's stage times is below this."""
MAX_ROUNDS = 3
"""Maximum number of times that tangents are added."""


@dataclass(frozen=True)
class RelaxedSolution:
    """The optimum of the relaxation."""

    bound_s: float
    """Lower bound for all placements of the grouping; infinite if there is no placement."""
    gpus: Array
    """Fractional GPUs, float64 ``[pools, kinds]``."""


class LinearRelaxation:
    """Solves the linear programs of one problem's groupings."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        problem = self.problem = predictor.problem
        self._kind_gpus = np.array([kind.gpus for kind in problem.kinds], dtype=np.float64)
        count, kinds = len(problem.stages), len(problem.kinds)
        self._speed_lines = [
            [upper_lines(predictor.best_rates[s][k]) for k in range(kinds)] for s in range(count)
        ]
        all_gpus = self._kind_gpus.astype(np.int64)[:, None]
        # Seconds of each stage if it had all GPUs: ``[stages]``.
        self._min_times = np.array(
            [predictor.duration(s, all_gpus, 0 * all_gpus)[0] for s in range(count)]
        )

    def solve(
        self,
        pools: PoolStages,
        chunks: Sequence[int] | None = None,
        enough_s: float = float("inf"),
    ) -> RelaxedSolution:
        """Return the relaxation of a grouping, valid for all of ``chunks`` (default: any number).

        With more numbers of chunks the bound is looser, because it combines the smallest overhead
        with the shortest chunk. A bound above ``enough_s`` seconds is not improved further.
        """
        kinds, stages = len(self.problem.kinds), len(self.problem.stages)
        if not np.all(np.isfinite(self._min_times)):
            return RelaxedSolution(float("inf"), np.zeros((len(pools), kinds)))
        program = _Program(self, pools, chunks or self.problem.chunks)
        optimum, values = program.run()
        for _ in range(MAX_ROUNDS):
            if values is None:
                return RelaxedSolution(float("inf"), np.zeros((len(pools), kinds)))
            speeds = values[program.speed]
            times = values[program.time] * program.unit
            inaccurate = [
                s for s in range(stages) if speeds[s] > 0 and times[s] * speeds[s] < 1 - TOLERANCE
            ]
            if not inaccurate or optimum > enough_s * (1 + 1e-6):
                break
            for s in inaccurate:
                program.add_tangent(s, speeds[s])
            optimum, values = program.run()
        if values is None:
            return RelaxedSolution(float("inf"), np.zeros((len(pools), kinds)))
        # The solver's optimum has a numerical error, but the bound must hold.
        return RelaxedSolution(optimum * (1 - 1e-6), values[program.gpus].reshape(-1, kinds))


def concave_hull(rates: Array) -> list[int]:
    """Return the corners (numbers of GPUs, ascending) of the smallest concave curve above
    non-decreasing rates ``[gpus + 1]``."""
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
    """Return at most :data:`MAX_SPEED_LINES` lines ``[n, 2]`` (slope, intercept) on or above rates
    ``[gpus + 1]``."""
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
    """Builds and solves the linear program of one grouping, with times in ``unit`` seconds.

    ``gpus``, ``kind_speed``, ``speed``, ... are slices of the vector of variables.
    """

    def __init__(
        self, relaxation: LinearRelaxation, pools: PoolStages, chunks: Sequence[int]
    ) -> None:
        self._relaxation = relaxation
        problem = relaxation.problem
        stages, kinds = len(problem.stages), len(problem.kinds)
        self.unit = float(relaxation._min_times.max())
        self.stage_pools = pools_of_stages(pools)
        sizes = {
            "gpus": len(pools) * kinds,
            "kind_speed": stages * kinds,
            "speed": stages,
            "time": stages,
            "start": stages,
            "end": stages,
            "total": 1,
        }
        offsets = np.cumsum([0, *sizes.values()])
        slices = [slice(a, b) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
        self.gpus, self.kind_speed, self.speed, self.time, self.start, self.end, self.total = slices
        self.size = int(offsets[-1])
        self.rows: list[Array] = []
        self.row_limits: list[float] = []
        self._add_capacity(kinds)
        self._add_speeds(kinds)
        for s in range(stages):
            fastest = 1 / relaxation._min_times[s]
            for speed in np.geomspace(fastest / 64, fastest, INITIAL_TANGENTS):
                self.add_tangent(s, float(speed))
        self._add_schedule(pools, chunks)

    def run(self) -> tuple[float, Array | None]:
        """Return the optimum in seconds, and the variables; infinite and None if infeasible."""
        cost = np.zeros(self.size)
        cost[self.total] = 1.0
        solved = linprog(cost, A_ub=np.array(self.rows), b_ub=self.row_limits, method="highs-ds")
        if not solved.success:
            return float("inf"), None
        return float(solved.fun) * self.unit, solved.x

    def add_tangent(self, stage: int, speed: float) -> None:
        """Add the tangent of ``1 / speed`` at ``v``: ``time >= 2 / v - speed / v**2``."""
        row = np.zeros(self.size)
        scale = 1 / speed / self.unit
        row[self.time.start + stage] = -1.0
        row[self.speed.start + stage] = -scale / speed
        self._add_row(row, -2 * scale)

    def _add_row(self, row: Array, limit: float) -> None:
        self.rows.append(row)
        self.row_limits.append(limit)

    def _add_capacity(self, kinds: int) -> None:
        for k in range(kinds):
            row = np.zeros(self.size)
            row[self.gpus.start + k : self.gpus.stop : kinds] = 1.0
            self._add_row(row, float(self._relaxation._kind_gpus[k]))
        names = [kind.name for kind in self._relaxation.problem.kinds]
        for group, limit in self._relaxation.problem.shared:
            row = np.zeros(self.size)
            for name in group:
                row[self.gpus.start + names.index(name) : self.gpus.stop : kinds] = 1.0
            self._add_row(row, float(limit))

    def _add_speeds(self, kinds: int) -> None:
        for s, per_kind in enumerate(self._relaxation._speed_lines):
            for k, lines in enumerate(per_kind):
                for slope, intercept in lines:
                    row = np.zeros(self.size)
                    row[self.kind_speed.start + s * kinds + k] = 1.0
                    for p in self.stage_pools[s]:
                        row[self.gpus.start + p * kinds + k] = -slope
                    self._add_row(row, intercept)
            # speed <= sum over kinds. Several kinds together reach a share m of the sum, unless the
            # fastest kind alone is faster, so speed <= m sum + (1 - m) (fastest kind alone).
            # A stage that cannot be divided has m = 0.
            problem = self._relaxation.problem
            mixing = problem.mixing if problem.stages[s].divisible else 0.0
            best_rates = self._relaxation.predictor.best_rates[s]
            fastest_kind = max(float(rates[-1]) for rates in best_rates)
            for share in {1.0, mixing}:
                row = np.zeros(self.size)
                row[self.speed.start + s] = 1.0
                first = self.kind_speed.start + s * kinds
                row[first : first + kinds] = -share
                self._add_row(row, (1 - share) * fastest_kind)

    def _add_schedule(self, pools: PoolStages, chunks: Sequence[int]) -> None:
        """Add the longest path of :meth:`Predictor.predict_batch`: each ``max`` is several rows."""
        problem, predictor = self._relaxation.problem, self._relaxation.predictor
        index = {stage.name: s for s, stage in enumerate(problem.stages)}
        groups = {s: group for group in predictor.lockstep_groups for s in group}
        streams = len(pools) > 1
        min_chunks, max_chunks = (min(chunks), max(chunks)) if streams else (0, 1)
        overheads = {
            s: float(predictor.num_transfers(group, self.stage_pools, min_chunks))
            * max(problem.stages[i].chunk_s for i in group)
            / self.unit
            for s, group in groups.items()
        }
        last_on_pool: dict[int, int] = {}
        for group in predictor.lockstep_groups:
            # The first stage represents its group, whose stages begin and end together.
            first = group[0]
            for terms in self._group_times(group):
                self._add_order(self.start, first, terms, first, self.end, overheads[first])
            for pool in sorted({p for s in group for p in self.stage_pools[s]}):
                switch = predictor.min_switch_s(group, pools[pool]) / self.unit
                if pool in last_on_pool:
                    self._add_order(self.end, last_on_pool[pool], [], first, self.start, switch)
                elif switch:
                    row = np.zeros(self.size)
                    row[self.start.start + first] = -1.0
                    self._add_row(row, -switch)
                last_on_pool[pool] = first
            for s in group:
                for name in problem.stages[s].after:
                    source = groups[index[name]]
                    if source == group:
                        continue
                    separate = in_separate_pools(self.stage_pools, index[name], s)
                    if not (separate and problem.stages[s].streams):
                        self._add_order(self.end, source[0], [], first, self.start, 0.0)
                    else:
                        lead = self._min_first_chunk(source, chunks) if streams else 1.0
                        for terms in self._group_times(source, lead):
                            overhead = overheads[source[0]] / max_chunks
                            self._add_order(
                                self.start, source[0], terms, first, self.start, overhead
                            )
                    for terms in self._group_times(group, 1 / max_chunks):
                        overhead = overheads[first] / max_chunks
                        self._add_order(self.end, source[0], terms, first, self.end, overhead)
        sync_time = predictor.min_sync_s(pools) / self.unit
        for group in predictor.lockstep_groups:
            delay = sync_time if predictor.sync_source in group else 0.0
            self._add_order(self.end, group[0], [], 0, self.total, delay)

    def _min_first_chunk(self, group: Sequence[int], chunks: Sequence[int]) -> float:
        """Return the minimum share of a group's time after which its first chunk is ready."""
        stage = self._relaxation.problem.stages[group[0]]
        if is_time_shared(group, self.stage_pools):
            return 1 / max(chunks)
        shares = [{0: 1 / m, **stage.lead.get(m, {})} for m in chunks]
        # The entry 0 (1 / m) applies only below the smallest known number of GPUs.
        return min(share for row in shares for gpus, share in row.items() if gpus or 1 not in row)

    def _group_times(
        self, group: Sequence[int], share: float = 1.0
    ) -> list[list[tuple[int, float]]]:
        """Return weighted sums of stage times, as (stage, weight) pairs; the largest sum is
        ``share`` of the lockstep group's time."""
        if len(group) == 1:
            return [[(group[0], share)]]
        half_step = 1 / (2 * self._relaxation.problem.cycle_steps)
        return [
            [(s, share * (weight if self.stage_pools[s] == pools else other)) for s in group]
            for pools in sorted({self.stage_pools[s] for s in group})
            for weight, other in ((1.0, half_step), (0.5 + half_step, 0.5))
        ]

    def _add_order(
        self,
        source_span: slice,
        source: int,
        times: Sequence[tuple[int, float]],
        target: int,
        target_span: slice,
        delay: float,
    ) -> None:
        """Add the row ``target >= source + weighted times + delay``."""
        row = np.zeros(self.size)
        row[source_span.start + source] += 1.0
        for s, weight in times:
            row[self.time.start + s] += weight
        row[target_span.start + target] -= 1.0
        if np.any(row):
            self._add_row(row, -delay)


NUM_BUDGETS, MIN_BUDGET = 256, 1 / 512
"""Number of budgets that are tried for a pool, and the smallest budget (1 buys all GPUs)."""
NUM_TIMES = 200
"""Number of iteration times ``T`` that are tried."""
EXPENSIVE_KIND_SHARE = 0.8
"""Weight of the expensive kind, in addition to the 0.1 that every kind has."""


def price_bounds(predictor: Predictor, groupings: Sequence[PoolStages]) -> Array:
    """Return a lower bound in seconds for each grouping, float64 ``[groupings]``."""
    stages, sizes = predictor.problem.stages, [kind.gpus for kind in predictor.problem.kinds]
    all_gpus = np.array(sizes)[:, None]
    min_times = np.array(
        [predictor.duration(s, all_gpus, 0 * all_gpus)[0] for s in range(len(stages))]
    )
    bounds = np.full(len(groupings), min_times.max())
    if not np.isfinite(bounds).all():
        return bounds
    membership = np.arange(1 << len(stages))[:, None] >> np.arange(len(stages)) & 1
    switches = np.array([_min_switch_total(predictor, np.flatnonzero(row)) for row in membership])
    # Groupings with few pools are padded with the empty pool, which costs nothing.
    disjoint = [(n, part) for n, pools in enumerate(groupings) for part in _without_overlap(pools)]
    indices = np.array([n for n, _ in disjoint])
    pool_codes = np.zeros((len(disjoint), len(stages)), np.int64)
    for row, (_, grouping) in zip(pool_codes, disjoint, strict=True):
        row[: len(grouping)] = [sum(1 << s for s in pool) for pool in grouping]
    times = np.geomspace(min_times.max(), min_times.sum() + switches.max(), NUM_TIMES)
    budgets = np.concatenate([[0.0], np.geomspace(MIN_BUDGET, 1, NUM_BUDGETS)])
    for prices in _candidate_prices(predictor, min_times):
        stage_s = [_min_seconds(predictor, s, prices, budgets) for s in range(len(stages))]
        pool_s = membership @ np.stack(stage_s) + switches[:, None]
        costs = np.zeros((len(membership), NUM_TIMES))
        for row, seconds in zip(costs[1:], pool_s[1:], strict=True):
            # The largest insufficient budget bounds the cost; 2: no budget is sufficient.
            enough = np.searchsorted(-seconds, -times * (1 + 1e-9))
            row[:] = np.where(enough < len(budgets), budgets[np.maximum(enough, 1) - 1], 2.0)
        is_affordable = np.sum([costs[pool_codes[:, p]] for p in range(len(stages))], axis=0) <= 1
        too_short = np.where(is_affordable.any(1), is_affordable.argmax(1), NUM_TIMES) - 1
        np.maximum.at(bounds, indices, np.where(too_short >= 0, times[too_short], 0.0))
    return bounds


def _without_overlap(pools: PoolStages) -> Iterator[PoolStages]:
    """Yield groupings without overlap whose bounds also hold for ``pools``: without the stages that
    are in several pools, or with a single pool of each job."""
    jobs = pools_of_jobs(pools)
    if len(jobs) == len(pools):
        yield pools
        return
    stage_pools = pools_of_stages(pools)
    yield tuple(tuple(s for s in pool if len(stage_pools[s]) == 1) for pool in pools)
    for n in range(max(map(len, jobs))):
        yield tuple(pools[job[min(n, len(job) - 1)]] for job in jobs)


def _candidate_prices(predictor: Predictor, min_times: Array) -> Iterator[Array]:
    """Yield prices of one GPU of each kind ``[kinds]``, such that all kinds cost the same, or in
    proportion to the speed of one or all stages, or such that one kind is expensive."""
    kinds = predictor.problem.kinds
    max_rates = np.array([[table[-1] for table in row] for row in predictor.best_rates])
    speeds = max_rates * min_times[:, None]
    shares = [
        np.ones(len(kinds)),
        speeds.sum(0),
        *speeds,
        *(EXPENSIVE_KIND_SHARE * np.eye(len(kinds)) + 0.1),
    ]
    sizes = np.array([kind.gpus for kind in kinds])
    for share in np.unique(np.maximum(shares, 1e-9), axis=0):
        yield share / share.sum() / sizes


def _min_seconds(predictor: Predictor, stage: int, prices: Array, budgets: Array) -> Array:
    """Return the minimum seconds of a stage for each budget, with the best fractional GPUs."""
    segments = []
    for price, rates in zip(prices, predictor.best_rates[stage], strict=True):
        corners = concave_hull(rates)
        for a, b in zip(corners[:-1], corners[1:], strict=True):
            segments.append(((rates[b] - rates[a]) / ((b - a) * price), (b - a) * price))
    segments.sort(reverse=True)
    speed_per_price, price = np.array(segments).T
    speed = np.interp(budgets, np.cumsum([0, *price]), np.cumsum([0, *(speed_per_price * price)]))
    return 1 / np.maximum(speed, 1e-30)


def _min_switch_total(predictor: Predictor, pool: Array) -> float:
    members = [int(s) for s in pool]
    groups = [[s for s in group if s in members] for group in predictor.lockstep_groups]
    return sum(predictor.min_switch_s(group, members) for group in groups if group)
