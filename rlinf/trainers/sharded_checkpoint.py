"""The state of a trainer in files: each rank writes its parts, and any number of ranks read theirs.

The files are safetensors, ``rank-R-of-N.safetensors``. A tensor that ranks share is split into any
ranges of its elements, in order (FSDP2: rows; ZeRO: any range; tensor parallel: a range of each
row). A table in each file lists the positions of its parts. Replicated tensors are in the file of
rank 0. No rank waits for another, and nothing is pickled.
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
from rlinf.safetensors_io import SafetensorsReader
from rlinf.sharded_tensors import is_sharded, local_rows, local_shard, storage_key

FORMAT = "rlinf-shards-2"
OPTIONAL_TENSORS = {"loss_scale"}
"""Tensors that only some trainers have. Reading a state without them leaves them unchanged."""
_NAME = re.compile(r"rank-0-of-(\d+)\.safetensors")


class StridedRange(NamedTuple):
    """Equal ranges of the elements of a tensor at a regular distance."""

    start: int
    """The first element of the first range."""
    length: int
    """Length of each range."""
    stride: int = 0
    """Distance from the beginning of one range to that of the next."""
    repeats: int = 1
    """Number of ranges."""


@dataclass(frozen=True)
class ShardPlacement:
    """Position of a rank's part of a tensor in the full tensor."""

    shape: tuple[int, ...]
    """Shape of the full tensor."""
    start: int
    """Number of elements before the part."""
    strided_ranges: tuple[StridedRange, ...] = ()
    """The ranges of the part, from front to back, if it is not one contiguous range."""

    def ranges(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield begin and length of each range of a part of so many elements."""
        for run in self.strided_ranges or (StridedRange(self.start, size),):
            for number in range(run.repeats):
                yield run.start + number * run.stride, run.length

    def extract(self, full: Tensor) -> Tensor:
        """Return the part of a full tensor, in one dimension; for a placement with strided
        ranges."""
        flat = full.reshape(-1)
        return torch.cat([_view(flat, run).reshape(-1) for run in self.strided_ranges])

    def insert(self, full: Tensor, part: Tensor) -> None:
        """Write the part into a full, contiguous tensor; for a placement with strided ranges."""
        flat, at = full.view(-1), 0
        for run in self.strided_ranges:
            size = run.length * run.repeats
            _view(flat, run).copy_(part[at : at + size].view(run.repeats, run.length))
            at += size


def _view(flat: Tensor, run: StridedRange) -> Tensor:
    start = flat.storage_offset() + run.start
    return flat.as_strided((run.repeats, run.length), (run.stride or run.length, 1), start)


def to_strided_ranges(starts: np.ndarray, lengths: np.ndarray) -> tuple[StridedRange, ...]:
    """Merge ranges into as few strided ranges as possible; adjacent ranges become one."""
    ranges: list[tuple[int, int]] = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if ranges and sum(ranges[-1]) == start:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + length)
        else:
            ranges.append((start, length))
    strided: list[StridedRange] = []
    for start, length in ranges:
        last = strided[-1] if strided else None
        step = start - (last.start + last.stride * (last.repeats - 1)) if last else 0
        if last and last.length == length and last.stride in (0, step):
            strided[-1] = StridedRange(last.start, length, step, last.repeats + 1)
        else:
            strided.append(StridedRange(start, length))
    return tuple(strided)


ShardPlacements = Mapping[str, ShardPlacement]


def write_shards(
    folder: Path,
    state: Mapping[str, Any],
    rank: int,
    size: int,
    places: ShardPlacements | None = None,
) -> None:
    """Write this rank's part of a state. Values that are not tensors are skipped.

    Args:
        state: nested dictionaries of tensors, such as those of torch's ``get_state_dict``.
        places: placements of tensors that are a rank's part, by their names in the files. FSDP2's
            tensors know their placement themselves.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own: dict[str, Tensor] = {}
    parts: dict[str, tuple[Any, ...]] = {}
    same: dict[str, str] = {}
    known: dict[object, str] = {}
    for name, value in named_tensors(state):
        first = known.setdefault(storage_key(value), name)
        if first != name:
            same[name] = first
            continue
        place = _place(value, (places or {}).get(name))
        if place is not None:
            is_strided = sum(run.repeats for run in place.strided_ranges) > 1
            parts[name] = (
                place.start,
                place.shape,
                *([place.strided_ranges] if is_strided else []),
            )
        elif rank:
            continue
        part = local_shard(value).detach().contiguous()
        own[name] = part if place is None else part.view(-1)
    table = json.dumps({"format": FORMAT, "parts": parts, "same": same}, sort_keys=True)
    path = folder / _file(rank, size)
    save_file(own, path, metadata={"table": table})
    sync_file(path)
    if rank == 0:
        # An earlier attempt with another number of ranks may have left files.
        for other in set(folder.glob("rank-*.safetensors")):
            if not other.name.endswith(f"-of-{size}.safetensors"):
                other.unlink()


@torch.no_grad()
def read_shards(
    folder: Path, state: Mapping[str, Any], places: ShardPlacements | None = None
) -> None:
    """Fill the tensors of a state from the files, which any trainer may have written.

    Args:
        state, places: as in :func:`write_shards`; the same tensors, with any sharding.

    Raises:
        DataError: there are no such files, or they do not match the state.
        ArtifactError: the files are committed and damaged; the state is undefined.
    """
    name = ""
    try:
        with contextlib.ExitStack() as stack:
            files = _Files(folder, stack)
            for name, value in named_tensors(state):
                if name in OPTIONAL_TENSORS and not files.has(name):
                    continue
                place = _place(value, (places or {}).get(name))
                files.want(name, place or ShardPlacement(tuple(value.shape), 0), local_shard(value))
            name = ""
            files.fill()
    except (SafetensorError, FileNotFoundError, ValueError, KeyError, TypeError) as error:
        where = f"{name}: " if name else ""
        raise DataError(f"{folder}: not a state of this trainer: {where}{error}") from error


def _place(value: Tensor, placement: ShardPlacement | None) -> ShardPlacement | None:
    """Return the placement of a part; None: it is a full tensor, which all ranks have."""
    if placement is not None or not is_sharded(value):
        return placement
    begin, end = local_rows(value)
    if len(local_shard(value)) != end - begin:
        raise ValueError(f"not {end - begin} of {value.shape[0]} rows")
    return ShardPlacement(tuple(value.shape), begin * value.shape[1:].numel())


@dataclass
class _Wanted:
    """Elements of one tensor of one file, and their destination."""

    low: int
    """The first, in the file's part."""
    part: Tensor
    """One-dimensional, or a scalar."""

    @property
    def high(self) -> int:
        return self.low + self.part.numel()


class _Files:
    """The files of a state. Each file that is needed is read once."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        sizes = [int(m[1]) for path in folder.glob("*") if (m := _NAME.fullmatch(path.name))]
        if len(sizes) != 1:
            raise ValueError(f"{len(sizes) or 'no'} files rank-0-of-N.safetensors")
        self._files: list[SafetensorsReader] = []
        self._wanted: list[dict[str, list[_Wanted]]] = []
        self._parts: dict[str, list[tuple[int, ShardPlacement]]] = {}
        self._same: dict[str, str] = {}
        self._known: dict[str, list[tuple[int, int, int, int]]] = {}
        for rank in range(sizes[0]):
            file = stack.enter_context(SafetensorsReader(folder / _file(rank, sizes[0])))
            table = json.loads(file.metadata["table"])
            if table["format"] != FORMAT:
                raise ValueError(f"format {table['format']!r} is not {FORMAT!r}")
            self._files.append(file)
            self._wanted.append({})
            self._same |= table["same"]
            for name, shape in file.shapes.items():
                start, full_shape, *runs = table["parts"].get(name, (0, shape))
                place = ShardPlacement(
                    tuple(full_shape), start, tuple(StridedRange(*run) for run in (runs or [()])[0])
                )
                self._parts.setdefault(name, []).append((rank, place))

    def has(self, name: str) -> bool:
        """Return whether a tensor is in the files."""
        return name in self._parts

    def want(self, name: str, place: ShardPlacement, part: Tensor) -> None:
        """Request a part of a tensor, which :meth:`fill` reads."""
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

    def _ranges(self, name: str, place: ShardPlacement) -> list[tuple[int, int, int, int]]:
        """Return the ranges of a tensor in the files: begin, length, position in the file's part,
        and rank."""
        if name not in self._known:
            ranges = []
            for rank, theirs in self._parts[name]:
                at, size = 0, torch.Size(self._files[rank].shapes[name]).numel()
                for start, length in theirs.ranges(size):
                    ranges.append((start, length, at, rank))
                    at += length
            self._known[name] = ranges = sorted(one for one in ranges if one[1])
            for one, other in itertools.pairwise(ranges):
                if sum(one[:2]) > other[0]:
                    raise ValueError(_missed(sum(one[:2]), place))
        for _, theirs in self._parts[name]:
            if theirs.shape != place.shape:
                raise ValueError(f"shape {list(theirs.shape)}, not {list(place.shape)}")
        return self._known[name]

    def fill(self) -> None:
        """Read the files from front to back. Elements that are not requested only enter the
        checksum."""
        for file, wanted in zip(self._files, self._wanted, strict=True):
            if not wanted:
                continue
            spans = {name: _rows(file.shapes[name], parts) for name, parts in wanted.items()}
            for name, tensor in file.tensors(spans):
                flat = tensor.view(-1)
                before = spans[name][0] * torch.Size(file.shapes[name][1:]).numel()
                for it in wanted[name]:
                    it.part.copy_(flat[it.low - before : it.high - before].view(it.part.shape))


def _missed(element: int, place: ShardPlacement) -> str:
    return f"element {element} of {list(place.shape)} is in no file, or in several"


def _rows(shape: tuple[int, ...], parts: list[_Wanted]) -> tuple[int, int]:
    """Return the rows of a tensor of this shape that contain all the parts."""
    each = torch.Size(shape[1:]).numel()
    return min(it.low for it in parts) // each, -(-max(it.high for it in parts) // each)


def named_tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state with their names in the files."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from named_tensors(value, f"{prefix}{key}/")


def _file(rank: int, size: int) -> str:
    return f"rank-{rank}-of-{size}.safetensors"
