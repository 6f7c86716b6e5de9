"""Records in shared memory of a node, from one writer to one reader, without a lock.

A segment holds two counters, a table of places and the bytes of the records. The writer changes the
places and the number of records that were put, the reader the number of those it is done with; each
is written last, so either process may die anywhere.
"""

from __future__ import annotations

import mmap
import platform
import threading
from collections import deque

import numpy as np

from rlinf.channels.wire import ALIGN, Encoded, decode
from rlinf.data.record import Record
from rlinf.errors import DataError, InputError

PLACES = 1024
AHEAD_BYTES = 8 << 20
"""No more than two records wait where they are larger: both ends' caches hold what is under way."""
HEAD = np.dtype([("put", "i8"), ("apart", "u1", 120), ("done", "i8"), ("too", "u1", 120)])
"""Each counter has cache lines of its own."""
START = -(-(HEAD.itemsize + 16 * PLACES) // mmap.PAGESIZE) * mmap.PAGESIZE
STORES_IN_ORDER = platform.machine() == "x86_64"
"""Whether a process that sees a counter sees what was written before it."""


class Ring:
    """One end; the bytes of records are ``len``."""

    def __init__(self, memory: mmap.mmap) -> None:
        if len(memory) <= START:
            raise InputError(f"shared memory of {len(memory)} bytes holds no records")
        head = np.frombuffer(memory, HEAD, 1)
        self._put, self._done = head["put"], head["done"]
        self._places = np.frombuffer(memory, "i8", 2 * PLACES, HEAD.itemsize).reshape(PLACES, 2)
        self._room = np.frombuffer(memory, np.uint8, offset=START)
        self._readable = memoryview(memory).toreadonly()[START:]
        self._barrier = threading.Lock()

    def __len__(self) -> int:
        return len(self._room)

    def _fence(self) -> None:
        """What was written before is seen before what is written after."""
        if not STORES_IN_ORDER:
            for _ in range(2):
                with self._barrier:
                    pass


class Writing(Ring):
    """The writer's end."""

    def __init__(self, memory: mmap.mmap) -> None:
        super().__init__(memory)
        self._under_way: deque[tuple[int, int]] = deque()
        """Start and end of the records that may still be read, the oldest first."""
        self._count = self._bytes = 0

    def put(self, record: Encoded) -> bool:
        """Write a record if there is room now."""
        if (start := self._place(record.size)) is None:
            return False
        record.write(self._room[start : start + record.size])
        self._places[self._count % PLACES] = start, record.size
        self._under_way.append((start, start + record.size))
        self._bytes += record.size
        self._count += 1
        self._fence()
        self._put[0] = self._count
        return True

    def _place(self, size: int) -> int | None:
        """Where so many bytes are free, if anywhere.

        As near to the beginning as can be: what was read a moment ago is still in the cache.
        """
        waiting = self._count - int(self._done[0])
        while len(self._under_way) > waiting:
            start, end = self._under_way.popleft()
            self._bytes -= end - start
        if waiting >= PLACES or (waiting >= 2 and self._bytes + size > AHEAD_BYTES):
            return None
        place = 0
        for start, end in sorted(self._under_way):
            if place + size <= start:
                return place
            place = -(-end // ALIGN) * ALIGN
        return place if place + size <= len(self) else None


class Reading(Ring):
    """The reader's end: it goes on after the records that an earlier look was done with."""

    def __init__(self, memory: mmap.mmap) -> None:
        super().__init__(memory)
        self._count = int(self._done[0])

    @property
    def waiting(self) -> bool:
        """Whether there is a record."""
        return int(self._put[0]) > self._count

    def get(self) -> Record:
        """The oldest record, which must be there; its arrays lie in the segment.

        Raises:
            DataError: what lies there is none.
        """
        start, size = self._places[self._count % PLACES].tolist()
        self._count += 1
        if not 0 <= start < start + size <= len(self):
            raise DataError("malformed record: not in the segment")
        return decode(self._readable[start : start + size])

    def release(self) -> None:
        """The records that were taken are done with: their memory is used again."""
        self._fence()
        self._done[0] = self._count
