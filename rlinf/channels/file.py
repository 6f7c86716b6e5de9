"""File transport: records cross from one job to a later one as HDF5 files.

A file holds many records: step arrays are concatenated along their leading dimension with one
offsets table, context arrays likewise with a table each, strings as UTF-8 bytes with a table. No
Python object is stored, so reading never runs foreign code, and equal records give equal bytes.

Columns with large rows lie in a file of their own beside it and are read as they are used, by
blocks whose checksums the first file has: a process that computes with a few of the records reads
those.
"""

from __future__ import annotations

import contextlib
import io
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import xxhash

from rlinf.artifacts import commit_of
from rlinf.channels.base import ChannelClosed, Sink, Source
from rlinf.checked import read_bytes, read_through
from rlinf.data.lazy import Lazy
from rlinf.data.record import LARGE_BYTES, Identity, Record, Scalar
from rlinf.errors import ArtifactError

SCHEMA, WITH_ROWS = 1, 2
"""Of a file; the second has some of its columns in a file beside it."""
PART_BYTES = 256 << 20
BLOCK_BYTES = 1 << 18
"""Rows are read and checked by blocks of about so much, or one by one."""


class FileWriter(Sink):
    """The producing side: collects records and writes ``<name>-r<rank>-p<part>.h5`` files.

    Nothing is visible to a reader before the stage commits its manifest. Records that make more
    than one part lie in them as they came: equal ones that come in another order give other bytes.
    """

    def __init__(self, folder: Path, name: str, rank: int = 0) -> None:
        self._folder, self._name, self._rank = folder, name, rank
        self._records: list[Record] = []
        self._bytes = 0
        self._parts = 0
        self._closed = False
        self.count = 0

    def put(self, record: Record) -> None:
        if self._closed:
            raise ChannelClosed("put on a closed channel")
        self._records.append(record)
        self.count += 1
        self._bytes += sum(a.nbytes for a in (*record.steps.values(), *record.context.values()))
        if self._bytes >= PART_BYTES:
            self._flush()

    def close(self) -> None:
        if not self._closed and (self._records or not self._parts):
            self._flush()
        self._closed = True

    def _flush(self) -> None:
        path = self._folder / f"{self._name}-r{self._rank:03d}-p{self._parts:03d}.h5"
        # Records come in any order from others; equal ones are to give equal bytes.
        write_records(path, sorted(self._records, key=lambda record: record.identity))
        self._records, self._bytes = [], 0
        self._parts += 1


class FileReader(Source):
    """The consuming side: the records of committed files, sorted by (iteration, sample).

    Of records with one identity the latest attempt is kept.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        latest: dict[tuple[int, int], Record] = {}
        for path in sorted(paths):
            for record in read_records(path):
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
        ValueError: records differ in their column names, kinds or trailing shapes.
        OSError: it cannot be written.
    """
    # The newest file format stores times in group headers; equal records must give equal bytes.
    with _writing(path) as target, h5py.File(target, "w", libver="earliest") as file:
        file.attrs["schema"] = SCHEMA
        file.attrs["count"] = len(records)
        identities = np.array([record.identity for record in records], dtype=np.int64)
        file["identity"] = identities.reshape(-1, 3)
        if not records:
            return
        first = records[0]
        large = _large(first)
        file.attrs["schema"] = WITH_ROWS if large else SCHEMA
        for record in records:
            if (
                record.steps.keys() != first.steps.keys()
                or record.context.keys() != first.context.keys()
                or record.info.keys() != first.info.keys()
            ):
                raise ValueError(f"{path.name}: records of one channel must have one schema")
        if first.steps:
            file["steps/offsets"] = _offsets([len(record) for record in records])
        for name in first.steps:
            if name not in large:
                file[f"steps/data/{name}"] = _concatenate([r.steps[name] for r in records], name)
        if large:
            _write_rows(path, file, {n: [r.steps[n] for r in records] for n in large})
        for name in first.context:
            arrays = [record.context[name] for record in records]
            file[f"context/{name}/offsets"] = _offsets([len(array) for array in arrays])
            file[f"context/{name}/data"] = _concatenate(arrays, name)
        for name in first.info:
            _write_info(file, name, [record.info[name] for record in records])


def read_records(path: Path) -> list[Record]:
    """Read all records of a file written by :func:`write_records`.

    Raises:
        ValueError: not such a file, or of another schema version.
        ArtifactError: it is committed and damaged.
    """
    data = read_bytes(path)
    try:
        file = h5py.File(io.BytesIO(data), "r")
    except OSError as error:
        raise ValueError(f"{path}: not a readable HDF5 file ({error})") from None
    with file:
        if (schema := file.attrs.get("schema")) not in (SCHEMA, WITH_ROWS):
            raise ValueError(f"{path}: record schema {schema}, expected {SCHEMA} or {WITH_ROWS}")
        count = int(file.attrs["count"])
        identities = file["identity"][:]
        steps: dict[str, list[np.ndarray]] = {}
        if "steps" in file:
            bounds = file["steps/offsets"][:]
            for name, data in file.get("steps/data", {}).items():
                steps[name] = _split(data[:], bounds)
            for name, sums in file.get("steps/rows", {}).items():
                column = _Rows(rows_of(path), name, sums).column()
                # What is asked of an array of them is asked of these.
                steps[name] = _split(cast(np.ndarray, column), bounds)
        context = {
            name: _split(group["data"][:], group["offsets"][:])
            for name, group in file.get("context", {}).items()
        }
        info = {name: _read_info(group) for name, group in file.get("info", {}).items()}
    return [
        Record(
            Identity(*map(int, identities[i])),
            {name: arrays[i] for name, arrays in steps.items()},
            {name: arrays[i] for name, arrays in context.items()},
            {name: values[i] for name, values in info.items()},
        )
        for i in range(count)
    ]


def read_infos(path: Path) -> list[tuple[Identity, int, dict[str, Scalar]]]:
    """Identity, number of steps and ``info`` of the records of a file; no array is read.

    Not compared with a checksum, which would take reading all of it: for pages that show a run.

    Raises:
        ValueError: not a readable file of records.
    """
    try:
        with h5py.File(path, "r", locking=False) as file:
            identities = file["identity"][:].tolist()
            lengths = np.zeros(len(identities), dtype=np.int64)
            if "steps" in file:
                lengths = np.diff(file["steps/offsets"][:])
            info = {name: _read_info(group) for name, group in file.get("info", {}).items()}
        return [
            (
                Identity(*identity),
                int(lengths[i]),
                {name: values[i] for name, values in info.items()},
            )
            for i, identity in enumerate(identities)
        ]
    except Exception as error:
        # One altered byte may be any of the library's errors, from a missing group on.
        raise ValueError(f"{path}: not a readable file of records ({error})") from None


def rows_of(path: Path) -> Path:
    """The file beside a file of records that has its large columns."""
    return path.with_suffix(".rows.hdf5")


def _large(record: Record) -> list[str]:
    """Columns of steps whose rows are large."""
    sizes = {n: a.itemsize * int(np.prod(a.shape[1:])) for n, a in record.steps.items()}
    return [name for name, size in sizes.items() if size >= LARGE_BYTES]


def _write_rows(path: Path, file: h5py.File, columns: dict[str, list[np.ndarray]]) -> None:
    with _writing(rows_of(path)) as target, h5py.File(target, "w", libver="earliest") as rows:
        for name, arrays in columns.items():
            _check_alike(arrays, name)
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


class _Rows:
    """A large column of all records of a file."""

    def __init__(self, path: Path, name: str, sums: Any) -> None:
        self._path, self._name, self._sums = path, name, sums[:]
        self._shape = tuple(int(size) for size in sums.attrs["shape"])
        self._dtype = np.dtype(str(sums.attrs["dtype"]))
        self._size = int(sums.attrs["block"])

    def column(self) -> Lazy:
        return Lazy(self._read, self._shape, self._dtype)

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
            read_through(self._path)
            raise error if commit_of(self._path) else self._damage(str(error)) from None
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
        commit, text = commit_of(self._path), f"{self._path}: {self._name}: {problem}"
        return ArtifactError(text, commit.manifest, commit.data) if commit else ValueError(text)


def _block(dtype: np.dtype, shape: Sequence[int]) -> int:
    """Rows of a block."""
    row = dtype.itemsize * int(np.prod(shape[1:]))
    return max(1, BLOCK_BYTES // max(1, row))


def _sum(rows: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(rows).view(np.uint8).data)


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
def _writing(path: Path) -> Iterator[_Target]:
    with _Target(path, "w+") as target:
        yield target
        if target.error is not None:
            raise OSError(target.error.errno, target.error.strerror, str(path))


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _check_alike(arrays: Sequence[np.ndarray], name: str) -> None:
    if len({(array.dtype, array.shape[1:]) for array in arrays}) > 1:
        raise ValueError(f"column {name!r}: dtype and trailing shape must not change")


def _concatenate(arrays: Sequence[np.ndarray], name: str) -> np.ndarray:
    _check_alike(arrays, name)
    return np.concatenate(arrays)


def _split(data: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    return [data[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]


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


def _read_info(group: Any) -> list[Scalar]:
    data = group["data"][:]
    if "offsets" not in group:
        values: list[Scalar] = data.tolist()
        if "whole" in group:
            places = np.flatnonzero(group["whole"][:]).tolist()
            for place, value in zip(places, group["integers"][:].tolist(), strict=True):
                values[place] = value
        return values
    return [bytes(part).decode() for part in _split(data, group["offsets"][:])]
