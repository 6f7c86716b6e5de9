"""Discovery of the cluster's inventory with a few queries to Slurm (:mod:`slurm.records`).

Each query runs once for the whole cluster. Parsing takes time linear in the text, so thousands of
nodes are no problem.
"""

from __future__ import annotations

import functools
import os
import pwd
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rlinf.errors import SlurmError
from slurm import gpus
from slurm.client import SlurmClient
from slurm.inventory import (
    MAX_ARRAY_SIZE,
    MAX_JOB_COUNT,
    SCHEMA,
    Inventory,
    NodeGroup,
    PartitionInventory,
)
from slurm.records import (
    SACCTMGR_ASSOCIATIONS,
    SACCTMGR_QOS,
    SCONTROL_NODE_USAGE,
    SCONTROL_PARTITIONS,
    SINFO_NODES,
    SQUEUE_PENDING,
    PartitionNode,
    PendingDemand,
    _allowed,
    _int_or_none,
    _to_int,
    _value_or_empty,
    _words,
    parse_gpus,
    parse_limits,
    parse_minutes,
    parse_nodes,
    parse_partition_records,
    parse_pending,
    parse_usage,
)

ENFORCING_WORDS = frozenset({"limits", "safe", "all"})
"""Words of AccountingStorageEnforce that enforce limits (manual page of slurm.conf)."""
IDLE_STATES = frozenset({"idle", "powered_down"})
USABLE_STATES = IDLE_STATES | frozenset(
    {"mixed", "allocated", "completing", "planned", "reserved", "powering_down", "power_down"}
    | {"power_up", "powering_up", "reboot_requested"}
)
"""Base states of usable nodes. All others, unknown ones included, count as down."""
DOWN_FLAGS = frozenset("*$^")
"""Suffixes of the states of unusable nodes: not responding, under maintenance, rebooting."""
BUSY_FLAGS = frozenset("-@!%")
"""Suffixes of nodes that are not idle: reserved for a job, to be rebooted, or powering down."""


@dataclass(frozen=True)
class SlurmOutput:
    """The output of Slurm's commands, unparsed except ``version`` and ``settings``."""

    version: str
    nodes: str
    """Answer to :data:`SINFO_NODES`."""
    partitions: str
    """Answer to :data:`SCONTROL_PARTITIONS`."""
    usage: str
    """Answer to :data:`SCONTROL_NODE_USAGE`."""
    pending: str
    """Answer to :data:`SQUEUE_PENDING`."""
    qos: str | None = None
    """Answer to :data:`SACCTMGR_QOS`; None: the cluster has no accounting."""
    associations: str | None = None
    """Answer to :data:`SACCTMGR_ASSOCIATIONS`; None as for ``qos``."""
    settings: Mapping[str, str] | None = None
    """Values by the names of slurm.conf; None: not queried, so limits count as enforced."""


NO_DEMAND = PendingDemand(0, 0)


def discover_inventory(
    client: SlurmClient, now: datetime | None = None, *, with_usage: bool = True
) -> Inventory:
    """Return the inventory of this cluster as this user sees it, without settings of a site file.

    Args:
        now: the time of the inventory; None: the current time.
        with_usage: query also which nodes are free and which jobs wait. Otherwise, partly used
            nodes count as used, and no jobs wait.

    Raises:
        SlurmError: Slurm is not installed or does not answer.
    """
    return build_inventory(query_slurm(client, with_usage=with_usage), now or datetime.now(UTC))


def discover_partitions(client: SlurmClient) -> dict[str, PartitionInventory]:
    """Return the partitions of this cluster by name, without the jobs that wait for them.

    Raises:
        SlurmError: Slurm is not installed or does not answer.
    """
    return build_partitions(client.run(*SINFO_NODES), client.run(*SCONTROL_PARTITIONS))


def query_slurm(client: SlurmClient, *, with_usage: bool = True) -> SlurmOutput:
    """Run all queries. A cluster without accounting is not an error.

    Args:
        with_usage: see :func:`discover_inventory`.

    Raises:
        SlurmError: Slurm is not installed or does not answer.
    """
    output = {
        "version": client.version(),
        "nodes": client.run(*SINFO_NODES),
        "partitions": client.run(*SCONTROL_PARTITIONS),
        "usage": client.run(*SCONTROL_NODE_USAGE) if with_usage else "",
        "pending": client.run(*SQUEUE_PENDING) if with_usage else "",
    }
    qos, associations = query_accounting(client) or (None, None)
    return SlurmOutput(**output, qos=qos, associations=associations, settings=client.settings())


def query_accounting(client: SlurmClient) -> tuple[str, str] | None:
    """Return the answers to :data:`SACCTMGR_QOS` and, for this user, :data:`SACCTMGR_ASSOCIATIONS`.

    Returns None without accounting.
    """
    user = f"user={_user()}"
    try:
        return client.run(*SACCTMGR_QOS), client.run(
            *SACCTMGR_ASSOCIATIONS[:-1], "where", user, SACCTMGR_ASSOCIATIONS[-1]
        )
    except SlurmError:
        return None


def build_inventory(output: SlurmOutput, created_at: datetime) -> Inventory:
    """Build an inventory from the output of Slurm's commands."""
    settings, limits = output.settings or {}, None
    if output.qos is not None and output.associations is not None:
        limits = parse_limits(output.qos, output.associations)
    return Inventory(
        schema_version=SCHEMA,
        created_at=created_at,
        slurm_version=output.version,
        partitions={
            name: _with_memory_of_cluster(partition, settings)
            for name, partition in build_partitions(
                output.nodes, output.partitions, output.usage, output.pending
            ).items()
        },
        limits=limits,
        cluster=settings.get("ClusterName", ""),
        enforces_limits=output.settings is None or enforces_limits(settings),
        max_array_size=_array_size(settings),
        max_jobs=_int_or_default(settings.get("MaxJobCount", ""), MAX_JOB_COUNT),
    )


def _with_memory_of_cluster(
    partition: PartitionInventory, settings: Mapping[str, str]
) -> PartitionInventory:
    """Return a partition with the cluster's memory per CPU where it sets none of its own."""
    default, maximum = partition.default_mem_mb_per_cpu, partition.max_mem_mb_per_cpu
    return partition.model_copy(
        update={
            "default_mem_mb_per_cpu": _int_or_none(settings.get("DefMemPerCPU", ""))
            if default is None
            else default,
            "max_mem_mb_per_cpu": _int_or_none(settings.get("MaxMemPerCPU", ""))
            if maximum is None
            else maximum,
        }
    )


def build_partitions(
    nodes: str, partitions: str, usage: str = "", pending: str = ""
) -> dict[str, PartitionInventory]:
    """Build the partitions from the output of Slurm's commands; see :class:`SlurmOutput`."""
    nodes_by_partition: dict[str, list[PartitionNode]] = defaultdict(list)
    for node in parse_nodes(nodes):
        nodes_by_partition[node.partition].append(node)
    gpus_in_use, demand, built = parse_usage(usage), parse_pending(pending), {}
    for record in parse_partition_records(partitions):
        name = record["PartitionName"]
        whole_nodes = record.get("OverSubscribe") == "EXCLUSIVE"
        groups = group_nodes(nodes_by_partition.get(name, ()), gpus_in_use, whole_nodes=whole_nodes)
        built[name] = build_partition(record, groups, demand.get(name, NO_DEMAND))
    return built


def _array_size(settings: Mapping[str, str]) -> int:
    """Return the maximum number of elements of an array."""
    # MaxArraySize is one more than the largest index.
    max_size = _int_or_default(settings.get("MaxArraySize", ""), MAX_ARRAY_SIZE)
    for word in settings.get("SchedulerParameters", "").split(","):
        key, _, value = word.partition("=")
        if key == "max_array_tasks":
            max_size = min(max_size, _int_or_default(value, max_size))
    # MaxArraySize=0 disables arrays; a single job is not an array.
    return max(max_size, 1)


def _int_or_default(text: str, default: int) -> int:
    return int(text) if text.isdigit() else default


def enforces_limits(settings: Mapping[str, str]) -> bool:
    """Return True if Slurm's configuration enforces the limits of accounting."""
    words = settings.get("AccountingStorageEnforce", "").split(",")
    return not ENFORCING_WORDS.isdisjoint(words)


def build_partition(
    record: Mapping[str, str],
    groups: tuple[NodeGroup, ...] = (),
    demand: PendingDemand = NO_DEMAND,
) -> PartitionInventory:
    """Build a partition from its record, its node groups and the demand of pending jobs."""
    return PartitionInventory(
        name=record["PartitionName"],
        groups=groups,
        queued_jobs=demand.jobs,
        queued_gpus=demand.gpus,
        time_limit_min=parse_minutes(record.get("MaxTime", "")),
        preempt_mode=record.get("PreemptMode", "OFF"),
        priority_tier=_to_int(record.get("PriorityTier", "1")),
        is_available=record.get("State", "UP") == "UP",
        is_default=record.get("Default") == "YES",
        qos=_value_or_empty(record.get("QoS", "")),
        allowed_qos=_allowed(record.get("AllowQos", "ALL")),
        denied_qos=_words(record.get("DenyQos", "")),
        allowed_accounts=_allowed(record.get("AllowAccounts", "ALL")),
        denied_accounts=_words(record.get("DenyAccounts", "")),
        max_nodes_per_job=_int_or_none(record.get("MaxNodes", "")),
        is_exclusive=record.get("OverSubscribe") == "EXCLUSIVE",
        default_mem_mb_per_cpu=_int_or_none(record.get("DefMemPerCPU", "")),
        max_mem_mb_per_cpu=_int_or_none(record.get("MaxMemPerCPU", "")),
    )


def group_nodes(
    members: Iterable[PartitionNode],
    gpus_in_use: Mapping[str, Mapping[str, int]],
    *,
    whole_nodes: bool,
) -> tuple[NodeGroup, ...]:
    """Group nodes with equal hardware; the groups with the most GPUs come first.

    Args:
        gpus_in_use: GPUs in use, by node and type.
        whole_nodes: the partition does not share nodes, so free GPUs of a partly used node are not
            available.
    """
    by_hardware: dict[tuple[Any, ...], list[PartitionNode]] = defaultdict(list)
    for node in members:
        by_hardware[(_gpu_hardware(node.gres, node.features), node.cpus, node.mem_mb)].append(node)
    groups = []
    for ((gpus_by_type, _), cpus, mem_mb), nodes in by_hardware.items():
        (gpu_type, gpus_per_node), *others = gpus_by_type or (("", 0),)
        num_nodes = Counter[str]()
        idle_gpus = 0
        for node in nodes:
            availability = _availability(node.state)
            num_nodes[availability] += 1
            if availability == "idle":
                idle_gpus += gpus_per_node
            elif availability == "part" and not whole_nodes:
                in_use = gpus_in_use.get(node.name, {gpu_type: gpus_per_node})
                idle_gpus += max(gpus_per_node - in_use.get(gpu_type, sum(in_use.values())), 0)
        feature_sets = ({*_words(text)} for text in {node.features for node in nodes})
        groups.append(
            NodeGroup(
                count=len(nodes),
                gpu_type=gpu_type,
                gpus_per_node=gpus_per_node,
                other_gpus=dict(others),
                cpus_per_node=cpus,
                mem_mb_per_node=mem_mb,
                features=tuple(sorted(set.intersection(*feature_sets))),
                nodes=tuple(node.name for node in nodes),
                idle_nodes=num_nodes["idle"],
                idle_gpus=idle_gpus,
                down_nodes=num_nodes["down"],
            )
        )
    return tuple(
        sorted(groups, key=lambda g: (-g.count * g.gpus_per_node, -g.count, g.description))
    )


@functools.lru_cache(maxsize=4096)
def _gpu_hardware(gres: str, features: str) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    """Return the number of GPUs of each type, the most frequent type first, and the features that
    describe the GPU."""
    counts = sorted(parse_gpus(gres).items(), key=lambda item: (-item[1], item[0]))
    gpu_features = sorted(feature for feature in _words(features) if gpus.is_gpu_feature(feature))
    return tuple(counts), tuple(gpu_features)


@functools.lru_cache(maxsize=256)
def _availability(state: str) -> str:
    """Return ``idle``, ``part`` (mixed: possibly partly free), ``busy`` or ``down``."""
    base = state.lower().rstrip("*~#!%$@^-+")
    flags = set(state[len(base) :])
    if base not in USABLE_STATES or flags & DOWN_FLAGS:
        return "down"
    if flags & BUSY_FLAGS:
        return "busy"
    if base in IDLE_STATES:
        return "idle"
    return "part" if base == "mixed" else "busy"


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
