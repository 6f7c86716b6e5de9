"""One copy of weights per node, which all processes of a trainer on the node share.

Each process of a pool that trains and generates in turns needs the full weights. With eight
processes on a node, separate copies of a 7 B model in float32 would take 224 GB of its memory.
"""

from __future__ import annotations

import logging
import mmap
import zlib
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf.errors import StorageError
from rlinf.safetensors_io import StreamedState
from rlinf.shared_memory import (
    attach_segment,
    create_segment,
    new_segment_name,
    remove_segment,
    shared_memory_id,
)

ALIGNMENT = 64
"""Bytes to which the tensors in a segment are aligned."""
NAME_BYTES = 96
"""Bytes in which processes send each other the name of a segment."""
log = logging.getLogger("rlinf")


def collect_once_per_node(
    open_stream: Callable[..., StreamedState], *, is_needed: bool
) -> dict[str, Tensor] | None:
    """Return full weights on the CPU that processes of a node share; a collective operation.

    The lowest rank of each node that needs them writes them into shared memory. If there is not
    enough of it, each process gets a copy of its own. The memory is freed with the last tensor,
    also if all processes are killed.

    Args:
        open_stream: :meth:`rlinf.trainers.base.Trainer.stream_weights`.
        is_needed: whether this process needs the weights. All processes take part.

    Returns:
        The tensors by name, which must not be changed; None if they are not needed.
    """
    rank = dist.get_rank()
    node = zlib.crc32(shared_memory_id().encode())
    others = _gather(torch.tensor([node, int(is_needed)]))
    sharing = [r for r, (other, needs) in enumerate(others.tolist()) if other == node and needs]
    is_writer = len(sharing) > 1 and rank == sharing[0]
    templates = open_stream().templates
    offsets, size = _place(templates)
    name, memory = _create_segment(size) if is_writer else ("", None)
    names = _gather(_encode(name))
    segment = _decode(names[sharing[0]]) if is_needed else ""
    if memory is not None:
        tensors = _views(memory, templates, offsets)
        for tensor_name, tensor in open_stream().stream:
            tensors[tensor_name].copy_(tensor)
    elif is_needed and not segment:
        tensors = open_stream(copy=True).collect()
    else:
        tensors = {}
        open_stream().drain()
    _wait_for_all()
    if segment and memory is None:
        tensors = _views(attach_segment(segment), templates, offsets)
    _wait_for_all()
    if name:
        remove_segment(name)  # the mappings stay
    return tensors if is_needed else None


def _create_segment(size: int) -> tuple[str, mmap.mmap | None]:
    """Return name and memory of a new segment; an empty name if there is not enough memory."""
    name = new_segment_name()
    try:
        return name, create_segment(name, max(size, 1))
    except StorageError as error:
        log.warning("each process of this node keeps a copy of the weights: %s", error)
        return "", None


def _place(templates: Mapping[str, Tensor]) -> tuple[dict[int, int], int]:
    """Return the offset of each distinct template by its id, and the total size in bytes."""
    offsets, size = dict[int, int](), 0
    for template in templates.values():
        if id(template) not in offsets:
            offsets[id(template)] = size
            size += -(-template.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, size


def _views(
    memory: mmap.mmap, templates: Mapping[str, Tensor], offsets: Mapping[int, int]
) -> dict[str, Tensor]:
    """Return tensors in a segment by name; tied names share one tensor."""
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    tensors = dict[int, Tensor]()
    for template in templates.values():
        start = offsets[id(template)]
        data = flat[start : start + template.nbytes]
        tensors[id(template)] = data.view(template.dtype).view(template.shape)
    return {name: tensors[id(template)] for name, template in templates.items()}


def _gather(tensor: Tensor) -> Tensor:
    """Return the CPU tensors of all processes, stacked by rank."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.stack(gathered)


def _wait_for_all() -> None:
    """Wait until all processes have called this. On the CPU, because GPUs may still compute."""
    dist.all_reduce(torch.zeros(1))


def _encode(name: str) -> Tensor:
    return torch.tensor(list(name.encode().ljust(NAME_BYTES, b"\0")), dtype=torch.uint8)


def _decode(encoded: Tensor) -> str:
    return bytes(encoded.tolist()).rstrip(b"\0").decode()
