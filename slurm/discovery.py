"""Discovery of the cluster's inventory: a few queries to Slurm and the parsers of its answers.

Each query runs once for the whole cluster. Parsing takes time linear in the text, so thousands of
nodes are no problem. Formats are those of Slurm 20.11 to 25.x (docs/howto/slurm.md).
"""

from __future__ import annotations

import functools
import os
import pwd
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from rlinf.errors import SlurmError
from slurm import gpus
from slurm.client import SlurmClient, parse_gpus, parse_minutes
from slurm.inventory import (
    SCHEMA,
    AccountingLimits,
    Association,
    Inventory,
    NodeGroup,
    PartitionInventory,
    QosLimits,
)

# sinfo's -o never truncates a value; -O does at its column widths.
SINFO_NODES = ("sinfo", "-h", "-N", "-o", "%N|%R|%T|%c|%m|%G|%f")
SCONTROL_PARTITIONS = ("scontrol", "-o", "show", "partition")
# -d adds GresUsed, which is present even if accounting does not track GPUs.
SCONTROL_NODE_USAGE = ("scontrol", "-o", "-d", "show", "node")
# Only -O prints the total resources of a pending job (%b omits --gpus). Its values have no blanks
# and fit the widths; -r prints each element of an array.
SQUEUE_PENDING = (
    *("squeue", "-h", "-r", "-t", "PD", "-O"),
    "Partition:200,NumNodes:12,tres-alloc:250,tres-per-node:100,Reason:60",
)
SACCTMGR_QOS = (
    *("sacctmgr", "-n", "-P", "show", "qos"),
    "format=Name,Priority,Preempt,MaxWall,MaxJobsPU,MaxSubmitPU,MaxTRESPU,MaxTRES,GrpTRES",
)
SACCTMGR_ASSOCIATIONS = (
    *("sacctmgr", "-n", "-P", "show", "assoc"),
    "format=Cluster,Account,Partition,QOS,MaxJobs,MaxSubmit,MaxWall,MaxTRES,GrpTRES,DefaultQOS",
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
NOT_WAITING_FOR_NODES = re.compile(
    r"\(?(?:JobHeld|Dependency|BeginTime|JobArrayTaskLimit|BadConstraints)"
)
"""Reasons of pending jobs that would not start even if nodes were free."""


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


class PartitionNode(NamedTuple):
    """A node as a member of one partition."""

    name: str
    partition: str
    state: str
    """Slurm's text, with its flags as a suffix: ``mixed-``."""
    cpus: int
    mem_mb: int
    gres: str
    """Slurm's text: ``gpu:a100:4``."""
    features: str
    """Separated by commas."""


class PendingDemand(NamedTuple):
    """The jobs that wait for a partition, and the GPUs that they request."""

    jobs: int
    gpus: int


NO_DEMAND = PendingDemand(0, 0)


def discover_inventory(client: SlurmClient, now: datetime) -> Inventory:
    """Return the inventory of this cluster as this user sees it, without settings of a site file.

    Raises:
        SlurmError: Slurm is not installed or does not answer.
    """
    return build_inventory(query_slurm(client), now)


def query_slurm(client: SlurmClient) -> SlurmOutput:
    """Run all queries. A cluster without accounting is not an error.

    Raises:
        SlurmError: Slurm is not installed or does not answer.
    """
    output = {
        "version": client.version(),
        "nodes": client.run(*SINFO_NODES),
        "partitions": client.run(*SCONTROL_PARTITIONS),
        "usage": client.run(*SCONTROL_NODE_USAGE),
        "pending": client.run(*SQUEUE_PENDING),
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
    nodes_by_partition: dict[str, list[PartitionNode]] = defaultdict(list)
    for node in parse_nodes(output.nodes):
        nodes_by_partition[node.partition].append(node)
    gpus_in_use = parse_usage(output.usage)
    demand = parse_pending(output.pending)
    partitions = {}
    for record in parse_partition_records(output.partitions):
        name = record["PartitionName"]
        whole_nodes = record.get("OverSubscribe") == "EXCLUSIVE"
        groups = group_nodes(nodes_by_partition.get(name, ()), gpus_in_use, whole_nodes=whole_nodes)
        partitions[name] = build_partition(record, groups, demand.get(name, NO_DEMAND))
    limits = None
    if output.qos is not None and output.associations is not None:
        limits = parse_limits(output.qos, output.associations)
    return Inventory(
        schema_version=SCHEMA,
        created_at=created_at,
        slurm_version=output.version,
        partitions=partitions,
        limits=limits,
        cluster=(output.settings or {}).get("ClusterName", ""),
        enforces_limits=output.settings is None or enforces_limits(output.settings),
    )


def enforces_limits(settings: Mapping[str, str]) -> bool:
    """Return True if Slurm's configuration enforces the limits of accounting."""
    words = settings.get("AccountingStorageEnforce", "").split(",")
    return not ENFORCING_WORDS.isdisjoint(words)


def parse_nodes(text: str) -> list[PartitionNode]:
    """Parse ``sinfo -h -N -o "%N|%R|%T|%c|%m|%G|%f"``: a line per node and partition."""
    nodes = []
    for line in text.splitlines():
        cells = line.strip().split("|")
        if len(cells) >= 7 and _are_numbers(cells[3:5]):
            name, partition, state, cpus, memory, gres, features = cells[:7]
            nodes.append(
                PartitionNode(
                    name, partition, state, _to_int(cpus), _to_int(memory), gres, features
                )
            )
    return nodes


def parse_partition_records(text: str) -> list[dict[str, str]]:
    """Parse ``scontrol -o show partition``: a line of ``Key=value`` words per partition."""
    records = []
    for line in text.splitlines():
        if line.startswith("PartitionName="):
            records.append(dict(word.split("=", 1) for word in line.split() if "=" in word))
    return records


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
    )


_NAME = re.compile(r"NodeName=(\S+)")
_GRES_USED = re.compile(r" GresUsed=(\S+)")
_ALLOCATED = re.compile(r" AllocTRES=(\S+)")


def parse_usage(text: str) -> dict[str, dict[str, int]]:
    """Parse ``scontrol -o -d show node``: each node's GPUs in use, by type.

    The numbers come from GresUsed, or from AllocTRES if a version or plugin omits GresUsed. A node
    with neither is skipped.
    """
    gpus_in_use = {}
    for line in text.splitlines():
        name_match = _NAME.match(line)
        if name_match is None:
            continue
        if gres_match := _GRES_USED.search(line):
            gpus_in_use[name_match[1]] = _gpus(gres_match[1])
        elif (tres_match := _ALLOCATED.search(line)) and "gres/gpu" in tres_match[1]:
            gpus_in_use[name_match[1]] = _gpus_of_tres(tres_match[1])
    return gpus_in_use


_PENDING_JOB = re.compile(r"\s*\S+\s+\d\S*\s+(?:\S*=\S*|N/A)\s+\S+\s+\S")
"""A line of squeue's answer to :data:`SQUEUE_PENDING`."""


def parse_pending(text: str) -> dict[str, PendingDemand]:
    """Parse squeue's answer to :data:`SQUEUE_PENDING`.

    A job that names several partitions waits in each of them. Its number of GPUs comes from its
    total resources, or from its resources per node if accounting does not track GPUs.
    """
    jobs: Counter[str] = Counter()
    gpus_by_partition: Counter[str] = Counter()
    for line in text.splitlines():
        cells = line.split(maxsplit=4)
        if len(cells) < 5 or not _PENDING_JOB.match(line) or NOT_WAITING_FOR_NODES.match(cells[4]):
            continue
        partitions, nodes, total, per_node, _ = cells
        requested = _gpus_of_tres(total) or _gpus_of_tres(per_node)
        num_gpus = sum(requested.values()) * (1 if "gres/gpu" in total else max(_to_int(nodes), 1))
        for partition in partitions.split(","):
            jobs[partition] += 1
            gpus_by_partition[partition] += num_gpus
    return {name: PendingDemand(count, gpus_by_partition[name]) for name, count in jobs.items()}


def parse_limits(qos: str, associations: str) -> AccountingLimits:
    """Parse the answers that :func:`query_accounting` returns."""
    return AccountingLimits(qos=parse_qos(qos), associations=parse_associations(associations))


def parse_qos(text: str) -> dict[str, QosLimits]:
    """Parse sacctmgr's answer to :data:`SACCTMGR_QOS`."""
    limits = {}
    for line in text.splitlines():
        cells = line.strip().split("|")
        if len(cells) < 9 or not cells[0] or not _are_numbers([cells[1], *cells[4:6]]):
            continue
        name, priority, preempts, wall, jobs, submit, per_user, per_job, total = cells[:9]
        limits[name] = QosLimits(
            priority=_to_int(priority),
            preempts=_words(preempts),
            max_wall_min=parse_minutes(wall),
            max_jobs_per_user=_int_or_none(jobs),
            max_submit_per_user=_int_or_none(submit),
            max_tres_per_user=parse_tres(per_user),
            max_tres_per_job=parse_tres(per_job),
            max_tres_all_jobs=parse_tres(total),
        )
    return limits


def parse_associations(text: str) -> tuple[Association, ...]:
    """Parse sacctmgr's answer to :data:`SACCTMGR_ASSOCIATIONS`."""
    associations = []
    for line in text.splitlines():
        cells = line.strip().split("|")
        if len(cells) < 10 or not all(cells[:2]) or not _are_numbers(cells[4:6]):
            continue
        cluster, account, partition, qos, jobs, submit, wall, per_job, total, default = cells[:10]
        associations.append(
            Association(
                cluster=cluster,
                account=account,
                partition=partition,
                qos=_words(qos),
                max_jobs=_int_or_none(jobs),
                max_submit=_int_or_none(submit),
                max_wall_min=parse_minutes(wall),
                max_tres_per_job=parse_tres(per_job),
                max_tres_all_jobs=parse_tres(total),
                default_qos=default,
            )
        )
    return tuple(associations)


def parse_tres(text: str) -> dict[str, int]:
    """Parse ``cpu=8,mem=16G,gres/gpu:a100=2``; memory is in MiB, also without a suffix."""
    amounts = {}
    for word in text.split(","):
        if match := re.fullmatch(r"mem=([\d.]+)([KMGTP]?)", word):
            amounts["mem"] = round(float(match[1]) * 1024.0 ** ("KMGTP".index(match[2] or "M") - 1))
        elif match := re.fullmatch(r"([^=]+)=(\d+)", word):
            amounts[match[1]] = int(match[2])
    return amounts


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
    for ((gpu_type, gpus_per_node, _), cpus, mem_mb), nodes in by_hardware.items():
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
def _gpu_hardware(gres: str, features: str) -> tuple[str, int, tuple[str, ...]]:
    """Return the GPU type, the count, and the features that describe the GPU."""
    gpus_by_type = _gpus(gres)
    gpu_type = min(gpus_by_type, key=lambda name: (-gpus_by_type[name], name), default="")
    gpu_features = sorted(feature for feature in _words(features) if gpus.is_gpu_feature(feature))
    return gpu_type, gpus_by_type.get(gpu_type, 0), tuple(gpu_features)


@functools.lru_cache(maxsize=4096)
def _gpus(gres: str) -> dict[str, int]:
    # An untyped GRES in use is written gpu:(null):2.
    return parse_gpus(gres)


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


_GPU_AMOUNT = re.compile(r"gpu(?::([^:=,]+))?[:=](\d+)(?=$|,|\()")


@functools.lru_cache(maxsize=4096)
def _gpus_of_tres(text: str) -> dict[str, int]:
    """Parse GPUs by type of ``gres/gpu=4,gres/gpu:a100=4``, ``gres:gpu:a100:2``, ``gres/gpu:2``.

    An amount without a type is the total of all types, so it becomes the only entry.
    """
    gpus_by_type = {gpu_type: int(amount) for gpu_type, amount in _GPU_AMOUNT.findall(text)}
    return {"": gpus_by_type[""]} if "" in gpus_by_type else gpus_by_type


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _to_int(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits.group()) if digits else 0


def _are_numbers(words: Iterable[str]) -> bool:
    """Return True if all words are numbers or empty, as in Slurm's lines but hardly in a banner."""
    return all(re.fullmatch(r"(?:\d+\+?)?", word) for word in words)


def _int_or_none(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _value_or_empty(text: str) -> str:
    return "" if text in ("N/A", "(null)", "none") else text


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in _value_or_empty(text).split(",") if word)


def _allowed(text: str) -> tuple[str, ...] | None:
    return None if text == "ALL" else _words(text)
