"""Reference transport: records change hands inside one process, without a copy."""

from __future__ import annotations

import threading
from collections import defaultdict, deque

from rlinf.channels.base import DEFAULT_KEY, Channel, ChannelClosed
from rlinf.data.record import Record


class ReferenceChannel(Channel):
    """A bounded queue per key between threads of one process.

    Args:
        capacity: most records a key may hold before ``put`` blocks; 0 is unbounded.
        unique: drop a record whose (iteration, sample) was already accepted, so that a retried
            producer does no harm.
    """

    def __init__(self, capacity: int = 0, *, unique: bool = False) -> None:
        self._queues: dict[str, deque[tuple[Record, int]]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._capacity = capacity
        self._seen: set[tuple[int, int]] | None = set() if unique else None
        self._closed = False

    def put(self, record: Record, weight: int = 1, *, key: str = DEFAULT_KEY) -> None:
        with self._changed:
            queue = self._queues[key]
            while self._capacity and len(queue) >= self._capacity and not self._closed:
                self._changed.wait()
            if self._closed:
                raise ChannelClosed("put on a closed channel")
            if self._seen is not None:
                if record.identity.key in self._seen:
                    return
                self._seen.add(record.identity.key)
            queue.append((record, weight))
            self._changed.notify_all()

    def get(self, *, key: str = DEFAULT_KEY) -> Record:
        with self._changed:
            self._wait_for_head(key)
            record, _ = self._queues[key].popleft()
            self._changed.notify_all()
            return record

    def get_batch(self, target_weight: int, *, key: str = DEFAULT_KEY) -> list[Record]:
        batch: list[Record] = []
        total = 0
        with self._changed:
            self._wait_for_head(key)
            queue = self._queues[key]
            while total < target_weight:
                while not queue and not self._closed:
                    self._changed.wait()
                if not queue or (batch and total + queue[0][1] > target_weight):
                    break
                record, weight = queue.popleft()
                batch.append(record)
                total += weight
                self._changed.notify_all()
        return batch

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return sum(len(queue) for queue in self._queues.values())

    def _wait_for_head(self, key: str) -> None:
        while not self._queues[key]:
            if self._closed:
                raise ChannelClosed("channel is closed and empty")
            self._changed.wait()
