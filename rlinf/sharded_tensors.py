"""Tensors sharded by rows over processes, as in FSDP2: local rows and full tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

BUCKET_BYTES = 8 << 20
"""Bytes of small tensors gathered at once, because each gather takes a few milliseconds."""


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor."""
    # Importing DTensor takes a second. Until another module has imported it, none exists.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, without a copy."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def storage_key(tensor: Tensor) -> object:
    """Return a key that is equal for several names of one tensor, such as tied weights."""
    shard = local_shard(tensor)
    return (shard.data_ptr(), shard.shape, shard.dtype) if shard.numel() else id(tensor)


def local_rows(tensor: Tensor) -> tuple[int, int]:
    """Return the range of rows, start and stop, of the full tensor that this process holds.

    Raises:
        ValueError: the tensor is not sharded by rows.
    """
    if not is_sharded(tensor):
        return 0, tensor.shape[0] if tensor.dim() else 1
    mesh, dim = _shard_dim(tensor)
    rows = tensor.shape[0]
    rows_per_process = -(-rows // mesh.size(dim))
    start = min(rows, mesh.get_local_rank(dim) * rows_per_process)
    return start, min(rows, start + rows_per_process)


def gather_full_tensors(
    named: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors one after the other; all processes must consume each tensor.

    Tensors that are not sharded over several processes are not copied.
    """
    bucket: list[tuple[str, DTensor]] = []
    size = 0
    for name, tensor in named:
        detached = tensor.detach()
        if not is_sharded(detached) or _num_shards(detached) == 1:
            yield name, local_shard(detached)
        elif detached.nbytes > bucket_bytes:
            yield name, _gather_large(detached)
        else:
            if size + detached.nbytes > bucket_bytes:
                yield from _gather_bucket(bucket)
                bucket, size = [], 0
            bucket.append((name, detached))
            size += detached.nbytes
    if bucket:
        yield from _gather_bucket(bucket)


def _gather_large(tensor: DTensor) -> Tensor:
    """Gather one tensor: each process broadcasts its rows into the full tensor.

    Gloo's all-gather would need memory for another full tensor.
    """
    mesh, dim = _shard_dim(tensor)
    local = _bytes(local_shard(tensor))
    full = local.new_empty(tensor.nbytes)
    shard_bytes = _shard_bytes(tensor, mesh.size(dim))
    for rank in range(mesh.size(dim)):
        shard = full[rank * shard_bytes : (rank + 1) * shard_bytes]
        if rank == mesh.get_local_rank(dim):
            shard.copy_(local)
        if len(shard):
            torch.distributed.broadcast(shard, group=mesh.get_group(dim), group_src=rank)
    return full.view(tensor.dtype).view(tensor.shape)


def _gather_bucket(bucket: list[tuple[str, DTensor]]) -> Iterator[tuple[str, Tensor]]:
    mesh, dim = _shard_dim(bucket[0][1])
    num_shards = mesh.size(dim)
    sizes = [_shard_bytes(tensor, num_shards) for _, tensor in bucket]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    shards = [_bytes(local_shard(tensor)) for _, tensor in bucket]
    local = shards[0].new_zeros(sum(sizes))
    for start, shard in zip(starts, shards, strict=True):
        local[start : start + len(shard)] = shard
    gathered = local.new_empty(num_shards, len(local))
    torch.distributed.all_gather_single(gathered.view(-1), local, group=mesh.get_group(dim))
    for start, size, (name, tensor) in zip(starts, sizes, bucket, strict=True):
        full = gathered[:, start : start + size].reshape(-1)[: tensor.nbytes]
        yield name, full.view(tensor.dtype).view(tensor.shape)


def _shard_bytes(tensor: DTensor, num_shards: int) -> int:
    """Return the bytes of the first shard; as in torch.chunk, later shards may be smaller."""
    return -(-tensor.shape[0] // num_shards) * tensor.shape[1:].numel() * tensor.itemsize


def _shard_dim(tensor: DTensor) -> tuple[DeviceMesh, int]:
    """Return the mesh and its dimension over which rows are sharded; other dimensions replicate.

    Raises:
        ValueError: the tensor has another placement.
    """
    from torch.distributed.tensor import Replicate, Shard

    *others, last = tensor.placements
    if last != Shard(0) or any(placement != Replicate() for placement in others):
        raise ValueError(f"placed as {tensor.placements}, not by rows")
    return tensor.device_mesh, tensor.device_mesh.ndim - 1


def _num_shards(tensor: DTensor) -> int:
    mesh, dim = _shard_dim(tensor)
    return mesh.size(dim)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
