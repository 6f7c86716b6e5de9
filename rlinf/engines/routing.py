"""Which of several like servers gets a request: the one that has its prefix, unless it is too busy.

A server keeps keys and values of what it has read. Samples of a group have their prompt in common,
turns of a dialogue all that was said before: asked of the same server, that is not computed again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

BLOCK = 16
"""Tokens: prefixes are known at multiples of it, and whole."""
SHARE = 0.5
"""A prefix that is known counts where it is so much of a request: a system message that all have in
common would else draw everything to one server."""
MOST = 1 << 18
"""Prefixes that are remembered; those that were used longest ago are forgotten."""


class Router:
    """Loads of servers and the prefixes they hold; may be used by several threads."""

    def __init__(self, count: int, imbalance: int) -> None:
        """
        Args:
            count: of servers.
            imbalance: by how many requests the one that holds a prefix may be above the least
                loaded one.
        """
        self._lock, self._imbalance = threading.Lock(), imbalance
        self.loads = [0] * count
        """Requests under way at each."""
        self._holders: OrderedDict[int, int] = OrderedDict()

    def take(self, tokens: Sequence[int], usable: Collection[int]) -> int:
        """The number of the server for a request, which counts as under way there.

        Args:
            tokens: what it asks to be read.
            usable: numbers of the servers that are up; at least one.
        """
        with self._lock:
            marks = list(_marks(tokens))
            least = min(usable, key=lambda number: (self.loads[number], number))
            chosen = self._holder(marks, len(tokens), usable)
            if chosen is None or self.loads[chosen] - self.loads[least] > self._imbalance:
                chosen = least
            self._remember(marks, chosen)
            self.loads[chosen] += 1
            return chosen

    def done(self, number: int, tokens: Sequence[int] = ()) -> None:
        """A request is no more under way; the server holds these tokens from now on."""
        with self._lock:
            self.loads[number] -= 1
            self._remember(list(_marks(tokens)), number)

    def forget(self, number: int | None = None) -> None:
        """A server holds nothing any more; None: none does."""
        with self._lock:
            for mark in [m for m, at in self._holders.items() if number in (None, at)]:
                del self._holders[mark]

    def _holder(
        self, marks: Sequence[tuple[int, int]], length: int, usable: Collection[int]
    ) -> int | None:
        for covered, mark in reversed(marks):
            if covered < SHARE * length:
                return None
            holder = self._holders.get(mark)
            if holder in usable:
                return holder
        return None

    def _remember(self, marks: Sequence[tuple[int, int]], number: int) -> None:
        for _, mark in marks:
            self._holders[mark] = number
            self._holders.move_to_end(mark)
        while len(self._holders) > MOST:
            self._holders.popitem(last=False)


def _marks(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Lengths of prefixes and a hash of each, the shortest first; each has the one before in it."""
    mark = 0
    for start in range(0, len(tokens), BLOCK):
        block = tokens[start : start + BLOCK]
        mark = hash((mark, *block))
        yield start + len(block), mark
