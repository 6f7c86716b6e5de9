"""Broadcast of weights from the trainer to engines in other processes, over torch.distributed.

Buckets are pipelined: while a bucket is in flight, the sender packs the next bucket and a receiver
computes the checksum of the previous bucket. Gloo sends tensors on CPUs, NCCL tensors on GPUs.
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
"""Default size of a bucket of a broadcast."""
BUCKET_TIMEOUT_S = 10.0
"""Timeout of one bucket; a dead or stopped peer is detected within this time."""
_MAX_LAYOUT_BYTES = 256 << 20
"""Largest layout that a receiver accepts."""
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
    """One member of a process group for weights; all ranks take part in every transfer.

    Args:
        group: the process group; its timeout limits how long a dead peer blocks the others.
        source: rank of the sender in the group.
        device: device of the buckets in flight; all ranks must use the same device type.
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
            The digest of the version.

        Raises:
            WeightTransferError: another rank is lost; the group cannot be used again.
        """
        layout = BucketLayout.from_tensors(tensors, bucket_bytes=bucket_bytes, dtype=dtype)
        layout_json = layout.to_json().encode()
        size = min(layout.bucket_bytes, layout.nbytes)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        checksums = torch.zeros(layout.num_buckets, dtype=torch.int64, device=self._device)
        with self._translate_errors():
            self._broadcast(torch.tensor([_MAGIC, version, len(layout_json)]).to(self._device))
            layout_data = torch.frombuffer(bytearray(layout_json), dtype=torch.uint8)
            self._broadcast(layout_data.to(self._device))
            in_flight: dist.Work | None = None
            for bucket in range(layout.num_buckets):
                bucket_range = layout.bucket_slice(bucket)
                # This buffer is free: only the previous bucket, in the other buffer, is in flight.
                data = buffers[bucket % 2][: bucket_range.stop - bucket_range.start]
                layout.pack_bucket(bucket, tensors, data)
                checksums[bucket : bucket + 1] = bucket_checksum(data)
                self._wait(in_flight)
                in_flight = self._start_broadcast(data)
            self._wait(in_flight)
            self._broadcast(checksums)
        return version_digest(version, layout_json, checksums.tolist())

    def receive(self) -> ReceivedWeights:
        """Take part in the sender's next transfer; tensors are on the CPU.

        Raises:
            WeightTransferError: a bucket is damaged (the group can be used again), or another rank
                is lost (the group cannot be used again). The weights must not be served.
        """
        with self._translate_errors():
            header = torch.zeros(3, dtype=torch.int64, device=self._device)
            self._broadcast(header)
            magic, version, length = header.tolist()
            if magic != _MAGIC or not 0 < length <= _MAX_LAYOUT_BYTES:
                raise WeightTransferError(f"not the beginning of weights ({magic:#x}, {length})")
            layout_data = torch.empty(length, dtype=torch.uint8, device=self._device)
            self._broadcast(layout_data)
            layout_json = layout_data.cpu().numpy().tobytes()
            layout = BucketLayout.from_json(layout_json)
            buffer, checksums = self._receive_buckets(layout)
            sent_checksums = torch.empty_like(checksums)
            self._broadcast(sent_checksums)
        if count := int((checksums != sent_checksums).sum()):
            raise WeightTransferError(
                f"broadcast of weights: {count} of {layout.num_buckets} buckets of version "
                f"{version} arrived damaged; they are not served"
            )
        digest = version_digest(version, layout_json, checksums.tolist())
        return ReceivedWeights(version, layout.tensor_views(buffer), digest)

    def close(self) -> None:
        """Abort the group. A rank that waits in a Gloo group waits until its timeout."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):
                group.abort()

    def _receive_buckets(self, layout: BucketLayout) -> tuple[Tensor, Tensor]:
        """Return the flat buffer on the CPU and the checksums on the group's device."""
        on_cpu = self._device.type == "cpu"
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
        # On a CPU, receive directly into the flat buffer.
        size = 0 if on_cpu else min(layout.bucket_bytes, layout.nbytes)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        checksums = torch.zeros(layout.num_buckets, dtype=torch.int64, device=self._device)
        previous: tuple[int, Tensor] | None = None
        for bucket in range(layout.num_buckets):
            bucket_range = layout.bucket_slice(bucket)
            length = bucket_range.stop - bucket_range.start
            data = buffer[bucket_range] if on_cpu else buffers[bucket % 2][:length]
            work = self._start_broadcast(data)
            if previous is not None:
                self._store_bucket(layout, *previous, buffer, checksums)
            self._wait(work)
            previous = (bucket, data)
        if previous is not None:
            self._store_bucket(layout, *previous, buffer, checksums)
        return buffer, checksums

    @staticmethod
    def _store_bucket(
        layout: BucketLayout, bucket: int, data: Tensor, buffer: Tensor, checksums: Tensor
    ) -> None:
        """Compute the checksum of a received bucket, and copy a bucket on a GPU to the CPU."""
        checksums[bucket : bucket + 1] = bucket_checksum(data)
        if data.device.type != "cpu":
            buffer[layout.bucket_slice(bucket)].copy_(data)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise torch's errors as :class:`WeightTransferError`."""
        try:
            yield
        except RuntimeError as error:
            raise WeightTransferError(
                f"broadcast of weights: another rank is gone, stopped or cut off ({error})"
            ) from error

    def _start_broadcast(self, data: Tensor) -> dist.Work:
        if self._group is None:
            raise RuntimeError("the group was given up")
        return self._group.broadcast(data, self._source)

    def _broadcast(self, tensor: Tensor) -> None:
        self._wait(self._start_broadcast(tensor))

    def _wait(self, work: dist.Work | None) -> None:
        if work is None:
            return
        if self._device.type != "cpu":
            # NCCL's wait blocks the stream, not this thread; a lost peer would block it forever.
            deadline = time.monotonic() + BUCKET_TIMEOUT_S
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no progress in {BUCKET_TIMEOUT_S:g} s")
                time.sleep(_POLL_INTERVAL_S)
        work.wait()
