"""Record files: records pass from one job to a later one as HDF5 files.

A file holds many records: step arrays are concatenated along their leading dimension with one
offsets table, context arrays likewise with a table each, strings as UTF-8 bytes with a table. No
Python object is stored, so reading never runs foreign code, and equal records give equal bytes.

Columns with large rows lie in a file of their own and are read when they are used, in blocks whose
checksums the first file holds. A process that uses a few of the records reads only those.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

import h5py
import numpy as np
import xxhash

from rlinf.artifacts import committed_file
from rlinf.channels.channel import ChannelClosed, RecordSink, RecordSource
from rlinf.data.record import LARGE_ROW_BYTES, LazyArray, Record, RecordId, Scalar
from rlinf.errors import ArtifactError
from rlinf.verified_io import read_bytes, verify_file

BLOCK_BYTES = 1 << 18
"""Rows are read and checked by blocks of about so much, or one by one."""


def large_columns_path(path: Path) -> Path:
    """Return the path of the file with the large columns of a file of records."""
    return path.with_suffix(".rows.hdf5")


def large_columns(record: Record) -> list[str]:
    """Return the names of step columns whose rows are large."""
    sizes = {n: a.dtype.itemsize * int(np.prod(a.shape[1:])) for n, a in record.steps.items()}
    return sorted(name for name, size in sizes.items() if size >= LARGE_ROW_BYTES)


def write_large_columns(path: Path, file: h5py.File, columns: dict[str, list[np.ndarray]]) -> None:
    """Write large columns beside ``path``, and their checksums into ``file``.

    Raises:
        ValueError: arrays of one column differ in dtype or trailing shape.
        OSError: it cannot be written.
    """
    with (
        open_hdf5_target(large_columns_path(path)) as target,
        h5py.File(target, "w", libver="earliest") as rows,
    ):
        for name, arrays in columns.items():
            check_same_layout(arrays, name)
            kind, shape = arrays[0].dtype, (sum(map(len, arrays)), *arrays[0].shape[1:])
            size = _block(kind, shape)
            column, sums, at = rows.create_dataset(name, shape, kind), [], 0
            for block in _blocks(arrays, size):
                column[at : at + len(block)] = block
                sums.append(_sum(block))
                at += len(block)
            data = file.create_dataset(f"steps/rows/{name}", data=np.array(sums, dtype=np.uint64))
            data.attrs["shape"], data.attrs["dtype"] = shape, kind.str
            data.attrs["block"] = size


def _blocks(arrays: Sequence[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Arrays one after the other, by ``size`` rows: there is never a second copy of them all."""
    waiting, count = list[np.ndarray](), 0
    for array in arrays:
        start = 0
        while start < len(array):
            part = array[start : start + size - count]
            waiting.append(part)
            start, count = start + len(part), count + len(part)
            if count == size:
                yield np.concatenate(waiting)
                waiting, count = [], 0
    if waiting:
        yield np.concatenate(waiting)


class LargeColumn:
    """A large column over all records of the file ``path``."""

    def __init__(self, path: Path, name: str, sums: Any) -> None:
        self._path, self._name, self._sums = large_columns_path(path), name, sums[:]
        self._shape = tuple(int(size) for size in sums.attrs["shape"])
        self._dtype = np.dtype(str(sums.attrs["dtype"]))
        self._size = int(sums.attrs["block"])

    def lazy_array(self) -> LazyArray:
        """Its rows; reading them raises ``ArtifactError`` where they are committed and damaged, and
        ``ValueError`` where they are damaged."""
        return LazyArray(self._read, self._shape, self._dtype)

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Rows, read now; raises as above."""
        return self._read(rows.start, rows.stop)

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Rows, of whole blocks that are as they were written.

        Raises:
            ArtifactError: they are not.
        """
        first, size = start // self._size, self._size
        try:
            with h5py.File(self._path, "r", locking=False) as file:
                column = file[self._name]
                if not isinstance(column, h5py.Dataset):
                    raise ValueError("no array")
                found = column[first * size : -(-stop // size) * size]
        except FileNotFoundError:
            raise self._damage("missing") from None
        except OSError as error:
            # The file as it was committed is no damage, whatever keeps it from being read now.
            verify_file(self._path)
            raise error if committed_file(self._path) else self._damage(str(error)) from None
        except (KeyError, ValueError, TypeError) as error:
            raise self._damage(str(error)) from None
        if found.shape[1:] != self._shape[1:] or found.dtype != self._dtype:
            raise self._damage("another shape or type")
        for number in range(-(-len(found) // size)):
            if _sum(found[number * size : (number + 1) * size]) != self._sums[first + number]:
                raise self._damage("altered (checksum differs)")
        if len(found) < stop - first * size:
            raise self._damage("truncated")
        return cast(np.ndarray, found[start - first * size : stop - first * size])

    def _damage(self, problem: str) -> Exception:
        commit, text = committed_file(self._path), f"{self._path}: {self._name}: {problem}"
        return ArtifactError(text, commit.manifest, commit.data) if commit else ValueError(text)


def _block(dtype: np.dtype, shape: Sequence[int]) -> int:
    """Rows of a block."""
    row = dtype.itemsize * int(np.prod(shape[1:]))
    return max(1, BLOCK_BYTES // max(1, row))


def _sum(rows: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(rows).view(np.uint8).data)


def check_same_layout(arrays: Sequence[np.ndarray], name: str) -> None:
    """Check that arrays can form one column.

    Raises:
        ValueError: they differ in dtype or trailing shape.
    """
    if len({(array.dtype, array.shape[1:]) for array in arrays}) > 1:
        raise ValueError(f"column {name!r}: dtype and trailing shape must not change")


class _Target(io.FileIO):
    """A file that fails only when asked.

    HDF5 cannot give up a file whose last writes failed: it tries again, also when Python ends, and
    then crashes.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        done = 0
        while done < size and self.error is None:
            try:
                done += super().write(memoryview(data).cast("B")[done:])
            except OSError as error:
                self.error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        if self.error is None:
            try:
                return super().truncate(size)
            except OSError as error:
                self.error = error
        return size or 0


@contextlib.contextmanager
def open_hdf5_target(path: Path) -> Iterator[io.FileIO]:
    """Open a new file for ``h5py.File``.

    Raises:
        OSError: writing failed; raised once the HDF5 file is closed.
    """
    with _Target(path, "w+") as target:
        yield target
        if target.error is not None:
            raise OSError(target.error.errno, target.error.strerror, str(path))


SCHEMA, SCHEMA_WITH_LARGE_COLUMNS = 1, 2
"""Schema of a file, and of one with some columns in a separate file."""
PART_BYTES = 256 << 20
MAX_OPEN_PARTS = 64
"""Maximum number of files that stay open during sorting; processes are often limited to 1024."""
T = TypeVar("T")


class RecordFileWriter(RecordSink):
    """The producing end: collects records and writes ``<name>-r<rank>-p<part>.h5`` files.

    Readers see nothing before the stage commits its manifest. Equal records give equal bytes in
    whatever order they come, because the parts are sorted by identity. If the records fill more
    than one part and came in another order, ``close`` writes them again, which temporarily takes
    twice the disk space but no more than a part of memory.
    """

    def __init__(self, folder: Path, name: str, rank: int = 0) -> None:
        self._folder, self._name, self._rank = folder, name, rank
        self._part = _FilePart[Record]()
        self._parts: list[list[_RecordPlace]] = []
        """What was written, in the order in which it lies there."""
        self._closed = False
        self.count = 0

    def put(self, record: Record) -> None:
        if self._closed:
            raise ChannelClosed("put on a closed channel")
        self._part.add(record, _size(record))
        self.count += 1
        if self._part.full:
            self._flush()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._part.items or not self._parts:
            self._flush()
        parts = list(_cut(sorted(place for part in self._parts for place in part)))
        if len(self._parts) > 1 and parts != self._parts:
            self._sort(parts)

    def _flush(self) -> None:
        records, number = sorted(self._part.items, key=lambda r: r.identity), len(self._parts)
        write_records(self._path(number), records)
        places = (_RecordPlace(r.identity, number, i, _size(r)) for i, r in enumerate(records))
        self._parts.append(list(places))
        self._part = _FilePart()

    def _sort(self, parts: Iterable[Sequence[_RecordPlace]]) -> None:
        """Write the parts anew, with what lies in them now."""
        with (
            tempfile.TemporaryDirectory(dir=self._folder, prefix="unsorted-") as folder,
            contextlib.ExitStack() as staying,
        ):
            written = []
            for number in range(len(self._parts)):
                written.append(self._path(number).rename(Path(folder) / self._path(number).name))
                if (rows := large_columns_path(self._path(number))).exists():
                    rows.rename(Path(folder) / rows.name)
            # Where records came in any order, each part has some of all that were written.
            files = (
                (path, staying.enter_context(_opened(path))) for path in written[:MAX_OPEN_PARTS]
            )
            there = [_Columns(file, path, lazy=False) for path, file in files]
            for number, places in enumerate(parts):
                by_part = defaultdict[int, list[_RecordPlace]](list)
                for place in places:
                    by_part[place.part].append(place)
                records = dict[_RecordPlace, Record]()
                for part, here in by_part.items():
                    # All are sorted: what goes from one file to another lies together.
                    span = here[0].number, here[-1].number + 1
                    if part < len(there):
                        found = there[part].records(*span)
                    else:
                        with _opened(written[part]) as file:
                            found = _Columns(file, written[part], lazy=False).records(*span)
                    records.update(zip(here, found, strict=True))
                write_records(self._path(number), [records[place] for place in places])

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}-r{self._rank:03d}-p{number:03d}.h5"


class _RecordPlace(NamedTuple):
    """Position of a record: its part and its number within; ``size`` in bytes."""

    identity: RecordId
    part: int
    number: int
    size: int


def _size(record: Record) -> int:
    return sum(a.nbytes for a in (*record.steps.values(), *record.context.values()))


class _FilePart(Generic[T]):
    """The items of a file, which ends with the item that reaches :data:`PART_BYTES`."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._bytes = 0

    def add(self, item: T, size: int) -> None:
        self.items.append(item)
        self._bytes += size

    @property
    def full(self) -> bool:
        return self._bytes >= PART_BYTES


def _cut(places: Iterable[_RecordPlace]) -> Iterator[list[_RecordPlace]]:
    """Parts of records in this order."""
    part = _FilePart[_RecordPlace]()
    for place in places:
        part.add(place, place.size)
        if part.full:
            yield part.items
            part = _FilePart()
    if part.items:
        yield part.items


class RecordFileReader(RecordSource):
    """The consuming end: the records of committed files, sorted by (iteration, sample).

    Of records with one identity the latest attempt is kept.
    """

    def __init__(self, paths: Iterable[Path], samples: Collection[int] | None = None) -> None:
        """Read the records.

        Args:
            samples: restrict the records to these samples; see :func:`read_records`.
        """
        latest: dict[tuple[int, int], Record] = {}
        for path in sorted(paths):
            for record in read_records(path, samples):
                known = latest.get(record.identity.key)
                if known is None or known.identity.attempt < record.identity.attempt:
                    latest[record.identity.key] = record
        self._records = deque(latest[key] for key in sorted(latest))

    def get(self) -> Record:
        if not self._records:
            raise ChannelClosed("all records were read")
        return self._records.popleft()


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write records of one schema to a new HDF5 file.

    Raises:
        ValueError: records differ in column names, dtypes or trailing shapes.
        OSError: it cannot be written.
    """
    # The newest file format stores times in group headers; equal records must give equal bytes.
    with open_hdf5_target(path) as target, h5py.File(target, "w", libver="earliest") as file:
        file.attrs["schema"] = SCHEMA
        file.attrs["count"] = len(records)
        identities = np.array([record.identity for record in records], dtype=np.int64)
        file["identity"] = identities.reshape(-1, 3)
        if not records:
            return
        first = records[0]
        wide = large_columns(first)
        file.attrs["schema"] = SCHEMA_WITH_LARGE_COLUMNS if wide else SCHEMA
        for record in records:
            if (
                record.steps.keys() != first.steps.keys()
                or record.context.keys() != first.context.keys()
                or record.info.keys() != first.info.keys()
            ):
                raise ValueError(f"{path.name}: records of one channel must have one schema")
        if first.steps:
            file["steps/offsets"] = _offsets([len(record) for record in records])
        # Where things lie in a file depends on what was made first.
        for name in sorted(first.steps):
            if name not in wide:
                file[f"steps/data/{name}"] = _concatenate([r.steps[name] for r in records], name)
        if wide:
            write_large_columns(path, file, {n: [r.steps[n] for r in records] for n in wide})
        for name in sorted(first.context):
            arrays = [record.context[name] for record in records]
            file[f"context/{name}/offsets"] = _offsets([len(array) for array in arrays])
            file[f"context/{name}/data"] = _concatenate(arrays, name)
        for name in sorted(first.info):
            _write_info(file, name, [record.info[name] for record in records])


def read_records(path: Path, samples: Collection[int] | None = None) -> list[Record]:
    """Read the records of a file written by :func:`write_records`.

    Args:
        samples: restrict the records to these samples; None: all. The whole file is read for its
            checksum all the same, but other records are neither decoded nor kept.

    Raises:
        ValueError: the file is invalid, or of another schema version.
        ArtifactError: it is committed and damaged.
    """
    data = read_bytes(path)
    try:
        file = h5py.File(io.BytesIO(data), "r")
    except OSError as error:
        raise ValueError(f"{path}: not a readable HDF5 file ({error})") from None
    with file:
        if (schema := file.attrs.get("schema")) not in (SCHEMA, SCHEMA_WITH_LARGE_COLUMNS):
            raise ValueError(
                f"{path}: record schema {schema}, expected {SCHEMA} or {SCHEMA_WITH_LARGE_COLUMNS}"
            )
        columns = _Columns(file, path)
        if samples is None:
            return columns.records(0, int(file.attrs["count"]))
        there = np.flatnonzero(np.isin(columns.identities[:, 1], list(samples)))
        runs = np.split(there, np.flatnonzero(np.diff(there) > 1) + 1) if len(there) else []
        return [r for run in runs for r in columns.records(int(run[0]), int(run[-1]) + 1)]


def _opened(path: Path) -> h5py.File:
    return h5py.File(path, "r", locking=False)


class _Columns:
    """The columns of a file of records, looked up once: reading some of it again and again would be
    looking for it for the most part."""

    def __init__(self, file: h5py.File, path: Path, *, lazy: bool = True) -> None:
        """
        Args:
            lazy: columns with large rows are read as they are used.
        """
        self.identities = file["identity"][:]
        self._steps: dict[str, Any] = dict(file.get("steps/data", {}).items())
        for name, sums in file.get("steps/rows", {}).items():
            rows = LargeColumn(path, name, sums)
            self._steps[name] = rows.lazy_array() if lazy else rows
        self._bounds: Any = file["steps/offsets"][:] if self._steps else None
        groups = file.get("context", {}).items()
        self._context = {name: (group["data"], group["offsets"][:]) for name, group in groups}
        self._info = {name: _Info(group) for name, group in file.get("info", {}).items()}

    def records(self, start: int, stop: int) -> list[Record]:
        """Return those from one number up to another."""
        steps = {n: _split(data, self._bounds[start : stop + 1]) for n, data in self._steps.items()}
        context = {n: _split(data, o[start : stop + 1]) for n, (data, o) in self._context.items()}
        info = {name: column.values(start, stop) for name, column in self._info.items()}
        return [
            Record(
                RecordId(*identity),
                {name: arrays[i] for name, arrays in steps.items()},
                {name: arrays[i] for name, arrays in context.items()},
                {name: values[i] for name, values in info.items()},
            )
            for i, identity in enumerate(self.identities[start:stop].tolist())
        ]


def read_record_info(path: Path) -> list[tuple[RecordId, int, dict[str, Scalar]]]:
    """Return identity, number of steps and ``info`` of the records of a file, without arrays.

    The checksum is not compared, which would require reading all of it: this is for reports.

    Raises:
        ValueError: the file is no readable file of records.
    """
    try:
        with _opened(path) as file:
            identities = file["identity"][:].tolist()
            lengths = np.zeros(len(identities), dtype=np.int64)
            if "steps" in file:
                lengths = np.diff(file["steps/offsets"][:])
            info = {
                name: _Info(group).values(0, len(identities))
                for name, group in file.get("info", {}).items()
            }
        return [
            (
                RecordId(*identity),
                int(lengths[i]),
                {name: values[i] for name, values in info.items()},
            )
            for i, identity in enumerate(identities)
        ]
    except Exception as error:
        # One altered byte may be any of the library's errors, from a missing group on.
        raise ValueError(f"{path}: not a readable file of records ({error})") from None


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _concatenate(arrays: Sequence[np.ndarray], name: str) -> np.ndarray:
    check_same_layout(arrays, name)
    return np.concatenate(arrays)


def _split(data: Any, offsets: np.ndarray) -> list[np.ndarray]:
    """Pieces of a column, which is read between the first and the last offset, or when it is used
    where it is lazy."""
    start, bounds = int(offsets[0]), (offsets - offsets[0]).tolist()
    rows = data[start : start + bounds[-1]]
    return [rows[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def _write_info(file: h5py.File, name: str, values: Sequence[Scalar]) -> None:
    group = file.create_group(f"info/{name}")
    kinds = {type(value) for value in values}
    if kinds == {str}:
        encoded = [str(value).encode() for value in values]
        group["offsets"] = _offsets([len(text) for text in encoded])
        group["data"] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    elif str in kinds:
        raise ValueError(f"info {name!r} mixes strings and numbers")
    elif kinds == {int}:
        group["data"] = _integers(name, values)
    else:
        group["data"] = np.array(values, dtype=np.float64)
        if int in kinds:
            # As floating-point numbers they would be others, and have another digest.
            whole = [type(value) is int for value in values]
            group["whole"] = np.array(whole, dtype=np.uint8)
            integers = [value for value in values if type(value) is int]
            group["integers"] = _integers(name, integers)


def _integers(name: str, values: Sequence[Scalar]) -> np.ndarray:
    for kind in (np.int64, np.uint64):
        with contextlib.suppress(OverflowError):
            return np.array(values, dtype=kind)
    raise ValueError(f"info {name!r} has whole numbers that do not fit in 64 bits together")


class _Info:
    """A column of ``info``; texts are read as they are asked for."""

    def __init__(self, group: Any) -> None:
        self._data, self._offsets, self._is_integer = group["data"], None, None
        if "offsets" in group:
            self._offsets = group["offsets"][:]
            return
        self._data = self._data[:]
        if "whole" in group:
            self._is_integer, self._integers = group["whole"][:], group["integers"][:]

    def values(self, start: int, stop: int) -> list[Scalar]:
        """Read the records from one number up to another."""
        if self._offsets is not None:
            texts = _split(self._data, self._offsets[start : stop + 1])
            return [bytes(text).decode() for text in texts]
        values: list[Scalar] = self._data[start:stop].tolist()
        if self._is_integer is not None:
            before = np.count_nonzero(self._is_integer[:start])
            places = np.flatnonzero(self._is_integer[start:stop]).tolist()
            integers = self._integers[before : before + len(places)].tolist()
            for place, value in zip(places, integers, strict=True):
                values[place] = value
        return values
