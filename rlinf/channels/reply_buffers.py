"""Reply buffers: shared memory into which a server writes the blocks of large replies.

A client on the same machine creates the buffers and names one in each request. It reuses a buffer
once it has read the reply, because memory that both processes have used before is several times
faster than new memory. A reply that is small or does not fit comes by socket.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from rlinf.errors import InputError, StorageError
from rlinf.shared_memory import (
    SHM_FOLDER,
    attach_segment,
    create_segment,
    new_segment_name,
    remove_segment,
)

BUFFER_BYTES = (8 << 20) + (128 << 10)
"""Size of a buffer: the few buffers in use fit in the last cache of a server's processor."""
MIN_BUFFERED_BYTES = 64 << 10
"""Bytes of a reply's blocks below which a socket is as fast."""
ALIGN_BYTES = 64
"""Each block starts at a multiple of this."""
MAX_MAPPED = 64
"""Maximum number of buffers that a server has mapped."""
Bytes = bytes | bytearray | memoryview
Block = Bytes | list[memoryview]
"""Bytes of a message, or the pieces of which they consist, because to join pieces takes a copy."""
log = logging.getLogger("rlinf")


def pieces_of(block: Block) -> Sequence[Bytes]:
    """Return the pieces of a block."""
    return block if isinstance(block, list) else [block]


def join(block: Block) -> Bytes:
    """Return the bytes of a block; joined pieces are copied."""
    return b"".join(block) if isinstance(block, list) else block


def positions(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each block in a buffer."""
    start = 0
    for size in sizes:
        yield start, start + size
        start = -(-(start + size) // ALIGN_BYTES) * ALIGN_BYTES


class ReplyBuffers:
    """The buffers of a client, by name."""

    def __init__(self) -> None:
        self._memory: dict[str, mmap.mmap] = {}
        self._free: list[str] = []
        self._has_failed = False

    def take(self) -> str | None:
        """Return the name of a buffer for one reply; None: there is not enough shared memory."""
        if self._free:
            return self._free.pop()
        if self._has_failed:
            return None
        name = new_segment_name()
        try:
            self._memory[name] = create_segment(name, BUFFER_BYTES)
        except (StorageError, OSError) as error:
            log.warning("replies come by socket: %s", error)
            self._has_failed = True
            return None
        return name

    def read(self, name: str, sizes: Sequence[int]) -> list[memoryview]:
        """Return views of the blocks in a buffer.

        Raises:
            KeyError: there is no such buffer.
        """
        memory = memoryview(self._memory[name]).toreadonly()
        return [memory[start:stop] for start, stop in positions(sizes)]

    def release(self, name: str) -> None:
        """Allow the use of a buffer for another reply."""
        self._free.append(name)

    def drop(self, name: str) -> None:
        """Remove a buffer into which a lost server may still write."""
        del self._memory[name]
        remove_segment(name)

    def close(self) -> None:
        for name in list(self._memory):
            self.drop(name)


class ReplyBufferWriter:
    """Writes the blocks of replies into the buffers of clients; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[str, np.ndarray] = {}

    def write(self, name: str, blocks: Sequence[Block]) -> bool:
        """Write blocks into a buffer; return False if they must be sent by socket."""
        sizes = [sum(map(len, pieces_of(block))) for block in blocks]
        if not sizes or sum(sizes) < MIN_BUFFERED_BYTES or (memory := self._map(name)) is None:
            return False
        places = list(positions(sizes))
        if places[-1][1] > len(memory):
            return False
        for (start, _), block in zip(places, blocks, strict=True):
            end = start
            for piece in pieces_of(block):
                memory[end : end + len(piece)] = np.frombuffer(piece, np.uint8)
                end += len(piece)
        return True

    def _map(self, name: str) -> np.ndarray | None:
        """Return the memory of a buffer; None: it is on another machine, or was removed."""
        with self._lock:
            if name in self._mapped:
                return self._mapped[name]
            try:
                memory = np.frombuffer(attach_segment(name), np.uint8)
            except (InputError, OSError, ValueError):
                return None
            existing = {n: m for n, m in self._mapped.items() if (SHM_FOLDER / n).exists()}
            self._mapped = dict([*existing.items(), (name, memory)][-MAX_MAPPED:])
            return memory
