"""Weights from the trainer to engines in other processes, by ``torch.distributed``.

Buckets follow one another through two buffers on each side: while one is on its way, the sender
packs the next and a receiver checks and unpacks the one before. The backend is the group's: Gloo
for tensors on CPUs, NCCL on GPUs, whose links a broadcast shares as a tree or ring by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf.errors import TransferError
from rlinf.weights.buckets import ALIGN, Layout, checksum

BUCKET_BYTES = 64 << 20
_LONGEST_LAYOUT = 256 << 20
_MAGIC = 0x726C696E667774


@dataclass(frozen=True)
class Received:
    """A version that arrived whole. The next transfer reuses ``tensors``: copy what shall stay."""

    version: int
    tensors: dict[str, Tensor]


class Broadcast:
    """One end of a group that weights are broadcast in; all ranks take part in every transfer.

    Args:
        group: from ``torch.distributed.new_group``; its timeout bounds how long a dead peer holds
            the others up.
        source: global rank of the sender.
        device: where buffers are; of one type in the whole group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        source: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._group, self._source, self._device = group, source, torch.device(device)
        self._layout: Layout | None = None
        self._tensors: dict[str, Tensor] = {}

    def send(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Send a state to all other ranks of the group, float32 tensors as ``dtype``."""
        layout = Layout.of(tensors, bucket_bytes=bucket_bytes, dtype=dtype)
        text = torch.frombuffer(bytearray(layout.to_json().encode()), dtype=torch.uint8)
        self._share(torch.tensor([_MAGIC, version, len(text)]).to(self._device))
        self._share(text.to(self._device))
        works: list[dist.Work | None] = [None, None]
        for bucket, (buffer, part, trailer) in enumerate(self._buffers(layout)):
            if (work := works[bucket % 2]) is not None:
                work.wait()
            layout.pack(bucket, tensors, part)
            trailer.copy_(checksum(part))
            works[bucket % 2] = self._start(buffer)
        for work in works:
            if work is not None:
                work.wait()

    def receive(self) -> Received:
        """Take part in the sender's next transfer.

        Raises:
            TransferError: something arrived damaged. The transfer is over and the group in order;
                the weights are not to be served.
        """
        head = torch.zeros(3, dtype=torch.int64, device=self._device)
        self._share(head)
        magic, version, length = head.tolist()
        if magic != _MAGIC or not 0 < length <= _LONGEST_LAYOUT:
            raise TransferError(f"broadcast of weights: not its beginning ({magic:#x}, {length})")
        text = torch.empty(length, dtype=torch.uint8, device=self._device)
        self._share(text)
        layout = Layout.from_json(text.cpu().numpy().tobytes())
        if layout != self._layout:
            self._tensors = {}
            self._layout, self._tensors = layout, layout.empty(self._device)
        damaged = torch.zeros(1, dtype=torch.int64, device=self._device)
        before: tuple[int, Tensor, Tensor] | None = None
        for bucket, (buffer, part, trailer) in enumerate(self._buffers(layout)):
            work = self._start(buffer)
            if before is not None:
                damaged += self._unpack(layout, *before)
            if work is not None:
                work.wait()
            before = (bucket, part, trailer)
        if before is not None:
            damaged += self._unpack(layout, *before)
        if count := int(damaged):
            raise TransferError(
                f"broadcast of weights: {count} of {layout.buckets} buckets of version {version} "
                "arrived damaged; they are not served"
            )
        return Received(version, self._tensors)

    def _unpack(self, layout: Layout, bucket: int, part: Tensor, trailer: Tensor) -> Tensor:
        layout.unpack(bucket, part, self._tensors)
        return checksum(part) != trailer

    def _buffers(self, layout: Layout) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each bucket what is sent: the whole, its bytes, and their checksum behind them."""
        size = min(layout.bucket_bytes, layout.nbytes) + ALIGN
        memory = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        for bucket in range(layout.buckets):
            span = layout.span(bucket)
            length = span.stop - span.start
            buffer = memory[bucket % 2][: length + 8]
            yield buffer, buffer[:length], buffer[length:].view(torch.int64)

    def _start(self, buffer: Tensor) -> dist.Work | None:
        return dist.broadcast(buffer, self._source, self._group, async_op=True)

    def _share(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, self._source, self._group)
