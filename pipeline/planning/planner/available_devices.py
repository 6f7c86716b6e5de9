"""What accounting and partitions allow this user's jobs: the check of ``rlinf run``, beforehand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipeline.cluster_config import ClusterConfig
from pipeline.plan import Plan, StagePlan
from pipeline.planning.profile.device_kinds import DeviceKind
from pipeline.resources import base_resources, check_quotas, plan_job_requests, resolve_for
from rlinf.errors import PlanError
from slurm.inventory import Inventory
from slurm.job_limits import Quotas, SharedLimit, quotas_from_inventory
from slurm.jobs import JobResources
from slurm.site import SiteConfig

if TYPE_CHECKING:
    from pipeline.planning.planner.stage_options import StageOption
import itertools
from collections.abc import Collection, Iterator

from pipeline.planning.profile.device_kinds import (
    describe_excluded_nodes,
    list_kinds,
    node_group_of_kind,
)
from pipeline.planning.profile.schema import KindProfile, Profile
from rlinf.errors import did_you_mean
from slurm import gpus

TIME_LIMIT_FACTOR = 10
"""Wall time asked for, in predicted times: a limit is for jobs that hang."""
MIN_TIME_LIMIT_MIN = 10
MEMORY_FACTOR = 1.5
MEMORY_STEP_MB = 256
MAX_CPUS_PER_GPU = 16


def request_for_devices(kinds: Sequence[DeviceKind], count: int) -> StagePlan:
    """What a job asks for that has so many devices of the first of these kinds.

    Args:
        kinds: several where jobs of each of them ask for the same.
    """
    first, constraints = kinds[0], {kind.constraint for kind in kinds}
    nodes = -(-count // first.devices_per_node)
    values: dict[str, object] = {
        "partition": first.partition or None,
        "nodes": nodes,
        "processes": -(-count // nodes),
    }
    if first.gpus_per_node:
        values |= {
            "gpus": values["processes"],
            "gpu_type": first.gpu_type or None,
            "constraint": first.constraint or None if len(constraints) == 1 else None,
            "cpus": min(map(_cpus, kinds)),
        }
    return _plan(values)


def request_for_option(option: StageOption) -> StagePlan:
    """What a stage asks for that runs as a job of its own."""
    first = option.devices[0].kind
    values: dict[str, object] = {
        "partition": first.partition or None,
        "nodes": sum(option.nodes),
        "processes": option.processes,
        "time_limit_min": _minutes(option),
    }
    if first.gpus_per_node:
        values |= {"gpus": option.processes if option.needs_device else 0, "cpus": _cpus(first)}
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
    return _plan(values)


def _plan(values: dict[str, object]) -> StagePlan:
    return StagePlan.model_validate({k: v for k, v in values.items() if v is not None})


def _minutes(option: StageOption) -> int:
    minutes = max(MIN_TIME_LIMIT_MIN, math.ceil(TIME_LIMIT_FACTOR * option.seconds / 60))
    return int(min(minutes, option.limit_s / 60))


def _cpus(kind: DeviceKind) -> int:
    """Of a process that has a GPU."""
    return min(MAX_CPUS_PER_GPU, max(1, kind.cpus_per_node // kind.gpus_per_node))


@dataclass(frozen=True)
class JobAllowance:
    """What is allowed in one partition, under the account and QOS of the site file."""

    quotas: Quotas = field(default_factory=Quotas)
    account: str | None = None
    qos: str | None = None
    max_minutes: tuple[int, str] | None = None
    """Minutes of a job, and who says so; None: no limit."""
    max_devices: int | None = None
    """Of a job; None: all there are."""
    refusal: str = ""
    """Why a job has no more of them; with 0 devices why none runs."""
    shared_limits: Mapping[SharedLimit, int] = field(default_factory=dict)
    """Limits on what all jobs have together, and how much of it a device takes; of a limit on jobs
    a job."""

    def refusal_for(self, needs: StagePlan, key: str) -> str:
        """Why a job that asks for this never runs; "" where it may."""
        try:
            self.quotas.check(self._resources(needs), key)
        except PlanError as error:
            return str(error)
        return ""

    def for_kind(self, kind: DeviceKind) -> JobAllowance:
        """The same, with what it comes to in jobs of a kind of device."""
        most, refused = kind.nodes * kind.devices_per_node, ""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            why = self.refusal_for(request_for_devices([kind], middle), f"a job on {kind.name}")
            low, high, refused = (low, middle, why) if why else (middle, high, refused)
        one = self._resources(request_for_devices([kind], 1))
        (shared,) = self.quotas.shared_limits(one)
        return JobAllowance(
            self.quotas,
            self.account,
            self.qos,
            self.quotas.max_minutes(one),
            low if refused else None,
            refused,
            shared,
        )

    def without_job_limits(self) -> JobAllowance:
        """The same without what it comes to in jobs as the planner asks for them; minutes do not
        depend on that."""
        return replace(self, max_devices=None, refusal="", shared_limits={})

    def for_job(self, needs: StagePlan, devices: int) -> JobAllowance:
        """The same, with how much of what jobs have together a device of a given job takes."""
        (shared,) = self.quotas.shared_limits(self._resources(needs))
        each = {limit: n if limit.key == "jobs" else n // devices for limit, n in shared.items()}
        return replace(self, shared_limits=each)

    def _resources(self, needs: StagePlan) -> JobResources:
        return base_resources(needs, account=self.account, qos=self.qos)


def check_quota(plan: Plan, cluster: ClusterConfig, inventory: Inventory) -> Plan:
    """A plan with what the cluster tells of it, as ``rlinf run`` has it, if accounting allows it.

    Raises:
        PlanError: it does not; names the key of the plan and the limit.
    """
    plan = resolve_for(plan, inventory.partitions)
    check_quotas(plan, plan_job_requests(plan, cluster), quotas_from_inventory(inventory))
    return plan


def job_allowance(quotas: Quotas, site: SiteConfig, kind: DeviceKind) -> JobAllowance:
    """What jobs on a kind of device are allowed."""
    own = site.settings_for(kind.partition)
    return JobAllowance(quotas, own.account, own.qos).for_kind(kind)


@dataclass(frozen=True)
class PartitionDevices:
    """Like devices of one partition."""

    kind: DeviceKind
    profile: KindProfile
    features: tuple[str, ...] = ()
    price: float = 1.0
    """Of one device for an hour, in the site's unit; 1 where the site file says nothing."""
    has_price: bool = False
    """Whether the site file says it."""
    time_limit_min: int | None = None
    time_limit_of: str = ""
    """Whose limit that is: ``partition h100``."""
    allowance: JobAllowance = field(default_factory=JobAllowance)
    """Of accounting."""
    max_nodes_per_job: int | None = None
    """Of a job; None: all there are."""
    is_preemptible: bool = False
    interruptions_per_hour: float = 0.0
    """Expected preemptions and failures of a job."""
    better_kind: str | None = None
    """A kind through which all of these nodes are reached too, and better."""
    nodes: frozenset[str] = frozenset()
    """Their names, those that are down included; empty where unknown."""
    down_nodes: int = 0

    @property
    def name(self) -> str:
        """Of the kind."""
        return self.kind.name

    @property
    def per_node(self) -> int:
        """Devices of a node."""
        return self.kind.devices_per_node

    @property
    def count(self) -> int:
        """All of them, or as many as all jobs together may have."""
        caps = [shared.maximum // amount for shared, amount in self.shared_limits.items()]
        return min([self.kind.nodes * self.per_node, *caps])

    @property
    def shared_limits(self) -> dict[SharedLimit, int]:
        """Limits on what all jobs have together, and how much of it a device takes."""
        return {
            own: n for own, n in self.allowance.shared_limits.items() if own.key != "jobs" and n
        }

    @property
    def feature(self) -> str | None:
        """A feature by which sbatch finds these nodes among those of the partition."""
        names = (self.kind.gpu_type, self.kind.gpu_model)
        return next((feature for feature in self.features if feature in names), None)

    @property
    def has_memory(self) -> bool:
        """Whether they have memory of their own, which peaks are of; else those are of the node's.

        GPUs that a dev cluster only pretends to have were measured on its CPUs. Where the profile
        does not say, GPUs have it, but for those of a known name whose model the inventory lacks.
        """
        kind, location = self.kind, self.profile.memory
        if location is not None or not kind.gpus_per_node:
            return location == "device" and kind.gpus_per_node > 0
        return bool(kind.gpu_model) or gpus.find_gpu(kind.gpu_type) is None

    @property
    def max_job_nodes(self) -> int:
        """Most nodes of a job."""
        return (
            self.kind.nodes
            if self.max_nodes_per_job is None
            else min(self.kind.nodes, self.max_nodes_per_job)
        )

    @property
    def max_job_devices(self) -> int:
        """Most devices of a job."""
        most = self.max_job_nodes * self.per_node
        return most if self.allowance.max_devices is None else min(most, self.allowance.max_devices)

    @property
    def limit_s(self) -> float:
        """Longest time of a job."""
        return math.inf if self.time_limit_min is None else 60.0 * self.time_limit_min

    def wait_s(self, nodes: int) -> float:
        """Expected seconds in the queue; what is nearest to so many nodes, 0 if never measured."""
        waits = self.waits_s
        if not waits:
            return 0.0
        return waits[min(waits, key=lambda known: abs(math.log(known / nodes)))]

    @property
    def waits_s(self) -> dict[int, float]:
        """By number of nodes: the wait that was measured."""
        found: dict[int, float] = {}
        for wait in self.profile.waits:
            past = wait.history.q50_s if wait.history else 0.0
            found.setdefault(wait.nodes, past if wait.test_only_s is None else wait.test_only_s)
        return found


def select_devices(
    inventory: Inventory,
    site: SiteConfig,
    profile: Profile,
    partitions: Collection[str] = (),
    *,
    is_user_plan: bool = False,
) -> tuple[dict[str, PartitionDevices], tuple[str, ...]]:
    """The devices to plan with, by kind, and notes on those that are left out.

    Nodes that were measured in another partition count as measured.

    Args:
        partitions: use these alone (partitions or kinds); all that were measured by default.
        given: for a plan by hand, which may ask for less with a device than the planner would: with
            those whose allowance is of 0 devices.

    Raises:
        PlanError: one of them is unknown or was not measured, or nothing of this cluster was.
    """
    kinds = list_kinds(inventory, site)
    _known(partitions, kinds, inventory)
    found, missing = {}, []
    closed: dict[str, str] = {}
    quotas = quotas_from_inventory(inventory)
    for name, kind in kinds.items():
        if partitions and not {name, kind.partition} & set(partitions):
            continue
        allowed = job_allowance(quotas, site, kind)
        if allowed.max_devices == 0 and not is_user_plan:
            closed[name] = allowed.refusal
            continue
        measured = _measured(kind, profile)
        if measured is None:
            missing.append(name)
            continue
        found[name] = _joined(kind, measured, inventory, site, allowed)
    if partitions and missing:
        raise PlanError(
            f"profile: nothing measured on {missing[0]!r}; "
            f"measure it with: rlinf profile --partition {kinds[missing[0]].partition}"
        )
    if closed and (partitions or not found):
        name, why = next(iter(closed.items()))
        raise PlanError(f"{name}: jobs of yours do not run there: {why}")
    if not found:
        raise PlanError(
            f"profile: it has {', '.join(profile.kinds)}, this cluster "
            f"{', '.join(kinds) or 'nothing'}; measure here with: rlinf profile"
        )
    notes = [f"{name} was not measured and is left out" for name in missing]
    notes += [f"{name} is left out: {why}" for name, why in closed.items()]
    notes += [
        f"{own.name}: a job has at most {own.max_nodes_per_job} of its {own.kind.nodes} nodes "
        "(MaxNodes)"
        for own in found.values()
        if own.max_nodes_per_job is not None and own.max_nodes_per_job < own.kind.nodes
    ]
    notes += [note for own in found.values() if (note := _allowed(own))]
    notes += [
        note for own in found.values() if (note := describe_excluded_nodes(own.kind, inventory))
    ]
    return _with_better_kind(found, inventory), tuple(notes)


def local_devices(profile: Profile, kind: DeviceKind) -> dict[str, PartitionDevices]:
    """This machine alone.

    Raises:
        PlanError: it was not measured.
    """
    measured = _measured(kind, profile)
    if measured is None:
        raise PlanError(
            f"profile: it has {', '.join(profile.kinds)}, not this machine; "
            "measure it with: rlinf profile"
        )
    return {kind.name: PartitionDevices(kind, measured)}


def with_counts(
    devices: Mapping[str, PartitionDevices], counts: Mapping[str, int]
) -> dict[str, PartitionDevices]:
    """The same with other numbers of devices: ``{"h100": 8}``; of whatever the same nodes are in.

    Raises:
        PlanError: an unknown kind, or a number that whole nodes do not give.
    """
    out = dict(devices)
    for name, count in counts.items():
        if name not in out:
            raise PlanError(f"{name}={count}: no such kind{did_you_mean(name, out)}; {_names(out)}")
        own = out[name]
        if count < 0 or count % own.per_node:
            raise PlanError(f"{name}={count}: nodes of {name} have {own.per_node} devices each")
        for other in [n for n in out if name in (n, out[n].better_kind)]:
            nodes, theirs = count // own.per_node, out[other]
            if theirs.kind.nodes < own.kind.nodes:  # has some of the nodes alone
                nodes = min(nodes, theirs.kind.nodes)
            if count == 0:
                del out[other]
            else:
                kind = replace(theirs.kind, nodes=nodes)
                names, allowed = _named(theirs.nodes, nodes, name), theirs.allowance.for_kind(kind)
                out[other] = replace(
                    theirs, kind=kind, nodes=names, down_nodes=0, allowance=allowed
                )
    return out


def with_memory_floors(
    devices: Mapping[str, PartitionDevices], estimated: Profile
) -> dict[str, PartitionDevices]:
    """The same, with what the model's shapes say cannot hold a stage as failures, below the least
    number of processes that was tried; above it measurements alone count."""
    out = dict(devices)
    for name, own in devices.items():
        least: dict[str, int] = {}
        for point in own.profile.points:
            least[point.stage] = min(point.processes, least.get(point.stage, point.processes))
        guessed = estimated.kinds[name].points if name in estimated.kinds else ()
        failed = [p for p in guessed if not p.succeeded and p.processes < least.get(p.stage, 0)]
        points = (*own.profile.points, *failed)
        out[name] = replace(own, profile=own.profile.model_copy(update={"points": points}))
    return out


def _with_better_kind(
    found: Mapping[str, PartitionDevices], inventory: Inventory
) -> dict[str, PartitionDevices]:
    """Set ``better_kind``: of partitions over the same nodes, one that is not preempted is better,
    then one with longer jobs, then one with more of the nodes, then the smaller one."""
    nodes = {name: own.nodes for name, own in found.items()}

    def rank(name: str) -> tuple[bool, float, int, int, str]:
        own, partition = found[name], inventory.partitions[found[name].kind.partition]
        return own.is_preemptible, -own.limit_s, -len(nodes[name]), partition.nodes, name

    better: dict[str, str] = {}
    ranked = sorted(found, key=rank)
    for i, name in enumerate(ranked):
        for other in ranked[:i]:
            if other not in better and nodes[name] and nodes[name] <= nodes[other]:
                better.setdefault(name, other)
    return {name: replace(own, better_kind=better.get(name)) for name, own in found.items()}


def _known(wanted: Collection[str], kinds: Mapping[str, DeviceKind], inventory: Inventory) -> None:
    names = set(kinds) | {kind.partition for kind in kinds.values()}
    for name in wanted:
        if name in names:
            continue
        if name in inventory.partitions:
            raise PlanError(f"partition {name}: no node of it can be used now")
        raise PlanError(f"no partition {name!r} here{did_you_mean(name, names)}")


def _measured(kind: DeviceKind, profile: Profile) -> KindProfile | None:
    own = profile.kinds.get(kind.name)
    if own is not None:
        if own.devices_per_node != kind.devices_per_node:
            raise PlanError(
                f"profile: kinds.{kind.name}.devices_per_node: measured on nodes of "
                f"{own.devices_per_node} devices, here they have {kind.devices_per_node}; "
                f"measure again with: rlinf profile --partition {kind.partition}"
            )
        return own
    for other in profile.kinds.values():
        alike = other.gpu_type == kind.gpu_type and other.devices_per_node == kind.devices_per_node
        if kind.gpu_type and alike and math.isclose(other.duty_cycle, kind.duty_cycle):
            return other
    return None


def _named(nodes: frozenset[str], count: int, kind: str) -> frozenset[str]:
    """So many nodes: of those there are, and of others that might be added to a kind."""
    if not nodes:
        return nodes
    return frozenset([*sorted(nodes), *(f"{kind} + {i}" for i in range(count))][:count])


def _allowed(own: PartitionDevices) -> str:
    """A note on what accounting allows of a kind, where that is less than there is."""
    there, most = own.kind.nodes * own.per_node, own.count
    if most < there:
        tight = min(own.shared_limits.items(), key=lambda item: item[0].maximum // item[1])[0]
        return (
            f"{own.name}: {most} of its {there} devices are planned with: {tight.owner} allows all "
            f"jobs together {tight.maximum} ({tight.name})"
        )
    if (
        own.allowance.max_devices is not None
        and own.max_job_devices < own.max_job_nodes * own.per_node
    ):
        return f"{own.name}: {own.allowance.refusal}"
    return ""


def _joined(
    kind: DeviceKind,
    measured: KindProfile,
    inventory: Inventory,
    site: SiteConfig,
    allowed: JobAllowance,
) -> PartitionDevices:
    group = node_group_of_kind(kind, inventory)
    price = group.cost_per_gpu_hour if group else None
    limits = [allowed.max_minutes] if allowed.max_minutes else []
    if (own := inventory.partitions[kind.partition].time_limit_min) is not None:
        limits.append((own, f"partition {kind.partition}"))
    longest = min(limits, default=None)
    return PartitionDevices(
        kind=kind,
        profile=measured,
        features=group.features if group else (),
        price=price or 1.0,
        has_price=price is not None,
        time_limit_min=longest[0] if longest else None,
        time_limit_of=longest[1] if longest else "",
        allowance=allowed,
        max_nodes_per_job=inventory.partitions[kind.partition].max_nodes_per_job,
        is_preemptible=inventory.is_preemptible(kind.partition),
        interruptions_per_hour=site.settings_for(kind.partition).interruptions_per_hour,
        nodes=frozenset(group.nodes if group else ()),
        down_nodes=group.down_nodes if group else 0,
    )


def _names(devices: Sequence[str] | Mapping[str, object]) -> str:
    return f"there are {', '.join(devices)}"


SharedCapacity = tuple[tuple[tuple[str, ...], int], ...]
"""Names of kinds, and how many devices they have together, or jobs."""
MAX_KINDS_FOR_SUBSETS = 6
"""Of more kinds over the same nodes only pairs and all together are looked at."""


def shared_capacities(devices: Mapping[str, PartitionDevices]) -> SharedCapacity:
    """Kinds that share nodes, in every combination whose devices are fewer than those of each
    added up; with all of these kept, the devices asked for can be found (Hall's theorem). And kinds
    that a limit of accounting counts together; where they take unlike amounts of it, each as much
    as the one that takes most."""
    found = list(_limited(devices))
    for names in _components(devices):
        sizes = range(2, len(names) + 1) if len(names) <= MAX_KINDS_FOR_SUBSETS else (2, len(names))
        for some in itertools.chain(*(itertools.combinations(names, size) for size in sizes)):
            most = _together([devices[name] for name in some])
            if most < sum(devices[name].count for name in some):
                found.append((some, most))
    return tuple(found)


def describe_limits(devices: Mapping[str, PartitionDevices]) -> list[str]:
    """Limits on what all jobs have together that devices count against, in words."""
    found = {shared for own in devices.values() for shared in own.allowance.shared_limits}
    return [f"{s.owner} allows {s.maximum} {s.key} in all ({s.name})" for s in sorted(found)]


def job_count_limits(devices: Mapping[str, PartitionDevices]) -> SharedCapacity:
    """Kinds whose jobs a limit of accounting counts together, and how many it lets run at once,
    where that is less than a job for each device.

    Of two and more one place is left to the driver, which ``rlinf submit`` makes a job too.
    """
    found: dict[SharedLimit, list[str]] = {}
    for name, own in devices.items():
        for shared in own.allowance.shared_limits:
            if shared.key == "jobs":
                found.setdefault(shared, []).append(name)
    return tuple(
        (tuple(names), max(1, shared.maximum - 1))
        for shared, names in found.items()
        if shared.maximum - 1 < sum(devices[name].count for name in names)
    )


def _limited(devices: Mapping[str, PartitionDevices]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Kinds that limits of accounting count together, and how many devices they allow of them."""
    limits = dict.fromkeys(shared for own in devices.values() for shared in own.shared_limits)
    for shared in limits:
        names = tuple(name for name, own in devices.items() if shared in own.shared_limits)
        most = shared.maximum // max(devices[name].shared_limits[shared] for name in names)
        if len(names) > 1 and most < sum(devices[name].count for name in names):
            yield names, most


def _components(devices: Mapping[str, PartitionDevices]) -> Iterator[list[str]]:
    """Names of kinds that share nodes, also by way of others; several each."""
    left = [name for name, own in devices.items() if own.nodes]
    while left:
        names = [left.pop(0)]
        for name in names:
            near = [n for n in left if devices[n].nodes & devices[name].nodes]
            names += near
            left = [n for n in left if n not in near]
        if len(names) > 1:
            yield names


def _together(some: list[PartitionDevices]) -> int:
    """Devices of several kinds; nodes that are down may be others in each."""
    nodes = len(frozenset[str]().union(*(own.nodes for own in some)))
    usable = nodes - sum(own.down_nodes for own in some)
    per_node = max(own.per_node for own in some)
    return max(usable * per_node, *(own.count for own in some))
