"""The ways to run a stage as its own job, with the expected times of each.

:class:`StageTimes` reads the times of a stage on a kind of device from the profile.
:class:`StageOption` is one way to run a stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.plan import StagePlan
from pipeline.planning.cost.regression import MIN_POINTS, TimeModel, TimingPoint, fit_times
from pipeline.planning.planner.available_devices import (
    PartitionDevices,
    build_stage_plan,
    cpus_per_process,
)
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
DEVIATIONS_TO_Q90 = 1.2816
"""Standard deviations from the mean to the 10 % and 90 % quantiles of a normal distribution."""


@dataclass(frozen=True)
class TimeEstimate:
    """An expected time with its standard deviation."""

    mean: float
    """Expected seconds."""
    spread: float = 0.0
    """Standard deviation, seconds."""


def q10_q90_interval(seconds: float, spread: float) -> tuple[float, float]:
    """Return the 10 % and 90 % quantiles of normally distributed seconds, at least 0."""
    return max(0.0, seconds - DEVIATIONS_TO_Q90 * spread), seconds + DEVIATIONS_TO_Q90 * spread


class StageTimes:
    """The times of a stage on a kind of device, from the profile.

    Raises:
        PlanError: no measurement of the stage succeeded, or none has the whole batch.
    """

    def __init__(
        self, devices: PartitionDevices, stage: str, spec: StageSpec, profile: Profile
    ) -> None:
        self.devices, self.stage, self.samples = devices, stage, profile.samples
        self.uses_device = spec.uses_device
        kind_profile = devices.profile
        names = [
            name
            for name, kind in profile.kinds.items()
            if (kind.partition, kind.gpu_type) == (kind_profile.partition, kind_profile.gpu_type)
        ]
        self.mixtures = {
            other: (mixture, mixture.kinds.index(name))
            for mixture in profile.mixtures
            for name, other in (mixture.kinds, mixture.kinds[::-1])
            if mixture.stage == stage and name in names
        }
        """For each other kind with which this kind was measured in one job, by its name in the
        profile: the mixture, and the index of this kind in the mixture."""
        self.profile_names = frozenset(names)
        """Names of this kind of device in the profile."""
        self._holds, self._single_spread = (
            spec.holds,
            DATA_SHEET_PROFILE_SPREAD if profile.estimated else SINGLE_MEASUREMENT_SPREAD,
        )
        points = [p for p in devices.profile.points if p.stage == stage]
        budgets = (None, profile.token_budget)
        succeeded = [p for p in points if p.succeeded and p.token_budget in budgets]
        if not succeeded:
            reason = points[0].failure if points else "it was not measured"
            raise PlanError(f"no measurement of stage {stage!r} succeeded ({reason})")
        self.peak_memory_bytes = max(p.peak_memory_bytes or 0 for p in succeeded)
        """Peak memory of a process."""
        self._failures = _failures_by_count(points, profile)
        self._first_iteration_extra_s = {
            p.processes: p.cold.median_s - p.time.median_s
            for p in succeeded
            if p.cold is not None and p.time is not None and p.samples == self.samples
        }
        self.measured = [
            TimingPoint(p.processes, p.samples, p.time.median_s, self._median(p.time).spread, count)
            for p in succeeded
            if p.time is not None and p.time.median_s > 0
            for count in [len(p.time.seconds)]
        ]
        """All successful measurements of the stage, also of smaller batches."""
        settings = {(p.processes, p.size) for p in self.measured}
        # Estimates exist for every number of processes, and jump where a job exceeds one node.
        self.can_interpolate = not profile.estimated
        can_fit = self.can_interpolate and len(settings) >= MIN_POINTS
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
        number, because more processes on a node need more memory. Below all measured numbers it is
        treated like the lowest of them, because fewer devices need more memory each.
        """
        lower = [measured for measured in self._failures if measured <= count]
        nearest = max(lower) if lower else min(self._failures)
        failure = self._failures[nearest]
        if not failure:
            return ""
        successes = sorted(measured for measured, reason in self._failures.items() if not reason)
        runnable = ", ".join(map(str, successes)) or "nothing"
        return (
            f"stage {self.stage!r} failed on {nearest} processes of {self.devices.name} "
            f"({failure}), so the planner does not use {count}; it runs on {runnable}"
        )

    def can_run(self, counts: Array) -> Array:
        """Return True for numbers of processes that can run the stage, bool ``[n]``."""
        return np.array([not self.refusal_for(int(count)) for count in counts], dtype=bool)

    def times(self, counts: Array, share: float = 1.0) -> tuple[Array, Array, Array]:
        """Return seconds of work, their standard deviations, and whether they are extrapolated.

        Args:
            counts: numbers of processes ``[n]``.
            share: share of the batch.

        Returns:
            Three arrays ``[n]``; infinite seconds if unknown.
        """
        if self._fit is not None:
            prediction = self._fit.predict(counts, share * self.samples)
            return prediction.seconds, prediction.spread_s, prediction.extrapolated
        points = [self._whole_batch.get(int(count)) for count in counts]
        seconds = np.array([share * p.seconds if p else np.inf for p in points])
        spread = np.array([p.spread_s if p else 0.0 for p in points])
        return seconds, spread, np.full(len(counts), share != 1)

    def time_line(self, count: int) -> tuple[float, float]:
        """Return the seconds of work on ``count`` processes as a linear function of the share of
        the batch: intercept and slope."""
        half, whole = (float(self.times(np.array([count]), share)[0][0]) for share in (0.5, 1.0))
        slope = 2 * (whole - half)
        return whole - slope, slope

    def overheads(self, processes: int) -> dict[str, TimeEstimate]:
        """Return the expected times of a job before its work, in order: start, imports, load.

        If the stage was measured as a separate job of one process, this measurement defines imports
        and load; the other measurements define the extra time to load on more processes.
        """
        dispatch = self._overhead("dispatch", 1)
        steps = [self._overhead(name, processes) for name in ("submission", "startup")]
        # A job is submitted when the driver notices the completion of the previous job.
        steps.append(self._overhead("completion", processes))
        parts = {"start": dispatch if dispatch.mean else _add_estimates(*steps)}
        parts["imports"] = self._overhead("imports", processes)
        parts["load"] = self._load(processes)
        separate = self._overhead("alone", 1, self.stage)
        if separate.mean:
            parts["imports"] = self._overhead("imports", 1, self.stage)
            extra_s = self._load(processes).mean - self._load(1).mean
            load_s = separate.mean - float(self.times(np.array([1]))[0][0]) + max(0.0, extra_s)
            parts["load"] = TimeEstimate(max(0.0, load_s), separate.spread)
        return parts

    def _load(self, processes: int) -> TimeEstimate:
        """Return the time to load, with the extra time of the first iteration of a process."""
        parts = [self._overhead(LOAD_OVERHEADS[self._holds], processes)] if self._holds else []
        if extra_s := self._first_iteration_extra_s:
            nearest = min(extra_s, key=lambda count: abs(math.log(count / processes)))
            parts.append(TimeEstimate(max(0.0, extra_s[nearest])))
        return _add_estimates(*parts)

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

    def _overhead(self, name: schema.OverheadName, processes: int, stage: str = "") -> TimeEstimate:
        """Return the overhead that was measured nearest to ``processes``; 0 if not measured."""
        overheads = self.devices.profile.overheads
        matching = [entry for entry in overheads if entry.name == name and entry.stage == stage]
        if not matching:
            return TimeEstimate(0.0)
        return self._median(min(matching, key=lambda e: abs(math.log(e.processes / processes))))

    def _median(self, measured: schema.Measurement) -> TimeEstimate:
        is_single = len(measured.seconds) == 1
        spread = self._single_spread * measured.median_s if is_single else measured.spread_s
        return TimeEstimate(measured.median_s, spread)


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

    A failure with fewer samples, or with smaller micro-batches, counts for the run's batch too.
    """
    budget = profile.token_budget or math.inf
    failures = {p.processes: "" for p in points if p.succeeded and p.token_budget in (None, budget)}
    for p in points:
        if not p.succeeded and p.samples <= profile.samples and (p.token_budget or 0) <= budget:
            failures[p.processes] = p.failure
    return failures


def _add_estimates(*parts: TimeEstimate) -> TimeEstimate:
    return TimeEstimate(
        sum(part.mean for part in parts), math.hypot(*(part.spread for part in parts))
    )


DEFAULT_MIXING_EFFICIENCY = 0.95
"""Speed of several kinds together on one stage, relative to the sum of their speeds, if it was not
measured: the goal of the benchmark ``hetero_efficiency``."""
TIME_LIMIT_FACTOR = 10
"""Requested time limit relative to the predicted time; only jobs that hang should reach it."""
MIN_TIME_LIMIT_MIN = 10
"""Minimum requested time limit, in minutes."""
MEMORY_FACTOR = 1.5
"""Requested memory relative to the measured peak."""
MEMORY_STEP_MB = 256
"""Requested memory is a multiple of this number."""
MIN_BATCH_SHARE = 0.02
"""Minimum share of the batch for the slower of two kinds in one job."""


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
class StageOption:
    """One way to run a stage as a job."""

    stage: str
    devices: tuple[PartitionDevices, ...]
    """One kind, or two kinds between which the batch is divided in proportion to their speeds."""
    nodes: tuple[int, ...]
    """Number of nodes of each kind in ``devices``."""
    processes: int
    """Processes per node; each has a device."""
    parts: Mapping[str, TimeEstimate]
    """Expected times of the job's parts, in order: start, imports, load, work."""
    speeds: tuple[float, ...] = ()
    """Relative speed of a process on each kind, if there are several."""
    peak_memory_bytes: int = 0
    """Peak memory of a process."""
    extrapolated: bool = False
    """True if the time is extrapolated beyond the measurements."""
    needs_device: bool = True
    """False if the stage uses no GPU even on nodes with GPUs."""

    @property
    def seconds(self) -> float:
        """The sum of all parts."""
        return sum(part.mean for part in self.parts.values())

    @property
    def conservative_s(self) -> float:
        """Seconds by which options are compared: if extrapolated, the upper end of the interval.

        A fit to fewer devices is too optimistic, because more devices share a network or node.
        """
        return (
            q10_q90_interval(self.seconds, self.spread_s)[1] if self.extrapolated else self.seconds
        )

    @property
    def spread_s(self) -> float:
        """The standard deviation, assuming independent errors of the parts."""
        return math.sqrt(sum(part.spread**2 for part in self.parts.values()))

    def with_corrections(self, corrections: Mapping[tuple[str, str], Correction]) -> StageOption:
        """Return the option with the corrections of its stage and kinds. With several kinds, the
        largest factors apply."""
        keys = [(self.stage, entry.name) for entry in self.devices]
        matching = [corrections[key] for key in keys if key in corrections]
        if not matching:
            return self
        startup = max(c.startup_factor for c in matching)
        work = max(c.work_factor for c in matching)
        factors = dict.fromkeys(self.parts, work) | {"start": startup, "imports": startup}
        parts = {}
        for name, part in self.parts.items():
            mean = part.mean * factors[name]
            max_spread = max(c.spread for c in matching) * mean if mean else 0.0
            parts[name] = TimeEstimate(mean, min(part.spread * factors[name], max_spread))
        return replace(self, parts=parts)

    @property
    def bound_by(self) -> str:
        """The name of the largest part."""
        return max(self.parts, key=lambda name: self.parts[name].mean)

    @property
    def num_processes(self) -> int:
        """The number of processes on all nodes."""
        return sum(self.nodes) * self.processes

    @property
    def num_devices(self) -> tuple[int, ...]:
        """The number of devices of each kind; 0 if the kind is a GPU and the stage needs none."""
        return tuple(
            nodes * self.processes if self.needs_device or not entry.kind.gpus_per_node else 0
            for entry, nodes in zip(self.devices, self.nodes, strict=True)
        )

    @property
    def price_per_hour(self) -> float:
        """The price of all devices for one hour."""
        return sum(entry.price * n for entry, n in zip(self.devices, self.num_devices, strict=True))

    @property
    def wait_s(self) -> float:
        """The expected time in the queue."""
        return max(entry.wait_s(sum(self.nodes)) for entry in self.devices)

    @property
    def interruptions_per_hour(self) -> float:
        """Expected preemptions and failures per hour."""
        return max(entry.interruptions_per_hour for entry in self.devices)

    @property
    def limit_s(self) -> float:
        """The maximum seconds of a job on these devices."""
        return min(entry.limit_s for entry in self.devices)

    @property
    def fits_time_limit(self) -> bool:
        """True if the time is known and within the time limit."""
        return math.isfinite(self.seconds) and self.seconds <= self.limit_s

    @property
    def place(self) -> str:
        """The kinds of device as text: ``h100``, or ``gpu: a100+h100`` in the partition ``gpu``."""
        if len(self.devices) == 1:
            return self.devices[0].name
        kinds = "+".join(entry.kind.gpu_type for entry in self.devices)
        return f"{self.devices[0].kind.partition}: {kinds}"

    @property
    def size(self) -> str:
        """The size, nodes x devices per node: ``2x4``."""
        nodes = "+".join(map(str, self.nodes))
        return f"{nodes}x{self.processes}"


def request_for_option(option: StageOption) -> StagePlan:
    """Return the request of a stage that runs as its own job."""
    first = option.devices[0].kind
    values: dict[str, object] = {
        "partition": first.partition or None,
        "nodes": sum(option.nodes),
        "processes": option.processes,
        "time_limit_min": _time_limit_min(option),
    }
    if first.gpus_per_node:
        values |= {
            "gpus": option.processes if option.needs_device else 0,
            "cpus": cpus_per_process(first),
        }
    if values.get("gpus") and first.gpu_type and len(option.devices) == 1:
        values["gpu_type"] = first.gpu_type
    if first.constraint and len(option.devices) == 1:
        values["constraint"] = first.constraint
    if len(option.devices) > 1:
        features = [str(entry.feature) for entry in option.devices]
        nodes = zip(features, option.nodes, strict=True)
        values["speed_weights"] = dict(zip(features, option.speeds, strict=True))
        values["constraint"] = f"[{'&'.join(f'{name}*{n}' for name, n in nodes)}]"
    if option.peak_memory_bytes and not option.devices[0].has_device_memory:
        memory_mb = MEMORY_FACTOR * option.processes * option.peak_memory_bytes / 2**20
        rounded = math.ceil(memory_mb / MEMORY_STEP_MB) * MEMORY_STEP_MB
        values["mem_mb"] = min(rounded, first.mem_mb_per_node) if first.partition else rounded
    return build_stage_plan(values)


def _time_limit_min(option: StageOption) -> int:
    minutes = max(MIN_TIME_LIMIT_MIN, math.ceil(TIME_LIMIT_FACTOR * option.seconds / 60))
    return int(min(minutes, option.limit_s / 60))


def stage_options(
    stage: str,
    devices: Mapping[str, PartitionDevices],
    profile: Profile,
    config: RunConfig,
    allowed: Collection[str] | None = None,
) -> list[StageOption]:
    """Return all ways to run a stage as its own job.

    Args:
        allowed: the only kinds that the stage may use; None: all.

    Raises:
        PlanError: the stage cannot run anywhere; the message has a reason for each kind.
    """
    usable = {n: entry for n, entry in devices.items() if allowed is None or n in allowed}
    options: list[StageOption] = []
    reasons = []
    stage_times: dict[str, StageTimes] = {}
    options_by_kind: dict[str, dict[tuple[object, ...], StageOption]] = {}
    max_processes, spec = num_work_items(stage, config), flow_of(config).all_stages[stage]
    for name, entry in usable.items():
        try:
            times = stage_times[name] = StageTimes(entry, stage, spec, profile)
            kind_options = [single_kind_option(times, *s) for s in _shapes(times, max_processes)]
            permitted = _permitted_options(kind_options)
            options_by_kind[name] = {(o.nodes, o.processes): o for o in permitted}
        except PlanError as error:
            reasons.append(f"{name}: {error}")
    for name, by_shape in options_by_kind.items():
        # Nodes are used under their better kind, unless a job is too long or too large for it.
        better = usable[name].better_kind or ""
        better_limit_s = usable[better].limit_s if better in usable else 0.0
        better_options = options_by_kind.get(better, {})
        for shape, option in by_shape.items():
            if shape not in better_options or option.seconds > better_limit_s:
                options.append(option)
    if spec.uses_device:  # two kinds may share a job
        for a, b in itertools.combinations(stage_times.values(), 2):
            if can_share_job(a.devices, b.devices):
                pairs = _shared_shapes((a, b), max_processes)
                mixed = [mixed_kind_option((a, b), *shape) for shape in pairs]
                options += _permitted_options(mixed, required=False)
    options = [option for option in options if math.isfinite(option.seconds)]
    if options and not any(option.seconds <= option.limit_s for option in options):
        fastest = min(options, key=lambda option: option.seconds)
        limit = min(fastest.devices, key=lambda entry: entry.limit_s)
        reasons.append(
            f"{fastest.place} {fastest.size} is the quickest and takes "
            f"{fastest.seconds / 60:.1f} minutes, {limit.time_limit_of} allows "
            f"{limit.limit_s / 60:g}"
        )
    # A job that exceeds its time limit would be requeued forever.
    options = [option for option in options if option.seconds <= option.limit_s]
    if not options:
        raise PlanError(
            f"stage {stage!r} fits nowhere: {'; '.join(reasons) or 'no device is allowed'}"
        )
    return options


def _permitted_options(
    options: Sequence[StageOption], *, required: bool = True
) -> list[StageOption]:
    """Return the options that exceed the time limit, unchecked, then those that accounting allows.

    Raises:
        PlanError: ``required``, but no job is allowed; the message has the smallest job's limit.
    """
    too_long = [option for option in options if not option.fits_time_limit]
    in_time = [option for option in options if option.fits_time_limit]
    reasons = [
        option.devices[0].allowance.refusal_for(
            request_for_option(option), f"stages.{option.stage}"
        )
        for option in in_time
    ]
    if required and in_time and all(reasons):
        _, reason = min(zip(in_time, reasons, strict=True), key=lambda pair: pair[0].num_processes)
        raise PlanError(reason)
    return [*too_long, *(o for o, reason in zip(in_time, reasons, strict=True) if not reason)]


def single_kind_option(times: StageTimes, nodes: int, processes: int) -> StageOption:
    """Return a stage's option on nodes of one kind; infinite seconds if its time is unknown."""
    seconds, spread, extrapolated = times.times(np.array([nodes * processes]))
    return StageOption(
        times.stage,
        (times.devices,),
        (nodes,),
        processes,
        {
            **times.overheads(nodes * processes),
            "work": TimeEstimate(float(seconds[0]), float(spread[0])),
        },
        peak_memory_bytes=times.peak_memory_bytes,
        extrapolated=bool(extrapolated[0]),
        needs_device=times.uses_device,
    )


def mixed_kind_option(
    stage_times: tuple[StageTimes, StageTimes], nodes: tuple[int, ...], processes: int
) -> StageOption:
    """Return a stage's option on nodes of two kinds in one job, with equal processes per node.

    The batch is divided so that both kinds end together, if times are linear in the share.
    """
    counts = [count * processes for count in nodes]
    lines = [times.time_line(count) for times, count in zip(stage_times, counts, strict=True)]
    (fixed_a, slope_a), (fixed_b, slope_b) = lines
    total_slope = slope_a + slope_b
    share_a = (fixed_b + slope_b - fixed_a) / total_slope if total_slope > 0 else math.nan
    # If times are unknown or independent of the share, divide the batch equally over processes.
    share_a = share_a if math.isfinite(share_a) else counts[0] / sum(counts)
    share_a = min(max(share_a, MIN_BATCH_SHARE), 1 - MIN_BATCH_SHARE)
    work_times = [
        times.times(np.array([count]), share)
        for times, count, share in zip(stage_times, counts, (share_a, 1 - share_a), strict=True)
    ]
    slowest = max(range(2), key=lambda i: float(work_times[i][0][0]))
    efficiency = mixing_efficiency(stage_times)
    seconds, spread, _ = (float(value[0]) / efficiency for value in work_times[slowest])
    speeds = [share_a / counts[0], (1 - share_a) / counts[1]]
    overheads = [times.overheads(sum(nodes) * processes) for times in stage_times]
    return StageOption(
        stage_times[0].stage,
        tuple(times.devices for times in stage_times),
        nodes,
        processes,
        {
            # A job starts with its slowest process.
            **{
                name: max((o[name] for o in overheads), key=lambda s: s.mean)
                for name in overheads[0]
            },
            "work": TimeEstimate(seconds, spread),
        },
        tuple(round(speed / min(speeds), 3) for speed in speeds),
        max(times.peak_memory_bytes for times in stage_times),
        any(bool(part[2][0]) for part in work_times),
    )


def mixing_efficiency(stage_times: tuple[StageTimes, StageTimes]) -> float:
    """Return a stage's speed on two kinds together, relative to the sum of their speeds.

    If a mixture was measured, this is the time of the slower kind alone for its part of the batch,
    divided by the time of both kinds for the whole batch.
    """
    for name, (mixture, index) in stage_times[0].mixtures.items():
        if name not in stage_times[1].profile_names:
            continue
        first_share = mixture.batch_share[index]
        parts = zip(stage_times, (first_share, 1 - first_share), strict=True)
        slowest = max(float(times.times(np.array([1]), share)[0][0]) for times, share in parts)
        if math.isfinite(slowest):
            return min(1.0, slowest / mixture.median_s)
    return DEFAULT_MIXING_EFFICIENCY


def can_share_job(a: PartitionDevices, b: PartitionDevices) -> bool:
    """Return True if a job can have nodes of both kinds: one partition and distinct features."""
    are_distinct = a.feature is not None and b.feature is not None and a.feature != b.feature
    # The feature with the GPU's name selects GPUs of all memory sizes.
    are_selectable = not (a.kind.constraint or b.kind.constraint)
    return a.kind.partition == b.kind.partition and are_distinct and are_selectable


def _shapes(times: StageTimes, max_processes: int) -> Iterator[tuple[int, int]]:
    """Yield nodes and processes per node: for each total of processes, the fewest nodes."""
    per_node = times.max_per_node()
    if not per_node:
        raise PlanError(
            f"one process of stage {times.stage!r} needs {times.peak_memory_bytes >> 20} MiB, "
            f"a node has {times.devices.kind.mem_mb_per_node}"
        )
    seen = set()
    for nodes in range(1, times.devices.max_job_nodes + 1):
        for processes in range(1, per_node + 1):
            count = nodes * processes
            if count <= max_processes and count not in seen and not times.refusal_for(count):
                seen.add(count)
                yield nodes, processes


def _shared_shapes(
    pair: tuple[StageTimes, StageTimes], max_processes: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the nodes of each kind, and the processes per node, of jobs on two kinds."""
    for processes in range(1, min(times.max_per_node() for times in pair) + 1):
        for nodes in itertools.product(*(_node_counts(t.devices.max_job_nodes) for t in pair)):
            count = sum(nodes) * processes
            # Both kinds are in one partition, whose limit applies to the job.
            if any(sum(nodes) > (t.devices.max_nodes_per_job or sum(nodes)) for t in pair):
                continue
            if count <= max_processes and not any(times.refusal_for(count) for times in pair):
                yield nodes, processes


def _node_counts(count: int) -> Sequence[int]:
    """Return numbers of nodes to try: small numbers, powers of two, and ``count``."""
    powers = {2**i for i in range(3, count.bit_length())}
    return sorted({*range(1, min(count, 8) + 1), *powers, count})
