"""Shared-memory transport: the writer's end of a channel, on the node of its reader.

It speaks to the reader as others do, by a mailbox (:mod:`rlinf.channels.mailbox`): so both know
that the other is alive. Its records lie in a segment of its own (:mod:`rlinf.channels.ring`), whose
name is in what it says of itself.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgpack

from rlinf.channels.base import ChannelFailed
from rlinf.channels.ring import START, Writing
from rlinf.channels.socket import LONGEST_NAP_S, SEGMENT, SHORTEST_NAP_S, SocketSink, host_of
from rlinf.channels.wire import encode
from rlinf.data.record import Record
from rlinf.errors import DataError, InputError
from rlinf.segments import make, remove, segment_name, this_memory

NO_ROOM_S = 30.0
"""How long a reader may make no room, alive: it hangs."""


class SharedMemorySink(SocketSink):
    """The end of a process that writes; any number of threads, one after the other.

    What it was writing when it died vanishes; what it had put before is there.

    Args:
        size: bytes for the records that wait or are in use.

    Raises:
        InputError: there is no such channel on this node.
        StorageError: not so much shared memory is free.
        ChannelFailed: its host does not answer.
    """

    def __init__(self, folder: Path, name: str, *, size: int = 64 << 20) -> None:
        pointer, host = host_of(folder, name)
        if host.memory != this_memory():
            raise InputError(f"{pointer}: no such channel on this node")
        self._segment = segment_name()
        self._ring = Writing(make(self._segment, START + size))
        self._writes = threading.Lock()
        try:
            super().__init__(folder, name, about=msgpack.packb({SEGMENT: self._segment}))
        except BaseException:
            remove(self._segment)
            raise

    def put(self, record: Record) -> None:
        """As the interface says.

        Raises:
            DataError: the record cannot be sent or is larger than the whole segment.
        """
        encoded = encode(record)
        if encoded.size > len(self._ring):
            raise DataError(
                f"record {tuple(record.identity)} takes {encoded.size} bytes, the shared memory "
                f"for {self._pointer.name} has {len(self._ring)}"
            )
        deadline, nap = time.monotonic() + NO_ROOM_S, SHORTEST_NAP_S
        with self._writes:
            while True:
                with self._changed:
                    self._check()
                if self._ring.put(encoded):
                    return
                if time.monotonic() > deadline:
                    raise ChannelFailed(
                        f"{self._pointer.name}: no room for {NO_ROOM_S:.0f} s: its reader hangs"
                    )
                time.sleep(nap)
                nap = min(1.5 * nap, LONGEST_NAP_S)

    def flush(self) -> None:
        """Wait until the reader knows of the segment: it has what was put, whoever dies."""
        with self._changed:
            while not self._welcome:
                self._check()
                self._changed.wait(LONGEST_NAP_S)
            self._check()

    def close(self) -> None:
        """Leave; what was put can still be read."""
        super().close()
        remove(self._segment)
