"""What all live transports share: order, weights, batches and duplicates."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from rlinf.data.record import Identity


class Batch:
    """Fills up to a target weight, record by record.

    A record is taken as long as it does not exceed the target; the first one always is, so a
    record heavier than the target comes alone. ``taken`` is the weight of what was taken before,
    None when nothing was.
    """

    def __init__(self, target_weight: int, taken: int | None = None) -> None:
        self.items: list[Any] = []
        self.total = taken
        self._target = target_weight

    def takes(self, weight: int) -> bool:
        """Whether a record of this weight may be added."""
        return self.total is None or self.total + weight <= self._target

    def add(self, item: Any, weight: int) -> None:
        self.items.append(item)
        self.total = (self.total or 0) + weight

    @property
    def full(self) -> bool:
        """Whether the target is reached."""
        return self.total is not None and self.total >= self._target


class Seen:
    """Remembers which (iteration, sample) were accepted, in a table of fixed size.

    A key lies in one of ``WAYS`` neighbouring rows; where all are taken the one of the oldest
    iteration is forgotten. The table may lie in shared memory (``rows``: ``int64 [N, 2]``, zero at
    first, changed under the owner's lock).
    """

    ROWS = 1 << 15
    WAYS = 64

    def __init__(self, rows: np.ndarray | None = None) -> None:
        self._rows = np.zeros((self.ROWS, 2), np.int64) if rows is None else rows

    def add(self, identity: Identity) -> bool:
        """Whether the record is new; it is known from then on."""
        iteration, sample = identity.key
        start = hash(identity.key) % (len(self._rows) - self.WAYS)
        rows = self._rows[start : start + self.WAYS]
        stored = 2 * iteration + 1  # never 0, which marks an empty row
        if ((rows[:, 0] == stored) & (rows[:, 1] == sample)).any():
            return False
        empty = rows[:, 0] == 0
        rows[empty.argmax() if empty.any() else rows[:, 0].argmin()] = (stored, sample)
        return True


class Entry(NamedTuple):
    """One queued item; ``order`` counts up over the whole channel."""

    order: int
    key: str
    item: Any
    weight: int


class KeyedQueue:
    """First-in first-out per key, in the memory of one process; the owner does the locking.

    Args:
        capacity: most items a key holds; 0 is unbounded.
    """

    def __init__(self, capacity: int = 0) -> None:
        self._queues: dict[str, deque[Entry]] = defaultdict(deque)
        self._capacity = capacity
        self._order = 0

    def full(self, key: str) -> bool:
        return bool(self._capacity) and len(self._queues.get(key, ())) >= self._capacity

    def push(self, key: str, item: Any, weight: int) -> None:
        self._order += 1
        self._queues[key].append(Entry(self._order, key, item, weight))

    def take(self, key: str, takes: Callable[[int], bool]) -> Entry | None:
        """Take the oldest item; None when there is none or ``takes(weight)`` says no."""
        queue = self._queues.get(key)
        if not queue or not takes(queue[0].weight):
            return None
        entry = queue.popleft()
        if not queue:
            del self._queues[key]
        return entry

    def give_back(self, entries: Iterable[Entry]) -> None:
        """Return items that were taken and not used to their places."""
        for entry in entries:
            self._queues[entry.key].append(entry)
            self._queues[entry.key] = deque(sorted(self._queues[entry.key]))

    def depth(self, key: str) -> int:
        return len(self._queues.get(key, ()))

    def depths(self) -> dict[str, int]:
        """Items waiting, by key."""
        return {key: len(queue) for key, queue in self._queues.items()}
