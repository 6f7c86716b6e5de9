"""Items that arrive once and in order over connections that break: numbers and acknowledgements.

A large item travels in pieces, so that whoever waits sees it come however slow the wire is, and
what arrived of it need not come again. Pieces are numbered: the sender keeps one until its item is
done with, the receiver takes each number once and in order, so whatever was lost or repeated on the
way, sending everything again from the first number that did not arrive is always right (go-back-N).
Nothing here knows of sockets or clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlinf.errors import DataError

Block = bytes | bytearray | memoryview

WINDOW = 1024
"""Pieces that may be under way."""
PIECE_BYTES = 512 << 10
"""Of a large item: the smaller, the slower a wire may be and the more work are fast ones."""
PART_BYTES = 64 << 10
"""How much of small items travels together: less than this may come between two breaks."""


class Piece(NamedTuple):
    """Some of an item; ``left`` is the number of bytes from its first one to the item's end."""

    left: int
    data: Block


class Part(NamedTuple):
    """A run of pieces as it travels; what is numbered below ``base`` will not come (again).

    ``turn`` is how often the sender has gone back to what was lost.
    """

    base: int
    first: int
    turn: int
    pieces: Sequence[Piece]


class Outbox:
    """The sender's end: pieces numbered from 0.

    ``size`` is the number of bytes of the pieces that are not done with.
    """

    def __init__(self, part_bytes: int = PART_BYTES, piece_bytes: int = PIECE_BYTES) -> None:
        self.size = 0
        self._pieces: deque[Piece] = deque()
        self._base = self._sent = self._received = self._turn = 0
        self._part_bytes, self._piece_bytes = part_bytes, piece_bytes

    def __len__(self) -> int:
        """Pieces that are not done with."""
        return len(self._pieces)

    def add(self, item: Block) -> bool:
        """Append an item; whether it is the only one that was not sent yet."""
        alone = self._sent - self._base == len(self._pieces)
        size, most = len(item), self._piece_bytes
        if size <= most:
            self._pieces.append(Piece(size, item))
        else:
            view = memoryview(item)
            for start in range(0, size, most):
                self._pieces.append(Piece(size - start, view[start : start + most]))
        self.size += size
        return alone

    def full(self, nbytes: int, limit: int) -> bool:
        """Whether so many bytes more are to wait; never where there is nothing else."""
        return bool(self._pieces) and (len(self._pieces) >= WINDOW or self.size + nbytes > limit)

    def take(self) -> Part:
        """What to send next; empty when there is nothing new or enough is under way."""
        stop = min(self._received + WINDOW, self._base + len(self._pieces))
        pieces: list[Piece] = []
        size = 0
        for number in range(self._sent, stop):
            piece = self._pieces[number - self._base]
            size += len(piece.data)
            if pieces and size > self._part_bytes:
                break
            pieces.append(piece)
        part = Part(self._base, self._sent, self._turn, pieces)
        self._sent += len(pieces)
        return part

    def put_back(self, part: Part) -> None:
        """The part that was taken last could not be sent: take it again."""
        self._sent = part.first

    def hear(self, received: int, done: int, gap: int | None) -> None:
        """The receiver has what is below ``received``, and what is below ``done`` for good.

        Args:
            gap: the turn in which something came to it that belongs after what it has. Once in each
                turn that is sent again: what was still under way then shows the same gap, and must
                not be answered each time. A receiver that is stopped shows none, and is not
                flooded.

        Raises:
            DataError: it speaks of pieces there never were.
        """
        if not 0 <= done <= received <= self._base + len(self._pieces):
            raise DataError("acknowledges what was never sent")
        if gap == self._turn:
            # It may have less than it said before: see Inbox.drop.
            self._sent = self._received = max(received, self._base)
            self._turn += 1
        else:
            self._received = max(self._received, received)
            self._sent = max(self._sent, self._received)
        for _ in range(done - self._base):
            self.size -= len(self._pieces.popleft().data)
        self._base = max(self._base, done)

    def restart(self) -> None:
        """Another receiver, which has nothing yet: send everything that is not done with."""
        self._sent = self._received = self._base
        self._turn += 1

    def clear(self) -> None:
        """Drop all items; what is under way of them may still arrive."""
        self._base += len(self._pieces)
        self._sent = self._received = self._base
        self._pieces.clear()
        self.size = 0


class Inbox:
    """The receiver's end; ``expected`` is the number of the next piece, and the acknowledgement.

    What is below ``whole`` made whole items. ``gap`` is for :meth:`Outbox.hear`.

    Args:
        max_bytes: the largest item.
    """

    def __init__(self, max_bytes: int) -> None:
        self.expected = self.whole = 0
        self.gap: int | None = None
        self._max_bytes = max_bytes
        self._begun: memoryview | None = None
        """The item whose pieces come, whose last bytes are not there yet."""
        self._left = 0

    def accept(self, part: Part) -> list[tuple[int, Block]]:
        """The items that are whole now, in order, and for each the number after its last piece.

        Of a part only the last piece may leave something of its item to come.

        Raises:
            DataError: the numbers make no sense, or an item is too large.
        """
        base, first, turn, pieces = part
        if not 0 <= base <= first:
            raise DataError("bad numbers")
        if base > self.expected:
            self.drop()
            self.expected = self.whole = base
        self.gap = turn if first > self.expected else None
        new = pieces[self.expected - first :] if self.gap is None else []
        if new and self._begun is not None and new[0].left != self._left:
            raise DataError("not the rest of the item that was begun")
        if new and new[-1].left > self._max_bytes:
            raise DataError("item too large")
        found = []
        for piece in new:
            self.expected += 1
            if (item := self._joined(*piece)) is not None:
                self.whole = self.expected
                found.append((self.expected, item))
        return found

    def drop(self) -> None:
        """Forget the beginning of an item; if its sender lives, all of it is sent again."""
        self.expected, self._begun = self.whole, None

    def _joined(self, left: int, data: Block) -> Block | None:
        if self._begun is None:
            if left == len(data):
                return data
            self._begun = np.empty(left, np.uint8).data
        end = len(self._begun) - left + len(data)
        self._begun[end - len(data) : end] = data
        self._left = left - len(data)
        if self._left:
            return None
        item, self._begun = self._begun, None
        return item
