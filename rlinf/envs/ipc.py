"""A pair of connected sockets, with shared memory for arrays.

Also loaded in the simulator process (:mod:`rlinf.envs.vector_env`): it imports the standard library
and numpy alone.
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

    def __init__(self, file: int) -> None:
        self._file = file
        self._map: Any = None

    def map_arrays(self, described: list[list[Any]], size: int, *, writes: bool) -> Arrays:
        """Return arrays mapped onto its first ``size`` bytes, each at its own offset."""
        if self._map is None or len(self._map) < size:
            if writes:
                # Reserved now: writing where there is no memory later would kill the process.
                os.posix_fallocate(self._file, 0, size)
            self._map = mmap.mmap(self._file, size)
        return {
            name: np.frombuffer(self._map, kind, math.prod(shape), at).reshape(shape)
            for name, kind, shape, at in described
        }


class SimulatorConnection:
    """One end of a pair of connected sockets: it exchanges a dictionary and arrays in each
    direction, in turns.

    Arrays are in shared memory; the receiver copies them before the next message. The rest is JSON
    on the socket. It is neither encoded nor decoded again if it equals the last message, which is
    so for every step.
    """

    def __init__(self, end: socket.socket, own: int, other: int) -> None:
        """Create one end. ``own`` and ``other`` are memory files for the arrays of this end and of
        the other."""
        self._socket, self._own, self._other = end, SharedArrays(own), SharedArrays(other)
        self._sent: tuple[Any, bytes, Arrays] = (None, b"", {})
        self._got: tuple[bytes, dict[str, Any], Arrays] = (b"", {}, {})

    def send(self, message: dict[str, Any], arrays: Arrays) -> None:
        """Send a message. Raises OSError if the other side has closed."""
        described, size = list[list[Any]](), 0
        for name, array in arrays.items():
            described.append([name, array.dtype.str, list(array.shape), size])
            size += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        content = [message, described, size]
        if content != self._sent[0]:
            places = self._own.map_arrays(described, size, writes=True) if size else {}
            self._sent = content, json.dumps(content).encode(), places
        _, header, places = self._sent
        for name, place in places.items():
            place[...] = arrays[name]
        self._socket.sendall(struct.pack("<Q", len(header)) + header)

    def receive(self) -> tuple[dict[str, Any], Arrays]:
        """Return the next message. Raises EOFError or OSError if the other side has closed."""
        (size,) = struct.unpack("<Q", self._read(8))
        header = bytes(self._read(size))
        if header != self._got[0]:
            message, described, size = json.loads(header)
            places = self._other.map_arrays(described, size, writes=False) if size else {}
            self._got = header, message, places
        _, message, places = self._got
        return message, {name: place.copy() for name, place in places.items()}

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        block = bytearray(size)
        view, done = memoryview(block), 0
        while done < size:
            count = self._socket.recv_into(view[done:])
            if not count:
                raise EOFError("the other side is gone")
            done += count
        return block
