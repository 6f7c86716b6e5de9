"""The record: the item of every channel. Large columns are read from disk only when used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.lib.mixins import NDArrayOperatorsMixin

Scalar = float | int | str
IMAGE_PREFIX = "images."
"""Prefix of camera image columns in requests and trajectories, before the name of the camera."""
VIDEO_PREFIX = "video."
"""Prefix of the columns of images that are recorded for videos and not passed to the policy."""
LARGE_ROW_BYTES = 1 << 10
"""Step columns with rows of at least this size, such as images, become :class:`LazyArray`."""


class RecordId(NamedTuple):
    """Number of an iteration, and of a sample in it. A retry differs only in ``attempt``."""

    iteration: int
    sample: int
    attempt: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Key by which a consumer drops duplicates."""
        return (self.iteration, self.sample)


@dataclass
class Record:
    """One item of a channel.

    ``steps`` are arrays with a common leading dimension ``T``: tokens of a response, steps of an
    episode, or rows of a request. ``context`` are arrays without that dimension (a prompt, a last
    observation). ``info`` are numbers and strings (stop reason, answer, group), converted to plain
    Python values, so that a record in memory and the same record read from a file have equal
    digests.
    """

    identity: RecordId
    """Iteration and sample number; not the digest that identifies a stage's output."""
    steps: dict[str, np.ndarray] = field(default_factory=dict)
    context: dict[str, np.ndarray] = field(default_factory=dict)
    info: dict[str, Scalar] = field(default_factory=dict)
    _digest: int | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = {name: len(array) for name, array in self.steps.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"steps of one record must have one length, got {lengths}")
        if not all(type(value) in (int, float, str) for value in self.info.values()):
            self.info = {name: _plain(value) for name, value in self.info.items()}

    def slice_steps(self, start: int, stop: int) -> Record:
        """Return the record with its steps from ``start`` up to ``stop``, as views."""
        if (start, stop) == (0, len(self)):
            return self
        steps = {name: column[start:stop] for name, column in self.steps.items()}
        return Record(self.identity, steps, self.context, self.info)

    def digest(self) -> int:
        """Return a 64-bit digest of everything but the attempt; computed once."""
        if self._digest is None:
            state = xxhash.xxh3_64(repr((self.identity.key, sorted(self.info.items()))).encode())
            for columns in (self.steps, self.context):
                for name in sorted(columns):
                    array = np.ascontiguousarray(columns[name])
                    state.update(f"{name}\0{array.dtype.str}\0{array.shape}\n".encode())
                    state.update(array.view(np.uint8).data if array.size else b"")
            self._digest = state.intdigest()
        return self._digest

    def __len__(self) -> int:
        """Number of steps ``T``; 0 when the record has no step arrays."""
        for column in self.steps.values():
            return len(column)
        return 0


def _plain(value: Any) -> Any:
    """Convert a number or text to its plain Python type. The writer rejects any other type."""
    if isinstance(value, bool | np.bool_ | np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    return str(value) if isinstance(value, np.str_) else value


def digest_records(records: Iterable[Record]) -> int:
    """Return a 64-bit digest of records in any order; see :func:`combine_digests`."""
    return combine_digests(record.digest() for record in records)


def combine_digests(digests: Iterable[int]) -> int:
    """Return the digest of a collection, in any order, from the digests of its members: their sum,
    because equal members would cancel in an exclusive or."""
    return sum(digests) % (1 << 64)


ReadRows = Callable[[int, int], np.ndarray]
"""Reads the rows of an array from a start index up to a stop index."""


class LazyArray(NDArrayOperatorsMixin):
    """An array ``[T, ...]`` whose rows are read when they are used.

    Shape, type and size are known without reading, and a slice of rows is lazy too. Everything else
    (arithmetic, array methods, NumPy functions) reads the rows. Convert a lazy array with
    :func:`to_array` before ``torch.from_numpy``.
    """

    def __init__(
        self, read: ReadRows, shape: tuple[int, ...], dtype: np.dtype, start: int = 0
    ) -> None:
        self._read, self._start = read, start
        self.shape, self.dtype = shape, dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) and key.step in (None, 1):
            start, stop, _ = key.indices(len(self))
            rows = max(0, stop - start)
            return LazyArray(self._read, (rows, *self.shape[1:]), self.dtype, self._start + start)
        if isinstance(key, int | np.integer) and -len(self) <= key < len(self):
            row = self._start + int(key) % len(self)
            return self._read(row, row + 1)[0]
        return np.asarray(self)[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(np.asarray(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = [np.asarray(value) if isinstance(value, LazyArray) else value for value in inputs]
        return getattr(ufunc, method)(*arrays, **options)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        rows = self._read(self._start, self._start + len(self))
        return rows if dtype is None else rows.astype(dtype)


def to_array(column: Any) -> np.ndarray:
    """Return a column as an array in memory."""
    return np.asarray(column)
