"""The state of a trainer in files: each rank writes its shards, any number of ranks read them.

Safetensors, ``rank-R-of-N.safetensors``. A tensor whose rows are shared out is cut as
``torch.chunk`` cuts; what all ranks have alike is in the file of rank 0, and so is the table that
says which is which. No rank waits for another, and nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlinf.artifacts import sync_file
from rlinf.errors import DataError
from rlinf.sharded import is_shared, local, memory, rows_of
from rlinf.tensors import TensorFile

FORMAT = "rlinf-shards-1"
_NAME = re.compile(r"rank-0-of-(\d+)\.safetensors")


def write(folder: Path, state: Mapping[str, Any], rank: int, size: int) -> None:
    """Write this rank's part of a state; what of it is no tensor is left out.

    Args:
        state: dictionaries of dictionaries of tensors, such as those of torch's ``get_state_dict``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own: dict[str, Tensor] = {}
    rows: dict[str, int] = {}
    same: dict[str, str] = {}
    known: dict[object, str] = {}
    for name, value in tensors(state):
        first = known.setdefault(memory(value), name)
        if first != name:
            same[name] = first
            continue
        if is_shared(value):
            rows[name] = value.shape[0]
            begin, end = rows_of(value)
            if len(local(value)) != end - begin:
                raise ValueError(f"{name}: not {end - begin} of {value.shape[0]} rows")
        elif rank:
            continue
        own[name] = local(value).detach().contiguous()
    table = json.dumps({"format": FORMAT, "rows": rows, "same": same}, sort_keys=True)
    path = folder / _file(rank, size)
    save_file(own, path, metadata={"table": table})
    sync_file(path)
    if rank == 0:
        # An attempt of another number of ranks may have ended here before.
        for other in set(folder.glob("rank-*.safetensors")):
            if not other.name.endswith(f"-of-{size}.safetensors"):
                other.unlink()


@torch.no_grad()
def read(folder: Path, state: Mapping[str, Any]) -> None:
    """Fill the tensors of a state, of the structure that was written, with what is in the files.

    Raises:
        DataError: there are no such files, or they do not fit the state.
        ArtifactError: they are committed and damaged; the state holds anything.
    """
    name = ""
    try:
        with contextlib.ExitStack() as stack:
            files = _Files(folder, stack)
            for name, value in tensors(state):
                files.want(name, value.shape, rows_of(value)[0], local(value))
            name = ""
            files.fill()
    except (SafetensorError, FileNotFoundError, ValueError, KeyError, TypeError) as error:
        where = f"{name}: " if name else ""
        raise DataError(f"{folder}: not a state of this trainer: {where}{error}") from error


@dataclass
class _Wanted:
    """Rows of one tensor of one file, and where they go."""

    low: int
    part: Tensor


def _span(parts: Sequence[_Wanted]) -> tuple[int, int]:
    """From the first to the last row of several parts."""
    ends = [(part.low, part.low + len(part.part) if part.part.dim() else 1) for part in parts]
    return min(low for low, _ in ends), max(high for _, high in ends)


class _Files:
    """The files of a state; each is read once, and only if something in it is needed."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._open: dict[int, TensorFile] = {}
        self._wanted: dict[int, dict[str, list[_Wanted]]] = {0: {}}
        sizes = [int(m[1]) for path in folder.glob("*") if (m := _NAME.fullmatch(path.name))]
        if len(sizes) != 1:
            raise ValueError(f"{len(sizes) or 'no'} files rank-0-of-N.safetensors")
        (self._size,) = sizes
        table = json.loads(self._file(0).metadata["table"])
        if table["format"] != FORMAT:
            raise ValueError(f"format {table['format']!r} is not {FORMAT!r}")
        self._rows, self._same = table["rows"], table["same"]

    def want(self, name: str, shape: torch.Size, begin: int, part: Tensor) -> None:
        """Have a part, from row ``begin``, of a tensor of this shape filled by :meth:`fill`."""
        name = self._same.get(name, name)
        saved = self._shape(0, name)
        whole = name not in self._rows
        saved = saved if whole else (self._rows[name], *saved[1:])
        if saved != tuple(shape):
            raise ValueError(f"shape {list(saved)}, not {list(shape)}")
        if not shape:
            self._add(0, name, _Wanted(0, part))
            return
        # Rows in each file, of which the last ones may have fewer or none.
        each = saved[0] if whole else -(-saved[0] // self._size)
        end = begin + len(part)
        for rank in range(begin // each, -(-end // each)) if len(part) else ():
            low, high = max(begin, rank * each), min(end, (rank + 1) * each)
            if self._shape(rank, name)[0] < high - rank * each:
                raise ValueError(f"rows are missing in {_file(rank, self._size)}")
            self._add(rank, name, _Wanted(low - rank * each, part[low - begin : high - begin]))

    def fill(self) -> None:
        """Read the files from front to back; what is not needed only goes into the checksum."""
        for rank, wanted in self._wanted.items():
            spans = {name: _span(parts) for name, parts in wanted.items()}
            for name, tensor in self._file(rank).tensors(spans):
                for rows in wanted[name]:
                    here, low = rows.part, rows.low - spans[name][0]
                    here.copy_(tensor[low : low + len(here)] if here.dim() else tensor)

    def _add(self, rank: int, name: str, wanted: _Wanted) -> None:
        self._wanted.setdefault(rank, {}).setdefault(name, []).append(wanted)

    def _shape(self, rank: int, name: str) -> tuple[int, ...]:
        shapes = self._file(rank).shapes
        if name not in shapes:
            raise ValueError(f"it is not in {_file(rank, self._size)}")
        return shapes[name]

    def _file(self, rank: int) -> TensorFile:
        if rank not in self._open:
            file = TensorFile(self._folder / _file(rank, self._size))
            self._open[rank] = self._stack.enter_context(file)
        return self._open[rank]


def tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state and their names in the files."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from tensors(value, f"{prefix}{key}/")


def _file(rank: int, size: int) -> str:
    return f"rank-{rank}-of-{size}.safetensors"
