"""The state of a trainer in files: each rank writes its parts, any number of ranks read theirs.

Safetensors, ``rank-R-of-N.safetensors``. A tensor that ranks share is cut into ranges of its
elements in their order, whichever a rank has (FSDP2: rows; ZeRO: any; tensor parallel: a stretch of
each row too); a table in each file says where its parts belong. What all ranks have alike is in the
file of rank 0. No rank waits for another, and nothing is pickled.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlinf.artifacts import sync_file
from rlinf.errors import DataError
from rlinf.sharded import is_shared, local, memory, rows_of
from rlinf.tensors import TensorFile

FORMAT = "rlinf-shards-2"
OWN = {"loss_scale"}
"""Of some trainers' states alone; of a state without them they stay as they are."""
_NAME = re.compile(r"rank-0-of-(\d+)\.safetensors")


class Run(NamedTuple):
    """Ranges of the elements of a tensor, one after the other."""

    start: int
    """The first element of the first range."""
    length: int
    """Of each."""
    step: int = 0
    """From the beginning of one to that of the next."""
    times: int = 1
    """How many they are."""


@dataclass(frozen=True)
class Place:
    """Where the elements of a rank's part of a tensor belong in the whole."""

    shape: tuple[int, ...]
    """Of the whole."""
    start: int
    """Elements before the part."""
    runs: tuple[Run, ...] = ()
    """Where they are not all in one range: the ranges, from front to back."""

    def ranges(self, size: int) -> Iterator[tuple[int, int]]:
        """Begin and length of each range of a part of so many elements."""
        for run in self.runs or (Run(self.start, size),):
            for number in range(run.times):
                yield run.start + number * run.step, run.length

    def take(self, whole: Tensor) -> Tensor:
        """The part of a tensor, which is whole, in one dimension; for a place with runs."""
        flat = whole.reshape(-1)
        return torch.cat([_view(flat, run).reshape(-1) for run in self.runs])

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write the part into a tensor that is whole and contiguous; for a place with runs."""
        flat, at = whole.view(-1), 0
        for run in self.runs:
            size = run.length * run.times
            _view(flat, run).copy_(part[at : at + size].view(run.times, run.length))
            at += size


def _view(flat: Tensor, run: Run) -> Tensor:
    start = flat.storage_offset() + run.start
    return flat.as_strided((run.times, run.length), (run.step or run.length, 1), start)


def runs_of(starts: np.ndarray, lengths: np.ndarray) -> tuple[Run, ...]:
    """Ranges that follow one another in as few runs as they make, neighbours as one."""
    ranges: list[tuple[int, int]] = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if ranges and sum(ranges[-1]) == start:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + length)
        else:
            ranges.append((start, length))
    found: list[Run] = []
    for start, length in ranges:
        last = found[-1] if found else None
        step = start - (last.start + last.step * (last.times - 1)) if last else 0
        if last and last.length == length and last.step in (0, step):
            found[-1] = Run(last.start, length, step, last.times + 1)
        else:
            found.append(Run(start, length))
    return tuple(found)


Places = Mapping[str, Place]


def write(
    folder: Path, state: Mapping[str, Any], rank: int, size: int, places: Places | None = None
) -> None:
    """Write this rank's part of a state; what of it is no tensor is left out.

    Args:
        state: dictionaries of dictionaries of tensors, such as those of torch's ``get_state_dict``.
        places: of tensors that are a rank's part, by their names in the files; those of FSDP2 say
            it themselves.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own: dict[str, Tensor] = {}
    parts: dict[str, tuple[Any, ...]] = {}
    same: dict[str, str] = {}
    known: dict[object, str] = {}
    for name, value in tensors(state):
        first = known.setdefault(memory(value), name)
        if first != name:
            same[name] = first
            continue
        place = _place(value, (places or {}).get(name))
        if place is not None:
            apart = sum(run.times for run in place.runs) > 1
            parts[name] = (place.start, place.shape, *([place.runs] if apart else []))
        elif rank:
            continue
        part = local(value).detach().contiguous()
        own[name] = part if place is None else part.view(-1)
    table = json.dumps({"format": FORMAT, "parts": parts, "same": same}, sort_keys=True)
    path = folder / _file(rank, size)
    save_file(own, path, metadata={"table": table})
    sync_file(path)
    if rank == 0:
        # An attempt of another number of ranks may have ended here before.
        for other in set(folder.glob("rank-*.safetensors")):
            if not other.name.endswith(f"-of-{size}.safetensors"):
                other.unlink()


@torch.no_grad()
def read(folder: Path, state: Mapping[str, Any], places: Places | None = None) -> None:
    """Fill the tensors of a state with what is in the files, whichever trainer wrote them.

    Args:
        state, places: as for :func:`write`; of the same tensors, cut in any way.

    Raises:
        DataError: there are no such files, or they do not fit the state.
        ArtifactError: they are committed and damaged; the state holds anything.
    """
    name = ""
    try:
        with contextlib.ExitStack() as stack:
            files = _Files(folder, stack)
            for name, value in tensors(state):
                if name in OWN and not files.has(name):
                    continue
                place = _place(value, (places or {}).get(name))
                files.want(name, place or Place(tuple(value.shape), 0), local(value))
            name = ""
            files.fill()
    except (SafetensorError, FileNotFoundError, ValueError, KeyError, TypeError) as error:
        where = f"{name}: " if name else ""
        raise DataError(f"{folder}: not a state of this trainer: {where}{error}") from error


def _place(value: Tensor, given: Place | None) -> Place | None:
    """Where a part belongs; None: it is the whole, which all ranks have."""
    if given is not None or not is_shared(value):
        return given
    begin, end = rows_of(value)
    if len(local(value)) != end - begin:
        raise ValueError(f"not {end - begin} of {value.shape[0]} rows")
    return Place(tuple(value.shape), begin * value.shape[1:].numel())


@dataclass
class _Wanted:
    """Elements of one tensor of one file, and where they go."""

    low: int
    """The first, in the file's part."""
    part: Tensor
    """One-dimensional, or a scalar."""

    @property
    def high(self) -> int:
        return self.low + self.part.numel()


class _Files:
    """The files of a state; what is in them is read once, of those in which something is needed."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        sizes = [int(m[1]) for path in folder.glob("*") if (m := _NAME.fullmatch(path.name))]
        if len(sizes) != 1:
            raise ValueError(f"{len(sizes) or 'no'} files rank-0-of-N.safetensors")
        self._files: list[TensorFile] = []
        self._wanted: list[dict[str, list[_Wanted]]] = []
        self._parts: dict[str, list[tuple[int, Place]]] = {}
        self._same: dict[str, str] = {}
        self._known: dict[str, list[tuple[int, int, int, int]]] = {}
        for rank in range(sizes[0]):
            file = stack.enter_context(TensorFile(folder / _file(rank, sizes[0])))
            table = json.loads(file.metadata["table"])
            if table["format"] != FORMAT:
                raise ValueError(f"format {table['format']!r} is not {FORMAT!r}")
            self._files.append(file)
            self._wanted.append({})
            self._same |= table["same"]
            for name, shape in file.shapes.items():
                start, whole, *runs = table["parts"].get(name, (0, shape))
                place = Place(tuple(whole), start, tuple(Run(*run) for run in (runs or [()])[0]))
                self._parts.setdefault(name, []).append((rank, place))

    def has(self, name: str) -> bool:
        """Whether a tensor is there."""
        return name in self._parts

    def want(self, name: str, place: Place, part: Tensor) -> None:
        """Have a part of a tensor filled by :meth:`fill`."""
        name = self._same.get(name, name)
        if name not in self._parts:
            raise ValueError("it is not there")
        flat, own = part.view(-1) if part.dim() else part, 0
        theirs = self._ranges(name, place)
        starts = [start for start, *_ in theirs]
        for begin, length in place.ranges(flat.numel()):
            at, end = begin, begin + length
            while at < end:
                start, size, low, rank = theirs[max(0, bisect.bisect_right(starts, at) - 1)]
                if not start <= at < start + size:
                    raise ValueError(_missed(at, place))
                high = min(end, start + size)
                here = flat[own : own + high - at] if flat.dim() else flat
                self._wanted[rank].setdefault(name, []).append(_Wanted(low + at - start, here))
                own, at = own + high - at, high

    def _ranges(self, name: str, place: Place) -> list[tuple[int, int, int, int]]:
        """Of a tensor in the files: begin and length of ranges, where in which file's part."""
        if name not in self._known:
            found = []
            for rank, theirs in self._parts[name]:
                at, size = 0, torch.Size(self._files[rank].shapes[name]).numel()
                for start, length in theirs.ranges(size):
                    found.append((start, length, at, rank))
                    at += length
            self._known[name] = found = sorted(one for one in found if one[1])
            for one, other in itertools.pairwise(found):
                if sum(one[:2]) > other[0]:
                    raise ValueError(_missed(sum(one[:2]), place))
        for _, theirs in self._parts[name]:
            if theirs.shape != place.shape:
                raise ValueError(f"shape {list(theirs.shape)}, not {list(place.shape)}")
        return self._known[name]

    def fill(self) -> None:
        """Read the files from front to back; what is not needed only goes into the checksum."""
        for file, wanted in zip(self._files, self._wanted, strict=True):
            if not wanted:
                continue
            spans = {name: _rows(file.shapes[name], parts) for name, parts in wanted.items()}
            for name, tensor in file.tensors(spans):
                flat = tensor.view(-1)
                before = spans[name][0] * torch.Size(file.shapes[name][1:]).numel()
                for it in wanted[name]:
                    it.part.copy_(flat[it.low - before : it.high - before].view(it.part.shape))


def _missed(element: int, place: Place) -> str:
    return f"element {element} of {list(place.shape)} is in no file, or in several"


def _rows(shape: tuple[int, ...], parts: list[_Wanted]) -> tuple[int, int]:
    """The rows of a tensor of this shape that all the parts are in."""
    each = torch.Size(shape[1:]).numel()
    return min(it.low for it in parts) // each, -(-max(it.high for it in parts) // each)


def tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state and their names in the files."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from tensors(value, f"{prefix}{key}/")


def _file(rank: int, size: int) -> str:
    return f"rank-{rank}-of-{size}.safetensors"
