"""The ways to run a stage as its own job, with the expected times of each.

:class:`StageTimes` reads the times of a stage on a kind of device from the profile.
:class:`StageOption` is one way to run it.
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
SINGLE_MEASUREMENT_SPREAD, DATA_SHEET_PROFILE_SPREAD = 0.1, 0.8
"""Relative standard deviations: of a single measurement, and of data sheets for programs that never
ran there: eight in ten within a factor of two (assumed)."""
DEVIATIONS_TO_Q90 = 1.2816
"""Standard deviations from the mean to the 10 % and 90 % quantiles of a normal distribution."""


@dataclass(frozen=True)
class TimeEstimate:
    """An expected time with its standard deviation."""

    mean: float
    spread: float = 0.0
    """Standard deviation, seconds."""


def q10_q90_interval(seconds: float, spread: float) -> tuple[float, float]:
    """Return the 10 % and 90 % quantiles of a normal distribution."""
    return max(0.0, seconds - DEVIATIONS_TO_Q90 * spread), seconds + DEVIATIONS_TO_Q90 * spread


class StageTimes:
    """The times of a stage on a kind of device, from the profile.

    Raises:
        PlanError: no measurement of the stage succeeded there, or none is of the whole batch.
    """

    def __init__(
        self, devices: PartitionDevices, stage: str, spec: StageSpec, profile: Profile
    ) -> None:
        self.devices, self.stage, self.samples = devices, stage, profile.samples
        self.device = spec.uses_device
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
        """By the profile's name of another kind: the measured mixture, and which of its two kinds
        this is."""
        self.measured_as = frozenset(mine)
        """Names of the measured kind in the profile."""
        self._loads, self._single = (
            spec.holds,
            DATA_SHEET_PROFILE_SPREAD if profile.estimated else SINGLE_MEASUREMENT_SPREAD,
        )
        points = [p for p in devices.profile.points if p.stage == stage]
        ran = [p for p in points if p.succeeded and p.token_budget in (None, profile.token_budget)]
        if not ran:
            why = points[0].failure if points else "it was not measured"
            raise PlanError(f"no measurement of stage {stage!r} succeeded ({why})")
        self.peak_memory_bytes = max(p.peak_memory_bytes or 0 for p in ran)
        """Peak memory of a process."""
        self._tried = _tried(points, profile)
        self._cold = {
            p.processes: p.cold.median_s - p.time.median_s
            for p in ran
            if p.cold is not None and p.time is not None and p.samples == self.samples
        }
        self.measured = [
            TimingPoint(p.processes, p.samples, p.time.median_s, self._median(p.time).spread, count)
            for p in ran
            if p.time is not None and p.time.median_s > 0
            for count in [len(p.time.seconds)]
        ]
        places = {(p.processes, p.size) for p in self.measured}
        # Formulas give each number of processes, with a step where a job exceeds its node.
        self.fits = not profile.estimated
        enough = self.fits and len(places) >= MIN_POINTS
        self._fit: TimeModel | None = fit_times(self.measured) if enough else None
        self._exact = {p.processes: p for p in self.measured if p.size == self.samples}
        if self._fit is None and not self._exact:
            raise PlanError(
                f"{len(places)} measurements of stage {stage!r}, none of the whole batch of "
                f"{self.samples} samples; measure on with: rlinf profile"
            )

    def refusal_for(self, count: int) -> str:
        """Return why this many processes cannot run the stage; "" if they can, as far as known.

        A failure is assumed to repeat. An unmeasured number behaves like the next lower measured
        one, because more processes on a node need more memory. Below all measured numbers it
        behaves like the next higher one, because fewer devices each need more memory.
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

    def can_run(self, counts: Array) -> Array:
        """Return which numbers of processes can run the stage, bool ``[n]``."""
        return np.array([not self.refusal_for(int(count)) for count in counts], dtype=bool)

    def times(self, counts: Array, share: float = 1.0) -> tuple[Array, Array, Array]:
        """Return seconds, their standard deviations, and whether they are extrapolated.

        Args:
            counts: numbers of processes ``[n]``.
            share: share of the batch.

        Returns:
            Three arrays ``[n]``; infinite seconds if unknown.
        """
        if self._fit is not None:
            answer = self._fit.predict(counts, share * self.samples)
            return answer.seconds, answer.spread_s, answer.extrapolated
        known = [self._exact.get(int(count)) for count in counts]
        seconds = np.array([share * p.seconds if p else np.inf for p in known])
        spread = np.array([p.spread_s if p else 0.0 for p in known])
        return seconds, spread, np.full(len(counts), share != 1)

    def time_line(self, count: int) -> tuple[float, float]:
        """Return the time as a line in the share of the batch: the value at 0 and the slope."""
        half, whole = (float(self.times(np.array([count]), share)[0][0]) for share in (0.5, 1.0))
        rise = 2 * (whole - half)
        return whole - rise, rise

    def overheads(self, processes: int) -> dict[str, TimeEstimate]:
        """Return the overheads of a job before and beside its work, in order.

        If separate stage jobs were measured on one process, they give the stage's imports and
        loading; more processes cost as much more as in the profile of loaded stages.
        """
        dispatch = self._overhead("dispatch", 1)
        steps = [self._overhead(name, processes) for name in ("submission", "startup")]
        # The completion of the previous job starts this one.
        steps.append(self._overhead("completion", processes))
        parts = {"start": dispatch if dispatch.mean else _sum(*steps)}
        parts["imports"] = self._overhead("imports", processes)
        parts["load"] = self._load(processes)
        alone = self._overhead("alone", 1, self.stage)
        if alone.mean:
            parts["imports"] = self._overhead("imports", 1, self.stage)
            more = self._load(processes).mean - self._load(1).mean
            own = alone.mean - float(self.times(np.array([1]))[0][0]) + max(0.0, more)
            parts["load"] = TimeEstimate(max(0.0, own), alone.spread)
        return parts

    def _load(self, processes: int) -> TimeEstimate:
        """Return the time of loading and the extra time of a process's first work."""
        parts = [self._overhead(LOAD_OVERHEADS[self._loads], processes)] if self._loads else []
        if self._cold:
            near = min(self._cold, key=lambda count: abs(math.log(count / processes)))
            parts.append(TimeEstimate(max(0.0, self._cold[near])))
        return _sum(*parts)

    def max_per_node(self) -> int:
        """Return the maximum processes per node: one per device and, without device memory, as many
        as fit the node's memory.

        On GPUs, a process that ran once is assumed to run again.
        """
        kind = self.devices.kind
        if self.devices.has_memory or not self.peak_memory_bytes or not kind.mem_mb_per_node:
            return self.devices.per_node
        fit = (kind.mem_mb_per_node << 20) // self.peak_memory_bytes
        return min(self.devices.per_node, fit)

    def _overhead(self, name: schema.OverheadName, processes: int, stage: str = "") -> TimeEstimate:
        every = self.devices.profile.overheads
        known = [entry for entry in every if entry.name == name and entry.stage == stage]
        if not known:
            return TimeEstimate(0.0)
        return self._median(min(known, key=lambda e: abs(math.log(e.processes / processes))))

    def _median(self, measured: schema.Measurement) -> TimeEstimate:
        single = len(measured.seconds) == 1
        spread = self._single * measured.median_s if single else measured.spread_s
        return TimeEstimate(measured.median_s, spread)


def num_work_items(stage: str, config: RunConfig) -> int:
    """Return the number of pieces of work that processes can share; more processes would be
    idle."""
    flow = flow_of(config)
    if not flow.all_stages[stage].uses_device:
        return 1
    if stage == flow.rollout_stage:  # whole starts are shared out
        return config.rollout.batch_size
    return config.rollout.batch_size * config.rollout.group_size


def _tried(points: list[schema.ProfilePoint], profile: Profile) -> dict[int, str]:
    """Return how the stage failed by number of processes; "" if the run's own work succeeded.

    A failure with less work, or in smaller micro-batches, is also a failure of the run's own work.
    """
    own = profile.token_budget or math.inf
    tried = {p.processes: "" for p in points if p.succeeded and p.token_budget in (None, own)}
    for p in points:
        if not p.succeeded and p.samples <= profile.samples and (p.token_budget or 0) <= own:
            tried[p.processes] = p.failure
    return tried


def _sum(*parts: TimeEstimate) -> TimeEstimate:
    return TimeEstimate(
        sum(part.mean for part in parts), math.hypot(*(part.spread for part in parts))
    )


DEFAULT_MIXING_EFFICIENCY = 0.95
"""Share of the summed speed that different devices keep on one stage, if it was not measured: the
goal of the benchmark ``hetero_efficiency``."""
TIME_LIMIT_FACTOR = 10
"""Requested wall time in predicted times: the limit is for jobs that hang."""
MIN_TIME_LIMIT_MIN = 10
MEMORY_FACTOR = 1.5
MEMORY_STEP_MB = 256
MIN_BATCH_SHARE = 0.02
"""Minimum share of the batch for the slower of two kinds."""


@dataclass(frozen=True)
class Correction:
    """Factors by which a run took longer than predicted."""

    startup_factor: float = 1.0
    """Factor of the start and imports of a job."""
    work_factor: float = 1.0
    """Factor of loading and work."""
    spread: float = math.inf
    """Maximum relative standard deviation that remains, because the run has measured an
    estimate."""


@dataclass(frozen=True)
class StageOption:
    """One way to run a stage as a job."""

    stage: str
    devices: tuple[PartitionDevices, ...]
    """If there are several, the nodes of each process a share of the batch by their speed."""
    nodes: tuple[int, ...]
    """Number of nodes of each of ``devices``."""
    processes: int
    """Processes per node; each has its own device."""
    parts: Mapping[str, TimeEstimate]
    """Expected times of the job's parts, in order: start, imports, load, warm-up, work."""
    speeds: tuple[float, ...] = ()
    """Relative speed of a process on each of ``devices``, if there are several."""
    peak_memory_bytes: int = 0
    """Peak memory of a process."""
    extrapolated: bool = False
    needs_device: bool = True
    """True if the stage uses GPUs where they exist."""

    @property
    def seconds(self) -> float:
        """The sum of all parts."""
        return sum(part.mean for part in self.parts.values())

    @property
    def conservative_s(self) -> float:
        """The time by which plans are compared: beyond measured numbers the upper end of the
        interval.

        Devices that share a network or a node are slower together than a fit of fewer predicts.
        """
        return (
            q10_q90_interval(self.seconds, self.spread_s)[1] if self.extrapolated else self.seconds
        )

    @property
    def spread_s(self) -> float:
        """The standard deviation; errors of the parts count as independent."""
        return math.sqrt(sum(part.spread**2 for part in self.parts.values()))

    def with_corrections(self, known: Mapping[tuple[str, str], Correction]) -> StageOption:
        """Return the option with a run's corrections by stage and kind; of several kinds the
        largest."""
        mine = [known[key] for own in self.devices if (key := (self.stage, own.name)) in known]
        if not mine:
            return self
        starting = max(c.startup_factor for c in mine)
        working = max(c.work_factor for c in mine)
        factors = dict.fromkeys(self.parts, working) | {"start": starting, "imports": starting}
        parts = {}
        for name, part in self.parts.items():
            mean = part.mean * factors[name]
            most = max(c.spread for c in mine) * mean if mean else 0.0
            parts[name] = TimeEstimate(mean, min(part.spread * factors[name], most))
        return replace(self, parts=parts)

    @property
    def bound_by(self) -> str:
        """The name of the largest part."""
        return max(self.parts, key=lambda name: self.parts[name].mean)

    @property
    def count(self) -> int:
        """The number of processes, each of which could have a device."""
        return sum(self.nodes) * self.processes

    @property
    def num_devices(self) -> tuple[int, ...]:
        """The number of devices of each of ``devices``; a stage without need for a device uses no
        GPU."""
        return tuple(
            nodes * self.processes if self.needs_device or not own.kind.gpus_per_node else 0
            for own, nodes in zip(self.devices, self.nodes, strict=True)
        )

    @property
    def price_per_hour(self) -> float:
        """The price of all devices for one hour."""
        return sum(own.price * n for own, n in zip(self.devices, self.num_devices, strict=True))

    @property
    def wait_s(self) -> float:
        """The expected time in the queue."""
        return max(own.wait_s(sum(self.nodes)) for own in self.devices)

    @property
    def interruptions_per_hour(self) -> float:
        """Expected preemptions and failures per hour."""
        return max(own.interruptions_per_hour for own in self.devices)

    @property
    def limit_s(self) -> float:
        """The maximum seconds of a job there."""
        return min(own.limit_s for own in self.devices)

    @property
    def fits_time_limit(self) -> bool:
        """True if the time is known and within the time limit."""
        return math.isfinite(self.seconds) and self.seconds <= self.limit_s

    @property
    def place(self) -> str:
        """The place in a word: ``h100``, ``gpu: a100+h100``."""
        if len(self.devices) == 1:
            return self.devices[0].name
        kinds = "+".join(own.kind.gpu_type for own in self.devices)
        return f"{self.devices[0].kind.partition}: {kinds}"

    @property
    def size(self) -> str:
        """The size: ``2x4``, nodes by devices of each."""
        nodes = "+".join(map(str, self.nodes))
        return f"{nodes}x{self.processes}"


def request_for_option(option: StageOption) -> StagePlan:
    """Return the request of a stage that runs as its own job."""
    first = option.devices[0].kind
    values: dict[str, object] = {
        "partition": first.partition or None,
        "nodes": sum(option.nodes),
        "processes": option.processes,
        "time_limit_min": _minutes(option),
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
        features = [str(own.feature) for own in option.devices]
        nodes = zip(features, option.nodes, strict=True)
        values["speed_weights"] = dict(zip(features, option.speeds, strict=True))
        values["constraint"] = f"[{'&'.join(f'{name}*{n}' for name, n in nodes)}]"
    if option.peak_memory_bytes and not option.devices[0].has_memory:
        need = MEMORY_FACTOR * option.processes * option.peak_memory_bytes / 2**20
        rounded = math.ceil(need / MEMORY_STEP_MB) * MEMORY_STEP_MB
        values["mem_mb"] = min(rounded, first.mem_mb_per_node) if first.partition else rounded
    return build_stage_plan(values)


def _minutes(option: StageOption) -> int:
    minutes = max(MIN_TIME_LIMIT_MIN, math.ceil(TIME_LIMIT_FACTOR * option.seconds / 60))
    return int(min(minutes, option.limit_s / 60))


def stage_options(
    stage: str,
    devices: Mapping[str, PartitionDevices],
    profile: Profile,
    config: RunConfig,
    allowed: Collection[str] | None = None,
) -> list[StageOption]:
    """Return all ways to run a stage.

    Args:
        allowed: the only kinds that it may use.

    Raises:
        PlanError: the stage cannot run anywhere; names the reason for each kind.
    """
    usable = {n: own for n, own in devices.items() if allowed is None or n in allowed}
    found: list[StageOption] = []
    reasons = []
    works: dict[str, StageTimes] = {}
    every: dict[str, dict[tuple[object, ...], StageOption]] = {}
    most, spec = num_work_items(stage, config), flow_of(config).all_stages[stage]
    for name, own in usable.items():
        try:
            works[name] = StageTimes(own, stage, spec, profile)
            mine = [single_kind_option(works[name], *shape) for shape in _shapes(works[name], most)]
            every[name] = {(o.nodes, o.processes): o for o in _allowed(mine)}
        except PlanError as error:
            reasons.append(f"{name}: {error}")
    for name, shapes in every.items():
        # The same nodes count under the better kind, except for jobs too long or large for it.
        same = usable[name].better_kind or ""
        limit_s = usable[same].limit_s if same in usable else 0.0
        others = every.get(same, {})
        found += [o for shape, o in shapes.items() if shape not in others or o.seconds > limit_s]
    if spec.uses_device:  # unlike devices may share it
        for a, b in itertools.combinations(works.values(), 2):
            if can_share_job(a.devices, b.devices):
                mixed = [
                    mixed_kind_option((a, b), *shape) for shape in _shared_shapes((a, b), most)
                ]
                found += _allowed(mixed, refuse=False)
    found = [option for option in found if math.isfinite(option.seconds)]
    if found and not any(option.seconds <= option.limit_s for option in found):
        quickest = min(found, key=lambda option: option.seconds)
        limit = min(quickest.devices, key=lambda own: own.limit_s)
        reasons.append(
            f"{quickest.place} {quickest.size} is the quickest and takes "
            f"{quickest.seconds / 60:.1f} minutes, {limit.time_limit_of} allows "
            f"{limit.limit_s / 60:g}"
        )
    # A job that its time limit ends would be requeued forever.
    found = [option for option in found if option.seconds <= option.limit_s]
    if not found:
        raise PlanError(
            f"stage {stage!r} fits nowhere: {'; '.join(reasons) or 'no device is allowed'}"
        )
    return found


def _allowed(found: Sequence[StageOption], *, refuse: bool = True) -> list[StageOption]:
    """Return the options whose jobs accounting allows.

    Raises:
        PlanError: it allows none, and ``refuse``; names the limit for the smallest job.
    """
    late = [option for option in found if not option.fits_time_limit]  # left out for their time
    in_time = [option for option in found if option.fits_time_limit]
    reasons = [
        option.devices[0].allowance.refusal_for(
            request_for_option(option), f"stages.{option.stage}"
        )
        for option in in_time
    ]
    if refuse and in_time and all(reasons):
        _, why = min(zip(in_time, reasons, strict=True), key=lambda pair: pair[0].count)
        raise PlanError(why)
    return [*late, *(o for o, why in zip(in_time, reasons, strict=True) if not why)]


def single_kind_option(work: StageTimes, nodes: int, processes: int) -> StageOption:
    """Return a stage's option on nodes of one kind; infinite seconds if its time is unknown."""
    seconds, spread, beyond = work.times(np.array([nodes * processes]))
    return StageOption(
        work.stage,
        (work.devices,),
        (nodes,),
        processes,
        {
            **work.overheads(nodes * processes),
            "work": TimeEstimate(float(seconds[0]), float(spread[0])),
        },
        peak_memory_bytes=work.peak_memory_bytes,
        extrapolated=bool(beyond[0]),
        needs_device=work.device,
    )


def mixed_kind_option(
    works: tuple[StageTimes, StageTimes], nodes: tuple[int, ...], processes: int
) -> StageOption:
    """Return a stage's option on nodes of two kinds in one job, with equal processes per node.

    The batch is divided so that both kinds end together; times are linear in their share of it.
    """
    counts = [count * processes for count in nodes]
    lines = [work.time_line(count) for work, count in zip(works, counts, strict=True)]
    (fixed_a, rate_a), (fixed_b, rate_b) = lines
    rise = rate_a + rate_b
    first = (fixed_b + rate_b - fixed_a) / rise if rise > 0 else math.nan
    # If times are unknown or independent of the size, all processes do the same amount.
    first = first if math.isfinite(first) else counts[0] / sum(counts)
    first = min(max(first, MIN_BATCH_SHARE), 1 - MIN_BATCH_SHARE)
    parts = [
        work.times(np.array([count]), share)
        for work, count, share in zip(works, counts, (first, 1 - first), strict=True)
    ]
    slowest = max(range(2), key=lambda i: float(parts[i][0][0]))
    kept = mixing_efficiency(works)
    seconds, spread, _ = (float(value[0]) / kept for value in parts[slowest])
    speeds = [first / counts[0], (1 - first) / counts[1]]
    each = [work.overheads(sum(nodes) * processes) for work in works]
    return StageOption(
        works[0].stage,
        tuple(work.devices for work in works),
        nodes,
        processes,
        {
            # A job starts with its slowest process.
            **{name: max((e[name] for e in each), key=lambda s: s.mean) for name in each[0]},
            "work": TimeEstimate(seconds, spread),
        },
        tuple(round(speed / min(speeds), 3) for speed in speeds),
        max(work.peak_memory_bytes for work in works),
        any(bool(part[2][0]) for part in parts),
    )


def mixing_efficiency(works: tuple[StageTimes, StageTimes]) -> float:
    """Return the share of the summed speed that a stage keeps on devices of two kinds, from the
    measured times of each for its part of the batch and of both for the whole batch."""
    for name, (mixture, place) in works[0].mixtures.items():
        if name not in works[1].measured_as:
            continue
        given = mixture.batch_share[place]
        parts = zip(works, (given, 1 - given), strict=True)
        slowest = max(float(work.times(np.array([1]), share)[0][0]) for work, share in parts)
        if math.isfinite(slowest):
            return min(1.0, slowest / mixture.median_s)
    return DEFAULT_MIXING_EFFICIENCY


def can_share_job(a: PartitionDevices, b: PartitionDevices) -> bool:
    """Return True if one job can have nodes of both: one partition, and distinct features."""
    are_distinct = a.feature is not None and b.feature is not None and a.feature != b.feature
    # The feature with the GPU's name does not select one memory size.
    alike = not (a.kind.constraint or b.kind.constraint)
    return a.kind.partition == b.kind.partition and are_distinct and alike


def _shapes(work: StageTimes, most: int) -> Iterator[tuple[int, int]]:
    """Yield nodes and processes per node: for every number of processes the fewest nodes."""
    per_node = work.max_per_node()
    if not per_node:
        raise PlanError(
            f"one process of stage {work.stage!r} needs {work.peak_memory_bytes >> 20} MiB, "
            f"a node has {work.devices.kind.mem_mb_per_node}"
        )
    seen = set()
    for nodes in range(1, work.devices.max_job_nodes + 1):
        for processes in range(1, per_node + 1):
            count = nodes * processes
            if count <= most and count not in seen and not work.refusal_for(count):
                seen.add(count)
                yield nodes, processes


def _shared_shapes(
    works: tuple[StageTimes, StageTimes], most: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    for processes in range(1, min(work.max_per_node() for work in works) + 1):
        for nodes in itertools.product(*(_some(work.devices.max_job_nodes) for work in works)):
            count = sum(nodes) * processes
            # Both kinds are in one partition, whose limit applies to the job.
            if any(sum(nodes) > (work.devices.max_nodes_per_job or sum(nodes)) for work in works):
                continue
            if count <= most and not any(work.refusal_for(count) for work in works):
                yield nodes, processes


def _some(count: int) -> Sequence[int]:
    """Return all small numbers, then powers of two, and the maximum."""
    powers = {2**i for i in range(3, count.bit_length())}
    return sorted({*range(1, min(count, 8) + 1), *powers, count})
