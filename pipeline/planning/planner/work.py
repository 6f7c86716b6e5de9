"""What a profile says of one stage on one kind of device: seconds, and what comes on top."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.planning.cost.fit import LEAST_POINTS, Fit, Point, fit_times
from pipeline.planning.planner.devices import Devices
from pipeline.planning.profile import schema
from pipeline.planning.profile.schema import Profile
from rlinf.config import RunConfig
from rlinf.errors import PlanError
from stages.flow import Stage, flow_of

Array = np.ndarray
LOADS: Mapping[str, schema.OverheadName] = {"engine": "engine_load", "trainer": "trainer_load"}
SINGLE_SPREAD, ESTIMATED = 0.1, 0.8
"""Relative standard deviation of what was measured once, and of what data sheets say of programs
that were never run there: eight in ten within a factor of two (assumed)."""
QUANTILE = 1.2816
"""Standard deviations to the 10 % and 90 % quantiles of a normal distribution."""


@dataclass(frozen=True)
class Seconds:
    """An expected time."""

    mean: float
    spread: float = 0.0
    """Standard deviation."""


def interval(seconds: float, spread: float) -> tuple[float, float]:
    """The 10 % and 90 % quantiles of a normal distribution."""
    return max(0.0, seconds - QUANTILE * spread), seconds + QUANTILE * spread


class Work:
    """A stage on a kind of device.

    Raises:
        PlanError: no measurement of it succeeded there, or none says what the whole batch takes.
    """

    def __init__(self, devices: Devices, stage: str, spec: Stage, profile: Profile) -> None:
        self.devices, self.stage, self.samples = devices, stage, profile.samples
        self.device = spec.device
        own = devices.profile
        mine = [
            name
            for name, kind in profile.kinds.items()
            if (kind.partition, kind.gpu_type) == (own.partition, own.gpu_type)
        ]
        self.mixtures = {
            other: (mixture, mixture.kinds.index(name))
            for mixture in profile.mixtures
            for name, other in (mixture.kinds, mixture.kinds[::-1])
            if mixture.stage == stage and name in mine
        }
        """By the profile's name of another kind: what was measured of both in one job, and which of
        its two kinds this one is."""
        self.measured_as = frozenset(mine)
        """Names in the profile of the kind that was measured."""
        self._loads, self._single = spec.loads, ESTIMATED if profile.estimated else SINGLE_SPREAD
        points = [p for p in devices.profile.points if p.stage == stage]
        ran = [p for p in points if p.ok and p.token_budget in (None, profile.token_budget)]
        if not ran:
            why = points[0].failure if points else "it was not measured"
            raise PlanError(f"no measurement of stage {stage!r} succeeded ({why})")
        self.peak_memory_bytes = max(p.peak_memory_bytes or 0 for p in ran)
        """Of a process."""
        self._tried = _tried(points, profile)
        self._cold = {
            p.processes: p.cold.median_s - p.time.median_s
            for p in ran
            if p.cold is not None and p.time is not None and p.samples == self.samples
        }
        self.measured = [
            Point(p.processes, p.samples, p.time.median_s, self._median(p.time).spread, count)
            for p in ran
            if p.time is not None and p.time.median_s > 0
            for count in [len(p.time.seconds)]
        ]
        places = {(p.processes, p.size) for p in self.measured}
        # Formulas say it of each number of processes, and jump where a job leaves its node.
        self.fits = not profile.estimated
        enough = self.fits and len(places) >= LEAST_POINTS
        self._fit: Fit | None = fit_times(self.measured) if enough else None
        self._exact = {p.processes: p for p in self.measured if p.size == self.samples}
        if self._fit is None and not self._exact:
            raise PlanError(
                f"{len(places)} measurements of stage {stage!r}, none of the whole batch of "
                f"{self.samples} samples; measure on with: rlinf profile"
            )

    def refused(self, count: int) -> str:
        """Why so many processes cannot run it; "" where they can, as far as is known.

        What failed once fails again. A number that was not tried is as the next lower one that
        was: processes that share a node need more of it the more there are. Below all that was
        tried it is as the next higher one: fewer devices each hold more.
        """
        lower = [tried for tried in self._tried if tried <= count]
        near = max(lower) if lower else min(self._tried)
        failure = self._tried[near]
        if not failure:
            return ""
        runs = sorted(tried for tried, why in self._tried.items() if not why)
        able = ", ".join(map(str, runs)) or "nothing"
        return (
            f"stage {self.stage!r} failed on {near} processes of {self.devices.name} ({failure}), "
            f"so {count} are not planned with; it runs on {able}"
        )

    def able(self, counts: Array) -> Array:
        """Which numbers of processes can run it, bool ``[n]``."""
        return np.array([not self.refused(int(count)) for count in counts], dtype=bool)

    def times(self, counts: Array, share: float = 1.0) -> tuple[Array, Array, Array]:
        """Seconds, their standard deviations, and whether they were extrapolated.

        Args:
            counts: numbers of processes ``[n]``.
            share: of the batch.

        Returns:
            Three arrays ``[n]``; infinite seconds where nothing is known.
        """
        if self._fit is not None:
            answer = self._fit.predict(counts, share * self.samples)
            return answer.seconds, answer.spread_s, answer.extrapolated
        known = [self._exact.get(int(count)) for count in counts]
        seconds = np.array([share * p.seconds if p else np.inf for p in known])
        spread = np.array([p.spread_s if p else 0.0 for p in known])
        return seconds, spread, np.full(len(counts), share != 1)

    def line(self, count: int) -> tuple[float, float]:
        """Seconds as a line in the share of the batch: at 0, and the rise to the whole."""
        half, whole = (float(self.times(np.array([count]), share)[0][0]) for share in (0.5, 1.0))
        rise = 2 * (whole - half)
        return whole - rise, rise

    def overheads(self, processes: int) -> dict[str, Seconds]:
        """What a job of its own costs before and beside the work, in order.

        Where jobs on their own were measured, on one process, they say what a stage's own imports
        and loading take; more processes cost more as the profile of loaded stages has it.
        """
        dispatch = self._overhead("dispatch", 1)
        steps = [self._overhead(name, processes) for name in ("submission", "startup")]
        # Of the job before, whose end starts this one.
        steps.append(self._overhead("completion", processes))
        parts = {"start": dispatch if dispatch.mean else _sum(*steps)}
        parts["imports"] = self._overhead("imports", processes)
        parts["load"] = self._load(processes)
        alone = self._overhead("alone", 1, self.stage)
        if alone.mean:
            parts["imports"] = self._overhead("imports", 1, self.stage)
            more = self._load(processes).mean - self._load(1).mean
            own = alone.mean - float(self.times(np.array([1]))[0][0]) + max(0.0, more)
            parts["load"] = Seconds(max(0.0, own), alone.spread)
        return parts

    def _load(self, processes: int) -> Seconds:
        """Loading, and what the first work of a process costs more."""
        parts = [self._overhead(LOADS[self._loads], processes)] if self._loads else []
        if self._cold:
            near = min(self._cold, key=lambda count: abs(math.log(count / processes)))
            parts.append(Seconds(max(0.0, self._cold[near])))
        return _sum(*parts)

    def per_node(self) -> int:
        """Most processes of a node: one per device, and of those without memory of their own as
        many as fit the node's.

        On GPUs a process that ran once runs again.
        """
        kind = self.devices.kind
        if self.devices.has_memory or not self.peak_memory_bytes or not kind.mem_mb_per_node:
            return self.devices.per_node
        fit = (kind.mem_mb_per_node << 20) // self.peak_memory_bytes
        return min(self.devices.per_node, fit)

    def _overhead(self, name: schema.OverheadName, processes: int, stage: str = "") -> Seconds:
        every = self.devices.profile.overheads
        known = [entry for entry in every if entry.name == name and entry.stage == stage]
        if not known:
            return Seconds(0.0)
        return self._median(min(known, key=lambda e: abs(math.log(e.processes / processes))))

    def _median(self, measured: schema.Measured) -> Seconds:
        single = len(measured.seconds) == 1
        spread = self._single * measured.median_s if single else measured.spread_s
        return Seconds(measured.median_s, spread)


def work_items(stage: str, config: RunConfig) -> int:
    """Pieces of work that processes can share; more processes would stand idle."""
    flow = flow_of(config)
    if not flow.table[stage].device:
        return 1
    if stage == flow.acts:  # whole starts are shared out
        return config.rollout.batch
    return config.rollout.batch * config.rollout.group_size


def _tried(points: list[schema.Point], profile: Profile) -> dict[int, str]:
    """By number of processes: how it failed there, "" where the run's own work was done.

    What fails of less work, or in smaller micro-batches, fails of the run's own too.
    """
    own = profile.token_budget or math.inf
    tried = {p.processes: "" for p in points if p.ok and p.token_budget in (None, own)}
    for p in points:
        if not p.ok and p.samples <= profile.samples and (p.token_budget or 0) <= own:
            tried[p.processes] = p.failure
    return tried


def _sum(*parts: Seconds) -> Seconds:
    return Seconds(sum(part.mean for part in parts), math.hypot(*(part.spread for part in parts)))
