"""Kinds of devices: the equal GPUs of a partition, or processes if it has no GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.errors import PlanError, did_you_mean
from slurm import gpus
from slurm.inventory import Inventory, NodeGroup
from slurm.site import SiteConfig

LOCAL_KIND = "local"
"""Name of the kind of this machine."""


@dataclass(frozen=True)
class DeviceKind:
    """The equal devices of one partition."""

    name: str
    """``partition``, or ``partition:gpu_type`` if the partition has several types."""
    partition: str
    """Name of the partition; "" on a machine without Slurm."""
    nodes: int
    """Number of nodes that are not down."""
    cpus_per_node: int
    mem_mb_per_node: int
    gpus_per_node: int = 0
    gpu_type: str = ""
    gpu_model: str = ""
    duty_cycle: float = 1.0
    constraint: str = ""
    """Constraint that sbatch needs besides the GPU's name: the feature that distinguishes these
    nodes from others of the partition with the same GPU name (``a100`` of 40 and 80 GB)."""

    @property
    def devices_per_node(self) -> int:
        """The number of GPUs of a node, or of its CPUs."""
        return self.gpus_per_node or max(1, self.cpus_per_node)


def list_kinds(inventory: Inventory, site: SiteConfig) -> dict[str, DeviceKind]:
    """Return all kinds of a cluster by name, without closed and empty partitions.

    If several groups of a partition have one type of GPU, the larger is the kind; see
    :func:`describe_excluded_nodes`.

    Raises:
        PlanError: no node can be used now.
    """
    found: dict[str, DeviceKind] = {}
    for name, partition in inventory.partitions.items():
        types = {group.gpu_type for group in partition.groups if group.gpus_per_node}
        for group in sorted(partition.groups, key=lambda g: g.usable_nodes):
            several = len(types) > 1 and group.gpus_per_node > 0
            kind = f"{name}:{group.gpu_type}" if several else name
            if partition.is_available and group.usable_nodes and not _lesser(group, types):
                found[kind] = DeviceKind(
                    name=kind,
                    partition=name,
                    nodes=group.usable_nodes,
                    cpus_per_node=group.cpus_per_node,
                    mem_mb_per_node=group.mem_mb_per_node,
                    gpus_per_node=group.gpus_per_node,
                    gpu_type=group.gpu_type,
                    gpu_model=group.gpu_model,
                    duty_cycle=site.settings_for(name).duty_cycle_for(
                        group.gpu_type, *group.features
                    ),
                    constraint=_telling(
                        group, partition.groups, site.settings_for(name).constraint
                    ),
                )
    if not found:
        down = sum(g.down_nodes for p in inventory.partitions.values() for g in p.groups)
        closed = [name for name, p in inventory.partitions.items() if not p.is_available]
        raise PlanError(
            f"no node of this cluster can be used now: {down} are down or drained, partitions "
            f"that are closed: {', '.join(closed) or 'none'}"
        )
    return dict(sorted(found.items()))


def node_group_of_kind(kind: DeviceKind, inventory: Inventory) -> NodeGroup | None:
    """Return the largest node group of a kind; None if no node can be used."""
    groups = inventory.partitions[kind.partition].groups
    mine = [g for g in groups if g.gpu_type == kind.gpu_type and g.usable_nodes]
    # Among equals the last one, as in list_kinds.
    return max(reversed(mine), key=lambda group: group.usable_nodes, default=None)


def describe_excluded_nodes(kind: DeviceKind, inventory: Inventory) -> str:
    """Describe the nodes with the same GPU name that do not belong to a kind; "" if there are
    none."""
    own = node_group_of_kind(kind, inventory)
    others = [
        group
        for group in inventory.partitions[kind.partition].groups
        if group is not own and group.usable_nodes and group.gpu_type == kind.gpu_type
    ]
    if own is None or not others:
        return ""
    nodes = " and ".join(f"{group.usable_nodes} of {group.description}" for group in others)
    why = ""
    if not kind.constraint and any(_gpu(group) != _gpu(own) for group in others):
        why = ", but jobs may run there, for no feature tells them apart"
    return f"{kind.name} is the nodes of {own.description}; left out are {nodes}{why}"


def _gpu(group: NodeGroup) -> tuple[object, ...]:
    return group.gpus_per_node, group.gpu_model, group.gpu_memory_gib


def _telling(group: NodeGroup, groups: Sequence[NodeGroup], given: str | None) -> str:
    """Return the constraint for a group whose GPU name is ambiguous: its distinguishing feature,
    combined with the site file's constraint; "" if not needed or if no feature distinguishes it."""
    others = [g for g in groups if g.gpu_type == group.gpu_type and _gpu(g) != _gpu(group)]
    if not group.gpus_per_node or not others:
        return ""
    theirs = {feature for other in others for feature in other.features}
    mine = [f for f in group.features if f not in theirs]
    telling = next(iter([*filter(gpus.is_gpu_feature, mine), *mine]), "")
    if not telling or telling == given:
        return ""
    return f"({given})&{telling}" if given else telling


def _lesser(group: NodeGroup, types: set[str]) -> bool:
    """Return True for nodes without GPUs in a partition with GPUs."""
    return bool(types) and not group.gpus_per_node


def local_kind() -> DeviceKind:
    """Return the kind of this machine: its GPUs, or the CPUs that this process may use."""
    import psutil
    import torch

    count = torch.cuda.device_count()
    return DeviceKind(
        name=LOCAL_KIND,
        partition="",
        nodes=1,
        cpus_per_node=len(os.sched_getaffinity(0)),
        mem_mb_per_node=psutil.virtual_memory().total >> 20,
        gpus_per_node=count,
        gpu_model=torch.cuda.get_device_name(0) if count else "",
    )


def select_kinds(kinds: dict[str, DeviceKind], partitions: Sequence[str]) -> list[DeviceKind]:
    """Return the kinds of some partitions; names of kinds are accepted too.

    Raises:
        PlanError: there is no such partition, or none of its nodes is up.
    """
    chosen = []
    for wanted in partitions:
        mine = [kind for kind in kinds.values() if wanted in (kind.name, kind.partition)]
        if not mine:
            names = {kind.partition or kind.name for kind in kinds.values()}
            raise PlanError(
                f"--partition {wanted}: no such partition with nodes that are up"
                f"{did_you_mean(wanted, names)}"
            )
        chosen += [kind for kind in mine if kind not in chosen]
    return chosen
