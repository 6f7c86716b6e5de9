"""Checking what a job asks for against what the cluster has, before anything is submitted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlinf.errors import PlanError, nearest
from slurm.client import Partition, partition_names
from slurm.jobs import Resources


def check_resources(needs: Resources, partitions: Mapping[str, Partition], key: str) -> None:
    """See that a partition, or each of a list (``a100,h100``), can give what a job needs.

    Args:
        key: of the plan, where it says so: ``stages.train``.

    Raises:
        PlanError: unknown or closed partition, unknown GPU type, too many nodes, GPUs, CPUs or
            minutes.
    """
    where = f"plan: {key}"
    for partition in _chosen(needs.partition, partitions, where):
        _check(needs, partition, where)


def _chosen(
    names: str | None, partitions: Mapping[str, Partition], where: str
) -> Iterator[Partition]:
    if names is None:
        partition = next((p for p in partitions.values() if p.default), None)
        if partition is None:
            raise PlanError(
                f"{where}.partition: this cluster has no default partition{nearest('', partitions)}"
            )
        yield partition
        return
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
    if needs.gpus_per_node:
        if not partition.gpus:
            raise PlanError(f"{where}.gpus: {at} has no GPUs")
        if needs.gpu_type is not None and needs.gpu_type not in partition.gpus:
            hint = nearest(needs.gpu_type, partition.gpus)
            raise PlanError(f"{where}.gpu_type: {at} has no GPU {needs.gpu_type!r}{hint}")
        kinds = partition.gpus
        most = kinds[needs.gpu_type] if needs.gpu_type else max(kinds.values())
        if needs.gpus_per_node > most:
            raise PlanError(f"{where}.gpus: {needs.gpus_per_node} asked, nodes of {at} have {most}")
    cpus = needs.cpus_per_task * needs.tasks_per_node
    if partition.cpus_per_node and cpus > partition.cpus_per_node:
        raise PlanError(f"{where}.cpus: {cpus} asked, nodes of {at} have {partition.cpus_per_node}")
    if needs.mem_mb and partition.mem_mb_per_node and needs.mem_mb > partition.mem_mb_per_node:
        raise PlanError(
            f"{where}.mem_mb: {needs.mem_mb} asked, nodes of {at} have {partition.mem_mb_per_node}"
        )
    limit = partition.time_limit_min
    if needs.time_min and limit is not None and needs.time_min > limit:
        raise PlanError(
            f"{where}.time_min: {needs.time_min} minutes asked, {at} allows {limit}; "
            "lower it (a stage that runs out of time is requeued and goes on) or choose another "
            "partition"
        )
