"""Record files: HDF5 files that pass records from one job to a later job.

A file contains many records (:class:`rlinf.data.record.Record`) as columns: the arrays of one name,
concatenated along their leading dimension. Step columns share one table of offsets; each column of
context arrays or of strings (UTF-8) has its own. No Python object is stored, so reading never runs
foreign code, and equal records give equal bytes.

Step columns with large rows, such as images, are in a separate file and are read when they are
used, in blocks whose checksums are in the record file. A process that uses a few of the records
reads only their blocks.
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
from rlinf.progress import PROGRESS
from rlinf.verified_io import read_bytes, verify_file

BLOCK_BYTES = 1 << 18
"""Approximate size of the blocks in which rows are read and verified; at least one row."""


def large_columns_path(path: Path) -> Path:
    """Return the path of the file with the large columns of a record file."""
    return path.with_suffix(".rows.hdf5")


def large_columns(record: Record) -> list[str]:
    """Return the names of step columns whose rows are large."""
    sizes = {n: a.dtype.itemsize * int(np.prod(a.shape[1:])) for n, a in record.steps.items()}
    return sorted(name for name, size in sizes.items() if size >= LARGE_ROW_BYTES)


def write_large_columns(path: Path, file: h5py.File, columns: dict[str, list[np.ndarray]]) -> None:
    """Write large columns beside ``path``, and their checksums into ``file``.

    Raises:
        ValueError: arrays of one column differ in dtype or trailing shape.
        OSError: the file cannot be written.
    """
    with (
        open_hdf5_target(large_columns_path(path)) as target,
        h5py.File(target, "w", libver="earliest") as rows_file,
    ):
        for name, arrays in columns.items():
            check_same_layout(arrays, name)
            dtype, shape = arrays[0].dtype, (sum(map(len, arrays)), *arrays[0].shape[1:])
            block_rows = _block_rows(dtype, shape)
            column, checksums, row = rows_file.create_dataset(name, shape, dtype), [], 0
            for block in _blocks(arrays, block_rows):
                column[row : row + len(block)] = block
                checksums.append(_checksum(block))
                row += len(block)
            table = np.array(checksums, dtype=np.uint64)
            data = file.create_dataset(f"steps/rows/{name}", data=table)
            data.attrs["shape"], data.attrs["dtype"] = shape, dtype.str
            data.attrs["block"] = block_rows


def _blocks(arrays: Sequence[np.ndarray], block_rows: int) -> Iterator[np.ndarray]:
    """Yield the concatenated arrays in blocks of ``block_rows`` rows; only a block is copied."""
    parts, count = list[np.ndarray](), 0
    for array in arrays:
        start = 0
        while start < len(array):
            part = array[start : start + block_rows - count]
            parts.append(part)
            start, count = start + len(part), count + len(part)
            if count == block_rows:
                yield np.concatenate(parts)
                parts, count = [], 0
    if parts:
        yield np.concatenate(parts)


class LargeColumn:
    """A large column of all records of the file ``path``.

    Args:
        checksums: the dataset in ``path`` with the checksum of each block of the column.
    """

    def __init__(self, path: Path, name: str, checksums: Any) -> None:
        self._path, self._name, self._checksums = large_columns_path(path), name, checksums[:]
        self._shape = tuple(int(size) for size in checksums.attrs["shape"])
        self._dtype = np.dtype(str(checksums.attrs["dtype"]))
        self._block_rows = int(checksums.attrs["block"])

    def lazy_array(self) -> LazyArray:
        """Return the rows as a lazy array. Reading damaged rows raises ``ArtifactError`` if the
        file is committed, else ``ValueError``."""
        return LazyArray(self._read, self._shape, self._dtype)

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Read the rows now; raises as :meth:`lazy_array`."""
        return self._read(rows.start, rows.stop)

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Read rows and verify the checksums of their blocks.

        Raises:
            ArtifactError, ValueError: rows are damaged; see :meth:`lazy_array`.
        """
        first_block, block_rows = start // self._block_rows, self._block_rows
        first_row = first_block * block_rows
        try:
            with h5py.File(self._path, "r", locking=False) as file:
                column = file[self._name]
                if not isinstance(column, h5py.Dataset):
                    raise ValueError("no array")
                rows = column[first_row : -(-stop // block_rows) * block_rows]
        except FileNotFoundError:
            raise self._damage_error("missing") from None
        except OSError as error:
            # A committed file with the right checksum is not damaged, so report the error itself.
            verify_file(self._path)
            raise error if committed_file(self._path) else self._damage_error(str(error)) from None
        except (KeyError, ValueError, TypeError) as error:
            raise self._damage_error(str(error)) from None
        if rows.shape[1:] != self._shape[1:] or rows.dtype != self._dtype:
            raise self._damage_error("another shape or type")
        for block in range(-(-len(rows) // block_rows)):
            content = rows[block * block_rows : (block + 1) * block_rows]
            if _checksum(content) != self._checksums[first_block + block]:
                raise self._damage_error("altered (checksum differs)")
        if len(rows) < stop - first_row:
            raise self._damage_error("truncated")
        return cast(np.ndarray, rows[start - first_row : stop - first_row])

    def _damage_error(self, problem: str) -> Exception:
        commit, text = committed_file(self._path), f"{self._path}: {self._name}: {problem}"
        return ArtifactError(text, commit.manifest, commit.data) if commit else ValueError(text)


def _block_rows(dtype: np.dtype, shape: Sequence[int]) -> int:
    row_bytes = dtype.itemsize * int(np.prod(shape[1:]))
    return max(1, BLOCK_BYTES // max(1, row_bytes))


def _checksum(rows: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(rows).view(np.uint8).data)


def check_same_layout(arrays: Sequence[np.ndarray], name: str) -> None:
    """Check that arrays can form one column.

    Raises:
        ValueError: they differ in dtype or trailing shape.
    """
    if len({(array.dtype, array.shape[1:]) for array in arrays}) > 1:
        raise ValueError(f"column {name!r}: dtype and trailing shape must not change")


class _Hdf5Target(io.FileIO):
    """A file that records its first write error instead of raising it.

    HDF5 cannot close a file whose last writes failed: it repeats them, also when Python ends, and
    then crashes.
    """

    error: OSError | None = None
    """The first error; None: all writes succeeded."""

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        written = 0
        while written < size and self.error is None:
            try:
                written += super().write(memoryview(data).cast("B")[written:])
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
        OSError: writing failed; raised after the HDF5 file is closed.
    """
    with _Hdf5Target(path, "w+") as target:
        yield target
        if target.error is not None:
            raise OSError(target.error.errno, target.error.strerror, str(path))


SCHEMA, SCHEMA_WITH_LARGE_COLUMNS = 1, 2
"""Schema of a file with all columns, and of a file with some columns in a separate file."""
PART_BYTES = 256 << 20
"""Bytes of records after which a new file begins."""
MAX_OPEN_PARTS = 64
"""Maximum number of files open during sorting; a process may often open only 1024."""
T = TypeVar("T")


class RecordFileWriter(RecordSink):
    """The writing end: collects records and writes ``<name>-r<rank>-p<part>.h5`` files.

    ``count`` is the number of records that were put. Readers see nothing before the stage commits
    its manifest. The parts are sorted by record id, so equal records give equal bytes in any order
    of arrival. If unsorted records fill more than one part, ``close`` writes them again. That
    temporarily takes twice the disk space, but only the memory of one part.
    """

    def __init__(self, folder: Path, name: str, rank: int = 0) -> None:
        self._folder, self._name, self._rank = folder, name, rank
        self._part = _FilePart[Record]()
        self._written_parts: list[list[_RecordPosition]] = []
        """Positions of the records of each written part, in file order."""
        self._closed = False
        self.count = 0

    def put(self, record: Record) -> None:
        if self._closed:
            raise ChannelClosed("put on a closed channel")
        self._part.add(record, _record_bytes(record))
        self.count += 1
        PROGRESS.mark()
        if self._part.is_full:
            self._flush()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._part.items or not self._written_parts:
            self._flush()
        parts = list(_split_into_parts(sorted(p for part in self._written_parts for p in part)))
        if len(self._written_parts) > 1 and parts != self._written_parts:
            self._rewrite_sorted(parts)

    def _flush(self) -> None:
        """Write the collected records as a part."""
        records = sorted(self._part.items, key=lambda r: r.identity)
        number = len(self._written_parts)
        write_records(self._path(number), records)
        positions = (
            _RecordPosition(r.identity, number, i, _record_bytes(r)) for i, r in enumerate(records)
        )
        self._written_parts.append(list(positions))
        self._part = _FilePart()

    def _rewrite_sorted(self, parts: Iterable[Sequence[_RecordPosition]]) -> None:
        """Write the parts again, with the records in the order of ``parts``."""
        with (
            tempfile.TemporaryDirectory(dir=self._folder, prefix="unsorted-") as folder,
            contextlib.ExitStack() as open_files,
        ):
            old_paths = []
            for number in range(len(self._written_parts)):
                old_paths.append(self._path(number).rename(Path(folder) / self._path(number).name))
                if (large_path := large_columns_path(self._path(number))).exists():
                    large_path.rename(Path(folder) / large_path.name)
            # If records arrived in random order, each new part has records of all old parts.
            opened = (
                (path, open_files.enter_context(_open(path))) for path in old_paths[:MAX_OPEN_PARTS]
            )
            columns = [_Columns(file, path, lazy=False) for path, file in opened]
            for number, positions in enumerate(parts):
                positions_by_part = defaultdict[int, list[_RecordPosition]](list)
                for position in positions:
                    positions_by_part[position.part].append(position)
                records = dict[_RecordPosition, Record]()
                for old_part, part_positions in positions_by_part.items():
                    # Old and new parts are sorted, so these records are adjacent in the old part.
                    start, last = part_positions[0].index_in_part, part_positions[-1].index_in_part
                    if old_part < len(columns):
                        part_records = columns[old_part].records(start, last + 1)
                    else:
                        with _open(old_paths[old_part]) as file:
                            part_columns = _Columns(file, old_paths[old_part], lazy=False)
                            part_records = part_columns.records(start, last + 1)
                    records.update(zip(part_positions, part_records, strict=True))
                write_records(self._path(number), [records[position] for position in positions])

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}-r{self._rank:03d}-p{number:03d}.h5"


class _RecordPosition(NamedTuple):
    """Position of a record: number of the part, index within the part, and size in bytes."""

    identity: RecordId
    part: int
    index_in_part: int
    size: int


def _record_bytes(record: Record) -> int:
    return sum(a.nbytes for a in (*record.steps.values(), *record.context.values()))


class _FilePart(Generic[T]):
    """The items of one file, which is full once their sizes reach :data:`PART_BYTES`."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._bytes = 0

    def add(self, item: T, size: int) -> None:
        self.items.append(item)
        self._bytes += size

    @property
    def is_full(self) -> bool:
        return self._bytes >= PART_BYTES


def _split_into_parts(positions: Iterable[_RecordPosition]) -> Iterator[list[_RecordPosition]]:
    """Yield the positions of each part, in this order."""
    part = _FilePart[_RecordPosition]()
    for position in positions:
        part.add(position, position.size)
        if part.is_full:
            yield part.items
            part = _FilePart()
    if part.items:
        yield part.items


class RecordFileReader(RecordSource):
    """The reading end: the records of committed files, sorted by (iteration, sample).

    Of several records of one iteration and sample, the latest attempt is kept.
    """

    def __init__(self, paths: Iterable[Path], samples: Collection[int] | None = None) -> None:
        """
        Args:
            samples: restrict the records to these samples; see :func:`read_records`.
        """
        latest: dict[tuple[int, int], Record] = {}
        for path in sorted(paths):
            for record in read_records(path, samples):
                previous = latest.get(record.identity.key)
                if previous is None or previous.identity.attempt < record.identity.attempt:
                    latest[record.identity.key] = record
        self._records = deque(latest[key] for key in sorted(latest))

    def get(self) -> Record:
        if not self._records:
            raise ChannelClosed("all records were read")
        return self._records.popleft()


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write records of one schema (column names, dtypes, trailing shapes) to a new HDF5 file.

    Raises:
        ValueError: the records differ in their schema.
        OSError: the file cannot be written.
    """
    # Newer file formats store times in group headers, but equal records must give equal bytes.
    with open_hdf5_target(path) as target, h5py.File(target, "w", libver="earliest") as file:
        file.attrs["schema"] = SCHEMA
        file.attrs["count"] = len(records)
        identities = np.array([record.identity for record in records], dtype=np.int64)
        file["identity"] = identities.reshape(-1, 3)
        if not records:
            return
        first = records[0]
        large = large_columns(first)
        file.attrs["schema"] = SCHEMA_WITH_LARGE_COLUMNS if large else SCHEMA
        for record in records:
            if (
                record.steps.keys() != first.steps.keys()
                or record.context.keys() != first.context.keys()
                or record.info.keys() != first.info.keys()
            ):
                raise ValueError(f"{path.name}: records of one channel must have one schema")
        if first.steps:
            file["steps/offsets"] = _offsets([len(record) for record in records])
        # The layout of a file depends on the order in which datasets are created.
        for name in sorted(first.steps):
            if name not in large:
                file[f"steps/data/{name}"] = _concatenate([r.steps[name] for r in records], name)
        if large:
            write_large_columns(path, file, {n: [r.steps[n] for r in records] for n in large})
        for name in sorted(first.context):
            arrays = [record.context[name] for record in records]
            file[f"context/{name}/offsets"] = _offsets([len(array) for array in arrays])
            file[f"context/{name}/data"] = _concatenate(arrays, name)
        for name in sorted(first.info):
            _write_info(file, name, [record.info[name] for record in records])


def read_records(path: Path, samples: Collection[int] | None = None) -> list[Record]:
    """Read the records of a file written by :func:`write_records`.

    Args:
        samples: restrict the records to these samples; None: all. The whole file is read to verify
            its checksum, but other records are neither decoded nor kept.

    Raises:
        ValueError: the file is invalid or has another schema version.
        ArtifactError: the file is committed and damaged.
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
        indices = np.flatnonzero(np.isin(columns.identities[:, 1], list(samples)))
        gaps = np.flatnonzero(np.diff(indices) > 1) + 1
        ranges = np.split(indices, gaps) if len(indices) else []
        return [r for i in ranges for r in columns.records(int(i[0]), int(i[-1]) + 1)]


def _open(path: Path) -> h5py.File:
    return h5py.File(path, "r", locking=False)


class _Columns:
    """The columns of a record file. Each is looked up once, because a lookup in HDF5 takes longer
    than most reads."""

    def __init__(self, file: h5py.File, path: Path, *, lazy: bool = True) -> None:
        """
        Args:
            lazy: read columns with large rows when they are used.
        """
        self.identities = file["identity"][:]
        self._steps: dict[str, Any] = dict(file.get("steps/data", {}).items())
        for name, checksums in file.get("steps/rows", {}).items():
            rows = LargeColumn(path, name, checksums)
            self._steps[name] = rows.lazy_array() if lazy else rows
        self._step_offsets: Any = file["steps/offsets"][:] if self._steps else None
        groups = file.get("context", {}).items()
        self._context = {name: (group["data"], group["offsets"][:]) for name, group in groups}
        self._info = {name: _Info(group) for name, group in file.get("info", {}).items()}

    def records(self, start: int, stop: int) -> list[Record]:
        """Return the records from index ``start`` to ``stop - 1``."""
        steps = {
            name: _split(data, self._step_offsets[start : stop + 1])
            for name, data in self._steps.items()
        }
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

    This function is for reports: it does not verify the checksum, because that would read the
    whole file.

    Raises:
        ValueError: the file is not a readable record file.
    """
    try:
        with _open(path) as file:
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
        # A changed byte may cause any error of the library, such as that of a missing group.
        raise ValueError(f"{path}: not a readable file of records ({error})") from None


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _concatenate(arrays: Sequence[np.ndarray], name: str) -> np.ndarray:
    check_same_layout(arrays, name)
    return np.concatenate(arrays)


def _split(data: Any, offsets: np.ndarray) -> list[np.ndarray]:
    """Return the part of a column between the first and the last offset, split at the offsets.

    A lazy column is read when the parts are used.
    """
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
            # As floats, large integers would change, and records would have another digest.
            is_integer = [type(value) is int for value in values]
            group["whole"] = np.array(is_integer, dtype=np.uint8)
            integers = [value for value in values if type(value) is int]
            group["integers"] = _integers(name, integers)


def _integers(name: str, values: Sequence[Scalar]) -> np.ndarray:
    for kind in (np.int64, np.uint64):
        with contextlib.suppress(OverflowError):
            return np.array(values, dtype=kind)
    raise ValueError(f"info {name!r} has whole numbers that do not fit in 64 bits together")


class _Info:
    """A column of ``info``; texts are read when their values are requested."""

    def __init__(self, group: Any) -> None:
        self._data, self._offsets, self._is_integer = group["data"], None, None
        if "offsets" in group:
            self._offsets = group["offsets"][:]
            return
        self._data = self._data[:]
        if "whole" in group:
            self._is_integer, self._integers = group["whole"][:], group["integers"][:]

    def values(self, start: int, stop: int) -> list[Scalar]:
        """Read the values from index ``start`` to ``stop - 1``."""
        if self._offsets is not None:
            texts = _split(self._data, self._offsets[start : stop + 1])
            return [bytes(text).decode() for text in texts]
        values: list[Scalar] = self._data[start:stop].tolist()
        if self._is_integer is not None:
            first_integer = np.count_nonzero(self._is_integer[:start])
            positions = np.flatnonzero(self._is_integer[start:stop]).tolist()
            integers = self._integers[first_integer : first_integer + len(positions)].tolist()
            for position, value in zip(positions, integers, strict=True):
                values[position] = value
        return values
