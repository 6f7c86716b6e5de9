"""Shard a policy's parameters over processes with FSDP2; parameters get memory after sharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rlinf.device_memory import allocate_parameters, move_buffers, move_to_device
from rlinf.models.base import Policy


def create_mesh(device: torch.device, processes: int, replicas: int) -> DeviceMesh:
    """Return the device mesh; with several replicas it is 2D, with one replica per row."""
    if replicas == 1:
        return init_device_mesh(device.type, (processes,))
    shape, names = (replicas, processes // replicas), ("replicate", "shard")
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def apply_fsdp(
    policy: Policy,
    mesh: DeviceMesh,
    device: torch.device,
    precision: MixedPrecisionPolicy,
    *,
    wrap_min_bytes: int,
    reshard_after_forward: bool,
) -> tuple[Any, bool]:
    """Shard a policy's module. Parameters without memory get this process's shard of it.

    Returns:
        The root module, and whether it is the only FSDP unit.
    """
    module = policy.module
    is_meta = any(parameter.is_meta for parameter in module.parameters())
    if is_meta:
        move_buffers(module, device)
    else:
        move_to_device(module, device)
    # Units never span two networks, because one of them may be gathered without the other.
    units = [unit for stack in policy.block_stacks() for unit in _units(stack, wrap_min_bytes)]
    for unit in units:
        fully_shard(
            unit, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward
        )
    # The backward pass needs the root's parameters first, so they stay gathered.
    root: Any = fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    if is_meta:
        allocate_parameters(module, device)
        # ``_apply`` makes FSDP read its parameters again and pad them, before they are loaded.
        module._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]
        policy.load_weights()
    return root, not units


def shard_coordinates(mesh: DeviceMesh) -> tuple[int, int, int]:
    """Return the indices of this process's replica and shard, and the number of shards."""
    replica = mesh.get_local_rank(0) if mesh.ndim > 1 else 0
    return replica, mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)


def _units(blocks: Sequence[nn.Module], min_bytes: int) -> list[list[nn.Module]]:
    """Group adjacent blocks into units of at least ``min_bytes``; none if the total is less."""
    units: list[list[nn.Module]] = []
    size = min_bytes
    for block in blocks:
        if size >= min_bytes:
            units.append([])
            size = 0
        units[-1].append(block)
        size += sum(p.nbytes for p in block.parameters())
    return units if len(units) > 1 or size >= min_bytes else []
