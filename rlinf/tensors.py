"""Safetensors files, read once from front to back and checked on the way (:mod:`rlinf.checked`)."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlinf.checked import Reader

HEADER_BYTES = 100_000_000
"""The longest header of a safetensors file, by its specification."""
TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: torch.dtype
    shape: list[int]
    nbytes: int


class TensorFile:
    """A safetensors file, read from front to back (https://huggingface.co/docs/safetensors).

    Raises:
        SafetensorError: no such file.
        ArtifactError: it is committed and damaged.
    """

    def __init__(self, path: Path) -> None:
        self._reader = Reader(path)
        self._path = path
        try:
            try:
                self.metadata, self._entries = self._header()
            except (ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
                self._reader.finish()  # damage is told from a file of another kind
                raise SafetensorError(f"{path}: not a safetensors file ({error})") from None
        except BaseException:
            self.__exit__()
            raise

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors by name. Not checked before :meth:`tensors` came to its end."""
        return {entry.name: tuple(entry.shape) for entry in self._entries}

    def tensors(self, wanted: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """The tensors, or those that are wanted, once, in the order of the file.

        Each is in memory of its own. They count only after the last one: by then all of the file
        has been read, and it is compared.

        Raises:
            ArtifactError: the file is not what was committed.
        """
        with self._reader as reader:
            for entry in self._entries:
                if wanted is not None and entry.name not in wanted:
                    reader.skip(entry.nbytes)
                    continue
                tensor = torch.empty(entry.shape, dtype=entry.dtype)
                if entry.nbytes:
                    reader.into(tensor.view(-1).view(torch.uint8).numpy().data)
                yield entry.name, tensor
            reader.finish()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__()

    def _header(self) -> tuple[dict[str, str], list[_Entry]]:
        prefix = bytearray(8)
        self._reader.into(memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > min(HEADER_BYTES, self._reader.left):
            raise ValueError(f"its header would have {length} bytes")
        text = bytearray(length)
        self._reader.into(memoryview(text))
        table = json.loads(text.decode())
        metadata = {str(k): str(v) for k, v in table.pop("__metadata__", {}).items()}
        entries, at = [], 0
        for name, about in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = about["data_offsets"]
            shape = [int(size) for size in about["shape"]]
            nbytes = math.prod(shape) * TYPES[about["dtype"]].itemsize
            if (begin, end) != (at, at + nbytes) or min(shape, default=0) < 0:
                raise ValueError(f"{name!r} is not where its shape says")
            entries.append(_Entry(name, TYPES[about["dtype"]], shape, nbytes))
            at = end
        if at != self._reader.left:
            raise ValueError(f"{self._reader.left} bytes of tensors, {at} by its header")
        return metadata, entries


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file; raises as :class:`TensorFile`."""
    return dict(TensorFile(path).tensors())
