"""Arrays that stay where they are until they are used: the large columns of a trajectory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Read = Callable[[int, int], np.ndarray]
"""The rows from one up to another."""


class Lazy:
    """Stands in for an array ``[T, ...]``; keeps none of it.

    Shape, type and size cost nothing. A slice of its rows is lazy too; anything else that is asked
    of it, ``np.asarray`` and NumPy's functions among it, reads the rows it has.
    """

    def __init__(self, read: Read, shape: tuple[int, ...], dtype: np.dtype, start: int = 0) -> None:
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
            return Lazy(self._read, (rows, *self.shape[1:]), self.dtype, self._start + start)
        return np.asarray(self)[key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self._read(self._start, self._start + len(self))
        return found if dtype is None else found.astype(dtype)


def whole(column: Any) -> np.ndarray:
    """A column as an array of this process."""
    return np.asarray(column)
