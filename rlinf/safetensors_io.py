"""Streaming readers and writers of safetensors files.

A file is read once, front to back, and its checksum is computed from the same bytes
(:mod:`rlinf.verified_io`). It is written tensor by tensor, so memory need not hold all tensors.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlinf.verified_io import VerifiedReader

MAX_HEADER_BYTES = 100_000_000
"""Maximum header size of a safetensors file, by its specification."""
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""Element types, in the reverse of the order in which safetensors writes them."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_DTYPE_ORDER = {dtype: index for index, dtype in enumerate(DTYPES.values())}


@dataclass(frozen=True)
class _Entry:
    """A tensor in the header of a file."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    nbytes: int


class SafetensorsReader:
    """Reads a safetensors file front to back (https://huggingface.co/docs/safetensors).

    Raises:
        SafetensorError: not a safetensors file.
        ArtifactError: the file is committed and damaged.
    """

    def __init__(self, path: Path) -> None:
        self._reader = VerifiedReader(path)
        self._path = path
        try:
            try:
                self.metadata, self._entries = self._read_header()
            except (ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
                self._reader.finish()  # raises ArtifactError if a committed file is damaged
                raise SafetensorError(f"{path}: not a safetensors file ({error})") from None
        except BaseException:
            self.__exit__()
            raise

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors by name. Not verified until :meth:`tensors` has finished."""
        return {entry.name: tuple(entry.shape) for entry in self._entries}

    def tensors(
        self, names: Collection[str] | Mapping[str, tuple[int, int]] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, or some of them, in the order of the file.

        Tensors do not share memory. The checksum is compared after the last tensor, so until then
        no tensor is verified.

        Args:
            names: names of the tensors; or for each name a range of rows (start, stop), so that
                other rows take no memory. None: all tensors.

        Raises:
            ArtifactError: the file differs from what was committed.
        """
        rows = names if isinstance(names, Mapping) else {}
        with self._reader as reader:
            for entry in self._entries:
                if names is not None and entry.name not in names:
                    reader.skip(entry.nbytes)
                    continue
                skip_before = skip_after = 0
                shape = entry.shape
                if entry.name in rows and shape and entry.nbytes:
                    start, stop = rows[entry.name]
                    row_bytes = entry.nbytes // shape[0]
                    skip_before, skip_after = start * row_bytes, (shape[0] - stop) * row_bytes
                    shape = [stop - start, *shape[1:]]
                reader.skip(skip_before)
                tensor = torch.empty(shape, dtype=entry.dtype)
                if tensor.numel():
                    reader.read_into(tensor.view(-1).view(torch.uint8).numpy().data)
                reader.skip(skip_after)
                yield entry.name, tensor
            reader.finish()

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__()

    def _read_header(self) -> tuple[dict[str, str], list[_Entry]]:
        """Return the metadata, and the tensors in the order of the file."""
        prefix = bytearray(8)
        self._reader.read_into(memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > min(MAX_HEADER_BYTES, self._reader.remaining):
            raise ValueError(f"its header would have {length} bytes")
        text = bytearray(length)
        self._reader.read_into(memoryview(text))
        table = json.loads(text.decode())
        metadata = {str(k): str(v) for k, v in table.pop("__metadata__", {}).items()}
        entries, offset = [], 0
        for name, info in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = info["data_offsets"]
            shape = [int(size) for size in info["shape"]]
            nbytes = math.prod(shape) * DTYPES[info["dtype"]].itemsize
            if (start, stop) != (offset, offset + nbytes) or min(shape, default=0) < 0:
                raise ValueError(f"{name!r} is not where its shape says")
            entries.append(_Entry(name, DTYPES[info["dtype"]], shape, nbytes))
            offset = stop
        if offset != self._reader.remaining:
            raise ValueError(f"{self._reader.remaining} bytes of tensors, {offset} by its header")
        return metadata, entries


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file; raises like :class:`SafetensorsReader`."""
    return dict(SafetensorsReader(path).tensors())


@dataclass(frozen=True)
class StreamedState:
    """The tensors of a network as a stream, which need not be in memory at once.

    If several processes share the network, all of them must consume every tensor.
    """

    templates: Mapping[str, Tensor]
    """By name, a tensor of the right shape and dtype, possibly on the meta device. Tied names share
    one tensor."""
    stream: Iterator[tuple[str, Tensor]]
    """Full tensors on the CPU, in any order; one per set of tied names."""
    source: Iterator[tuple[str, Tensor]] | None = None
    """The iterator from which ``stream`` takes its tensors to copy them to the CPU. None: it copies
    nothing."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> StreamedState:
        """Return the state of tensors in memory."""
        return cls(tensors, iter(tensors.items()))

    def collect(self) -> dict[str, Tensor]:
        """Return all tensors by name; tied names share one tensor."""
        by_template = {id(self.templates[name]): tensor for name, tensor in self.stream}
        return {name: by_template[id(template)] for name, template in self.templates.items()}

    def drain(self) -> None:
        """Consume the remaining tensors, without copies of them on the CPU."""
        collections.deque(self.stream if self.source is None else self.source, maxlen=0)


def save_tensors(
    path: Path, state: StreamedState, names: Collection[str], metadata: Mapping[str, str]
) -> None:
    """Write tensors as they arrive, with the same bytes as safetensors' own writer.

    Args:
        names: tensors to write; tied names get a copy each.
    """
    entries, offset = dict[str, tuple[int, int]](), 0
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    names_by_template: dict[int, list[str]] = {}
    for name in sorted(names, key=lambda name: (-_DTYPE_ORDER[state.templates[name].dtype], name)):
        template = state.templates[name]
        entries[name] = (offset, offset + template.nbytes)
        table[name] = {
            "dtype": _CODES[template.dtype],
            "shape": list(template.shape),
            "data_offsets": [offset, offset + template.nbytes],
        }
        offset += template.nbytes
        names_by_template.setdefault(id(template), []).append(name)
    header = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in state.stream:
            template = state.templates[name]
            if (tensor.dtype, tensor.shape) != (template.dtype, template.shape):
                raise ValueError(f"{path}: {name} came as {tensor.dtype} {tuple(tensor.shape)}")
            for tied_name in names_by_template.pop(id(state.templates[name]), ()):
                file.seek(8 + len(header) + entries[tied_name][0])
                remaining = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
                while remaining:
                    remaining = remaining[file.write(remaining) :]
                del remaining
            del tensor  # before the next tensor is created
    if names_by_template:
        raise ValueError(f"{path}: {len(names_by_template)} tensors never came")
