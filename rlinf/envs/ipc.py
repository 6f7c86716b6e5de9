"""The connection between a stage and a simulator process: a socket pair, and shared memory for
arrays.

The simulator process (:mod:`rlinf.envs.vector_env`) loads this module too, so it imports only the
standard library and numpy.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import socket
import struct
from typing import Any

import numpy as np

from .observations import Arrays

ALIGNMENT_BYTES = 64
"""Arrays begin at multiples of this many bytes."""


class SharedArrays:
    """A memory file shared by two processes: one writes arrays into it, the other reads them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: Any = None

    def map_arrays(self, layout: list[list[Any]], size: int, *, is_writer: bool) -> Arrays:
        """Return arrays mapped onto the first ``size`` bytes; ``layout`` has name, dtype, shape and
        offset of each array."""
        if self._map is None or len(self._map) < size:
            if is_writer:
                # Reserve the memory now: if none is left, a later write would kill the process.
                os.posix_fallocate(self._fd, 0, size)
            self._map = mmap.mmap(self._fd, size)
        return {
            name: np.frombuffer(self._map, dtype, math.prod(shape), offset).reshape(shape)
            for name, dtype, shape, offset in layout
        }


class SimulatorConnection:
    """One end of a connection. The two ends take turns to send a message: a dictionary and arrays.

    Arrays are in shared memory; the receiver copies them before the next message. The dictionary
    and the layout of the arrays are JSON on the socket. If both equal those of the last message,
    as is usual in steps, they are neither encoded nor decoded again.
    """

    def __init__(self, end: socket.socket, write_fd: int, read_fd: int) -> None:
        """Create one end, which sends arrays in memory file ``write_fd`` and receives them in
        ``read_fd``."""
        self._socket = end
        self._write_memory, self._read_memory = SharedArrays(write_fd), SharedArrays(read_fd)
        self._last_sent: tuple[Any, bytes, Arrays] = (None, b"", {})
        """The last message with its layout, the JSON of both, and the mapped arrays."""
        self._last_received: tuple[bytes, dict[str, Any], Arrays] = (b"", {}, {})
        """The last JSON, the message in it, and the mapped arrays."""

    def send(self, message: dict[str, Any], arrays: Arrays) -> None:
        """Send a message. Raises OSError if the other side has closed."""
        layout, size = list[list[Any]](), 0
        for name, array in arrays.items():
            layout.append([name, array.dtype.str, list(array.shape), size])
            size += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        content = [message, layout, size]
        if content != self._last_sent[0]:
            mapped = self._write_memory.map_arrays(layout, size, is_writer=True) if size else {}
            self._last_sent = content, json.dumps(content).encode(), mapped
        _, header, mapped = self._last_sent
        for name, shared in mapped.items():
            shared[...] = arrays[name]
        self._socket.sendall(struct.pack("<Q", len(header)) + header)

    def receive(self) -> tuple[dict[str, Any], Arrays]:
        """Return the next message. Raises EOFError or OSError if the other side has closed."""
        (size,) = struct.unpack("<Q", self._read(8))
        header = bytes(self._read(size))
        if header != self._last_received[0]:
            message, layout, size = json.loads(header)
            mapped = self._read_memory.map_arrays(layout, size, is_writer=False) if size else {}
            self._last_received = header, message, mapped
        _, message, mapped = self._last_received
        return message, {name: shared.copy() for name, shared in mapped.items()}

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        block = bytearray(size)
        view, done = memoryview(block), 0
        while done < size:
            count = self._socket.recv_into(view[done:])
            if not count:
                raise EOFError("the other side has closed the connection")
            done += count
        return block
