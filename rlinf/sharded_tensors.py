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
"""Bytes of small tensors gathered at once, because each round costs a few milliseconds."""


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor."""
    # The import takes a second, and where nothing has made it there are none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, without a copy."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def storage_key(tensor: Tensor) -> object:
    """Return a key that is equal for several names of one tensor, such as tied weights."""
    own = local_shard(tensor)
    return (own.data_ptr(), own.shape, own.dtype) if own.numel() else id(tensor)


def local_rows(tensor: Tensor) -> tuple[int, int]:
    """Return the range of rows of the full tensor that this process holds: begin and end.

    Raises:
        ValueError: the tensor is not sharded by rows.
    """
    if not is_sharded(tensor):
        return 0, tensor.shape[0] if tensor.dim() else 1
    mesh, dim = _shared_by(tensor)
    rows = tensor.shape[0]
    each = -(-rows // mesh.size(dim))
    begin = min(rows, mesh.get_local_rank(dim) * each)
    return begin, min(rows, begin + each)


def gather_full_tensors(
    named: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors one after the other; all processes must consume every one.

    Tensors that no other process shares are not copied.
    """
    bucket: list[tuple[str, DTensor]] = []
    size = 0
    for name, tensor in named:
        own = tensor.detach()
        if not is_sharded(own) or _ways(own) == 1:
            yield name, local_shard(own)
        elif own.nbytes > bucket_bytes:
            yield name, _large(own)
        else:
            if size + own.nbytes > bucket_bytes:
                yield from _small(bucket)
                bucket, size = [], 0
            bucket.append((name, own))
            size += own.nbytes
    if bucket:
        yield from _small(bucket)


def _large(tensor: DTensor) -> Tensor:
    """Gather one tensor: each process broadcasts its rows to their place.

    Gloo's all-gather would need another full tensor of memory.
    """
    mesh, dim = _shared_by(tensor)
    own = _bytes(local_shard(tensor))
    whole = own.new_empty(tensor.nbytes)
    each = _part_bytes(tensor, mesh.size(dim))
    for rank in range(mesh.size(dim)):
        part = whole[rank * each : (rank + 1) * each]
        if rank == mesh.get_local_rank(dim):
            part.copy_(own)
        if len(part):
            torch.distributed.broadcast(part, group=mesh.get_group(dim), group_src=rank)
    return whole.view(tensor.dtype).view(tensor.shape)


def _small(bucket: list[tuple[str, DTensor]]) -> Iterator[tuple[str, Tensor]]:
    mesh, dim = _shared_by(bucket[0][1])
    ways = mesh.size(dim)
    sizes = [_part_bytes(tensor, ways) for _, tensor in bucket]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    parts = [_bytes(local_shard(tensor)) for _, tensor in bucket]
    own = parts[0].new_zeros(sum(sizes))
    for start, part in zip(starts, parts, strict=True):
        own[start : start + len(part)] = part
    every = own.new_empty(ways, len(own))
    torch.distributed.all_gather_single(every.view(-1), own, group=mesh.get_group(dim))
    for start, size, (name, tensor) in zip(starts, sizes, bucket, strict=True):
        whole = every[:, start : start + size].reshape(-1)[: tensor.nbytes]
        yield name, whole.view(tensor.dtype).view(tensor.shape)


def _part_bytes(tensor: DTensor, ways: int) -> int:
    """Return the bytes of the first part; as in torch.chunk, later parts may be shorter."""
    return -(-tensor.shape[0] // ways) * tensor.shape[1:].numel() * tensor.itemsize


def _shared_by(tensor: DTensor) -> tuple[DeviceMesh, int]:
    """Return the mesh and the dimension over which rows are sharded; other dimensions replicate.

    Raises:
        ValueError: the tensor is placed otherwise.
    """
    from torch.distributed.tensor import Replicate, Shard

    *others, last = tensor.placements
    if last != Shard(0) or any(placement != Replicate() for placement in others):
        raise ValueError(f"placed as {tensor.placements}, not by rows")
    return tensor.device_mesh, tensor.device_mesh.ndim - 1


def _ways(tensor: DTensor) -> int:
    mesh, dim = _shared_by(tensor)
    return mesh.size(dim)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
