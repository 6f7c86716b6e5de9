"""Requests that the processes of a run have taken of its budget, before they are sent.

They are taken in blocks. A block is a file with the number of requests in it, and has the next free
number as its name: it is made by ``link``, which fails where another process was first, on NFS too.
So no more are taken than there are, by however many processes, in whatever order. What is left of a
block when its process ends is lost to the run; so a block has no more than its process has to send.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from rlinf.errors import DataError

BLOCKS = 1000
"""Of a large budget; of a small one each request is a block."""


class Claims:
    """Of one process; not for several threads at once."""

    def __init__(self, folder: Path | None) -> None:
        """
        Args:
            folder: where those of all processes are, earlier ones too; None: there are no others.
        """
        self._folder = folder
        self._next = self._taken = 0
        """Number of blocks that were seen, and of requests in them."""

    def take(self, most: int, wanted: int) -> int:
        """Take a block of a budget of ``most`` requests.

        Args:
            wanted: most that are in it, if that is one or more.

        Returns how many are in it; 0: the budget is used up.

        Raises:
            DataError: a file in the folder is no block.
        """
        while True:
            self._look()
            size = min(most - self._taken, max(1, min(most // BLOCKS, wanted)))
            if size <= 0:
                return 0
            if self._folder is None or self._made(self._folder / str(self._next), size):
                self._taken, self._next = self._taken + size, self._next + 1
                return size

    def _look(self) -> None:
        """See what others have taken."""
        while self._folder is not None and (path := self._folder / str(self._next)).exists():
            try:
                size = int(path.read_text())
            except ValueError:
                raise DataError(
                    f"{path} does not say how many requests were taken; write a number into it"
                ) from None
            self._taken, self._next = self._taken + size, self._next + 1

    @staticmethod
    def _made(path: Path, size: int) -> bool:
        """Make a block; false: there is one of this number already."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{os.getpid()}.{secrets.token_hex(8)}")
        with temporary.open("w") as file:
            file.write(str(size))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True
