"""What messages of a mailbox are made of (:mod:`rlinf.channels.mailbox`), and how it is found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import zmq
import zmq.utils.garbage  # now, so that it ends after us where Python ends (atexit)

from rlinf.artifacts import write_atomic
from rlinf.channels.numbered import Block, Piece
from rlinf.errors import DataError

MAX_NAME = 200
ZERO_COPY_BYTES = 1 << 16


class Pointer(NamedTuple):
    """What a pointer file says: where the host is, and what it is asked by."""

    addresses: list[str]
    token: str
    timeout_s: float
    max_bytes: int
    memory: str
    """Of its node; see :func:`rlinf.segments.this_memory`."""


def write_pointer(path: Path, pointer: Pointer) -> None:
    """Say where a host is."""
    write_atomic(path, json.dumps(pointer._asdict()), private=True)


def read_pointer(path: Path) -> Pointer | None:
    """Where a host is; None when that cannot be read (yet).

    On a shared filesystem the file may be missing, empty or stale for a while.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        pointer = Pointer(*(values[name] for name in Pointer._fields))
        timeout_s, max_bytes = float(pointer.timeout_s), int(pointer.max_bytes)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    addresses = pointer.addresses
    texts = [*addresses, pointer.token, pointer.memory] if type(addresses) is list else [None]
    whole = all(type(text) is str for text in texts)
    return (
        pointer._replace(timeout_s=timeout_s, max_bytes=max_bytes) if whole and addresses else None
    )


def send(
    socket: zmq.Socket[bytes],
    head: list[bytes],
    message: tuple[Any, ...],
    pieces: Sequence[Piece] | None,
) -> bool:
    """Send a message, with pieces behind it in one frame; whether it is under way.

    Only large frames are worth the bookkeeping of a send without a copy.
    """
    if pieces is not None:
        message = (*message, [piece.left for piece in pieces])
    parts: list[Any] = [*head, msgpack.packb(message)]
    if pieces:
        blocks = [piece.data for piece in pieces]
        parts.append(b"".join(blocks) if len(blocks) > 1 else blocks[0])
    try:
        socket.send_multipart(parts, zmq.NOBLOCK, copy=len(parts[-1]) < ZERO_COPY_BYTES)
    except zmq.Again:
        return False
    return True


def pieces_of(lefts: Sequence[int], frames: Sequence[memoryview]) -> list[Piece]:
    """The pieces behind a message of :func:`send`, not copied.

    Raises:
        DataError: they are not as the message says.
    """
    if len(frames) != bool(lefts):
        raise DataError("sizes and frames differ")
    pieces = []
    rest = frames[0] if frames else memoryview(b"")
    for left in lefts:
        if type(left) is not int or left <= 0 or not rest:
            raise DataError("sizes and frames differ")
        pieces.append(Piece(left, rest[:left]))
        rest = rest[left:]
    if rest:
        raise DataError("sizes and frames differ")
    return pieces


def opened(control: memoryview) -> list[Any]:
    """The list of a message.

    Raises:
        DataError: it is none.
    """
    message = msgpack.unpackb(control)
    if type(message) is not list:
        raise DataError("not a list")
    return message


def unpacked(packed: Block) -> dict[str, Any]:
    """A map as it travels.

    Raises:
        DataError: not one.
    """
    content = msgpack.unpackb(packed)
    if type(content) is not dict:
        raise DataError("not a packed map")
    return content


def check_numbers(*numbers: int) -> None:
    if any(type(number) is not int for number in numbers):
        raise DataError("not a number")
