"""The channel interface of records, and the in-process channel."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator

from rlinf.data.record import Record
from rlinf.errors import RlinfError


class ChannelClosed(Exception):
    """The channel is closed: ``get`` has no further record, and ``put`` accepts none."""


class ChannelFailed(RlinfError):
    """The channel is broken: a participant failed or cannot be reached."""


class RecordSource(ABC):
    """The reading end of a channel; it returns records in the order in which they were put."""

    @abstractmethod
    def get(self) -> Record:
        """Wait for a record and return the oldest one.

        Raises:
            ChannelClosed: the channel is closed and empty.
            ChannelFailed: no further record can arrive.
        """

    def __iter__(self) -> Iterator[Record]:
        """Yield all records until the channel is closed and empty."""
        while True:
            try:
                yield self.get()
            except ChannelClosed:
                return


class RecordSink(ABC):
    """The writing end of a channel, for any number of threads.

    A channel between processes has one sink per writer.
    """

    @abstractmethod
    def put(self, record: Record) -> None:
        """Append a record; block while the channel is full.

        Raises:
            ChannelClosed: this sink or the whole channel was closed.
            ChannelFailed: there is no reader any more.
            DataError: the record cannot be sent.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the channel to further records; earlier records can still be read."""


class Channel(RecordSource, RecordSink):
    """Both ends of a channel, in one process."""


class LocalChannel(Channel):
    """A queue of records between threads, without copies; ``len`` is the number of records.

    Args:
        capacity: maximum number of records before ``put`` waits; 0 is unbounded.
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
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._records)
