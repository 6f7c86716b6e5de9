"""Exact differences between two versions of the weights.

A reinforcement-learning update leaves most bfloat16 weights unchanged, because it is smaller than
the distance to the next representable number. For each changed element, a delta stores a gap (the
number of unchanged elements before it) and a step (the difference of its bit patterns). A step of 1
leads to the next representable number; most steps are +1 or -1. Gaps and steps are Huffman-coded.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlinf.errors import WeightTransferError
from rlinf.safetensors_io import SafetensorsReader
from rlinf.weights.buckets import split_tied_tensors, transfer_dtype

FORMAT = "rlinf-delta-2"
_SKIP = 255
"""Gap byte for this many unchanged elements; the next byte continues the count."""


@dataclass(frozen=True)
class WeightSnapshot:
    """The weights of one version on the CPU, in the dtype in which they are sent; read-only."""

    distinct: dict[str, Tensor]
    """Tensors by name; of tied tensors only the first."""
    ties: dict[str, str]
    """For each other name of a tied tensor, its name in ``distinct``."""

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> WeightSnapshot:
        """Return a snapshot with float32 cast to ``dtype``; memory is shared if possible."""
        distinct, ties = split_tied_tensors(tensors)
        tensors_on_cpu = {
            name: tensor.detach().to("cpu", transfer_dtype(tensor.dtype, dtype)).contiguous()
            for name, tensor in distinct.items()
        }
        return cls(tensors_on_cpu, ties)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return self.distinct | {name: self.distinct[other] for name, other in self.ties.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.distinct.values())

    @cached_property
    def digest(self) -> str:
        """The xxh3-128 digest (hex) of names, dtypes, shapes and bits."""
        total = xxhash.xxh3_128(repr(sorted(self.ties.items())).encode())
        for name, tensor in sorted(self.distinct.items()):
            total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\n".encode())
            if tensor.numel():
                total.update(tensor.view(-1).view(torch.uint8).numpy().data)
        return total.hexdigest()


@dataclass(frozen=True)
class WeightDelta:
    """The difference between two snapshots, identified by their digests.

    ``tensors`` has ``gaps/NAME`` and ``steps/NAME`` (uint8, compressed) for a tensor with few
    changes, and ``whole/NAME`` for a new tensor or one with many changes. ``changed`` has the
    number of changed elements of each tensor. Unchanged tensors are left out. ``removed`` has the
    names of tensors that the new snapshot lacks.
    """

    tensors: dict[str, Tensor]
    changed: dict[str, int]
    removed: tuple[str, ...]
    base_digest: str
    target_digest: str

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        table = {
            "changed": self.changed,
            "removed": self.removed,
            "start": self.base_digest,
            "end": self.target_digest,
        }
        save_file(self.tensors, path, metadata={"format": FORMAT, "table": json.dumps(table)})

    @classmethod
    def load(cls, path: Path) -> WeightDelta:
        """Read a file that :meth:`save` has written.

        Raises:
            WeightTransferError: the file is not a delta.
            ArtifactError: the file is part of a committed output and damaged.
        """
        try:
            file = SafetensorsReader(path)
            tensors = dict(file.tensors())
            if file.metadata.get("format") != FORMAT:
                raise ValueError(f"format {file.metadata.get('format')!r} is not {FORMAT!r}")
            table = json.loads(file.metadata["table"])
            changed = {str(name): int(count) for name, count in table["changed"].items()}
            digests = str(table["start"]), str(table["end"])
            return cls(tensors, changed, tuple(table["removed"]), *digests)
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightTransferError(f"{path}: not a delta of weights ({error})") from None


def compute_delta(old: WeightSnapshot, new: WeightSnapshot) -> WeightDelta:
    """Return the delta from ``old`` to ``new``."""
    tensors: dict[str, Tensor] = {}
    changed: dict[str, int] = {}
    for name, tensor in new.distinct.items():
        count, parts = _encode(old.distinct.get(name), tensor)
        if parts:
            changed[name] = count
            tensors |= {f"{kind}/{name}": part for kind, part in parts.items()}
    removed = tuple(sorted(set(old.distinct) - set(new.distinct)))
    return WeightDelta(tensors, changed, removed, old.digest, new.digest)


def apply_delta(old: WeightSnapshot, delta: WeightDelta) -> WeightSnapshot:
    """Apply ``delta`` to ``old``; unchanged tensors are shared.

    Raises:
        WeightTransferError: the delta's base is not ``old``, the delta is malformed, or the result
            does not have its ``target_digest``.
    """
    if delta.base_digest != old.digest:
        raise WeightTransferError("the delta does not start from these weights")
    new = {name: tensor for name, tensor in old.distinct.items() if name not in delta.removed}
    for name, count in delta.changed.items():
        try:
            if f"whole/{name}" in delta.tensors:
                new[name] = delta.tensors[f"whole/{name}"]
            else:
                gaps, steps = delta.tensors[f"gaps/{name}"], delta.tensors[f"steps/{name}"]
                new[name] = _decode(old.distinct[name], count, gaps, steps)
        except (KeyError, ValueError, IndexError, zlib.error) as error:
            raise WeightTransferError(
                f"the delta of {name!r} does not belong to these weights ({error})"
            ) from None
    result = WeightSnapshot(new, old.ties)
    if result.digest != delta.target_digest:
        raise WeightTransferError("the delta leads to other weights than its target")
    return result


def _encode(old: Tensor | None, new: Tensor) -> tuple[int, dict[str, Tensor]]:
    """Return the number of changed elements and the tensors to store; none if nothing changed."""
    full = {"whole": new.detach().contiguous()}
    if old is None or old.dtype != new.dtype or old.shape != new.shape:
        return new.numel(), full
    if not new.numel():
        return 0, {}
    old_bits, new_bits = _bits(old), _bits(new)
    positions = np.flatnonzero(old_bits != new_bits)
    if not len(positions):
        return 0, {}
    steps = _zigzag(new_bits[positions] - old_bits[positions])
    # One plane for each byte of a step, because the high bytes are almost all 0.
    planes = np.ascontiguousarray(steps.view(np.uint8).reshape(len(steps), -1).T)
    parts = {"gaps": _compress(_gaps(positions)), "steps": _compress(planes)}
    is_smaller = sum(part.nbytes for part in parts.values()) < new.nbytes
    return len(positions), parts if is_smaller else full


def _decode(old: Tensor, count: int, gaps: Tensor, steps: Tensor) -> Tensor:
    """Return the new tensor from the old one, the number of changes, and their encoding."""
    new = old.clone(memory_format=torch.contiguous_format)
    bits = _bits(new)
    gap_bytes = _decompress(gaps, count + len(bits) // _SKIP)
    positions = _positions(np.frombuffer(gap_bytes, np.uint8))
    planes = np.frombuffer(_decompress(steps, count * bits.itemsize), np.uint8)
    values = np.ascontiguousarray(planes.reshape(bits.itemsize, count).T).view(bits.dtype)
    bits[positions] += _unzigzag(values[:, 0])
    return new


def _bits(tensor: Tensor) -> np.ndarray:
    """Return the elements' bit patterns as unsigned integers, without a copy if contiguous."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return data.view(f"u{tensor.dtype.itemsize}")


def _zigzag(steps: np.ndarray) -> np.ndarray:
    """Encode signed differences as unsigned integers, so that small absolute values stay small."""
    signed = steps.view(f"i{steps.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)


def _unzigzag(steps: np.ndarray) -> np.ndarray:
    one = steps.dtype.type(1)
    return (steps >> one) ^ (~(steps & one) + one)


def _gaps(positions: np.ndarray) -> np.ndarray:
    """Return how many unchanged elements precede each changed one, in one byte if below 255."""
    gaps = np.diff(positions, prepend=-1) - 1
    skips = gaps // _SKIP
    coded = np.full(len(gaps) + int(skips.sum()), _SKIP, np.uint8)
    coded[np.cumsum(skips + 1) - 1] = gaps % _SKIP
    return coded


def _positions(gaps: np.ndarray) -> np.ndarray:
    """Return the positions that :func:`_gaps` encoded."""
    is_skip = gaps == _SKIP
    ends = np.cumsum(np.where(is_skip, _SKIP, gaps.astype(np.int64) + 1))
    return ends[~is_skip] - 1


def _compress(data: np.ndarray) -> Tensor:
    # Only run lengths and Huffman codes: a search for other repetitions finds few and takes time.
    coder = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    coded = coder.compress(data.tobytes()) + coder.flush()
    return torch.frombuffer(bytearray(coded), dtype=torch.uint8)


def _decompress(data: Tensor, max_bytes: int) -> bytes:
    decoder = zlib.decompressobj(-15)
    out = decoder.decompress(data.numpy().tobytes(), max_bytes)
    if decoder.decompress(decoder.unconsumed_tail, 1) or not decoder.eof:
        raise ValueError("not of the announced length")
    return out
