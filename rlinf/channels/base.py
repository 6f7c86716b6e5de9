"""The channel interface of records, and how channels end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from rlinf.data.record import Record
from rlinf.errors import RlinfError


class ChannelClosed(Exception):
    """No further record will come (``get``), or none is accepted (``put``)."""


class ChannelFailed(RlinfError):
    """The channel broke: a participant failed, or nobody is there to answer."""


class Source(ABC):
    """The end of a channel that records are taken from, in the order they were put."""

    @abstractmethod
    def get(self) -> Record:
        """Take the oldest record; waits for one.

        Raises:
            ChannelClosed: closed and empty.
            ChannelFailed: nothing can come any more.
        """

    def __iter__(self) -> Iterator[Record]:
        """All records until the channel is closed and drained."""
        while True:
            try:
                yield self.get()
            except ChannelClosed:
                return


class Sink(ABC):
    """The end of a channel that records are put into; any number of threads."""

    @abstractmethod
    def put(self, record: Record) -> None:
        """Append a record; waits while there is no room.

        Raises:
            ChannelClosed: the channel was closed, here or for everybody.
            ChannelFailed: there is nobody any more to take it.
            DataError: the record cannot be sent.
        """

    def flush(self) -> None:  # noqa: B027 - nothing to do where put itself waits
        """Wait until every record put here outlives this process.

        Raises:
            ChannelFailed: as for ``put``.
        """

    @abstractmethod
    def close(self) -> None:
        """Put no further record; what was put still arrives."""


class Channel(Source, Sink):
    """Both ends, in one process."""
