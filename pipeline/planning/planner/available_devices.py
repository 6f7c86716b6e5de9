"""The devices that a plan may use, what jobs request on them, and what accounting allows.

:class:`PartitionDevices` joins the cluster's inventory with the profile of a run.
:class:`JobAllowance` applies the limits of accounting and partitions beforehand, as ``rlinf run``
does. Kinds may share nodes or limits; :func:`shared_capacities` lists these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.cluster_config import ClusterConfig
from pipeline.plan import Plan, StagePlan
from pipeline.planning.profile.device_kinds import (
    DeviceKind,
    describe_excluded_nodes,
    list_kinds,
    node_group_of_kind,
)
from pipeline.planning.profile.schema import KindProfile, Profile
from pipeline.resources import base_resources, check_quotas, plan_job_requests, resolve_for
from rlinf.errors import PlanError, did_you_mean
from slurm import gpus
from slurm.inventory import Inventory
from slurm.job_limits import Quotas, SharedLimit, quotas_from_inventory
from slurm.jobs import JobResources
from slurm.site import SiteConfig

MAX_CPUS_PER_GPU = 16


def request_for_devices(kinds: Sequence[DeviceKind], count: int) -> StagePlan:
    """Return the request of a job with this many devices of the first kind.

    Args:
        kinds: several if jobs on each of them request the same.
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
            "cpus": min(map(cpus_per_process, kinds)),
        }
    return build_stage_plan(values)


def build_stage_plan(values: dict[str, object]) -> StagePlan:
    """Return the request with these keys; None leaves a key at its default."""
    return StagePlan.model_validate({k: v for k, v in values.items() if v is not None})


def cpus_per_process(kind: DeviceKind) -> int:
    """Return the CPUs of a process with a GPU."""
    return min(MAX_CPUS_PER_GPU, max(1, kind.cpus_per_node // kind.gpus_per_node))


@dataclass(frozen=True)
class JobAllowance:
    """The limits of jobs in one partition, under the account and QOS of the site file."""

    quotas: Quotas = field(default_factory=Quotas)
    account: str | None = None
    qos: str | None = None
    max_minutes: tuple[int, str] | None = None
    """Maximum minutes of a job, and who sets the limit; None: no limit."""
    max_devices: int | None = None
    """Maximum devices of a job; None: no limit."""
    refusal: str = ""
    """Why a job cannot have more devices; with ``max_devices`` of 0 why none can run."""
    shared_limits: Mapping[SharedLimit, int] = field(default_factory=dict)
    """Limits on the total of all jobs, and how much of each a device uses; for a limit on jobs, a
    job."""

    def refusal_for(self, needs: StagePlan, key: str) -> str:
        """Return why a job with this request never runs; "" if it may run."""
        try:
            self.quotas.check(self._resources(needs), key)
        except PlanError as error:
            return str(error)
        return ""

    def for_kind(self, kind: DeviceKind) -> JobAllowance:
        """Return the allowance for a kind of device, with the limits in numbers of devices."""
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
        """Return the allowance without the limits that depend on the planner's own requests."""
        return replace(self, max_devices=None, refusal="", shared_limits={})

    def for_job(self, needs: StagePlan, devices: int) -> JobAllowance:
        """Return the allowance with the amounts that a device of this job uses of shared limits."""
        (shared,) = self.quotas.shared_limits(self._resources(needs))
        each = {limit: n if limit.key == "jobs" else n // devices for limit, n in shared.items()}
        return replace(self, shared_limits=each)

    def _resources(self, needs: StagePlan) -> JobResources:
        return base_resources(needs, account=self.account, qos=self.qos)


def check_quota(plan: Plan, cluster: ClusterConfig, inventory: Inventory) -> Plan:
    """Return a plan with the cluster's settings, as ``rlinf run`` resolves it.

    Raises:
        PlanError: accounting does not allow it; names the key of the plan and the limit.
    """
    plan = resolve_for(plan, inventory.partitions)
    check_quotas(plan, plan_job_requests(plan, cluster), quotas_from_inventory(inventory))
    return plan


def job_allowance(quotas: Quotas, site: SiteConfig, kind: DeviceKind) -> JobAllowance:
    """Return the limits of jobs on a kind of device."""
    own = site.settings_for(kind.partition)
    return JobAllowance(quotas, own.account, own.qos).for_kind(kind)


@dataclass(frozen=True)
class PartitionDevices:
    """The equal devices of one partition, with their profile and limits."""

    kind: DeviceKind
    profile: KindProfile
    features: tuple[str, ...] = ()
    price: float = 1.0
    """Price of a device for one hour, in the site's unit; 1 without a price in the site file."""
    has_price: bool = False
    """True if the site file sets the price."""
    time_limit_min: int | None = None
    time_limit_of: str = ""
    """Who sets the time limit: ``partition h100``."""
    allowance: JobAllowance = field(default_factory=JobAllowance)
    """The limits of accounting."""
    max_nodes_per_job: int | None = None
    """Maximum nodes of a job; None: no limit."""
    is_preemptible: bool = False
    interruptions_per_hour: float = 0.0
    """Expected preemptions and failures of a job, per hour."""
    better_kind: str | None = None
    """A better kind that contains all of these nodes; None if there is none."""
    nodes: frozenset[str] = frozenset()
    """Names of the nodes, down nodes included; empty if unknown."""
    down_nodes: int = 0

    @property
    def name(self) -> str:
        """The name of the kind."""
        return self.kind.name

    @property
    def per_node(self) -> int:
        """The number of devices of a node."""
        return self.kind.devices_per_node

    @property
    def count(self) -> int:
        """The number of devices, or the maximum that all jobs together may have."""
        caps = [shared.maximum // amount for shared, amount in self.shared_limits.items()]
        return min([self.kind.nodes * self.per_node, *caps])

    @property
    def shared_limits(self) -> dict[SharedLimit, int]:
        """Limits on the total of all jobs, and how much of each a device uses."""
        return {
            own: n for own, n in self.allowance.shared_limits.items() if own.key != "jobs" and n
        }

    @property
    def feature(self) -> str | None:
        """A feature by which sbatch selects these nodes in the partition; None if there is none."""
        names = (self.kind.gpu_type, self.kind.gpu_model)
        return next((feature for feature in self.features if feature in names), None)

    @property
    def has_memory(self) -> bool:
        """True if the devices have their own memory, to which measured peaks refer; else it is the
        node's.

        Fake GPUs of a dev cluster were measured on its CPUs. If the profile does not say it, GPUs
        have their own memory, except those with a known name whose model the inventory lacks.
        """
        kind, location = self.kind, self.profile.memory
        if location is not None or not kind.gpus_per_node:
            return location == "device" and kind.gpus_per_node > 0
        return bool(kind.gpu_model) or gpus.find_gpu(kind.gpu_type) is None

    @property
    def max_job_nodes(self) -> int:
        """Maximum nodes of a job."""
        return (
            self.kind.nodes
            if self.max_nodes_per_job is None
            else min(self.kind.nodes, self.max_nodes_per_job)
        )

    @property
    def max_job_devices(self) -> int:
        """Maximum devices of a job."""
        most = self.max_job_nodes * self.per_node
        return most if self.allowance.max_devices is None else min(most, self.allowance.max_devices)

    @property
    def limit_s(self) -> float:
        """Maximum seconds of a job."""
        return math.inf if self.time_limit_min is None else 60.0 * self.time_limit_min

    def wait_s(self, nodes: int) -> float:
        """Return the expected queue wait of a job of this many nodes: the nearest measured one,
        else 0."""
        waits = self.waits_s
        if not waits:
            return 0.0
        return waits[min(waits, key=lambda known: abs(math.log(known / nodes)))]

    @property
    def waits_s(self) -> dict[int, float]:
        """The measured waits by number of nodes."""
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
    """Return the devices to plan with, by kind, and notes on excluded ones.

    Nodes that were measured in another partition count as measured.

    Args:
        partitions: use only these partitions or kinds; all measured ones by default.
        is_user_plan: include devices on which the planner may not run jobs, because a user's plan
            may request less per device.

    Raises:
        PlanError: one of them is unknown or was not measured, or none of this cluster was measured.
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
    """Return the devices of this machine.

    Raises:
        PlanError: this machine was not measured.
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
    """Return the devices with other numbers, such as ``{"h100": 8}``, in all kinds that share the
    nodes.

    Raises:
        PlanError: an unknown kind, or a number that is not a multiple of a node's devices.
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
    """Add failures where the model's shape needs more memory than there is. They apply below the
    smallest measured number of processes; above it only measurements count."""
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
    """Return this many node names: existing ones, then names of added nodes."""
    if not nodes:
        return nodes
    return frozenset([*sorted(nodes), *(f"{kind} + {i}" for i in range(count))][:count])


def _allowed(own: PartitionDevices) -> str:
    """Return a note on the limits of accounting for a kind, if these are below its devices."""
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
"""Names of kinds, and the number of devices or jobs that they have together."""
MAX_KINDS_FOR_SUBSETS = 6
"""For more kinds on the same nodes, only pairs and all of them together are considered."""


def shared_capacities(devices: Mapping[str, PartitionDevices]) -> SharedCapacity:
    """Return kinds with shared nodes whose devices together are fewer than the sum of their
    devices, and kinds that a limit of accounting counts together.

    All such combinations are included, so requested devices that satisfy them can be found (Hall's
    theorem). If kinds use different amounts of a limit, each counts like the largest.
    """
    found = list(_limited(devices))
    for names in _components(devices):
        sizes = range(2, len(names) + 1) if len(names) <= MAX_KINDS_FOR_SUBSETS else (2, len(names))
        for some in itertools.chain(*(itertools.combinations(names, size) for size in sizes)):
            most = _together([devices[name] for name in some])
            if most < sum(devices[name].count for name in some):
                found.append((some, most))
    return tuple(found)


def describe_limits(devices: Mapping[str, PartitionDevices]) -> list[str]:
    """Describe the limits on the total of all jobs that these devices count against."""
    found = {shared for own in devices.values() for shared in own.allowance.shared_limits}
    return [f"{s.owner} allows {s.maximum} {s.key} in all ({s.name})" for s in sorted(found)]


def job_count_limits(devices: Mapping[str, PartitionDevices]) -> SharedCapacity:
    """Return kinds whose jobs a limit of accounting counts together, and how many may run at once,
    if that is less than a job for each device.

    If the limit is two or more, one place is reserved for the driver, which ``rlinf submit`` runs
    as a job too.
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
    """Yield kinds that a limit of accounting counts together, and how many devices it allows."""
    limits = dict.fromkeys(shared for own in devices.values() for shared in own.shared_limits)
    for shared in limits:
        names = tuple(name for name, own in devices.items() if shared in own.shared_limits)
        most = shared.maximum // max(devices[name].shared_limits[shared] for name in names)
        if len(names) > 1 and most < sum(devices[name].count for name in names):
            yield names, most


def _components(devices: Mapping[str, PartitionDevices]) -> Iterator[list[str]]:
    """Yield groups of kinds that share nodes, directly or through other kinds."""
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
    """Return the devices of several kinds together; their down nodes may differ."""
    nodes = len(frozenset[str]().union(*(own.nodes for own in some)))
    usable = nodes - sum(own.down_nodes for own in some)
    per_node = max(own.per_node for own in some)
    return max(usable * per_node, *(own.count for own in some))
