"""How a stage could run as a job of its own, with what each way is expected to take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.cost.fit import LEAST_POINTS as FIT_POINTS
from pipeline.cost.fit import Fit, Point, fit_times
from pipeline.planner.devices import Devices
from pipeline.profile import schema
from pipeline.profile.schema import LOADS, OF_A_JOB, Profile
from rlinf.config import RunConfig
from rlinf.errors import PlanError

Array = np.ndarray
SHARED = frozenset({"rollout", "inference", "train"})
"""Stages that unlike devices may share."""
NO_GPU = frozenset({"reward", "sync"})
"""Stages that compute nothing on a GPU."""
ONE_PROCESS = frozenset({"reward", "sync"})
"""Stages that gain nothing from a second process."""
MIXING = 0.95
"""Share of the summed speed that unlike devices keep on one stage: the goal of the benchmark
``hetero_efficiency``."""
SINGLE_SPREAD = 0.1
"""Relative standard deviation of what was measured once."""


@dataclass(frozen=True)
class Seconds:
    """An expected time."""

    mean: float
    spread: float = 0.0
    """Standard deviation."""


@dataclass(frozen=True)
class Correction:
    """How much longer than predicted something took in a run."""

    starting: float = 1.0
    """Start and imports of a job."""
    working: float = 1.0
    """Loading and work."""


@dataclass(frozen=True)
class Option:
    """A way to run one stage."""

    stage: str
    devices: tuple[Devices, ...]
    """Several: nodes of each take a share by their speed."""
    nodes: tuple[int, ...]
    """Of each of ``devices``."""
    processes: int
    """Per node; each has a device of its own."""
    parts: Mapping[str, Seconds]
    """Of the job, in order: start, imports, load, work."""
    speeds: tuple[float, ...] = ()
    """Of a process on each of ``devices``, where there are several."""
    peak_memory_bytes: int = 0
    """Of a process."""
    extrapolated: bool = False

    @property
    def seconds(self) -> float:
        """All parts."""
        return sum(part.mean for part in self.parts.values())

    @property
    def spread_s(self) -> float:
        """Standard deviation; the parts' errors are taken as independent."""
        return math.sqrt(sum(part.spread**2 for part in self.parts.values()))

    def corrected(self, known: Mapping[tuple[str, str], Correction]) -> Option:
        """With what a run has taught, by stage and kind; of several kinds the one worst off."""
        mine = [known[key] for own in self.devices if (key := (self.stage, own.name)) in known]
        if not mine:
            return self
        starting = max(c.starting for c in mine)
        working = max(c.working for c in mine)
        factors = dict.fromkeys(self.parts, working) | {"start": starting, "imports": starting}
        parts = {
            name: Seconds(part.mean * factors[name], part.spread * factors[name])
            for name, part in self.parts.items()
        }
        return replace(self, parts=parts)

    @property
    def bound_by(self) -> str:
        """The largest part."""
        return max(self.parts, key=lambda name: self.parts[name].mean)

    @property
    def count(self) -> int:
        """Devices held."""
        return sum(self.nodes) * self.processes

    @property
    def price_per_hour(self) -> float:
        """Of all devices held."""
        pairs = zip(self.devices, self.nodes, strict=True)
        return sum(own.price * nodes * self.processes for own, nodes in pairs)

    @property
    def wait_s(self) -> float:
        """Expected time in the queue."""
        return max(own.wait_s(sum(self.nodes)) for own in self.devices)

    @property
    def losses_per_hour(self) -> float:
        """Expected preemptions and failures."""
        return max(own.losses_per_hour for own in self.devices)

    @property
    def place(self) -> str:
        """Where, in a word: ``h100``, ``gpu: a100+h100``."""
        if len(self.devices) == 1:
            return self.devices[0].name
        kinds = "+".join(own.kind.gpu_type for own in self.devices)
        return f"{self.devices[0].kind.partition}: {kinds}"

    @property
    def size(self) -> str:
        """How much of it: ``2x4``, nodes by devices of each."""
        nodes = "+".join(map(str, self.nodes))
        return f"{nodes}x{self.processes}"


def options(
    stage: str,
    devices: Mapping[str, Devices],
    profile: Profile,
    config: RunConfig,
    allowed: Collection[str] | None = None,
) -> list[Option]:
    """All ways to run a stage.

    Args:
        allowed: the only kinds it may use.

    Raises:
        PlanError: it cannot run anywhere; says why on each kind.
    """
    usable = {n: own for n, own in devices.items() if allowed is None or n in allowed}
    found, reasons = [], []
    fits: dict[str, _Work] = {}
    for name, own in usable.items():
        try:
            fits[name] = _Work(own, stage, profile)
            if own.same_as not in usable:
                found += _alone(fits[name], stage, profile, config)
        except PlanError as error:
            reasons.append(f"{name}: {error}")
    if stage in SHARED:
        found += _mixed(fits, stage, profile, config)
    if not found:
        raise PlanError(
            f"stage {stage!r} fits nowhere: {'; '.join(reasons) or 'no device is allowed'}"
        )
    return found


class _Work:
    """Seconds of work of a stage on n processes of a kind; the first work of a process."""

    def __init__(self, devices: Devices, stage: str, profile: Profile) -> None:
        self.devices = devices
        self.points = _points(devices, stage, profile)
        self.peak = max((p.peak_memory_bytes or 0 for p in self.points), default=0)
        self.most = _most(devices, stage)
        measured = [
            Point(p.processes, p.samples, time.median_s, _spread(time), len(time.seconds))
            for p in self.points
            if (time := p.cold or p.time) is not None and time.median_s > 0
        ]
        places = {(p.processes, p.size) for p in measured}
        self._fit: Fit | None = fit_times(measured) if len(places) >= FIT_POINTS else None
        self._exact = {p.processes: p for p in measured if p.size == profile.samples}
        if self._fit is None and not self._exact:
            raise PlanError(
                f"{len(places)} measurements of stage {stage!r}, none of the whole batch of "
                f"{profile.samples} samples; measure on with: rlinf profile"
            )

    def times(self, counts: Array, samples: int) -> tuple[Array, Array, Array]:
        """Seconds, their standard deviations and whether extrapolated, for numbers of processes."""
        if self._fit is not None:
            answer = self._fit.predict(counts, samples)
            return answer.seconds, answer.spread_s, answer.extrapolated
        known = [self._exact.get(int(count)) for count in counts]
        seconds = np.array([p.seconds if p else np.inf for p in known])
        spread = np.array([p.spread_s if p else 0.0 for p in known])
        return seconds, spread, np.zeros(len(counts), dtype=bool)


def _points(devices: Devices, stage: str, profile: Profile) -> list[schema.Point]:
    own = [p for p in devices.profile.points if p.stage == stage]
    ran = [p for p in own if p.ok and p.token_budget in (None, profile.token_budget)]
    if not ran:
        why = own[0].failure if own else "it was not measured"
        raise PlanError(f"no measurement of stage {stage!r} succeeded ({why})")
    return ran


def _most(devices: Devices, stage: str) -> float:
    """Processes from which on the stage is known to fail at least one whole run."""
    failed = [p.processes for p in devices.profile.points if p.stage == stage and not p.ok]
    ran = [p.processes for p in devices.profile.points if p.stage == stage and p.ok]
    above = [count for count in failed if count > max(ran, default=0)]
    return min(above, default=math.inf)


def _spread(time: schema.Measured) -> float:
    return time.spread_s if len(time.seconds) > 1 else SINGLE_SPREAD * time.median_s


def _shapes(work: _Work, most: int) -> Iterator[tuple[int, int]]:
    """Nodes and processes of each, for every number of processes the fewest nodes that give it."""
    seen = set()
    for nodes in range(1, work.devices.kind.nodes + 1):
        for processes in range(1, _per_node(work) + 1):
            count = nodes * processes
            if count <= most and count < work.most and count not in seen:
                seen.add(count)
                yield nodes, processes


def work_items(stage: str, config: RunConfig) -> int:
    """Pieces of work that processes can share; more processes would stand idle."""
    if stage in ONE_PROCESS:
        return 1
    if stage == "rollout":
        return config.rollout.batch
    return config.rollout.batch * config.rollout.group_size


def _alone(work: _Work, stage: str, profile: Profile, config: RunConfig) -> list[Option]:
    shapes = list(_shapes(work, work_items(stage, config)))
    if not shapes:
        raise PlanError("a node has not the memory for one process of it")
    counts = np.array([nodes * processes for nodes, processes in shapes])
    seconds, spread, beyond = work.times(counts, profile.samples)
    return [
        Option(
            stage,
            (work.devices,),
            (nodes,),
            processes,
            {
                **_overheads(work.devices, stage, nodes * processes),
                "work": Seconds(float(seconds[i]), float(spread[i])),
            },
            peak_memory_bytes=work.peak,
            extrapolated=bool(beyond[i]),
        )
        for i, (nodes, processes) in enumerate(shapes)
        if np.isfinite(seconds[i])
    ]


def _mixed(
    works: Mapping[str, _Work], stage: str, profile: Profile, config: RunConfig
) -> list[Option]:
    """Nodes of two kinds of one partition in one job, as many processes on each node."""
    found = []
    for a, b in itertools.combinations(works.values(), 2):
        pair = (a.devices, b.devices)
        if a.devices.kind.partition != b.devices.kind.partition:
            continue
        if not (a.devices.feature and b.devices.feature) or a.devices.feature == b.devices.feature:
            continue
        for processes in range(1, min(_per_node(work) for work in (a, b)) + 1):
            for nodes in itertools.product(*(_some(own.kind.nodes) for own in pair)):
                counts = [n * processes for n in nodes]
                if sum(counts) > work_items(stage, config):
                    continue
                option = _pair(stage, (a, b), nodes, processes, profile)
                if option is not None:
                    found.append(option)
    return found


def _pair(
    stage: str,
    works: tuple[_Work, _Work],
    nodes: tuple[int, ...],
    processes: int,
    profile: Profile,
) -> Option | None:
    times, spreads, beyond = [], [], False
    for work, count in zip(works, nodes, strict=True):
        seconds, spread, outside = work.times(np.array([count * processes]), profile.samples)
        if not np.isfinite(seconds[0]):
            return None
        times.append(float(seconds[0]))
        spreads.append(float(spread[0]) / float(seconds[0]))
        beyond |= bool(outside[0])
    together = 1 / (MIXING * sum(1 / t for t in times))
    speeds = [1 / (t * count * processes) for t, count in zip(times, nodes, strict=True)]
    least = min(speeds)
    each = [_overheads(work.devices, stage, sum(nodes) * processes) for work in works]
    return Option(
        stage,
        tuple(work.devices for work in works),
        nodes,
        processes,
        {
            # A job starts with its slowest process.
            **{name: max((e[name] for e in each), key=lambda s: s.mean) for name in each[0]},
            "work": Seconds(together, together * max(spreads)),
        },
        tuple(round(speed / least, 3) for speed in speeds),
        max(work.peak for work in works),
        beyond,
    )


def _some(count: int) -> Sequence[int]:
    """All small numbers, then powers of two, and all there are."""
    powers = {2**i for i in range(3, count.bit_length())}
    return sorted({*range(1, min(count, 8) + 1), *powers, count})


def _overheads(devices: Devices, stage: str, processes: int) -> dict[str, Seconds]:
    def of(*names: schema.OverheadName) -> Seconds:
        known = [_overhead(devices, name, processes) for name in names]
        return Seconds(sum(k.mean for k in known), math.hypot(*(k.spread for k in known)))

    submission, startup, imports = OF_A_JOB
    load = (LOADS[stage],) if stage in LOADS else ()
    return {"start": of(submission, startup), "imports": of(imports), "load": of(*load)}


def _overhead(devices: Devices, name: schema.OverheadName, processes: int) -> Seconds:
    known = [entry for entry in devices.profile.overheads if entry.name == name]
    if not known:
        return Seconds(0.0)
    entry = min(known, key=lambda e: abs(math.log(e.processes / processes)))
    return Seconds(entry.median_s, _spread(entry))


def _per_node(work: _Work) -> int:
    """Most processes of a node: one per device, and on CPUs as many as fit its memory.

    On GPUs a process that ran once runs again.
    """
    kind = work.devices.kind
    if (kind.gpus_per_node and kind.gpu_model) or not work.peak or not kind.mem_mb_per_node:
        return work.devices.per_node
    return min(work.devices.per_node, (kind.mem_mb_per_node << 20) // work.peak)
