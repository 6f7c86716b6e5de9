"""The expected times of a stage on a kind of device, from the profile of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.planning.cost.regression import MIN_POINTS, TimeModel, TimingPoint, fit_times
from pipeline.planning.planner.available_devices import PartitionDevices
from pipeline.planning.profile import schema
from pipeline.planning.profile.schema import Profile
from rlinf.config import RunConfig
from rlinf.errors import PlanError
from stages.flow import StageSpec, flow_of

Array = np.ndarray
LOAD_OVERHEADS: Mapping[str, schema.OverheadName] = {
    "engine": "engine_load",
    "trainer": "trainer_load",
}
"""Profiled overhead of loading, by what a stage keeps in memory (``StageSpec.holds``)."""
SINGLE_MEASUREMENT_SPREAD, DATA_SHEET_PROFILE_SPREAD = 0.1, 0.8
"""Assumed relative standard deviations: of a time that was measured once, and of a time from data
sheets (80 % of these are within a factor of two)."""
STARTUP_PARTS = ("start", "imports")
"""Parts of a job before its stage begins."""


@dataclass(frozen=True)
class TimeEstimate:
    """Expected times with their standard deviations, in seconds ``[n]``."""

    mean: Array
    spread: Array

    def __add__(self, other: TimeEstimate) -> TimeEstimate:
        return TimeEstimate(self.mean + other.mean, np.hypot(self.spread, other.spread))


@dataclass(frozen=True)
class Correction:
    """Factors by which a stage took longer on a kind than predicted, in earlier runs."""

    startup_factor: float = 1.0
    """Factor of the start and imports of a job."""
    work_factor: float = 1.0
    """Factor of loading and work."""
    spread: float = math.inf
    """Maximum relative standard deviation of corrected times; infinite (no maximum) unless the
    profile is only estimated."""


@dataclass(frozen=True)
class StageTable:
    """The times of a stage on 0 to n devices of a kind. Arrays are ``[n + 1]``."""

    parts: Mapping[str, Array]
    """Expected seconds of each part, in order: start, imports, load and work of a job; only work in
    a pool. Infinite where the stage cannot run."""
    spread: Array
    """Relative standard deviation of the sum of the parts."""
    used: Array
    """Number of devices that have work, int64."""
    extrapolated: Array
    """True if the times are beyond the measurements."""
    per_node: int
    """Maximum number of processes per node."""
    peak_memory_bytes: int
    """Peak memory of a process."""

    @property
    def seconds(self) -> Array:
        """The sum of all parts."""
        return np.sum(list(self.parts.values()), axis=0)

    @property
    def rates(self) -> Array:
        """Iterations per second; 0 where the stage cannot run."""
        return 1 / self.seconds


StageTables = Mapping[str, Mapping[str, StageTable]]
"""Tables by stage and kind."""


class StageTimes:
    """The times of a stage on a kind of device, from the profile.

    Raises:
        PlanError: no measurement of the stage succeeded, or none has the whole batch.
    """

    def __init__(
        self, devices: PartitionDevices, stage: str, spec: StageSpec, profile: Profile
    ) -> None:
        self.devices, self.stage, self.samples = devices, stage, profile.samples
        self._holds, self._single_spread = (
            spec.holds,
            DATA_SHEET_PROFILE_SPREAD if profile.estimated else SINGLE_MEASUREMENT_SPREAD,
        )
        points = [p for p in devices.profile.points if p.stage == stage]
        succeeded = [p for p in points if p.succeeded]
        if not succeeded:
            reason = points[0].failure if points else "it was not measured"
            raise PlanError(f"no measurement of stage {stage!r} succeeded ({reason})")
        self.peak_memory_bytes = max(p.peak_memory_bytes or 0 for p in succeeded)
        """Peak memory of a process."""
        self._failures = _failures_by_count(points, profile)
        self._first_iteration_extra_s = {
            p.processes: max(0.0, p.cold.median_s - p.time.median_s)
            for p in succeeded
            if p.cold is not None and p.time is not None and p.samples == self.samples
        }
        self.measured = [
            TimingPoint(p.processes, p.samples, p.time.median_s, self._spread(p.time), count)
            for p in succeeded
            if p.time is not None and p.time.median_s > 0
            for count in [len(p.time.seconds)]
        ]
        """All successful measurements of the stage, also of smaller batches."""
        settings = {(p.processes, p.size) for p in self.measured}
        # Estimates exist for every number of processes, and jump where a job exceeds one node.
        can_fit = not profile.estimated and len(settings) >= MIN_POINTS
        self._fit: TimeModel | None = fit_times(self.measured) if can_fit else None
        self._whole_batch = {p.processes: p for p in self.measured if p.size == self.samples}
        if self._fit is None and not self._whole_batch:
            raise PlanError(
                f"{len(settings)} measurements of stage {stage!r}, none of the whole batch of "
                f"{self.samples} samples; continue measuring with: rlinf profile"
            )

    def refusal_for(self, count: int) -> str:
        """Return why ``count`` processes cannot run the stage; "" if no failure is known.

        A failure is assumed to repeat. An unmeasured number is treated like the next lower measured
        number, because more processes on a node need more memory. Numbers below all measured ones
        are not used, because fewer devices need more memory each.
        """
        measured = sorted(self._failures)
        if count < measured[0] and not self._failures[measured[0]]:
            return (
                f"stage {self.stage!r} was measured on {measured[0]} processes of "
                f"{self.devices.name} or more, and {count} may have too little memory; measure "
                f"with: rlinf profile --processes {count}"
            )
        nearest = measured[max(0, int(np.searchsorted(measured, count, "right")) - 1)]
        failure = self._failures[nearest]
        if not failure:
            return ""
        runnable = ", ".join(str(n) for n in measured if not self._failures[n]) or "nothing"
        return (
            f"stage {self.stage!r} failed on {nearest} processes of {self.devices.name} "
            f"({failure}), so the planner does not use {count}; it runs on {runnable}"
        )

    def work(self, counts: Array, share: float = 1.0) -> tuple[TimeEstimate, Array]:
        """Return the times of work, infinite if unknown, and whether they are extrapolated.

        Args:
            counts: numbers of processes ``[n]``.
            share: share of the batch.
        """
        if self._fit is not None:
            prediction = self._fit.predict(counts, share * self.samples)
            return TimeEstimate(prediction.seconds, prediction.spread_s), prediction.extrapolated
        points = [self._whole_batch.get(int(count)) for count in counts]
        seconds = np.array([share * p.seconds if p else np.inf for p in points])
        spread = np.array([p.spread_s if p else 0.0 for p in points])
        return TimeEstimate(seconds, spread), np.full(len(counts), share != 1)

    def time_line(self, count: int) -> tuple[float, float]:
        """Return the seconds of work on ``count`` processes as a linear function of the share of
        the batch: intercept and slope."""
        half, whole = (self.work(np.array([count]), share)[0].mean[0] for share in (0.5, 1.0))
        slope = 2 * float(whole - half)
        return float(whole) - slope, slope

    def overheads(self, counts: Array) -> dict[str, TimeEstimate]:
        """Return the expected times of jobs before their work, in order: start, imports, load.

        If the stage was measured as a separate job of one process, this measurement defines imports
        and load; the other measurements define the extra time to load on more processes.

        Args:
            counts: numbers of processes ``[n]``.
        """
        one = np.ones_like(counts)
        start = self._overhead("dispatch", one)
        if not start.mean.any():
            # A job is submitted when the driver notices the completion of the previous job.
            start = self._overhead("submission", counts) + self._overhead("startup", counts)
            start = start + self._overhead("completion", counts)
        imports, load = self._overhead("imports", counts), self._load(counts)
        separate = self._overhead("alone", one, self.stage)
        if separate.mean.any():
            imports = self._overhead("imports", one, self.stage)
            extra_s = np.maximum(0.0, load.mean - self._load(one).mean)
            load_s = separate.mean - self.work(one)[0].mean + extra_s
            load = TimeEstimate(np.maximum(0.0, load_s), separate.spread)
        return {"start": start, "imports": imports, "load": load}

    def max_per_node(self) -> int:
        """Return the maximum number of processes per node: one per device, or fewer if devices have
        no memory of their own and the node's memory is too small.

        On GPUs, a process that ran once is assumed to fit again.
        """
        kind = self.devices.kind
        if self.devices.has_device_memory or not self.peak_memory_bytes or not kind.mem_mb_per_node:
            return self.devices.per_node
        max_processes = (kind.mem_mb_per_node << 20) // self.peak_memory_bytes
        return min(self.devices.per_node, max_processes)

    def table(
        self,
        max_processes: int,
        correction: Correction,
        *,
        is_job: bool,
        one_device_jobs: bool = False,
        any_shape: bool = False,
    ) -> StageTable:
        """Return the times on 0 to all devices of the kind.

        Args:
            max_processes: more devices are idle.
            is_job: the stage is a job of its own, whose start and loading count too.
            one_device_jobs: each device is a job of its own (an elastic pool).
            any_shape: allow numbers of devices that cannot be divided equally over nodes.

        Raises:
            PlanError: the stage cannot run on any number of devices.
        """
        devices, per_node = self.devices, self.max_per_node()
        if not per_node:
            raise PlanError(
                f"one process of stage {self.stage!r} needs {self.peak_memory_bytes >> 20} MiB, "
                f"a node has {devices.kind.mem_mb_per_node}"
            )
        counts = np.arange(devices.count + 1)
        processes = np.clip(counts, 1, max_processes)
        work, extrapolated = self.work(processes)
        parts = {**self.overheads(processes), "work": work}
        factors = dict.fromkeys(parts, correction.work_factor)
        factors |= dict.fromkeys(STARTUP_PARTS, correction.startup_factor)
        parts = {
            n: TimeEstimate(factors[n] * p.mean, factors[n] * p.spread) for n, p in parts.items()
        }
        job_s = np.sum([part.mean for part in parts.values()], axis=0)
        parts = parts if is_job else {"work": parts["work"]}
        total = sum(parts.values(), start=TimeEstimate(np.zeros(1), np.zeros(1)))
        can_run = np.array([n > 0 and not self.refusal_for(int(n)) for n in counts])
        can_run &= np.isfinite(total.mean)
        if not can_run.any():
            reason = self.refusal_for(devices.count)
            raise PlanError(reason or "no available number of devices was measured")
        job_counts = np.minimum(counts, 1) if one_device_jobs else counts
        if not any_shape:
            nodes = -(-job_counts // per_node) if is_job else -(-job_counts // devices.per_node)
            nodes = np.maximum(1, nodes)
            can_run &= (-(-job_counts // nodes) <= per_node) & (nodes <= devices.max_job_nodes)
            can_run &= (job_counts % nodes == 0) | (not is_job)
        can_run &= job_counts <= devices.max_job_devices
        if not can_run.any():
            raise PlanError(
                f"jobs have at most {devices.max_job_devices} devices, but the stage needs "
                f"more ({devices.allowance.refusal or 'MaxNodes'})"
            )
        # A job that ends before its stage would repeat that stage forever.
        fastest_s = float(job_s[can_run].min())
        can_run &= job_s <= devices.limit_s
        if not can_run.any():
            raise PlanError(
                f"start and work take {fastest_s / 60:.1f} minutes at best, "
                f"{devices.time_limit_of} allows jobs of {devices.time_limit_min}"
            )
        return StageTable(
            {n: np.where(can_run, part.mean, np.inf) for n, part in parts.items()},
            np.where(can_run, np.minimum(total.spread / total.mean, correction.spread), 0.0),
            np.where(can_run, np.minimum(counts, max_processes), 0),
            can_run & extrapolated,
            per_node,
            self.peak_memory_bytes,
        )

    def _load(self, counts: Array) -> TimeEstimate:
        """Return the times to load, with the extra time of the first iteration of a process."""
        load = TimeEstimate(np.zeros(len(counts)), np.zeros(len(counts)))
        if self._holds:
            load = self._overhead(LOAD_OVERHEADS[self._holds], counts)
        if extra_s := self._first_iteration_extra_s:
            seconds = np.array([*extra_s.values()])[_nearest([*extra_s], counts)]
            load = TimeEstimate(load.mean + seconds, load.spread)
        return load

    def _overhead(self, name: schema.OverheadName, counts: Array, stage: str = "") -> TimeEstimate:
        """Return the overheads that were measured nearest to ``counts``; 0 if not measured."""
        entries = [e for e in self.devices.profile.overheads if (e.name, e.stage) == (name, stage)]
        if not entries:
            return TimeEstimate(np.zeros(len(counts)), np.zeros(len(counts)))
        nearest = _nearest([entry.processes for entry in entries], counts)
        medians = np.array([entry.median_s for entry in entries])
        return TimeEstimate(medians[nearest], np.array([self._spread(e) for e in entries])[nearest])

    def _spread(self, measured: schema.Measurement) -> float:
        is_single = len(measured.seconds) == 1
        return self._single_spread * measured.median_s if is_single else measured.spread_s


def _nearest(measured: Sequence[int], counts: Array) -> Array:
    """Return the indices of the measured numbers that are nearest to ``counts`` by their ratio."""
    return np.asarray(np.abs(np.log(measured)[:, None] - np.log(counts)).argmin(0))


def num_work_items(stage: str, config: RunConfig) -> int:
    """Return the number of parts into which a stage can be divided; more processes are idle."""
    flow = flow_of(config)
    if not flow.all_stages[stage].uses_device:
        return 1
    if stage == flow.rollout_stage:  # all samples of a prompt go to one process
        return config.rollout.batch_size
    return config.rollout.batch_size * config.rollout.group_size


def _failures_by_count(points: list[schema.ProfilePoint], profile: Profile) -> dict[int, str]:
    """Return why the stage failed, by measured number of processes; "" if the stage succeeded.

    A failure with fewer samples counts for the run's batch too.
    """
    failures = {p.processes: "" for p in points if p.succeeded}
    failures |= {
        p.processes: p.failure for p in points if p.failure and p.samples <= profile.samples
    }
    return failures
