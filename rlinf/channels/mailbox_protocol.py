"""The protocol of mailboxes (:mod:`rlinf.channels.mailbox`): reliable delivery, messages, sessions.

Items arrive once and in order, even if connections break. A large item is sent in pieces. The
receiver thus sees progress on a slow network, and pieces that have arrived are not sent again.
Pieces are numbered. The sender keeps a piece until its item is acknowledged; the receiver accepts
each number once and in order. It is therefore always correct to resend everything from the first
missing number (go-back-N). The sender and receiver classes use no sockets and no clocks.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import zmq
import zmq.utils.garbage  # imported first: its atexit handler then runs after ours

from rlinf.artifacts import write_atomic
from rlinf.errors import DataError

Block = bytes | bytearray | memoryview

WINDOW_PIECES = 1024
"""Maximum number of pieces in flight."""
PIECE_BYTES = 512 << 10
"""Bytes of a piece. Smaller pieces suit slow networks but cost more work on fast ones."""
BATCH_BYTES = 64 << 10
"""Maximum bytes of small items per message; a bad connection may break during a larger one."""


class ItemPiece(NamedTuple):
    """A part of an item; ``remaining`` counts the bytes from its start to the item's end."""

    remaining: int
    data: Block


class PieceBatch(NamedTuple):
    """Consecutive pieces in one message."""

    base: int
    """No piece below this number will be sent (again)."""
    first: int
    """Number of the first piece."""
    turn: int
    """Number of times that the sender has gone back to a lost piece."""
    pieces: Sequence[ItemPiece]


class ReliableSender:
    """The sending end; pieces are numbered from 0.

    ``size`` is the number of bytes of unacknowledged pieces.
    """

    def __init__(self, batch_bytes: int = BATCH_BYTES, piece_bytes: int = PIECE_BYTES) -> None:
        self.size = 0
        self._pieces: deque[ItemPiece] = deque()
        self._base = self._sent = self._received = self._turn = 0
        """Numbers of the first kept, unsent and unreceived piece; turn of :class:`PieceBatch`."""
        self._batch_bytes, self._piece_bytes = batch_bytes, piece_bytes

    def __len__(self) -> int:
        """Number of unacknowledged pieces."""
        return len(self._pieces)

    def add(self, item: Block) -> bool:
        """Append an item; return whether it is the only unsent item."""
        is_only_unsent = self._sent - self._base == len(self._pieces)
        size, max_bytes = len(item), self._piece_bytes
        if size <= max_bytes:
            self._pieces.append(ItemPiece(size, item))
        else:
            view = memoryview(item)
            for start in range(0, size, max_bytes):
                self._pieces.append(ItemPiece(size - start, view[start : start + max_bytes]))
        self.size += size
        return is_only_unsent

    def is_full(self, nbytes: int, limit: int) -> bool:
        """Return whether an item of ``nbytes`` must wait. False if all items are acknowledged."""
        return bool(self._pieces) and (
            len(self._pieces) >= WINDOW_PIECES or self.size + nbytes > limit
        )

    def next_batch(self) -> PieceBatch:
        """Return the pieces to send next; empty if there are none or the window is full."""
        stop = min(self._received + WINDOW_PIECES, self._base + len(self._pieces))
        pieces: list[ItemPiece] = []
        size = 0
        for number in range(self._sent, stop):
            piece = self._pieces[number - self._base]
            size += len(piece.data)
            if pieces and size > self._batch_bytes:
                break
            pieces.append(piece)
        batch = PieceBatch(self._base, self._sent, self._turn, pieces)
        self._sent += len(pieces)
        return batch

    def requeue(self, batch: PieceBatch) -> None:
        """Undo :meth:`next_batch` for a batch that could not be sent."""
        self._sent = batch.first

    def acknowledge(self, received: int, done: int, gap: int | None) -> None:
        """Handle an acknowledgement: the receiver has all pieces below ``received``, and has
        handled all pieces below ``done``.

        Args:
            gap: the turn of the last batch, if pieces before it are missing; else None. The sender
                goes back at most once for each turn, because further pieces in flight report the
                same gap. A stopped receiver reports no gap and is not flooded.

        Raises:
            DataError: the numbers include pieces that were never sent.
        """
        if not 0 <= done <= received <= self._base + len(self._pieces):
            raise DataError("acknowledges what was never sent")
        if gap == self._turn:
            # The receiver may have fewer pieces than before: see ReliableReceiver.drop_partial.
            self._sent = self._received = max(received, self._base)
            self._turn += 1
        else:
            self._received = max(self._received, received)
            self._sent = max(self._sent, self._received)
        for _ in range(done - self._base):
            self.size -= len(self._pieces.popleft().data)
        self._base = max(self._base, done)

    def restart(self) -> None:
        """Send all items again, to another receiver, which has no pieces yet."""
        self._sent = self._received = self._base
        self._turn += 1

    def clear(self) -> None:
        """Drop all items; pieces in flight may still arrive."""
        self._base += len(self._pieces)
        self._sent = self._received = self._base
        self._pieces.clear()
        self.size = 0


class ReliableReceiver:
    """The receiving end; ``expected`` is the number of the next piece.

    All items below piece ``complete`` are complete. ``expected`` and ``gap`` are for
    :meth:`ReliableSender.acknowledge`.

    Args:
        max_bytes: the largest item.
    """

    def __init__(self, max_bytes: int) -> None:
        self.expected = self.complete = 0
        self.gap: int | None = None
        self._max_bytes = max_bytes
        self._partial: memoryview | None = None
        """The incomplete item whose pieces are arriving."""
        self._remaining = 0

    def accept(self, batch: PieceBatch) -> list[tuple[int, Block]]:
        """Return the items that are now complete, in order, each with the number of the next piece.

        Only the last piece of a batch may leave its item incomplete.

        Raises:
            DataError: the numbers are inconsistent, or an item is too large.
        """
        base, first, turn, pieces = batch
        if not 0 <= base <= first:
            raise DataError("bad numbers")
        if base > self.expected:
            self.drop_partial()
            self.expected = self.complete = base
        self.gap = turn if first > self.expected else None
        new = pieces[self.expected - first :] if self.gap is None else []
        if new and self._partial is not None and new[0].remaining != self._remaining:
            raise DataError("not the rest of the incomplete item")
        if new and new[-1].remaining > self._max_bytes:
            raise DataError("item too large")
        items = []
        for piece in new:
            self.expected += 1
            if (item := self._append_piece(*piece)) is not None:
                self.complete = self.expected
                items.append((self.expected, item))
        return items

    def drop_partial(self) -> None:
        """Drop the incomplete item; a live sender sends all of it again."""
        self.expected, self._partial = self.complete, None

    def _append_piece(self, remaining: int, data: Block) -> Block | None:
        if self._partial is None:
            if remaining == len(data):
                return data
            self._partial = np.empty(remaining, np.uint8).data
        end = len(self._partial) - remaining + len(data)
        self._partial[end - len(data) : end] = data
        self._remaining = remaining - len(data)
        if self._remaining:
            return None
        item, self._partial = self._partial, None
        return item


MAX_NAME = 200
"""Maximum length of a peer's name, characters."""
ZERO_COPY_BYTES = 1 << 16


class HostPointer(NamedTuple):
    """Content of a pointer file: the addresses of the host and the limits of its mailbox."""

    addresses: list[str]
    token: str
    timeout_s: float
    max_bytes: int
    memory: str
    """Shared-memory id of its node; see :func:`rlinf.shared_memory.shared_memory_id`."""


def write_pointer(path: Path, pointer: HostPointer) -> None:
    """Publish the addresses and limits of a host."""
    write_atomic(path, json.dumps(pointer._asdict()), private=True)


def read_pointer(path: Path) -> HostPointer | None:
    """Return the content of a pointer file, or None if it cannot be read (yet).

    On a shared filesystem the file may be missing, empty or stale for a while.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        pointer = HostPointer(*(values[name] for name in HostPointer._fields))
        timeout_s, max_bytes = float(pointer.timeout_s), int(pointer.max_bytes)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    addresses = pointer.addresses
    texts = [*addresses, pointer.token, pointer.memory] if type(addresses) is list else [None]
    is_valid = all(type(text) is str for text in texts)
    if not (is_valid and addresses):
        return None
    return pointer._replace(timeout_s=timeout_s, max_bytes=max_bytes)


def send_message(
    socket: zmq.Socket[bytes],
    head: list[bytes],
    message: tuple[Any, ...],
    pieces: Sequence[ItemPiece] | None,
) -> bool:
    """Send a message, followed by pieces in one frame; return whether the socket accepted it.

    Only large frames are sent without a copy, because sending without one has an overhead.
    """
    if pieces is not None:
        message = (*message, [piece.remaining for piece in pieces])
    parts: list[Any] = [*head, msgpack.packb(message)]
    if pieces:
        blocks = [piece.data for piece in pieces]
        parts.append(b"".join(blocks) if len(blocks) > 1 else blocks[0])
    try:
        socket.send_multipart(parts, zmq.NOBLOCK, copy=len(parts[-1]) < ZERO_COPY_BYTES)
    except zmq.Again:
        return False
    return True


def split_pieces(sizes: Sequence[int], frames: Sequence[memoryview]) -> list[ItemPiece]:
    """Return the pieces that follow a message of :func:`send_message`, without a copy.

    Raises:
        DataError: the frames do not match the sizes.
    """
    if len(frames) != bool(sizes):
        raise DataError("sizes and frames differ")
    pieces = []
    frame = frames[0] if frames else memoryview(b"")
    for remaining in sizes:
        if type(remaining) is not int or remaining <= 0 or not frame:
            raise DataError("sizes and frames differ")
        pieces.append(ItemPiece(remaining, frame[:remaining]))
        frame = frame[remaining:]
    if frame:
        raise DataError("sizes and frames differ")
    return pieces


def unpack_list(control: memoryview) -> list[Any]:
    """Unpack the list of a message.

    Raises:
        DataError: the message is not a list.
    """
    message = msgpack.unpackb(control)
    if type(message) is not list:
        raise DataError("not a list")
    return message


def unpack_map(packed: Block) -> dict[str, Any]:
    """Unpack a packed map.

    Raises:
        DataError: the content is not a map.
    """
    content = msgpack.unpackb(packed)
    if type(content) is not dict:
        raise DataError("not a packed map")
    return content


def check_numbers(*numbers: int) -> None:
    if any(type(number) is not int for number in numbers):
        raise DataError("not a number")


REASON_DEPARTED, REASON_REPLACED = "left", "replaced"
"""Reasons of a loss after which a peer does not return."""


class PeerJoined(NamedTuple):
    """A peer joined, for the first time or again; ``incarnation`` identifies its process."""

    worker: str
    """Name of the peer."""
    description: dict[str, Any]
    incarnation: str


class PeerReport(NamedTuple):
    """An item from a peer."""

    worker: str
    content: Any


class PeerLost(NamedTuple):
    """A peer became silent, left, or was replaced by another process of the same name."""

    worker: str
    reason: str


PeerEvent = PeerJoined | PeerReport | PeerLost


class PeerStatus(NamedTuple):
    """The last known state of a peer; ``age_s`` counts from its last message."""

    status: dict[str, Any]
    age_s: float
    description: dict[str, Any]
    alive: bool
    incarnation: str


@dataclass(eq=False)
class PeerSession:
    """The host's state of one incarnation of a peer.

    The items of all pieces below ``acknowledged`` were handled.
    """

    id: bytes
    """The incarnation."""
    name: str
    last_heard: float
    """Time (monotonic) of the last message; pauses of the host are added to it."""
    receiver: ReliableReceiver
    description: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    alive: bool = False
    """False before it joins and while it is reported lost."""
    retired: bool = False
    """True once it has left or another incarnation has its name."""
    sender: ReliableSender = field(default_factory=ReliableSender)
    acknowledged: int = 0
