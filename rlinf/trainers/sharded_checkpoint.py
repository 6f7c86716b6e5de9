"""The state of a trainer in files: each rank writes its parts, and any number of ranks read theirs.

The files are safetensors, ``rank-R-of-N.safetensors``. A rank's part of a sharded tensor is one or
more ranges of the elements, in order (FSDP2: rows; ZeRO: any range; tensor parallel: a range of
each row). A table in each file lists the positions of its parts in the full tensors. Replicated
tensors are in the file of rank 0. No rank waits for another, and nothing is pickled.
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
_RANK_0_FILE = re.compile(r"rank-0-of-(\d+)\.safetensors")


class StridedRange(NamedTuple):
    """Ranges of a tensor's elements, of equal length and at a regular distance."""

    start: int
    """The first element of the first range."""
    length: int
    """Length of each range."""
    stride: int = 0
    """Distance between the starts of adjacent ranges; 0: there is one range."""
    repeats: int = 1
    """Number of ranges."""


@dataclass(frozen=True)
class ShardPlacement:
    """Position of a rank's part of a tensor in the full tensor."""

    shape: tuple[int, ...]
    """Shape of the full tensor."""
    start: int
    """Number of elements of the full tensor before the part's first."""
    strided_ranges: tuple[StridedRange, ...] = ()
    """The ranges of the part, from front to back, if it is not one contiguous range."""

    def ranges(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield start and length of each range of a part of ``size`` elements."""
        for strided in self.strided_ranges or (StridedRange(self.start, size),):
            for index in range(strided.repeats):
                yield strided.start + index * strided.stride, strided.length

    def extract(self, full: Tensor) -> Tensor:
        """Return the part of a full tensor, in one dimension; only with strided ranges."""
        flat = full.reshape(-1)
        return torch.cat([_view(flat, strided).reshape(-1) for strided in self.strided_ranges])

    def insert(self, full: Tensor, part: Tensor) -> None:
        """Write the part into a full, contiguous tensor; only with strided ranges."""
        flat, position = full.view(-1), 0
        for strided in self.strided_ranges:
            view = _view(flat, strided)
            view.copy_(part[position : position + view.numel()].view(view.shape))
            position += view.numel()


def _view(flat: Tensor, strided: StridedRange) -> Tensor:
    """Return the elements of a strided range as ``[repeats, length]``."""
    start, stride = flat.storage_offset() + strided.start, strided.stride or strided.length
    return flat.as_strided((strided.repeats, strided.length), (stride, 1), start)


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
        distance = start - (last.start + last.stride * (last.repeats - 1)) if last else 0
        if last and last.length == length and last.stride in (0, distance):
            strided[-1] = StridedRange(last.start, length, distance, last.repeats + 1)
        else:
            strided.append(StridedRange(start, length))
    return tuple(strided)


ShardPlacements = Mapping[str, ShardPlacement]
"""Placement of this rank's part of each tensor, by the tensor's name in the files."""


def write_shards(
    folder: Path,
    state: Mapping[str, Any],
    rank: int,
    world_size: int,
    placements: ShardPlacements | None = None,
) -> None:
    """Write this rank's part of a state. Values that are not tensors are skipped.

    Args:
        state: nested dictionaries of tensors, such as those of torch's ``get_state_dict``.
        placements: placement of each tensor that is a rank's part, by its name in the files. It is
            not needed for DTensors (FSDP2), which know their placement.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    parts: dict[str, tuple[Any, ...]] = {}
    tied_names: dict[str, str] = {}
    names_by_storage: dict[object, str] = {}
    for name, value in named_tensors(state):
        first = names_by_storage.setdefault(storage_key(value), name)
        if first != name:
            tied_names[name] = first
            continue
        placement = _placement_of(value, (placements or {}).get(name))
        if placement is not None:
            is_strided = sum(strided.repeats for strided in placement.strided_ranges) > 1
            parts[name] = (
                placement.start,
                placement.shape,
                *([placement.strided_ranges] if is_strided else []),
            )
        elif rank:
            continue
        part = local_shard(value).detach().contiguous()
        tensors[name] = part if placement is None else part.view(-1)
    table = json.dumps({"format": FORMAT, "parts": parts, "same": tied_names}, sort_keys=True)
    path = folder / _file_name(rank, world_size)
    save_file(tensors, path, metadata={"table": table})
    sync_file(path)
    if rank == 0:
        # An earlier attempt with another number of ranks may have left files.
        for old_file in set(folder.glob("rank-*.safetensors")):
            if not old_file.name.endswith(f"-of-{world_size}.safetensors"):
                old_file.unlink()


@torch.no_grad()
def read_shards(
    folder: Path, state: Mapping[str, Any], placements: ShardPlacements | None = None
) -> None:
    """Fill the tensors of a state from the files, which any trainer may have written.

    Args:
        state, placements: as in :func:`write_shards`; the same tensors, with any sharding.

    Raises:
        DataError: there are no such files, or they do not match the state.
        ArtifactError: committed files are damaged; the state is then undefined.
    """
    name = ""
    try:
        with contextlib.ExitStack() as stack:
            reader = _StateReader(folder, stack)
            for name, value in named_tensors(state):
                if name in OPTIONAL_TENSORS and not reader.has(name):
                    continue
                placement = _placement_of(value, (placements or {}).get(name))
                full = ShardPlacement(tuple(value.shape), 0)
                reader.request(name, placement or full, local_shard(value))
            name = ""
            reader.fill()
    except (SafetensorError, FileNotFoundError, ValueError, KeyError, TypeError) as error:
        prefix = f"{name}: " if name else ""
        raise DataError(f"{folder}: not a state of this trainer: {prefix}{error}") from error


@torch.no_grad()
def read_full_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the full tensors whose names in the files begin with a prefix, float32, by name.

    Raises:
        DataError: there are no such files, or they are not complete.
        ArtifactError: committed files are damaged.
    """
    try:
        with contextlib.ExitStack() as stack:
            reader = _StateReader(folder, stack)
            tensors = {name: torch.empty(shape) for name, shape in reader.shapes(prefix).items()}
            for name, tensor in tensors.items():
                reader.request(name, ShardPlacement(tuple(tensor.shape), 0), tensor)
            reader.fill()
    except (SafetensorError, FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: not a state of a trainer: {error}") from error
    return tensors


def _placement_of(value: Tensor, placement: ShardPlacement | None) -> ShardPlacement | None:
    """Return the placement of a tensor's part; None if all ranks have the full tensor."""
    if placement is not None or not is_sharded(value):
        return placement
    start, stop = local_rows(value)
    if len(local_shard(value)) != stop - start:
        raise ValueError(f"not {stop - start} of {value.shape[0]} rows")
    return ShardPlacement(tuple(value.shape), start * value.shape[1:].numel())


@dataclass
class _ReadRequest:
    """A range of one tensor of one file, and its destination."""

    start: int
    """Offset of the range in the file's part of the tensor."""
    target: Tensor
    """Destination: one-dimensional, or a scalar."""

    @property
    def stop(self) -> int:
        return self.start + self.target.numel()


class _StateReader:
    """Reads requested parts of a state from its files, each of which is read at most once."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        sizes = [int(m[1]) for path in folder.glob("*") if (m := _RANK_0_FILE.fullmatch(path.name))]
        if len(sizes) != 1:
            raise ValueError(f"{len(sizes) or 'no'} files rank-0-of-N.safetensors")
        self._files: list[SafetensorsReader] = []
        """The files, by rank."""
        self._requests: list[dict[str, list[_ReadRequest]]] = []
        """Requests to each file, by tensor."""
        self._placements: dict[str, list[tuple[int, ShardPlacement]]] = {}
        """Rank and placement of each part of a tensor, by tensor."""
        self._tied_names: dict[str, str] = {}
        """Name under which a tied tensor is stored, by its other names."""
        self._ranges_by_name: dict[str, list[tuple[int, int, int, int]]] = {}
        """Results of :meth:`_ranges`."""
        for rank in range(sizes[0]):
            file = stack.enter_context(SafetensorsReader(folder / _file_name(rank, sizes[0])))
            table = json.loads(file.metadata["table"])
            if table["format"] != FORMAT:
                raise ValueError(f"format {table['format']!r} is not {FORMAT!r}")
            self._files.append(file)
            self._requests.append({})
            self._tied_names |= table["same"]
            for name, shape in file.shapes.items():
                start, full_shape, *strided = table["parts"].get(name, (0, shape))
                strided_ranges = tuple(StridedRange(*item) for item in (strided or [()])[0])
                placement = ShardPlacement(tuple(full_shape), start, strided_ranges)
                self._placements.setdefault(name, []).append((rank, placement))

    def has(self, name: str) -> bool:
        return name in self._placements

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the full tensors whose names begin with a prefix, by name."""
        return {
            name: parts[0][1].shape
            for name, parts in sorted(self._placements.items())
            if name.startswith(prefix)
        }

    def request(self, name: str, placement: ShardPlacement, part: Tensor) -> None:
        """Request a part of a tensor; :meth:`fill` then reads it into ``part``."""
        name = self._tied_names.get(name, name)
        if name not in self._placements:
            raise ValueError("no file has it")
        flat, offset = part.view(-1) if part.dim() else part, 0
        ranges = self._ranges(name, placement)
        starts = [start for start, *_ in ranges]
        for first, length in placement.ranges(flat.numel()):
            position, end = first, first + length
            while position < end:
                index = max(0, bisect.bisect_right(starts, position) - 1)
                start, size, file_offset, rank = ranges[index]
                if not start <= position < start + size:
                    raise ValueError(_coverage_message(position, placement))
                stop = min(end, start + size)
                target = flat[offset : offset + stop - position] if flat.dim() else flat
                request = _ReadRequest(file_offset + position - start, target)
                self._requests[rank].setdefault(name, []).append(request)
                offset, position = offset + stop - position, stop

    def _ranges(self, name: str, placement: ShardPlacement) -> list[tuple[int, int, int, int]]:
        """Return a tensor's ranges in the files: start, length, offset in the file's part, rank."""
        if name not in self._ranges_by_name:
            ranges = []
            for rank, file_placement in self._placements[name]:
                offset, size = 0, torch.Size(self._files[rank].shapes[name]).numel()
                for start, length in file_placement.ranges(size):
                    ranges.append((start, length, offset, rank))
                    offset += length
            self._ranges_by_name[name] = ranges = sorted(item for item in ranges if item[1])
            for (start, length, *_), (next_start, *_) in itertools.pairwise(ranges):
                if start + length > next_start:
                    raise ValueError(_coverage_message(start + length, placement))
        for _, file_placement in self._placements[name]:
            if file_placement.shape != placement.shape:
                raise ValueError(f"shape {list(file_placement.shape)}, not {list(placement.shape)}")
        return self._ranges_by_name[name]

    def fill(self) -> None:
        """Read the files from front to back; unrequested elements only enter the checksum."""
        for file, requests in zip(self._files, self._requests, strict=True):
            if not requests:
                continue
            spans = {name: _row_range(file.shapes[name], rs) for name, rs in requests.items()}
            for name, tensor in file.tensors(spans):
                flat = tensor.view(-1)
                skipped = spans[name][0] * torch.Size(file.shapes[name][1:]).numel()
                for request in requests[name]:
                    elements = flat[request.start - skipped : request.stop - skipped]
                    request.target.copy_(elements.view(request.target.shape))


def _coverage_message(element: int, placement: ShardPlacement) -> str:
    return f"element {element} of {list(placement.shape)} is in no file, or in several"


def _row_range(shape: tuple[int, ...], requests: list[_ReadRequest]) -> tuple[int, int]:
    """Return the range of rows, of a tensor of this shape, that contains all requests."""
    row_size = torch.Size(shape[1:]).numel()
    start, stop = min(r.start for r in requests), max(r.stop for r in requests)
    return start // row_size, -(-stop // row_size)


def named_tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state with their names in the files, such as ``model/NAME``."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from named_tensors(value, f"{prefix}{key}/")


def _file_name(rank: int, world_size: int) -> str:
    return f"rank-{rank}-of-{world_size}.safetensors"
