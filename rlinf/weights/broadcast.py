"""Broadcast of weights from the trainer to engines in other processes, over torch.distributed.

Buckets are pipelined: while one is in flight, the sender packs the next one and a receiver computes
the checksum of the previous one. Gloo moves tensors on CPUs; NCCL moves those on GPUs, and chooses
a tree or ring by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf.errors import WeightTransferError
from rlinf.weights.buckets import BucketLayout, bucket_checksum, version_digest

BUCKET_BYTES = 64 << 20
BUCKET_TIMEOUT_S = 10.0
"""Timeout of one bucket: a dead or stopped peer is noticed within this time."""
_LONGEST_LAYOUT = 256 << 20
_MAGIC = 0x726C696E667774
_POLL_INTERVAL_S = 0.0005


class BroadcastGroup(Protocol):
    """A process group, or one backend of it."""

    def broadcast(self, tensor: Tensor, root: int, /) -> dist.Work: ...

    def abort(self) -> None: ...


@dataclass(frozen=True)
class ReceivedWeights:
    """A complete version of the weights; ``digest`` is computed by
    :func:`rlinf.weights.buckets.version_digest`."""

    version: int
    tensors: dict[str, Tensor]
    digest: str


class WeightBroadcast:
    """One end of a process group for weights; all ranks take part in every transfer.

    Args:
        group: has its own timeout, so that a dead peer does not block the others for long.
        source: rank of the sender in the group.
        device: device of the buckets in flight; of one type in the whole group.
    """

    def __init__(
        self, group: BroadcastGroup, source: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self._group: BroadcastGroup | None = group
        self._source, self._device = source, torch.device(device)

    def send(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> str:
        """Send the weights to all other ranks of the group, float32 tensors as ``dtype``.

        Returns:
            The digest of what was sent.

        Raises:
            WeightTransferError: another rank no longer takes part; the group cannot be used again.
        """
        layout = BucketLayout.from_tensors(tensors, bucket_bytes=bucket_bytes, dtype=dtype)
        text = layout.to_json().encode()
        size = min(layout.bucket_bytes, layout.nbytes)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        sums = torch.zeros(layout.num_buckets, dtype=torch.int64, device=self._device)
        with self._in_time():
            self._share(torch.tensor([_MAGIC, version, len(text)]).to(self._device))
            self._share(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device))
            before: dist.Work | None = None
            for bucket in range(layout.num_buckets):
                span = layout.bucket_slice(bucket)
                # Its last content has left: only the bucket before this one is under way.
                part = buffers[bucket % 2][: span.stop - span.start]
                layout.pack_bucket(bucket, tensors, part)
                sums[bucket : bucket + 1] = bucket_checksum(part)
                self._wait(before)
                before = self._start(part)
            self._wait(before)
            self._share(sums)
        return version_digest(version, text, sums.tolist())

    def receive(self) -> ReceivedWeights:
        """Take part in the sender's next transfer; tensors are on the CPU.

        Raises:
            WeightTransferError: a bucket arrived damaged (the group can be used again), or another
                rank no longer takes part (it cannot). The weights must not be served.
        """
        with self._in_time():
            head = torch.zeros(3, dtype=torch.int64, device=self._device)
            self._share(head)
            magic, version, length = head.tolist()
            if magic != _MAGIC or not 0 < length <= _LONGEST_LAYOUT:
                raise WeightTransferError(f"not the beginning of weights ({magic:#x}, {length})")
            text = torch.empty(length, dtype=torch.uint8, device=self._device)
            self._share(text)
            table = text.cpu().numpy().tobytes()
            layout = BucketLayout.from_json(table)
            flat, sums = self._take(layout)
            sent = torch.empty_like(sums)
            self._share(sent)
        if count := int((sums != sent).sum()):
            raise WeightTransferError(
                f"broadcast of weights: {count} of {layout.num_buckets} buckets of version "
                f"{version} arrived damaged; they are not served"
            )
        return ReceivedWeights(
            version, layout.tensor_views(flat), version_digest(version, table, sums.tolist())
        )

    def close(self) -> None:
        """Abort the group. A rank that waits in a Gloo group waits until its timeout."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):
                group.abort()

    def _take(self, layout: BucketLayout) -> tuple[Tensor, Tensor]:
        """Return the flat state on the CPU and the checksums on the group's device."""
        on_cpu = self._device.type == "cpu"
        flat = torch.empty(layout.nbytes, dtype=torch.uint8)
        # On a CPU they come to where they stay.
        size = 0 if on_cpu else min(layout.bucket_bytes, layout.nbytes)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        sums = torch.zeros(layout.num_buckets, dtype=torch.int64, device=self._device)
        before: tuple[int, Tensor] | None = None
        for bucket in range(layout.num_buckets):
            span = layout.bucket_slice(bucket)
            length = span.stop - span.start
            part = flat[span] if on_cpu else buffers[bucket % 2][:length]
            work = self._start(part)
            if before is not None:
                self._put(layout, *before, flat, sums)
            self._wait(work)
            before = (bucket, part)
        if before is not None:
            self._put(layout, *before, flat, sums)
        return flat, sums

    @staticmethod
    def _put(layout: BucketLayout, bucket: int, part: Tensor, flat: Tensor, sums: Tensor) -> None:
        sums[bucket : bucket + 1] = bucket_checksum(part)
        if part.device.type != "cpu":
            flat[layout.bucket_slice(bucket)].copy_(part)

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise WeightTransferError(
                f"broadcast of weights: another rank is gone, stopped or cut off ({error})"
            ) from error

    def _start(self, part: Tensor) -> dist.Work:
        if self._group is None:
            raise RuntimeError("the group was given up")
        return self._group.broadcast(part, self._source)

    def _share(self, tensor: Tensor) -> None:
        self._wait(self._start(tensor))

    def _wait(self, work: dist.Work | None) -> None:
        if work is None:
            return
        if self._device.type != "cpu":
            # NCCL's own wait holds up the stream, not this thread: a peer that is gone would hold
            # up the stream for good.
            deadline = time.monotonic() + BUCKET_TIMEOUT_S
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no progress in {BUCKET_TIMEOUT_S:g} s")
                time.sleep(_POLL_INTERVAL_S)
        work.wait()
