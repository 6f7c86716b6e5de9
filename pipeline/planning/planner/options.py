"""How a stage could run as a job of its own, with what each way is expected to take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.planning.planner.asked import of_option
from pipeline.planning.planner.devices import Devices
from pipeline.planning.planner.work import Seconds, Work, interval, work_items
from pipeline.planning.profile.schema import Profile
from rlinf.config import RunConfig
from rlinf.errors import PlanError
from stages.flow import flow_of

MIXING = 0.95
"""Share of the summed speed that unlike devices keep on one stage, where that was not measured: the
goal of the benchmark ``hetero_efficiency``."""
LEAST_SHARE = 0.02
"""Of the batch, for the slower of two kinds."""


@dataclass(frozen=True)
class Correction:
    """How much longer than predicted something took in a run."""

    starting: float = 1.0
    """Start and imports of a job."""
    working: float = 1.0
    """Loading and work."""
    spread: float = math.inf
    """Relative standard deviation that is left at most: a run measures what was only estimated."""


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
    """Of the job, in order: start, imports, load, warm-up, work."""
    speeds: tuple[float, ...] = ()
    """Of a process on each of ``devices``, where there are several."""
    peak_memory_bytes: int = 0
    """Of a process."""
    extrapolated: bool = False
    device: bool = True
    """Whether it takes GPUs where there are some."""

    @property
    def seconds(self) -> float:
        """All parts."""
        return sum(part.mean for part in self.parts.values())

    @property
    def prudent_s(self) -> float:
        """What plans are compared by: beyond what was measured the upper end of the interval.

        Devices that share a network or a node are slower together than any fit of fewer foresees.
        """
        return interval(self.seconds, self.spread_s)[1] if self.extrapolated else self.seconds

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
        parts = {}
        for name, part in self.parts.items():
            mean = part.mean * factors[name]
            most = max(c.spread for c in mine) * mean if mean else 0.0
            parts[name] = Seconds(mean, min(part.spread * factors[name], most))
        return replace(self, parts=parts)

    @property
    def bound_by(self) -> str:
        """The largest part."""
        return max(self.parts, key=lambda name: self.parts[name].mean)

    @property
    def count(self) -> int:
        """Processes, each of which could have a device."""
        return sum(self.nodes) * self.processes

    @property
    def held(self) -> tuple[int, ...]:
        """Of each of ``devices``, how many it holds: what needs none takes no GPU."""
        return tuple(
            nodes * self.processes if self.device or not own.kind.gpus_per_node else 0
            for own, nodes in zip(self.devices, self.nodes, strict=True)
        )

    @property
    def price_per_hour(self) -> float:
        """Of all devices held."""
        return sum(own.price * n for own, n in zip(self.devices, self.held, strict=True))

    @property
    def wait_s(self) -> float:
        """Expected time in the queue."""
        return max(own.wait_s(sum(self.nodes)) for own in self.devices)

    @property
    def losses_per_hour(self) -> float:
        """Expected preemptions and failures."""
        return max(own.losses_per_hour for own in self.devices)

    @property
    def limit_s(self) -> float:
        """Longest time of a job there."""
        return min(own.limit_s for own in self.devices)

    @property
    def in_time(self) -> bool:
        """Whether it is known how long it takes, and a job may last that long."""
        return math.isfinite(self.seconds) and self.seconds <= self.limit_s

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
    found: list[Option] = []
    reasons = []
    works: dict[str, Work] = {}
    every: dict[str, dict[tuple[object, ...], Option]] = {}
    most, spec = work_items(stage, config), flow_of(config).table[stage]
    for name, own in usable.items():
        try:
            works[name] = Work(own, stage, spec, profile)
            mine = [alone(works[name], *shape) for shape in _shapes(works[name], most)]
            every[name] = {(o.nodes, o.processes): o for o in _allowed(mine)}
        except PlanError as error:
            reasons.append(f"{name}: {error}")
    for name, shapes in every.items():
        # Of the same nodes the better name, but for jobs that are too long or large for it.
        same = usable[name].same_as or ""
        limit_s = usable[same].limit_s if same in usable else 0.0
        others = every.get(same, {})
        found += [o for shape, o in shapes.items() if shape not in others or o.seconds > limit_s]
    if spec.device:  # unlike devices may share it
        for a, b in itertools.combinations(works.values(), 2):
            if shareable(a.devices, b.devices):
                mixed = [together((a, b), *shape) for shape in _shared_shapes((a, b), most)]
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
    # A job that its time ends is requeued for ever.
    found = [option for option in found if option.seconds <= option.limit_s]
    if not found:
        raise PlanError(
            f"stage {stage!r} fits nowhere: {'; '.join(reasons) or 'no device is allowed'}"
        )
    return found


def _allowed(found: Sequence[Option], *, refuse: bool = True) -> list[Option]:
    """Those whose job accounting allows.

    Raises:
        PlanError: none, and ``refuse``; names the limit on the smallest.
    """
    late = [option for option in found if not option.in_time]  # left out for their time
    judged = [option for option in found if option.in_time]
    reasons = [
        option.devices[0].allowance.why_not(of_option(option), f"stages.{option.stage}")
        for option in judged
    ]
    if refuse and judged and all(reasons):
        _, why = min(zip(judged, reasons, strict=True), key=lambda pair: pair[0].count)
        raise PlanError(why)
    return [*late, *(o for o, why in zip(judged, reasons, strict=True) if not why)]


def alone(work: Work, nodes: int, processes: int) -> Option:
    """A stage on nodes of one kind; infinite seconds where nothing is known of that many."""
    seconds, spread, beyond = work.times(np.array([nodes * processes]))
    return Option(
        work.stage,
        (work.devices,),
        (nodes,),
        processes,
        {
            **work.overheads(nodes * processes),
            "work": Seconds(float(seconds[0]), float(spread[0])),
        },
        peak_memory_bytes=work.peak_memory_bytes,
        extrapolated=bool(beyond[0]),
        device=work.device,
    )


def together(works: tuple[Work, Work], nodes: tuple[int, ...], processes: int) -> Option:
    """A stage on nodes of two kinds in one job, as many processes on each node.

    The batch is divided so that both end together; times are linear in their part of it.
    """
    counts = [count * processes for count in nodes]
    lines = [work.line(count) for work, count in zip(works, counts, strict=True)]
    (fixed_a, rate_a), (fixed_b, rate_b) = lines
    rise = rate_a + rate_b
    first = (fixed_b + rate_b - fixed_a) / rise if rise > 0 else math.nan
    # Where times do not depend on the size, or nothing is known of them, all do as much.
    first = first if math.isfinite(first) else counts[0] / sum(counts)
    first = min(max(first, LEAST_SHARE), 1 - LEAST_SHARE)
    parts = [
        work.times(np.array([count]), share)
        for work, count, share in zip(works, counts, (first, 1 - first), strict=True)
    ]
    slowest = max(range(2), key=lambda i: float(parts[i][0][0]))
    kept = mixing(works)
    seconds, spread, _ = (float(value[0]) / kept for value in parts[slowest])
    speeds = [first / counts[0], (1 - first) / counts[1]]
    each = [work.overheads(sum(nodes) * processes) for work in works]
    return Option(
        works[0].stage,
        tuple(work.devices for work in works),
        nodes,
        processes,
        {
            # A job starts with its slowest process.
            **{name: max((e[name] for e in each), key=lambda s: s.mean) for name in each[0]},
            "work": Seconds(seconds, spread),
        },
        tuple(round(speed / min(speeds), 3) for speed in speeds),
        max(work.peak_memory_bytes for work in works),
        any(bool(part[2][0]) for part in parts),
    )


def mixing(works: tuple[Work, Work]) -> float:
    """Share of the summed speed that a stage keeps on devices of two kinds: what either was
    measured to take for its part of the batch, beside what both took for all of it."""
    for name, (mixture, place) in works[0].mixtures.items():
        if name not in works[1].measured_as:
            continue
        given = mixture.batch_share[place]
        parts = zip(works, (given, 1 - given), strict=True)
        slowest = max(float(work.times(np.array([1]), share)[0][0]) for work, share in parts)
        if math.isfinite(slowest):
            return min(1.0, slowest / mixture.median_s)
    return MIXING


def shareable(a: Devices, b: Devices) -> bool:
    """Whether one job can have nodes of both: one partition, told apart by a feature."""
    apart = a.feature is not None and b.feature is not None and a.feature != b.feature
    # The feature of the GPU's name does not find those of one size.
    alike = not (a.kind.constraint or b.kind.constraint)
    return a.kind.partition == b.kind.partition and apart and alike


def _shapes(work: Work, most: int) -> Iterator[tuple[int, int]]:
    """Nodes and processes of each, for every number of processes the fewest nodes that give it."""
    per_node = work.per_node()
    if not per_node:
        raise PlanError(
            f"one process of stage {work.stage!r} needs {work.peak_memory_bytes >> 20} MiB, "
            f"a node has {work.devices.kind.mem_mb_per_node}"
        )
    seen = set()
    for nodes in range(1, work.devices.job_nodes + 1):
        for processes in range(1, per_node + 1):
            count = nodes * processes
            if count <= most and count not in seen and not work.refused(count):
                seen.add(count)
                yield nodes, processes


def _shared_shapes(works: tuple[Work, Work], most: int) -> Iterator[tuple[tuple[int, ...], int]]:
    for processes in range(1, min(work.per_node() for work in works) + 1):
        for nodes in itertools.product(*(_some(work.devices.job_nodes) for work in works)):
            count = sum(nodes) * processes
            # Both are of one partition, whose limit holds for the job.
            if any(sum(nodes) > (work.devices.most_nodes or sum(nodes)) for work in works):
                continue
            if count <= most and not any(work.refused(count) for work in works):
                yield nodes, processes


def _some(count: int) -> Sequence[int]:
    """All small numbers, then powers of two, and all there are."""
    powers = {2**i for i in range(3, count.bit_length())}
    return sorted({*range(1, min(count, 8) + 1), *powers, count})
