"""Kinds of devices: the like GPUs of a partition, or processes where there are none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.errors import PlanError, did_you_mean
from slurm import gpus
from slurm.inventory import Inventory, NodeGroup
from slurm.site import SiteConfig

LOCAL_KIND = "local"
"""Name of the kind that this machine is."""


@dataclass(frozen=True)
class DeviceKind:
    """Like devices of one partition."""

    name: str
    """``partition``, or ``partition:gpu_type`` where the partition has several types."""
    partition: str
    """"" on a machine without Slurm."""
    nodes: int
    """Nodes that are not down."""
    cpus_per_node: int
    mem_mb_per_node: int
    gpus_per_node: int = 0
    gpu_type: str = ""
    gpu_model: str = ""
    duty_cycle: float = 1.0
    constraint: str = ""
    """What sbatch needs besides the GPU's name to find these nodes: the feature that tells them
    from others of the partition, whose GPUs are called the same (``a100`` of 40 and 80 GB)."""

    @property
    def devices_per_node(self) -> int:
        """GPUs of a node, or its CPUs."""
        return self.gpus_per_node or max(1, self.cpus_per_node)


def list_kinds(inventory: Inventory, site: SiteConfig) -> dict[str, DeviceKind]:
    """All kinds of a cluster, by name; partitions that are closed or have no nodes are left out.

    Of groups of a partition with one type of GPU the larger is the kind; see :func:`left_out`.

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
    """The largest group of nodes of a kind; None: none of them can be used."""
    groups = inventory.partitions[kind.partition].groups
    mine = [g for g in groups if g.gpu_type == kind.gpu_type and g.usable_nodes]
    # Of equals the last, as list_kinds has it.
    return max(reversed(mine), key=lambda group: group.usable_nodes, default=None)


def describe_excluded_nodes(kind: DeviceKind, inventory: Inventory) -> str:
    """Which nodes with the same GPUs by name are not among those of a kind; "": none."""
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
    """The feature of a group that no other with the same name for another GPU has, with the
    constraint that a site file gives all jobs there; "" where it is not needed, or none tells."""
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
    """Whether these are nodes without GPUs in a partition that has some with."""
    return bool(types) and not group.gpus_per_node


def local_kind() -> DeviceKind:
    """This machine: its GPUs, or the CPUs this process may use."""
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
    """The kinds of some partitions; a kind's own name is understood too.

    Raises:
        PlanError: there is no such partition, or no node of it is up.
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
