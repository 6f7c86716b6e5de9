"""The best any placement of one grouping could do, by a linear program.

Everything in :mod:`pipeline.planning.planner.predict` but the measured speeds is linear: an
iteration is a longest path through starts and ends. So give up whole GPUs, and replace each
measured speed by the least concave curve above it. The time of a stage is then a convex function of
the GPUs, bounded from below by tangents. What is left is a linear program whose value no placement
of the grouping goes below, and whose fractional GPUs are a good place to start looking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from pipeline.planning.planner.predict import Predictor, apart, shares_turns
from pipeline.planning.planner.problem import Pools, homes

Array = np.ndarray

LINES = 6
"""Lines that bound the speed of a stage on a kind of GPU from above."""
TANGENTS = 24
"""Tangents that bound the time of a stage from below, before any is added: with so many, programs
are hardly ever solved again."""
TOLERANCE = 0.01
"""Tangents are added until the program's times are this near to the true ones, relative."""
ROUNDS = 3


@dataclass(frozen=True)
class Relaxed:
    """The optimum of the relaxation."""

    bound_s: float
    """No placement of the grouping has a shorter iteration; infinite where there is none."""
    gpus: Array
    """Fractional GPUs, float64 ``[pools, kinds]``."""


class Relaxation:
    """Relaxations of one problem; what does not depend on the grouping is made once."""

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
        pools: Pools,
        chunks: Sequence[int] | None = None,
        enough_s: float = float("inf"),
    ) -> Relaxed:
        """The relaxation of a grouping of stages into pools, over some grains (default: all).

        The more they differ the looser it is: each is granted the least overhead of all, and the
        shortest pieces. A bound above ``enough_s`` is not made better.
        """
        kinds, stages = len(self.problem.kinds), len(self.problem.stages)
        if not np.all(np.isfinite(self._least)):
            return Relaxed(float("inf"), np.zeros((len(pools), kinds)))
        program = _Program(self, pools, chunks or self.problem.chunks)
        value, x = program.run()
        for _ in range(ROUNDS):
            if x is None:
                return Relaxed(float("inf"), np.zeros((len(pools), kinds)))
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
            return Relaxed(float("inf"), np.zeros((len(pools), kinds)))
        # A solver's optimum is off by its own tolerance; the bound must hold.
        return Relaxed(value * (1 - 1e-6), x[program.gpus].reshape(len(pools), kinds))


def hull(rates: Array) -> list[int]:
    """Numbers of GPUs, ascending, that are corners of the least concave curve above rates
    ``[gpus + 1]``, which never fall."""
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
    """Lines ``[n, 2]`` (slope, height at zero) on or above rates ``[gpus + 1]``; at most LINES."""
    corners = hull(rates)
    if len(corners) == 1:
        return np.array([[0.0, rates[0]]])
    left, right = np.array(corners[:-1]), np.array(corners[1:])
    slope = (rates[right] - rates[left]) / (right - left)
    lines = np.stack([slope, rates[left] - slope * left], axis=1)
    if len(lines) > LINES:
        lines = lines[np.unique(np.linspace(0, len(lines) - 1, LINES).round().astype(int))]
    return lines


class _Program:
    """Builds and solves the linear program of one grouping, times in units of ``unit`` seconds."""

    def __init__(self, relaxation: Relaxation, pools: Pools, chunks: Sequence[int]) -> None:
        self._of = relaxation
        problem = relaxation.problem
        stages, kinds = len(problem.stages), len(problem.kinds)
        self.unit = float(relaxation._least.max())
        self.home = homes(pools)
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
            for speed in np.geomspace(fastest / 64, fastest, TANGENTS):
                self.add_tangent(s, float(speed))
        self._flow(pools, chunks)

    def run(self) -> tuple[float, Array | None]:
        """The optimum in seconds, and where it is."""
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
            # What does not mix at all is a share of 0.
            problem = self._of.problem
            mixing = problem.mixing if problem.stages[s].divisible else 0.0
            alone = max(float(table[-1]) for table in self._of.predictor.best[s])
            for share in {1.0, mixing}:
                row = np.zeros(self.size)
                row[self.speed.start + s] = 1.0
                first = self.part.start + s * kinds
                row[first : first + kinds] = -share
                self._add(row, (1 - share) * alone)

    def _flow(self, pools: Pools, chunks: Sequence[int]) -> None:
        """The longest path of :meth:`Predictor.many`, each ``max`` as several rows."""
        problem, predictor = self._of.problem, self._of.predictor
        index = {stage.name: s for s, stage in enumerate(problem.stages)}
        groups = {s: group for group in predictor.groups for s in group}
        piped = len(pools) > 1
        fewest, most = (min(chunks), max(chunks)) if piped else (0, 1)
        slow = {
            s: float(predictor.passes(group, self.home, fewest))
            * max(problem.stages[i].chunk_s for i in group)
            / self.unit
            for s, group in groups.items()
        }
        free: dict[int, int] = {}
        for group in predictor.groups:
            # One stage stands for its group: they begin and end together.
            head = group[0]
            for terms in self._group_times(group):
                self._after(self.start, head, terms, head, self.end, slow[head])
            for pool in sorted({p for s in group for p in self.home[s]}):
                change = predictor.least_switch(group, pools[pool]) / self.unit
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
                    passed = apart(self.home, index[name], s)
                    if not (passed and problem.stages[s].streams):
                        self._after(self.end, other[0], [], head, self.start, 0.0)
                    else:
                        ahead = self._least_lead(other, chunks) if piped else 1.0
                        for terms in self._group_times(other, ahead):
                            least = slow[other[0]] / most
                            self._after(self.start, other[0], terms, head, self.start, least)
                    for terms in self._group_times(group, 1 / most):
                        self._after(self.end, other[0], terms, head, self.end, slow[head] / most)
        moved = predictor.least_sync(pools) / self.unit
        for group in predictor.groups:
            last = moved if predictor.source in group else 0.0
            self._after(self.end, group[0], [], 0, self.total, last)

    def _least_lead(self, group: Sequence[int], chunks: Sequence[int]) -> float:
        """The least share of a group's time until its first micro-batch is ready."""
        stage = self._of.problem.stages[group[0]]
        if shares_turns(group, self.home):
            return 1 / max(chunks)
        shares = [{0: 1 / m, **stage.lead.get(m, {})} for m in chunks]
        return min(
            share for each in shares for gpus, share in each.items() if gpus or 1 not in each
        )

    def _group_times(
        self, group: Sequence[int], part: float = 1.0
    ) -> list[list[tuple[int, float]]]:
        """Weighted sums of stage times, the largest of which is a part of the time of a group."""
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
        """``target >= source + weighted times + more``."""
        row = np.zeros(self.size)
        row[source_span.start + source] += 1.0
        for s, weight in times:
            row[self.time.start + s] += weight
        row[target_span.start + target] -= 1.0
        if np.any(row):
            self._add(row, -more)
