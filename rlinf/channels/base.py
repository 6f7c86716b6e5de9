"""The channel interface that every transport implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rlinf.data.record import Record
from rlinf.errors import RlinfError

DEFAULT_KEY = ""


class ChannelClosed(Exception):
    """No further record will come (``get``), or none is accepted (``put``)."""


class ChannelFailed(RlinfError):
    """The channel broke: a participant failed, or nobody is there to answer."""


class Channel(ABC):
    """An ordered, typed, bounded stream of records.

    Order is first-in first-out per key. ``put`` blocks while the channel is full, ``get`` while it
    is empty; iteration ends when the channel is closed and drained. A transport that connects
    processes that do not run at the same time (files) accepts ``put`` on one side and ``get`` on
    the other.

    ``put`` and ``get`` raise :class:`ChannelFailed` once a participant has called ``fail``.
    """

    _putter: ThreadPoolExecutor | None = None
    _getter: ThreadPoolExecutor | None = None

    @abstractmethod
    def put(self, record: Record, weight: int = 1, *, key: str = DEFAULT_KEY) -> None:
        """Append a record of the given weight (tokens, samples).

        Raises:
            ChannelClosed: the channel was closed.
        """

    @abstractmethod
    def get(self, *, key: str = DEFAULT_KEY) -> Record:
        """Take the oldest record.

        Raises:
            ChannelClosed: closed and empty.
        """

    @abstractmethod
    def get_batch(self, target_weight: int, *, key: str = DEFAULT_KEY) -> list[Record]:
        """Take records in order until their weights reach ``target_weight``.

        Never takes a record that would exceed the target, except as the first one: a record heavier
        than the target comes alone. Returns fewer only when the channel is closed.

        Raises:
            ChannelClosed: closed and empty.
        """

    @abstractmethod
    def close(self) -> None:
        """Accept no further record; readers drain what is left."""

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Give up for everybody: every ``put`` and ``get`` raises ``ChannelFailed(reason)``."""

    def flush(self) -> None:  # noqa: B027 - nothing to do where put itself waits
        """Wait until every record put here is in the channel and outlives this process."""

    def leave(self) -> None:  # noqa: B027 - nothing to do inside one process
        """Have no further part in the channel; the others go on.

        Records taken last count as done.
        """

    def __iter__(self) -> Iterator[Record]:
        while True:
            try:
                yield self.get()
            except ChannelClosed:
                return

    def put_async(self, record: Record, weight: int = 1, **options: Any) -> Future[None]:
        """``put`` without waiting; records of one caller keep their order."""
        if self._putter is None:
            self._putter = ThreadPoolExecutor(1, thread_name_prefix="channel-put")
        return self._putter.submit(self.put, record, weight, **options)

    def get_async(self, **options: Any) -> Future[Record]:
        """``get`` without waiting; handles of one caller are served in order."""
        if self._getter is None:
            self._getter = ThreadPoolExecutor(1, thread_name_prefix="channel-get")
        return self._getter.submit(self.get, **options)
