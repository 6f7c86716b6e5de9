"""Arrays that are read when they are used: the large columns of a trajectory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

ReadRows = Callable[[int, int], np.ndarray]
"""Reads the rows from a start up to a stop."""


class LazyArray(NDArrayOperatorsMixin):
    """A stand-in for an array ``[T, ...]`` that holds no data.

    Shape, type and size cost nothing, and a slice of rows is lazy too. Everything else (arithmetic,
    array methods, NumPy functions) reads the rows. Convert it with :func:`to_array` before
    ``torch.from_numpy``.
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
