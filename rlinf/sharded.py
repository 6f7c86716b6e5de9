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

BUCKET_BYTES = 32 << 20
"""What is gathered at once, of small tensors: each round takes the network a few milliseconds."""


def is_shared(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is one of those tensors."""
    # The import takes a second, and where nothing has made it there are none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, without a copy."""
    return tensor.to_local() if is_shared(tensor) else tensor


def memory(tensor: Tensor) -> object:
    """Equal for those that are one tensor under several names, as tied weights are."""
    own = local(tensor)
    return (own.data_ptr(), own.shape, own.dtype) if own.numel() else id(tensor)


def rows_of(tensor: Tensor) -> tuple[int, int]:
    """Which rows of the whole are this process's: begin and end.

    Raises:
        ValueError: it is not by rows that the tensor is shared out.
    """
    if not is_shared(tensor):
        return 0, tensor.shape[0] if tensor.dim() else 1
    mesh, dim = _shared_by(tensor)
    rows = tensor.shape[0]
    each = -(-rows // mesh.size(dim))
    begin = min(rows, mesh.get_local_rank(dim) * each)
    return begin, min(rows, begin + each)


def gathered(
    named: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """The tensors whole, one after the other; all processes that share them take every one.

    What no other process has a part of is not copied.
    """
    bucket: list[tuple[str, DTensor]] = []
    size = 0
    for name, tensor in named:
        own = tensor.detach()
        if not is_shared(own) or _ways(own) == 1:
            yield name, local(own)
            continue
        if bucket and size + own.nbytes > bucket_bytes:
            yield from _gathered(bucket, bucket_bytes)
            bucket, size = [], 0
        bucket.append((name, own))
        size += own.nbytes
    if bucket:
        yield from _gathered(bucket, bucket_bytes)


def _gathered(bucket: list[tuple[str, DTensor]], most: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket whole, by as many rounds as fit into it.

    Gloo copies what is gathered once more: a large tensor all at once would be there twice.
    """
    mesh, dim = _shared_by(bucket[0][1])
    ways, group = mesh.size(dim), mesh.get_group(dim)
    # As torch.chunk cuts: every process has as many rows, the last ones fewer or none.
    sizes = [-(-t.shape[0] // ways) * t.shape[1:].numel() * t.itemsize for _, t in bucket]
    own = [_bytes(local(tensor)) for _, tensor in bucket]
    wholes = [own[0].new_empty(tensor.nbytes) for _, tensor in bucket]
    step = max(1, min(most // ways, sum(sizes)))
    sent, every = own[0].new_zeros(step), own[0].new_empty(ways, step)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    for low in range(0, sum(sizes), step):
        # What of each tensor is in this round, counted in the bytes of one process.
        cuts = [
            (max(low - start, 0), min(low + step - start, size), start - low)
            for start, size in zip(starts, sizes, strict=True)
        ]
        for part, (begin, end, at) in zip(own, cuts, strict=True):
            if begin < (end := min(end, len(part))):
                sent[at + begin : at + end] = part[begin:end]
        torch.distributed.all_gather_single(every.view(-1), sent, group=group)
        for whole, size, (begin, end, at) in zip(wholes, sizes, cuts, strict=True):
            for rank in range(ways):
                to = min(rank * size + end, len(whole))
                if begin < end and rank * size + begin < to:
                    count = to - rank * size - begin
                    whole[to - count : to] = every[rank, at + begin : at + begin + count]
    for (name, tensor), whole in zip(bucket, wholes, strict=True):
        yield name, whole.view(tensor.dtype).view(tensor.shape)


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
