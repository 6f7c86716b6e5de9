"""The channel interface that every transport implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rlinf.data.record import Record

DEFAULT_KEY = ""


class ChannelClosed(Exception):
    """No further record will come (``get``), or none is accepted (``put``)."""


class Channel(ABC):
    """An ordered, typed, bounded stream of records.

    Order is first-in first-out per key. ``put`` blocks while the channel is full, ``get`` while it
    is empty; iteration ends when the channel is closed and drained. A transport that connects
    processes that do not run at the same time (files) accepts ``put`` on one side and ``get`` on
    the other.
    """

    _workers: ThreadPoolExecutor | None = None

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

    def __iter__(self) -> Iterator[Record]:
        while True:
            try:
                yield self.get()
            except ChannelClosed:
                return

    def put_async(self, record: Record, weight: int = 1, **options: Any) -> Future[None]:
        """``put`` without waiting; records of one caller keep their order."""
        return self._pool().submit(self.put, record, weight, **options)

    def get_async(self, **options: Any) -> Future[Record]:
        """``get`` without waiting."""
        return self._pool().submit(self.get, **options)

    def _pool(self) -> ThreadPoolExecutor:
        if self._workers is None:
            self._workers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="channel")
        return self._workers
