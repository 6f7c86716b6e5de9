"""Tensors whose rows several processes share, as in FSDP2: whose rows are whose, and the whole."""

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
"""What is gathered at once, of small tensors: each round takes the network a few milliseconds."""


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is one of those tensors."""
    # The import takes a second, and where nothing has made it there are none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, without a copy."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def storage_key(tensor: Tensor) -> object:
    """Equal for those that are one tensor under several names, as tied weights are."""
    own = local_shard(tensor)
    return (own.data_ptr(), own.shape, own.dtype) if own.numel() else id(tensor)


def local_rows(tensor: Tensor) -> tuple[int, int]:
    """Which rows of the whole are this process's: begin and end.

    Raises:
        ValueError: it is not by rows that the tensor is shared out.
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
    """The tensors whole, one after the other; all processes that share them take every one.

    What no other process has a part of is not copied.
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
    """One tensor whole: each process sends its rows to where they belong.

    Gloo gathers into memory of its own first, a whole tensor more.
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
    """Of the first part: as torch.chunk cuts, the last ones have fewer rows or none."""
    return -(-tensor.shape[0] // ways) * tensor.shape[1:].numel() * tensor.itemsize


def _shared_by(tensor: DTensor) -> tuple[DeviceMesh, int]:
    """The mesh and its dimension over which the rows are shared out; over others there are copies.

    Raises:
        ValueError: it is placed otherwise.
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
