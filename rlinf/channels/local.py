"""Local transport: records change hands between threads of one process, without a copy."""

from __future__ import annotations

import threading
from collections import deque

from rlinf.channels.base import Channel, ChannelClosed
from rlinf.data.record import Record


class LocalChannel(Channel):
    """A queue; ``len`` is the number of records in it.

    Args:
        capacity: most records it may hold before ``put`` waits; 0 is unbounded.
    """

    def __init__(self, capacity: int = 0) -> None:
        self._capacity = capacity
        self._records: deque[Record] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, record: Record) -> None:
        with self._changed:
            while self._capacity and len(self._records) >= self._capacity and not self._closed:
                self._changed.wait()
            if self._closed:
                raise ChannelClosed("put on a closed channel")
            self._records.append(record)
            self._changed.notify_all()

    def get(self) -> Record:
        with self._changed:
            while not self._records:
                if self._closed:
                    raise ChannelClosed("channel is closed and empty")
                self._changed.wait()
            record = self._records.popleft()
            self._changed.notify_all()
            return record

    def close(self) -> None:
        """Put no further record; those that wait are taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._records)
