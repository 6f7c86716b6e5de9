"""Reference transport: records change hands inside one process, without a copy."""

from __future__ import annotations

import threading

from rlinf.channels.base import DEFAULT_KEY, Channel, ChannelClosed, ChannelFailed
from rlinf.channels.queue import Batch, KeyedQueue, Seen
from rlinf.data.record import Record


class ReferenceChannel(Channel):
    """A bounded queue per key between threads of one process.

    Args:
        capacity: most records a key may hold before ``put`` blocks; 0 is unbounded.
        unique: drop a record whose (iteration, sample) was already accepted, so that a retried
            producer does no harm.
    """

    def __init__(self, capacity: int = 0, *, unique: bool = False) -> None:
        self._queue = KeyedQueue(capacity)
        self._changed = threading.Condition()
        self._seen = Seen() if unique else None
        self._closed = False
        self._failure: str | None = None

    def put(self, record: Record, weight: int = 1, *, key: str = DEFAULT_KEY) -> None:
        with self._changed:
            while self._queue.full(key) and not self._closed:
                self._changed.wait()
            self._check()
            if self._closed:
                raise ChannelClosed("put on a closed channel")
            if self._seen is None or self._seen.add(record.identity):
                self._queue.push(key, record, weight)
                self._changed.notify_all()

    def get(self, *, key: str = DEFAULT_KEY) -> Record:
        return self._take(Batch(0), key)[0]

    def get_batch(self, target_weight: int, *, key: str = DEFAULT_KEY) -> list[Record]:
        return self._take(Batch(target_weight), key)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()
        self.close()

    def __len__(self) -> int:
        with self._changed:
            return sum(self._queue.depths().values())

    def _take(self, batch: Batch, key: str) -> list[Record]:
        with self._changed:
            while not batch.full:
                self._check()
                if entry := self._queue.take(key, batch.takes):
                    batch.add(entry.item, entry.weight)
                    self._changed.notify_all()
                elif self._closed or self._queue.depth(key):
                    break
                else:
                    self._changed.wait()
        if not batch.items:
            raise ChannelClosed("channel is closed and empty")
        return batch.items

    def _check(self) -> None:
        if self._failure is not None:
            raise ChannelFailed(self._failure)
