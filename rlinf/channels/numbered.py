"""Items that arrive once and in order over connections that break: numbers and acknowledgements.

The sender keeps an item until it is acknowledged. The receiver takes each number once and in order,
so whatever was lost or repeated on the way, sending everything again from the first number that did
not arrive is always right (go-back-N). Nothing here knows of sockets or clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from rlinf.errors import DataError

Item = TypeVar("Item")
Block = bytes | bytearray | memoryview

WINDOW = 1024


class Part(NamedTuple):
    """A run of items as it travels; what is numbered below ``base`` will not come (again)."""

    base: int
    first: int
    items: list[Block]


class Outbox:
    """The sender's end: items numbered from 0.

    ``size`` is the number of bytes of the items that are not done with.

    Args:
        part_bytes: how much travels in one part; an item that is larger goes alone.
        resend_s: how long the receiver may miss something before it is sent again.
    """

    def __init__(self, part_bytes: int, resend_s: float) -> None:
        self.size = 0
        self._items: deque[Block] = deque()
        self._base = self._sent = self._received = 0
        self._since = 0.0
        self._part_bytes, self._resend_s = part_bytes, resend_s

    def __len__(self) -> int:
        """Items that are not done with."""
        return len(self._items)

    def add(self, item: Block) -> bool:
        """Append an item; whether it is the only one that was not sent yet."""
        self._items.append(item)
        self.size += len(item)
        return self._sent - self._base == len(self._items) - 1

    def full(self, nbytes: int, limit: int) -> bool:
        """Whether so many bytes more are to wait; never where there is nothing else."""
        return bool(self._items) and (len(self._items) >= WINDOW or self.size + nbytes > limit)

    def take(self, now: float) -> Part:
        """What to send next; empty when there is nothing new or enough is under way."""
        start = self._sent - self._base
        stop = self._received + WINDOW - self._base
        items: list[Block] = []
        size = 0
        for item in islice(self._items, start, stop):
            size += len(item)
            if items and size > self._part_bytes:
                break
            items.append(item)
        if items and self._sent == self._received:
            self._since = now
        part = Part(self._base, self._sent, items)
        self._sent += len(items)
        return part

    def hear(self, received: int, done: int, now: float, *, gap: bool) -> None:
        """The receiver has what is below ``received``, and what is below ``done`` for good.

        Args:
            gap: what it heard last came after something that it has not got. Only then is
                something sent again, so a receiver that is stopped is not flooded.

        Raises:
            DataError: it speaks of items there never were.
        """
        if not 0 <= done <= received <= self._base + len(self._items):
            raise DataError("acknowledges what was never sent")
        if received > self._received:
            self._received, self._since = received, now
            self._sent = max(self._sent, received)
        elif gap and self._sent > self._received and now - self._since > self._resend_s:
            self.rewind()
            self._since = now
        for _ in range(done - self._base):
            self.size -= len(self._items.popleft())
        self._base = max(self._base, done)

    def rewind(self) -> None:
        """What is under way is lost: send it again."""
        self._sent = self._received

    def restart(self) -> None:
        """Another receiver, which has nothing yet: send everything that is not done with."""
        self._sent = self._received = self._base

    def clear(self) -> None:
        """Drop all items; those under way may still arrive."""
        self._base += len(self._items)
        self._sent = self._received = self._base
        self._items.clear()
        self.size = 0


class Inbox:
    """The receiver's end; ``expected`` is the number of the next item, and the acknowledgement.

    ``gap`` is whether what came last was numbered above it: something before was lost.
    """

    def __init__(self) -> None:
        self.expected = 0
        self.gap = False

    def accept(self, base: int, first: int, items: Sequence[Item]) -> Sequence[Item]:
        """The items that are new, in order.

        Raises:
            DataError: the numbers make no sense.
        """
        if not 0 <= base <= first:
            raise DataError("bad numbers")
        self.expected = max(self.expected, base)
        self.gap = first > self.expected
        if self.gap:
            return []
        new = items[self.expected - first :]
        self.expected += len(new)
        return new
