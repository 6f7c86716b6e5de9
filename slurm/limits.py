"""Checking what a job asks for against what the cluster has, before anything is submitted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rlinf.errors import PlanError, nearest
from slurm.client import LikeNodes, Partition, default_partition, partition_names
from slurm.jobs import Resources


def check_resources(needs: Resources, partitions: Mapping[str, Partition], key: str) -> None:
    """See that a partition, or each of a list (``a100,h100``), can give what a job needs.

    Args:
        key: of the plan, where it says so: ``stages.train``.

    Raises:
        PlanError: unknown or closed partition, unknown GPU type, too many nodes, GPUs, CPUs or
            minutes, or too few nodes that have all of it at once.
    """
    where = f"plan: {key}"
    for partition in _chosen(needs.partition, partitions, where):
        _check(needs, partition, where)


def _chosen(
    names: str | None, partitions: Mapping[str, Partition], where: str
) -> Iterator[Partition]:
    if names is None:
        names = default_partition(partitions)
        if names is None:
            raise PlanError(
                f"{where}.partition: this cluster has no default partition{nearest('', partitions)}"
            )
    for name in partition_names(names):
        if name not in partitions:
            raise PlanError(
                f"{where}.partition: no partition {name!r} here{nearest(name, partitions)}"
            )
        yield partitions[name]


def _check(needs: Resources, partition: Partition, where: str) -> None:
    at = f"partition {partition.name!r}"
    if not partition.available:
        raise PlanError(
            f"{where}.partition: {at} is {partition.state} and starts no jobs; choose another, or "
            "ask when it will be up"
        )
    if needs.nodes > partition.nodes:
        raise PlanError(f"{where}.nodes: {needs.nodes} asked, {at} has {partition.nodes}")
    if partition.max_nodes is not None and needs.nodes > partition.max_nodes:
        raise PlanError(
            f"{where}.nodes: {needs.nodes} asked, {at} allows a job {partition.max_nodes} "
            "(MaxNodes); lower it or choose another partition"
        )
    _check_nodes(needs, partition.groups, where, at)
    limit = partition.time_limit_min
    if needs.time_min and limit is not None and needs.time_min > limit:
        raise PlanError(
            f"{where}.time_min: {needs.time_min} minutes asked, {at} allows {limit}; "
            "lower it (a stage that runs out of time is requeued and goes on) or choose another "
            "partition"
        )


def _check_nodes(needs: Resources, groups: Sequence[LikeNodes], where: str, at: str) -> None:
    """See that enough nodes have all that is asked of each, at once."""
    gpus, kind = needs.gpus_per_node, needs.gpu_type
    cpus, mem_mb = needs.cpus_per_task * needs.tasks_per_node, needs.mem_mb or 0
    if gpus:
        there = {name: 0 for group in groups for name in group.gpus}
        if not there:
            raise PlanError(f"{where}.gpus: {at} has no GPUs")
        if kind is not None and kind not in there:
            raise PlanError(f"{where}.gpu_type: {at} has no GPU {kind!r}{nearest(kind, there)}")
    left = list(groups)
    for key, asked, has in (
        ("gpus", gpus, lambda group: _gpus(group, kind)),
        ("cpus", cpus, lambda group: group.cpus or math.inf),
        ("mem_mb", mem_mb, lambda group: group.mem_mb or math.inf),
    ):
        most = max(map(has, groups), default=math.inf)
        if asked > most:
            raise PlanError(f"{where}.{key}: {asked} asked, nodes of {at} have {most}")
        left = [group for group in left if asked <= has(group)]
    fit = sum(group.count for group in left)
    if needs.nodes > fit:
        each = [f"{gpus} {kind or 'GPUs'}"] * bool(gpus) + [f"{cpus} CPUs"]
        each += [f"{mem_mb} MiB"] * bool(mem_mb)
        there_are = "; ".join(f"{group.count} with {group}" for group in groups)
        raise PlanError(
            f"{where}.nodes: {needs.nodes} asked with {', '.join(each)} on each, {at} has {fit} "
            f"such nodes ({there_are})"
        )


def _gpus(group: LikeNodes, kind: str | None) -> int:
    """GPUs per node; without a type Slurm gives any."""
    return sum(group.gpus.values()) if kind is None else group.gpus.get(kind, 0)
