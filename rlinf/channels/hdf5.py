"""HDF5 files whose writing may fail."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
def writing(path: Path) -> Iterator[io.FileIO]:
    """A new file to give to ``h5py.File``.

    Raises:
        OSError: it could not be written, once the other is closed.
    """
    with _Target(path, "w+") as target:
        yield target
        if target.error is not None:
            raise OSError(target.error.errno, target.error.strerror, str(path))
