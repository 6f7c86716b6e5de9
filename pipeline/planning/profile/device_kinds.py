"""Kinds of devices: the GPUs of one type in a partition, or its CPUs if it has no GPUs."""

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
    """The devices of one type in a partition."""

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
    """Name of the GPU in GRES; "" without GPUs or Slurm."""
    gpu_model: str = ""
    """Key of :data:`slurm.gpus.GPUS`, or without Slurm the name from CUDA; "" if unknown."""
    duty_cycle: float = 1.0
    """Share of the time that processes may run; below 1 only on dev clusters."""
    constraint: str = ""
    """Value of sbatch's ``--constraint``: a feature that only nodes of this kind have, needed if
    GPUs of one name differ, such as ``a100`` with 40 and 80 GB; else ""."""

    @property
    def devices_per_node(self) -> int:
        """The number of GPUs per node, or of CPUs without GPUs.

        Each process needs a CPU, so GPUs without one are not counted.
        """
        gpus, cpus = self.gpus_per_node, self.cpus_per_node  # 0 CPUs: their number is unknown
        return min(gpus, cpus or gpus) if gpus else max(1, cpus)


def list_kinds(inventory: Inventory, site: SiteConfig) -> dict[str, DeviceKind]:
    """Return all kinds of a cluster by name, without unavailable and empty partitions.

    If several groups of a partition have the same type of GPU, the kind is the largest group; see
    :func:`describe_excluded_nodes`.

    Raises:
        PlanError: no node can be used now.
    """
    kinds: dict[str, DeviceKind] = {}
    for name, partition in inventory.partitions.items():
        types = {group.gpu_type for group in partition.groups if group.gpus_per_node}
        for group in sorted(partition.groups, key=lambda g: g.usable_nodes):
            needs_type = len(types) > 1 and group.gpus_per_node > 0
            kind = f"{name}:{group.gpu_type}" if needs_type else name
            if partition.is_available and group.usable_nodes and not _lacks_gpus(group, types):
                kinds[kind] = DeviceKind(
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
                    constraint=_constraint(
                        group, partition.groups, site.settings_for(name).constraint
                    ),
                )
    if not kinds:
        down = sum(g.down_nodes for p in inventory.partitions.values() for g in p.groups)
        unavailable = [name for name, p in inventory.partitions.items() if not p.is_available]
        raise PlanError(
            f"no node of this cluster can be used now: {down} are down or drained, partitions "
            f"that are closed: {', '.join(unavailable) or 'none'}"
        )
    return dict(sorted(kinds.items()))


def node_group_of_kind(kind: DeviceKind, inventory: Inventory) -> NodeGroup | None:
    """Return the largest node group of a kind; None if no node can be used."""
    groups = inventory.partitions[kind.partition].groups
    matching = [g for g in groups if g.gpu_type == kind.gpu_type and g.usable_nodes]
    # If several are largest, take the last one, as list_kinds does.
    return max(reversed(matching), key=lambda group: group.usable_nodes, default=None)


def describe_excluded_nodes(kind: DeviceKind, inventory: Inventory) -> str:
    """Describe nodes with the same GPU name that are not part of the kind; "" if none exist."""
    kind_group = node_group_of_kind(kind, inventory)
    excluded = [
        group
        for group in inventory.partitions[kind.partition].groups
        if group is not kind_group and group.usable_nodes and group.gpu_type == kind.gpu_type
    ]
    if kind_group is None or not excluded:
        return ""
    nodes = " and ".join(f"{group.usable_nodes} of {group.description}" for group in excluded)
    reason = ""
    if not kind.constraint and any(_hardware(g) != _hardware(kind_group) for g in excluded):
        reason = ", but jobs may run there, because no feature distinguishes them"
    return f"{kind.name} is the nodes of {kind_group.description}; left out are {nodes}{reason}"


def _hardware(group: NodeGroup) -> tuple[object, ...]:
    """Return the properties in which groups with the same GPU name may differ."""
    return group.gpus_per_node, group.gpu_model, group.gpu_memory_gib


def _constraint(group: NodeGroup, groups: Sequence[NodeGroup], site_constraint: str | None) -> str:
    """Return a feature that only this group has among groups with the same GPU name, combined with
    the site's constraint; "" if these groups are equal, or if there is no such feature."""
    same_type = [g for g in groups if g.gpu_type == group.gpu_type]
    others = [g for g in same_type if _hardware(g) != _hardware(group)]
    if not group.gpus_per_node or not others:
        return ""
    other_features = {feature for other in others for feature in other.features}
    own_features = [f for f in group.features if f not in other_features]
    selected = next(iter([*filter(gpus.is_gpu_feature, own_features), *own_features]), "")
    if not selected or selected == site_constraint:
        return ""
    return f"({site_constraint})&{selected}" if site_constraint else selected


def _lacks_gpus(group: NodeGroup, types: set[str]) -> bool:
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
        PlanError: a partition does not exist, or has no usable nodes.
    """
    selected = []
    for requested in partitions:
        matching = [kind for kind in kinds.values() if requested in (kind.name, kind.partition)]
        if not matching:
            names = {kind.partition or kind.name for kind in kinds.values()}
            raise PlanError(
                f"--partition {requested}: no such partition with nodes that are up"
                f"{did_you_mean(requested, names)}"
            )
        selected += [kind for kind in matching if kind not in selected]
    return selected
