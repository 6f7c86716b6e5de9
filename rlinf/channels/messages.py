"""What messages of a mailbox are made of (:mod:`rlinf.channels.mailbox`), and how it is found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import zmq

from rlinf.artifacts import write_atomic
from rlinf.channels.curve import HEARTBEAT_S
from rlinf.channels.numbered import Block
from rlinf.channels.wire import join
from rlinf.errors import DataError

MAX_NAME = 200
MAX_CONTROL_BYTES = 1 << 20
"""The largest message without its items; a larger one is dropped and counted."""
CUT_BYTES = 16 << 20
"""A larger part of a message ends its connection unread, where no larger item may be sent."""
ROOM_BYTES = 1 << 10
"""What a frame takes beyond the item in it: its encryption is a few dozen."""
PART_BYTES = 64 << 10
ZERO_COPY_BYTES = 1 << 16
RESEND_S = HEARTBEAT_S


class Pointer(NamedTuple):
    """What a pointer file says: where the host is, and what it is asked by."""

    addresses: list[str]
    token: str
    timeout_s: float
    max_bytes: int
    memory: str
    """Of its node; see :func:`rlinf.segments.this_memory`."""


def largest_frame(max_bytes: int) -> int:
    """Where a connection ends whose items have up to so many bytes; the largest one gets through.

    One that does not would be sent again for ever, and nothing after it.
    """
    return max(CUT_BYTES, max_bytes + ROOM_BYTES)


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
    blocks: Sequence[Block] | None,
) -> bool:
    """Send a message, with the sizes and frames of blocks; whether it is under way.

    Only large frames are worth the bookkeeping of a send without a copy.
    """
    frames: list[Any] = []
    if blocks is not None:
        message = (*message, [len(block) for block in blocks])
        frames = join(blocks)
    parts = [*head, msgpack.packb(message), *frames]
    try:
        if frames and max(len(frame) for frame in frames) >= ZERO_COPY_BYTES:
            socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        else:
            socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def opened(control: memoryview) -> list[Any]:
    """The list of a message.

    Raises:
        DataError: it is none, or too large to be one.
    """
    if len(control) > MAX_CONTROL_BYTES:
        raise DataError("message too large")
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
