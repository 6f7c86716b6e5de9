"""Record channels over sockets or shared memory.

A channel is a mailbox (:mod:`rlinf.channels.mailbox`) to which peers send records and whose host
reads them. Peers on any node of the run find the host by a file in the run folder. A peer on the
host's node may instead write its records into a ring in shared memory.
"""

from __future__ import annotations

import contextlib
import mmap
import platform
import threading
import time
from collections import deque
from pathlib import Path

import msgpack
import numpy as np

from rlinf.channels.channel import ChannelClosed, ChannelFailed, RecordSink, RecordSource
from rlinf.channels.curve_sockets import first_reachable, routing_id
from rlinf.channels.mailbox import EMPTY_MAP, MailboxHost, MailboxPeer, QueuedEvent
from rlinf.channels.mailbox_protocol import (
    REASON_DEPARTED,
    REASON_REPLACED,
    HostPointer,
    PeerEvent,
    PeerLost,
    PeerReport,
    PeerSession,
    read_pointer,
    unpack_map,
)
from rlinf.channels.wire_format import ALIGN_BYTES, EncodedRecord, decode_record, encode_record
from rlinf.data.record import Record
from rlinf.errors import DataError, InputError
from rlinf.shared_memory import (
    attach_segment,
    create_segment,
    is_orphaned,
    new_segment_name,
    remove_segment,
    shared_memory_id,
)

RING_SLOTS = 1024
"""Maximum number of unreleased records."""
MAX_AHEAD_BYTES = 8 << 20
"""Maximum bytes of unreleased records, so that they fit in the CPU caches; two records may always
wait."""
RING_HEADER = np.dtype([("put", "i8"), ("pad0", "u1", 120), ("done", "i8"), ("pad1", "u1", 120)])
"""Number of records that the writer has put, and of those that the reader has released (``done``).
Padding puts each counter in separate cache lines."""
RING_DATA_START = -(-(RING_HEADER.itemsize + 16 * RING_SLOTS) // mmap.PAGESIZE) * mmap.PAGESIZE
STORES_IN_ORDER = platform.machine() == "x86_64"
"""Whether the CPU guarantees that a process which sees a new counter value also sees all earlier
writes."""


class SharedMemoryRing:
    """One end of a ring of records in shared memory; ``len`` is the ring's size in bytes."""

    def __init__(self, memory: mmap.mmap) -> None:
        if len(memory) <= RING_DATA_START:
            raise InputError(f"shared memory of {len(memory)} bytes holds no records")
        head = np.frombuffer(memory, RING_HEADER, 1)
        self._put_count, self._released_count = head["put"], head["done"]
        self._slots = np.frombuffer(memory, "i8", 2 * RING_SLOTS, RING_HEADER.itemsize).reshape(
            RING_SLOTS, 2
        )
        """Start and size of each record in the data, in bytes."""
        self._data = np.frombuffer(memory, np.uint8, offset=RING_DATA_START)
        self._readable = memoryview(memory).toreadonly()[RING_DATA_START:]
        self._barrier = threading.Lock()

    def __len__(self) -> int:
        return len(self._data)

    def _fence(self) -> None:
        """Memory barrier: earlier writes become visible before later ones."""
        if not STORES_IN_ORDER:
            # Releasing a lock and acquiring it again orders all writes around it.
            for _ in range(2):
                with self._barrier:
                    pass


class RingWriter(SharedMemoryRing):
    """The writer's end."""

    def __init__(self, memory: mmap.mmap) -> None:
        super().__init__(memory)
        self._unreleased: deque[tuple[int, int]] = deque()
        """Start and end of the unreleased records, oldest first."""
        self._count = 0
        """Number of records written."""
        self._bytes = 0
        """Bytes of the unreleased records."""

    def put(self, record: EncodedRecord) -> bool:
        """Write a record and return True, or return False if there is no room."""
        if (start := self._find_offset(record.size)) is None:
            return False
        record.write(self._data[start : start + record.size])
        self._slots[self._count % RING_SLOTS] = start, record.size
        self._unreleased.append((start, start + record.size))
        self._bytes += record.size
        self._count += 1
        self._fence()
        self._put_count[0] = self._count
        return True

    def _find_offset(self, size: int) -> int | None:
        """Return the lowest offset with ``size`` free bytes, or None.

        Low offsets were read most recently, so they are still in the cache.
        """
        num_unreleased = self._count - int(self._released_count[0])
        while len(self._unreleased) > num_unreleased:
            start, end = self._unreleased.popleft()
            self._bytes -= end - start
        is_far_ahead = num_unreleased >= 2 and self._bytes + size > MAX_AHEAD_BYTES
        if num_unreleased >= RING_SLOTS or is_far_ahead:
            return None
        offset = 0
        for start, end in sorted(self._unreleased):
            if offset + size <= start:
                return offset
            offset = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        return offset if offset + size <= len(self) else None


class RingReader(SharedMemoryRing):
    """The reader's end. It begins after the records that an earlier reader released."""

    def __init__(self, memory: mmap.mmap) -> None:
        super().__init__(memory)
        self._count = int(self._released_count[0])
        """Number of records returned, those of earlier readers included."""

    @property
    def has_record(self) -> bool:
        """True if a record is available."""
        return int(self._put_count[0]) > self._count

    def get(self) -> Record:
        """Return the oldest record; one must be available. Its arrays are in the segment.

        Raises:
            DataError: the bytes are not a record.
        """
        start, size = self._slots[self._count % RING_SLOTS].tolist()
        self._count += 1
        if not 0 <= start < start + size <= len(self):
            raise DataError("malformed record: not in the segment")
        return decode_record(self._readable[start : start + size])

    def release(self) -> None:
        """Release all returned records; their memory is reused."""
        self._fence()
        self._released_count[0] = self._count


CHECK_INTERVAL_S = 1.0
"""Minimum seconds between checks whether silent peers have ended."""
MIN_POLL_S, MAX_POLL_S = 2e-5, 1e-3
"""Intervals between checks of shared memory for a record or free space."""
SEGMENT_KEY = "segment"
"""Key in a peer's description: the name of the shared memory with its records."""


def channel_pointer(folder: Path, name: str) -> Path:
    """Return the pointer file of a channel."""
    return folder / f"{name}.socket.json"


def find_channel_host(folder: Path, name: str) -> tuple[Path, HostPointer]:
    """Return the pointer file of a channel and its content.

    Raises:
        InputError: there is no such channel.
    """
    pointer = channel_pointer(folder, name)
    if (host := read_pointer(pointer)) is None:
        if pointer.exists():
            raise InputError(f"{pointer}: damaged; start its host again")
        raise InputError(f"{pointer}: no such channel; its host has not started or has ended")
    return pointer, host


class SocketSource(MailboxHost, RecordSource):
    """The reading end, whose process hosts the channel; the channel ends with it.

    ``malformed`` counts messages and records that were dropped because they could not be read.

    Args:
        folder: the run's folder for channels, with keys and addresses; created with mode 0700.
        interface: where to listen, as for :func:`rlinf.channels.curve_sockets.listen`.
        timeout_s: how long a peer may be silent before the host drops its state, and how long the
            host may be silent before its peers fail.
        max_bytes: the largest record.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        interface: str | None = None,
        timeout_s: float = 5.0,
        max_bytes: int = 1 << 30,
    ) -> None:
        self._records: deque[Record] = deque()
        self._rings: dict[str, RingReader] = {}
        """Readers of the shared memory of each peer."""
        self._segments: dict[str, str] = {}
        """Name of the shared memory of each peer."""
        self._departed_peers: set[str] = set()
        """Peers whose memory is released once all their records are read."""
        self._silent_peers: set[str] = set()
        """Peers that were reported silent. A stopped peer may continue, add records to the same
        memory, and leave before its next message."""
        self._last_check = 0.0
        self._borrowed_from: RingReader | None = None
        """The ring in which the last record is; None: the record has memory of its own."""
        super().__init__(
            channel_pointer(folder, name),
            decode_record,
            interface=interface,
            timeout_s=timeout_s,
            max_bytes=max_bytes,
            ack_on_poll=False,
        )

    @property
    def is_borrowed(self) -> bool:
        """True if the last record is in shared memory that the next ``get`` releases.

        Copy its arrays to use them longer.
        """
        return self._borrowed_from is not None

    def get(self) -> Record:
        if self._borrowed_from is not None:
            self._borrowed_from.release()
            self._borrowed_from = None
        poll_s = MIN_POLL_S
        while True:
            for ring in list(self._rings.values()):
                if ring.has_record:
                    try:
                        record = ring.get()
                    except DataError as error:
                        self._malformed.count_dropped(error)
                        ring.release()
                        continue
                    self._borrowed_from = ring
                    return record
            if self._records:
                return self._records.popleft()
            self._release_segments()
            for event in self.poll_events(poll_s if self._rings else CHECK_INTERVAL_S):
                self._handle_event(event)
            poll_s = min(1.5 * poll_s, MAX_POLL_S)

    def _release_segments(self) -> None:
        """Release memory whose writer has ended and whose records are all read."""
        if self._silent_peers and (now := time.monotonic()) - self._last_check > CHECK_INTERVAL_S:
            self._last_check = now
            segments = {name: self._segments.get(name) for name in self._silent_peers}
            orphaned = {
                name for name, segment in segments.items() if not segment or is_orphaned(segment)
            }
            self._silent_peers -= orphaned
            self._departed_peers |= orphaned
        for name in list(self._departed_peers):
            # Records that the peer wrote before it left must be read first.
            if (ring := self._rings.get(name)) is None or not ring.has_record:
                self._rings.pop(name, None)
                self._segments.pop(name, None)
                self._departed_peers.discard(name)

    def _handle_event(self, event: PeerEvent) -> None:
        if isinstance(event, PeerReport):
            self._records.append(event.content)
        elif isinstance(event, PeerLost):
            self.forget_peer(event.worker)
            if event.reason in (REASON_DEPARTED, REASON_REPLACED):
                self._silent_peers.discard(event.worker)
                self._departed_peers.add(event.worker)
            else:
                self._silent_peers.add(event.worker)
        elif (segment := event.description.get(SEGMENT_KEY)) is not None:
            # A silent peer has returned.
            self._silent_peers.discard(event.worker)
            self._departed_peers.discard(event.worker)
            with contextlib.suppress(InputError, OSError):
                self._attach(event.worker, segment)

    def _on_hello(
        self, frames: list[memoryview], id_: bytes, name: str, description: bytes, status: bytes
    ) -> None:
        # Attach before the answer: the peer may leave at once and remove the segment's name.
        if (segment := unpack_map(description).get(SEGMENT_KEY)) is not None:
            self._attach(name, segment)
        super()._on_hello(frames, id_, name, description, status)

    def _retire(self, session: PeerSession, reason: str) -> None:
        was_alive = session.alive
        super()._retire(session, reason)
        if not was_alive:
            # The peer was reported silent; now report that it will not return.
            self._events.append(QueuedEvent(session, PeerLost(session.name, reason)))

    def _attach(self, name: str, segment: object) -> None:
        if name not in self._rings:
            self._rings[name] = RingReader(attach_segment(str(segment)))
            self._segments[name] = str(segment)


class SocketSink(MailboxPeer, RecordSink):
    """The sending end, for any number of threads.

    ``put`` blocks until at most ``WINDOW_BYTES`` are unacknowledged. ``flush`` waits until the host
    has all records. Small records are sent together. If the host is silent for its ``timeout_s``,
    all operations raise ``ChannelFailed``.

    Raises:
        InputError: there is no such channel.
        ChannelFailed: its host does not answer.
    """

    def __init__(self, folder: Path, name: str, *, description: bytes = EMPTY_MAP) -> None:
        pointer, host = find_channel_host(folder, name)
        try:
            address = first_reachable(host.addresses)
        except ValueError as error:
            raise InputError(f"{pointer}: damaged ({error}); start its host again") from None
        if address is None:
            raise ChannelFailed(f"{pointer.name}: no answer at {', '.join(host.addresses)}")
        self._max_bytes = host.max_bytes
        peer = routing_id().hex()
        super().__init__(
            pointer, peer, _reject_item, description=description, host=host, address=address
        )

    def put(self, record: Record) -> None:
        """
        Raises:
            DataError: the record cannot be sent or is larger than the host accepts.
        """
        encoded = encode_record(record)
        if encoded.size > self._max_bytes:
            raise DataError(
                f"record {tuple(record.identity)} takes {encoded.size} bytes; "
                f"{self._pointer.name} accepts {self._max_bytes}; raise max_bytes"
            )
        self.send_item(encoded.to_bytes(), wait=True)

    def close(self) -> None:
        """Leave when the host has all records or has ended."""
        with contextlib.suppress(ChannelFailed, ChannelClosed):
            self.flush()
        super().close()


def _reject_item(item: object) -> None:
    raise DataError("the host of records sends none")


FULL_TIMEOUT_S = 30.0
"""Seconds without free space after which the reader counts as hanging."""


class SharedMemorySink(SocketSink):
    """The sending end over shared memory, for any number of threads, which write in turn.

    If the process dies, the record that it is writing is lost; all earlier records arrive.

    Args:
        size: bytes for records that are waiting or in use.

    Raises:
        InputError: there is no such channel on this node.
        StorageError: there is not enough free shared memory.
        ChannelFailed: its host does not answer.
    """

    def __init__(self, folder: Path, name: str, *, size: int = 64 << 20) -> None:
        pointer, host = find_channel_host(folder, name)
        if host.memory != shared_memory_id():
            raise InputError(f"{pointer}: no such channel on this node")
        self._segment = new_segment_name()
        self._ring = RingWriter(create_segment(self._segment, RING_DATA_START + size))
        self._write_lock = threading.Lock()
        try:
            super().__init__(folder, name, description=msgpack.packb({SEGMENT_KEY: self._segment}))
        except BaseException:
            remove_segment(self._segment)
            raise

    def put(self, record: Record) -> None:
        """
        Raises:
            DataError: the record cannot be sent or is larger than the whole segment.
        """
        encoded = encode_record(record)
        if encoded.size > len(self._ring):
            raise DataError(
                f"record {tuple(record.identity)} takes {encoded.size} bytes, the shared memory "
                f"for {self._pointer.name} has {len(self._ring)}"
            )
        deadline, poll_s = time.monotonic() + FULL_TIMEOUT_S, MIN_POLL_S
        with self._write_lock:
            while True:
                with self._changed:
                    self._raise_if_failed()
                if self._ring.put(encoded):
                    return
                if time.monotonic() > deadline:
                    raise ChannelFailed(
                        f"{self._pointer.name}: no free space for {FULL_TIMEOUT_S:.0f} s: "
                        "its reader hangs"
                    )
                time.sleep(poll_s)
                poll_s = min(1.5 * poll_s, MAX_POLL_S)

    def flush(self) -> None:
        """Wait until the reader has attached the segment. Records then survive this process."""
        with self._changed:
            while not self._is_connected:
                self._raise_if_failed()
                self._changed.wait(MAX_POLL_S)
            self._raise_if_failed()

    def close(self) -> None:
        """Leave; the records can still be read."""
        super().close()
        remove_segment(self._segment)
