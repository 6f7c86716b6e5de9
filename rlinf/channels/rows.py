"""Large columns of steps, in a file beside that of their records: read by blocks, as they are used.

The records' file has a checksum of each block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import xxhash

from rlinf.artifacts import commit_of
from rlinf.channels.hdf5 import writing
from rlinf.checked import read_through
from rlinf.data.lazy import Lazy
from rlinf.data.record import LARGE_BYTES, Record
from rlinf.errors import ArtifactError

BLOCK_BYTES = 1 << 18
"""Rows are read and checked by blocks of about so much, or one by one."""


def rows_of(path: Path) -> Path:
    """The file beside a file of records that has its large columns."""
    return path.with_suffix(".rows.hdf5")


def large(record: Record) -> list[str]:
    """Names of the columns of steps whose rows are large."""
    sizes = {n: a.dtype.itemsize * int(np.prod(a.shape[1:])) for n, a in record.steps.items()}
    return sorted(name for name, size in sizes.items() if size >= LARGE_BYTES)


def write_rows(path: Path, file: h5py.File, columns: dict[str, list[np.ndarray]]) -> None:
    """Write large columns beside ``path``, and into ``file``, which is there, their checksums.

    Raises:
        ValueError: arrays of one column differ in kind or trailing shape.
        OSError: it cannot be written.
    """
    with writing(rows_of(path)) as target, h5py.File(target, "w", libver="earliest") as rows:
        for name, arrays in columns.items():
            check_alike(arrays, name)
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


class Rows:
    """A large column of all records of the file ``path``."""

    def __init__(self, path: Path, name: str, sums: Any) -> None:
        self._path, self._name, self._sums = rows_of(path), name, sums[:]
        self._shape = tuple(int(size) for size in sums.attrs["shape"])
        self._dtype = np.dtype(str(sums.attrs["dtype"]))
        self._size = int(sums.attrs["block"])

    def column(self) -> Lazy:
        """Its rows; reading them raises ``ArtifactError`` where they are committed and damaged, and
        ``ValueError`` where they are damaged."""
        return Lazy(self._read, self._shape, self._dtype)

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


def check_alike(arrays: Sequence[np.ndarray], name: str) -> None:
    """See that arrays can be one column.

    Raises:
        ValueError: they differ in kind or trailing shape.
    """
    if len({(array.dtype, array.shape[1:]) for array in arrays}) > 1:
        raise ValueError(f"column {name!r}: dtype and trailing shape must not change")
