"""The devices that a plan may use, the requests of jobs on them, and the limits of accounting.

:class:`PartitionDevices` joins the cluster's inventory with the profile of a run.
:class:`JobAllowance` checks the limits of accounting and partitions, as ``rlinf run`` does. Kinds
may share nodes or limits; :func:`shared_capacities` lists the groups of such kinds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.plan import Plan, StagePlan
from pipeline.planning.profile.device_kinds import (
    DeviceKind,
    describe_excluded_nodes,
    list_kinds,
    node_group_of_kind,
)
from pipeline.planning.profile.schema import KindProfile, Profile
from pipeline.resources import (
    ClusterConfig,
    base_resources,
    check_job_limits,
    plan_job_requests,
    resolve_with_inventory,
)
from rlinf.errors import PlanError, did_you_mean
from slurm import gpus
from slurm.inventory import Inventory
from slurm.job_limits import ClusterLimits, SharedLimit, cluster_limits_from_inventory
from slurm.jobs import JobResources
from slurm.site import SiteConfig

MAX_CPUS_PER_GPU = 16
"""Maximum number of CPUs that a job requests for each GPU."""
TIME_LIMIT_FACTOR = 10
"""Requested time limit relative to the predicted time; only jobs that hang should reach it."""
MIN_TIME_LIMIT_MIN = 10
"""Minimum requested time limit, in minutes."""
MAX_LEASE_MIN = 1440
"""Maximum requested time limit of a pool's job, in minutes; the next job renews it."""
MEMORY_FACTOR = 1.5
"""Requested memory relative to the measured peak."""
MEMORY_STEP_MB = 256
"""Requested memory is a multiple of this number."""


def request_for_devices(
    kinds: Sequence[DeviceKind],
    count: int,
    *,
    per_node: int | None = None,
    needs_gpu: bool = True,
    process_memory_bytes: int = 0,
    seconds: float | None = None,
    limit_s: float = math.inf,
) -> StagePlan:
    """Return the request of a job with ``count`` devices of the first kind.

    Args:
        kinds: kind of the devices; several kinds if jobs on each kind must make the same request.
        per_node: maximum number of processes per node; None: all devices of a node.
        needs_gpu: False if the job has no GPU, even on nodes with GPUs.
        process_memory_bytes: memory of a process on the host; 0: not requested.
        seconds: expected duration; None: no time limit is requested.
        limit_s: maximum duration of a job.
    """
    first, constraints = kinds[0], {kind.constraint for kind in kinds}
    nodes = -(-count // (per_node or first.devices_per_node))
    processes = -(-count // nodes)
    values: dict[str, object] = {
        "partition": first.partition or None,
        "nodes": nodes,
        "processes": processes,
    }
    if first.gpus_per_node:
        values |= {
            "gpus": processes if needs_gpu else 0,
            "gpu_type": first.gpu_type or None if needs_gpu else None,
            "constraint": first.constraint or None if len(constraints) == 1 else None,
            "cpus": min(map(cpus_per_process, kinds)),
        }
    if process_memory_bytes:
        memory_mb = MEMORY_FACTOR * processes * process_memory_bytes / 2**20
        rounded = math.ceil(memory_mb / MEMORY_STEP_MB) * MEMORY_STEP_MB
        values["mem_mb"] = min(rounded, first.mem_mb_per_node) if first.partition else rounded
    if seconds is not None:
        minutes = max(MIN_TIME_LIMIT_MIN, math.ceil(TIME_LIMIT_FACTOR * seconds / 60))
        values["time_limit_min"] = int(min(minutes, limit_s / 60))
    return StagePlan.model_validate({k: v for k, v in values.items() if v is not None})


def cpus_per_process(kind: DeviceKind) -> int:
    """Return the number of CPUs of a process with a GPU."""
    return min(MAX_CPUS_PER_GPU, max(1, kind.cpus_per_node // kind.gpus_per_node))


@dataclass(frozen=True)
class JobAllowance:
    """The limits of jobs in one partition, under the account and QOS of the site file."""

    cluster_limits: ClusterLimits = field(default_factory=ClusterLimits)
    account: str | None = None
    qos: str | None = None
    """Account and QOS of the jobs; None: Slurm's default."""
    max_minutes: tuple[int, str] | None = None
    """Maximum minutes of a job and the owner of this limit; None: no limit."""
    max_devices: int | None = None
    """Maximum devices of a job; None: no limit."""
    refusal: str = ""
    """Why a job cannot have more than ``max_devices`` devices; "" without a limit."""
    shared_limits: Mapping[SharedLimit, int] = field(default_factory=dict)
    """Limits on the total of all jobs, with the amount of each limit that a device uses (or a job,
    if the limit is on the number of jobs)."""

    def refusal_for(self, request: StagePlan, key: str) -> str:
        """Return why a job with this request will never run; "" if it may run. In the reason,
        ``key`` is the name of the request."""
        try:
            self.cluster_limits.check(self._resources(request), key)
        except PlanError as error:
            return str(error)
        return ""

    def for_kind(self, kind: DeviceKind) -> JobAllowance:
        """Return the allowance for a kind of device, with the limits in numbers of devices."""
        total, refusal = kind.nodes * kind.devices_per_node, ""
        low, high = 0, total + 1  # numbers of devices: allowed, and not allowed
        while high - low > 1:
            middle = (low + high) // 2
            reason = self.refusal_for(request_for_devices([kind], middle), f"a job on {kind.name}")
            low, high, refusal = (low, middle, reason) if reason else (middle, high, refusal)
        resources = self._resources(request_for_devices([kind], 1))
        (shared,) = self.cluster_limits.shared_limits(resources)
        return JobAllowance(
            self.cluster_limits,
            self.account,
            self.qos,
            self.cluster_limits.max_minutes(resources),
            low if refusal else None,
            refusal,
            shared,
        )

    def without_job_limits(self) -> JobAllowance:
        """Return the allowance without limits that depend on the planner's requests."""
        return replace(self, max_devices=None, refusal="", shared_limits={})

    def _resources(self, request: StagePlan) -> JobResources:
        return base_resources(request, account=self.account, qos=self.qos)


def check_plan_limits(plan: Plan, cluster: ClusterConfig, inventory: Inventory) -> Plan:
    """Return a plan with the cluster's settings, as ``rlinf run`` resolves it.

    Raises:
        PlanError: accounting does not allow the plan; the message names its key and the limit.
    """
    plan = resolve_with_inventory(plan, cluster, inventory)
    check_job_limits(
        plan, plan_job_requests(plan, cluster), cluster_limits_from_inventory(inventory)
    )
    return plan


def job_allowance(
    cluster_limits: ClusterLimits, site: SiteConfig, kind: DeviceKind
) -> JobAllowance:
    """Return the limits of jobs on a kind of device."""
    settings = site.settings_for(kind.partition)
    return JobAllowance(cluster_limits, settings.account, settings.qos).for_kind(kind)


@dataclass(frozen=True)
class PartitionDevices:
    """Devices of one type in one partition, with their profile and limits."""

    kind: DeviceKind
    profile: KindProfile
    features: tuple[str, ...] = ()
    """Slurm features of the nodes."""
    price: float = 1.0
    """Price of a device for one hour, in the site's unit; 1 without a price in the site file."""
    has_price: bool = False
    """True if the site file sets the price."""
    time_limit_min: int | None = None
    """Maximum minutes of a job; None: no limit."""
    time_limit_of: str = ""
    """The owner of the time limit: ``partition h100``."""
    allowance: JobAllowance = field(default_factory=JobAllowance)
    """The limits of accounting."""
    max_nodes_per_job: int | None = None
    """Maximum nodes of a job; None: no limit."""
    is_preemptible: bool = False
    interruptions_per_hour: float = 0.0
    """Expected preemptions and failures of a job, per hour."""
    better_kind: str | None = None
    """A preferred kind, in another partition, that has all of these nodes; None: there is none."""
    nodes: frozenset[str] = frozenset()
    """Names of the nodes, including down nodes; empty if unknown."""
    down_nodes: int = 0
    """Number of ``nodes`` that are down."""

    @property
    def name(self) -> str:
        """The name of the kind."""
        return self.kind.name

    @property
    def per_node(self) -> int:
        """The number of devices per node."""
        return self.kind.devices_per_node

    @property
    def count(self) -> int:
        """The number of devices that all jobs together may use, by the nodes and shared limits."""
        caps = [shared.maximum // amount for shared, amount in self.shared_limits.items()]
        return min([self.kind.nodes * self.per_node, *caps])

    @property
    def shared_limits(self) -> dict[SharedLimit, int]:
        """Limits on the total of all jobs, with the amount of each limit that a device uses."""
        limits = self.allowance.shared_limits.items()
        return {limit: n for limit, n in limits if limit.key != "jobs" and n}

    @property
    def feature(self) -> str | None:
        """A feature by which sbatch selects these nodes in the partition; None if there is none."""
        names = (self.kind.gpu_type, self.kind.gpu_model)
        return next((feature for feature in self.features if feature in names), None)

    @property
    def has_device_memory(self) -> bool:
        """True if the profile's memory peaks are of the devices; False: of the node.

        If the profile does not contain this, GPUs are assumed to have their own memory, except the
        fake GPUs of a dev cluster, which were measured on its CPUs. Their type is known, but the
        inventory has no model for it.
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
        devices = self.max_job_nodes * self.per_node
        allowed = self.allowance.max_devices
        return devices if allowed is None else min(devices, allowed)

    @property
    def limit_s(self) -> float:
        """Maximum seconds of a job."""
        return math.inf if self.time_limit_min is None else 60.0 * self.time_limit_min

    def wait_s(self, nodes: int) -> float:
        """Return the expected queue wait of a job, as measured for the nearest number of nodes; 0
        without measurements."""
        waits = self.waits_s
        if not waits:
            return 0.0
        return waits[min(waits, key=lambda count: abs(math.log(count / nodes)))]

    @property
    def waits_s(self) -> dict[int, float]:
        """The expected queue waits in the profile, by number of nodes."""
        return {wait.nodes: wait.expected_s for wait in self.profile.waits}


def select_devices(
    inventory: Inventory,
    site: SiteConfig,
    profile: Profile,
    partitions: Collection[str] = (),
    *,
    is_user_plan: bool = False,
) -> tuple[dict[str, PartitionDevices], tuple[str, ...]]:
    """Return the devices to plan with, by kind, and notes on excluded devices.

    For a kind without measurements, those of the same GPUs in another partition are used.

    Args:
        partitions: use only these partitions or kinds; all measured kinds by default.
        is_user_plan: include devices on which the planner's jobs cannot run, because a user's plan
            may request less per device.

    Raises:
        PlanError: a requested partition is unknown or was not measured, or nothing was measured.
    """
    kinds = list_kinds(inventory, site)
    _check_partitions(partitions, kinds, inventory)
    selected, missing = {}, []
    refused: dict[str, str] = {}
    cluster_limits = cluster_limits_from_inventory(inventory)
    for name, kind in kinds.items():
        if partitions and not {name, kind.partition} & set(partitions):
            continue
        allowance = job_allowance(cluster_limits, site, kind)
        if allowance.max_devices == 0 and not is_user_plan:
            refused[name] = allowance.refusal
            continue
        kind_profile = _find_profile(kind, profile)
        if kind_profile is None:
            missing.append(name)
            continue
        selected[name] = _build_devices(kind, kind_profile, inventory, site, allowance)
    if partitions and missing:
        raise PlanError(
            f"profile: nothing measured on {missing[0]!r}; "
            f"measure it with: rlinf profile --partition {kinds[missing[0]].partition}"
        )
    if refused and (partitions or not selected):
        name, reason = next(iter(refused.items()))
        raise PlanError(f"{name}: your jobs cannot run there: {reason}")
    if not selected:
        raise PlanError(
            f"profile: it has {', '.join(profile.kinds)}, but this cluster has "
            f"{', '.join(kinds) or 'nothing'}; measure here with: rlinf profile"
        )
    notes = [f"{name} was not measured and is left out" for name in missing]
    notes += [f"{name} is left out: {reason}" for name, reason in refused.items()]
    notes += [
        f"{entry.name}: a job has at most {entry.max_nodes_per_job} of its {entry.kind.nodes} "
        "nodes (MaxNodes)"
        for entry in selected.values()
        if entry.max_nodes_per_job is not None and entry.max_nodes_per_job < entry.kind.nodes
    ]
    notes += [note for entry in selected.values() if (note := _limit_note(entry))]
    notes += [
        note
        for entry in selected.values()
        if (note := describe_excluded_nodes(entry.kind, inventory))
    ]
    return _with_better_kind(selected, inventory), tuple(notes)


def local_devices(profile: Profile, kind: DeviceKind) -> dict[str, PartitionDevices]:
    """Return the devices of this machine.

    Raises:
        PlanError: this machine was not measured.
    """
    kind_profile = _find_profile(kind, profile)
    if kind_profile is None:
        raise PlanError(
            f"profile: it has {', '.join(profile.kinds)}, but not this machine; "
            "measure it with: rlinf profile"
        )
    return {kind.name: PartitionDevices(kind, kind_profile)}


def with_counts(
    devices: Mapping[str, PartitionDevices], counts: Mapping[str, int]
) -> dict[str, PartitionDevices]:
    """Return the devices with other numbers of devices, such as ``{"h100": 8}``. The number of a
    kind also applies to the kinds of which it is the ``better_kind``.

    Raises:
        PlanError: an unknown kind, or a number that is not a multiple of a node's devices.
    """
    result = dict(devices)
    for name, count in counts.items():
        if name not in result:
            hint = f"{did_you_mean(name, result)}; there are {', '.join(result)}"
            raise PlanError(f"{name}={count}: no such kind{hint}")
        entry = result[name]
        if count < 0 or count % entry.per_node:
            raise PlanError(f"{name}={count}: nodes of {name} have {entry.per_node} devices each")
        for other_name in [n for n in result if name in (n, result[n].better_kind)]:
            nodes, other = count // entry.per_node, result[other_name]
            if other.kind.nodes < entry.kind.nodes:  # the other kind has only some of the nodes
                nodes = min(nodes, other.kind.nodes)
            if count == 0:
                del result[other_name]
            else:
                kind = replace(other.kind, nodes=nodes)
                node_names = _resize_names(other.nodes, nodes, name)
                allowance = other.allowance.for_kind(kind)
                result[other_name] = replace(
                    other, kind=kind, nodes=node_names, down_nodes=0, allowance=allowance
                )
    return result


def _with_better_kind(
    devices: Mapping[str, PartitionDevices], inventory: Inventory
) -> dict[str, PartitionDevices]:
    """Set ``better_kind``. Among kinds with the same nodes, prefer a kind without preemption, then
    longer jobs, then more of the nodes, then the smaller partition."""
    nodes = {name: entry.nodes for name, entry in devices.items()}

    def rank(name: str) -> tuple[bool, float, int, int, str]:
        entry, partition = devices[name], inventory.partitions[devices[name].kind.partition]
        return entry.is_preemptible, -entry.limit_s, -len(nodes[name]), partition.nodes, name

    better: dict[str, str] = {}
    ranked = sorted(devices, key=rank)
    for i, name in enumerate(ranked):
        for other in ranked[:i]:
            if other not in better and nodes[name] and nodes[name] <= nodes[other]:
                better.setdefault(name, other)
    return {name: replace(entry, better_kind=better.get(name)) for name, entry in devices.items()}


def _check_partitions(
    requested: Collection[str], kinds: Mapping[str, DeviceKind], inventory: Inventory
) -> None:
    names = set(kinds) | {kind.partition for kind in kinds.values()}
    for name in requested:
        if name in names:
            continue
        if name in inventory.partitions:
            raise PlanError(f"partition {name}: no node of it can be used now")
        raise PlanError(f"no partition {name!r} here{did_you_mean(name, names)}")


def _find_profile(kind: DeviceKind, profile: Profile) -> KindProfile | None:
    measured = profile.kinds.get(kind.name)
    if measured is not None:
        if measured.devices_per_node != kind.devices_per_node:
            raise PlanError(
                f"profile: kinds.{kind.name}.devices_per_node: measured on nodes of "
                f"{measured.devices_per_node} devices, here they have {kind.devices_per_node}; "
                f"measure again with: rlinf profile --partition {kind.partition}"
            )
        return measured
    for other in profile.kinds.values():
        alike = other.gpu_type == kind.gpu_type and other.devices_per_node == kind.devices_per_node
        if kind.gpu_type and alike and math.isclose(other.duty_cycle, kind.duty_cycle):
            return other
    return None


def _resize_names(nodes: frozenset[str], count: int, kind: str) -> frozenset[str]:
    """Return ``count`` names of nodes: existing names first, then invented names."""
    if not nodes:
        return nodes
    return frozenset([*sorted(nodes), *(f"{kind} + {i}" for i in range(count))][:count])


def _limit_note(entry: PartitionDevices) -> str:
    total, planned = entry.kind.nodes * entry.per_node, entry.count
    if planned < total:
        limit = min(entry.shared_limits.items(), key=lambda item: item[0].maximum // item[1])[0]
        return (
            f"{entry.name}: {planned} of its {total} devices are used: {limit.owner} allows all "
            f"jobs together {limit.maximum} ({limit.name})"
        )
    if entry.max_job_devices < entry.max_job_nodes * entry.per_node:
        return f"{entry.name}: {entry.allowance.refusal}"
    return ""


def _build_devices(
    kind: DeviceKind,
    kind_profile: KindProfile,
    inventory: Inventory,
    site: SiteConfig,
    allowance: JobAllowance,
) -> PartitionDevices:
    group = node_group_of_kind(kind, inventory)
    price = group.cost_per_gpu_hour if group else None
    limits = [allowance.max_minutes] if allowance.max_minutes else []
    if (partition_min := inventory.partitions[kind.partition].time_limit_min) is not None:
        limits.append((partition_min, f"partition {kind.partition}"))
    time_limit = min(limits, default=None)
    return PartitionDevices(
        kind=kind,
        profile=kind_profile,
        features=group.features if group else (),
        price=price or 1.0,
        has_price=price is not None,
        time_limit_min=time_limit[0] if time_limit else None,
        time_limit_of=time_limit[1] if time_limit else "",
        allowance=allowance,
        max_nodes_per_job=inventory.partitions[kind.partition].max_nodes_per_job,
        is_preemptible=inventory.is_preemptible(kind.partition),
        interruptions_per_hour=site.settings_for(kind.partition).interruptions_per_hour,
        nodes=frozenset(group.nodes if group else ()),
        down_nodes=group.down_nodes if group else 0,
    )


SharedCapacities = tuple[tuple[tuple[str, ...], int], ...]
"""Groups of kinds, each with the maximum number of devices or jobs of its kinds together."""
MAX_KINDS_FOR_SUBSETS = 6
"""If more kinds than this share nodes, only pairs and the set of all these kinds are considered."""


def shared_capacities(devices: Mapping[str, PartitionDevices]) -> SharedCapacities:
    """Return groups of kinds that share nodes or a limit of accounting, with their total devices.

    A group is included if its total is below the sum over its kinds. Because all these groups are
    included, a request that satisfies them can be allocated (Hall's theorem). If kinds use
    different amounts of a limit, the largest amount is used for all.
    """
    capacities = list(_limited_kinds(devices))
    for names in _components(devices):
        sizes = range(2, len(names) + 1) if len(names) <= MAX_KINDS_FOR_SUBSETS else (2, len(names))
        for subset in itertools.chain(*(itertools.combinations(names, size) for size in sizes)):
            total = _count_union([devices[name] for name in subset])
            if total < sum(devices[name].count for name in subset):
                capacities.append((subset, total))
    return tuple(capacities)


def describe_limits(devices: Mapping[str, PartitionDevices]) -> list[str]:
    """Describe the limits on the total of all jobs that apply to these devices."""
    limits = {limit for entry in devices.values() for limit in entry.allowance.shared_limits}
    return [f"{s.owner} allows {s.maximum} {s.key} in all ({s.name})" for s in sorted(limits)]


def job_count_limits(devices: Mapping[str, PartitionDevices]) -> SharedCapacities:
    """Return groups of kinds with a common limit of fewer running jobs than they have devices.

    If the limit is two or more, one job is reserved for the driver of ``rlinf submit``.
    """
    kinds_by_limit: dict[SharedLimit, list[str]] = {}
    for name, entry in devices.items():
        for limit in entry.allowance.shared_limits:
            if limit.key == "jobs":
                kinds_by_limit.setdefault(limit, []).append(name)
    return tuple(
        (tuple(names), max(1, limit.maximum - 1))
        for limit, names in kinds_by_limit.items()
        if limit.maximum - 1 < sum(devices[name].count for name in names)
    )


def _limited_kinds(
    devices: Mapping[str, PartitionDevices],
) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield groups of kinds with a common limit of accounting, and its number of devices."""
    limits = dict.fromkeys(limit for entry in devices.values() for limit in entry.shared_limits)
    for limit in limits:
        names = tuple(name for name, entry in devices.items() if limit in entry.shared_limits)
        total = limit.maximum // max(devices[name].shared_limits[limit] for name in names)
        if len(names) > 1 and total < sum(devices[name].count for name in names):
            yield names, total


def _components(devices: Mapping[str, PartitionDevices]) -> Iterator[list[str]]:
    """Yield groups of kinds that share nodes, directly or through other kinds."""
    remaining = [name for name, entry in devices.items() if entry.nodes]
    while remaining:
        names = [remaining.pop(0)]
        for name in names:
            neighbors = [n for n in remaining if devices[n].nodes & devices[name].nodes]
            names += neighbors
            remaining = [n for n in remaining if n not in neighbors]
        if len(names) > 1:
            yield names


def _count_union(entries: list[PartitionDevices]) -> int:
    """Return the number of usable devices of several kinds together. Nodes in several kinds count
    once; the down nodes of each kind are assumed to be different."""
    nodes = len(frozenset[str]().union(*(entry.nodes for entry in entries)))
    usable = nodes - sum(entry.down_nodes for entry in entries)
    per_node = max(entry.per_node for entry in entries)
    return max(usable * per_node, *(entry.count for entry in entries))
