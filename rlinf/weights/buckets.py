"""Named tensors as one flat buffer, split into buckets of equal size.

Transports send buckets instead of tensors, because each transfer has a fixed cost. A tensor may
span several buckets. Sender and receivers use one :class:`BucketLayout`, which is sent as JSON.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import xxhash
from torch import Tensor

from rlinf.errors import WeightTransferError

BUCKET_BYTES = 4 << 20
"""Default size of a bucket."""
ALIGN_BYTES = 64
"""Alignment of tensors and buckets, so that no element is split between buckets."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
    )
}
"""Dtypes that can be sent, by name."""


@dataclass(frozen=True)
class TensorEntry:
    """Position of a tensor's elements, in row-major order, in the flat buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Offset in bytes within the flat buffer."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class BucketLayout:
    """The layout of a flat buffer; ``ties`` maps further names of tied tensors to entry names."""

    entries: tuple[TensorEntry, ...]
    ties: dict[str, str]
    bucket_bytes: int

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
    ) -> BucketLayout:
        """Return the layout of tensors; float32 tensors are sent as ``dtype``, tied tensors once.

        Raises:
            ValueError: the bucket size is not a multiple of 64.
        """
        if bucket_bytes <= 0 or bucket_bytes % ALIGN_BYTES:
            raise ValueError(
                f"bucket_bytes {bucket_bytes} is not a positive multiple of {ALIGN_BYTES}"
            )
        distinct, ties = split_tied_tensors(tensors)
        entries, offset = [], 0
        for name, tensor in distinct.items():
            dtype_name = str(transfer_dtype(tensor.dtype, dtype)).removeprefix("torch.")
            entries.append(TensorEntry(name, dtype_name, tuple(tensor.shape), offset))
            offset += _aligned(entries[-1].nbytes)
        return cls(tuple(entries), ties, bucket_bytes)

    @cached_property
    def nbytes(self) -> int:
        """Size of the flat buffer in bytes."""
        return max((_aligned(e.offset + e.nbytes) for e in self.entries), default=0)

    @property
    def num_buckets(self) -> int:
        """Number of buckets; the last one may be shorter."""
        return -(-self.nbytes // self.bucket_bytes)

    def bucket_slice(self, bucket: int) -> slice:
        """Return the range of a bucket in the flat buffer, in bytes."""
        start = bucket * self.bucket_bytes
        return slice(start, min(start + self.bucket_bytes, self.nbytes))

    def pack_bucket(self, bucket: int, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        """Write a bucket into ``out`` (uint8, at least as long, any device), casting as needed."""
        for entry, elements, byte_slice in self._entry_slices(bucket):
            source = tensors[entry.name].detach().reshape(-1)[elements]
            out[byte_slice].view(DTYPES[entry.dtype]).copy_(source)

    def tensor_views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return views of the tensors in a flat buffer, uint8 ``[nbytes]``."""
        distinct = {
            e.name: buffer[e.offset : e.offset + e.nbytes].view(DTYPES[e.dtype]).view(e.shape)
            for e in self.entries
        }
        return distinct | {name: distinct[other] for name, other in self.ties.items()}

    def to_json(self) -> str:
        table = [[e.name, e.dtype, list(e.shape), e.offset] for e in self.entries]
        return json.dumps({"bucket_bytes": self.bucket_bytes, "ties": self.ties, "entries": table})

    @classmethod
    def from_json(cls, text: str | bytes) -> BucketLayout:
        """Parse the output of :meth:`to_json`.

        Raises:
            WeightTransferError: the text is not a layout (unknown types, negative sizes, overlaps).
        """
        try:
            values = json.loads(text)
            entries = tuple(
                TensorEntry(str(name), str(dtype), tuple(int(n) for n in shape), int(offset))
                for name, dtype, shape, offset in values["entries"]
            )
            ties = {str(name): str(distinct) for name, distinct in values["ties"].items()}
            layout = cls(entries, ties, int(values["bucket_bytes"]))
            end = 0
            for entry in entries:
                if (
                    entry.offset < end
                    or entry.offset % ALIGN_BYTES
                    or min(entry.shape, default=0) < 0
                ):
                    raise ValueError(f"entry {entry.name!r} is out of place")
                end = entry.offset + entry.nbytes
            if layout.bucket_bytes <= 0 or layout.bucket_bytes % ALIGN_BYTES:
                raise ValueError(f"bucket size {layout.bucket_bytes}")
            if not set(ties.values()) <= {entry.name for entry in entries}:
                raise ValueError("a name is tied to none of the entries")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise WeightTransferError(f"damaged layout of weights ({error})") from None
        return layout

    @cached_property
    def _offsets(self) -> list[int]:
        return [entry.offset for entry in self.entries]

    def _entry_slices(self, bucket: int) -> Iterator[tuple[TensorEntry, slice, slice]]:
        """Yield each entry of a bucket, its elements, and their bytes within the bucket."""
        bucket_range = self.bucket_slice(bucket)
        first = max(0, bisect_right(self._offsets, bucket_range.start) - 1)
        for entry in self.entries[first:]:
            if entry.offset >= bucket_range.stop:
                break
            start = max(bucket_range.start, entry.offset)
            stop = min(bucket_range.stop, entry.offset + entry.nbytes)
            if start < stop:
                size = DTYPES[entry.dtype].itemsize
                elements = slice((start - entry.offset) // size, (stop - entry.offset) // size)
                yield entry, elements, slice(start - bucket_range.start, stop - bucket_range.start)


def transfer_dtype(dtype: torch.dtype, float32_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor is sent; float32 may be cast to another dtype."""
    return float32_dtype if float32_dtype is not None and dtype == torch.float32 else dtype


def split_tied_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the distinct tensors by sorted name, and ``{further name: name of the tensor}``."""
    distinct: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first_names: dict[object, str] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = first_names.setdefault(key if tensor.numel() else name, name)
        if first == name:
            distinct[name] = tensor
        else:
            ties[name] = first
    return distinct, ties


def bucket_checksum(data: Tensor) -> Tensor:
    """Return the 64-bit checksum of a bucket, int64 ``[1]`` on its device.

    On a CPU it is xxh3. On other devices it is the sum, modulo 2^64, of each word times an odd
    number that depends on its position. The sum detects every change of one word and needs no copy
    to the host. Both ends of a transfer must use the same device type.
    """
    if data.device.type == "cpu":
        digest = xxhash.xxh3_64_intdigest(data.numpy().data)
        return torch.tensor([digest - (1 << 64) if digest >> 63 else digest])
    return weighted_sum(data)


def weighted_sum(data: Tensor) -> Tensor:
    """Return the checksum that GPUs compute for ``data``: uint8, a multiple of 8 bytes long."""
    words = data.view(torch.int64)
    factors = torch.arange(1, 2 * len(words), 2, device=data.device) * _ODD
    return (words * factors).sum().reshape(1)


def version_digest(version: int, layout_json: bytes, checksums: Sequence[int]) -> str:
    """Return the digest of a version from its number, layout and bucket checksums."""
    return xxhash.xxh3_128_hexdigest(repr((version, layout_json, list(checksums))).encode())


_ODD = 0x1E3779B97F4A7C15
"""About 2^61 times the golden ratio, so that the factors use all bits."""


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
