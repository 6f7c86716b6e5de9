"""Socket transport of records: a mailbox (:mod:`rlinf.channels.mailbox`) whose host alone reads.

Its peers find it in the run directory; they may be anywhere in the run.
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
MAX_AHEAD_BYTES = 8 << 20
"""No more than two records wait where they are larger: both ends' caches hold what is under way."""
RING_HEADER = np.dtype([("put", "i8"), ("apart", "u1", 120), ("done", "i8"), ("too", "u1", 120)])
"""Each counter has cache lines of its own."""
RING_DATA_START = -(-(RING_HEADER.itemsize + 16 * RING_SLOTS) // mmap.PAGESIZE) * mmap.PAGESIZE
STORES_IN_ORDER = platform.machine() == "x86_64"
"""Whether a process that sees a counter sees what was written before it."""


class SharedMemoryRing:
    """One end; the bytes of records are ``len``."""

    def __init__(self, memory: mmap.mmap) -> None:
        if len(memory) <= RING_DATA_START:
            raise InputError(f"shared memory of {len(memory)} bytes holds no records")
        head = np.frombuffer(memory, RING_HEADER, 1)
        self._put, self._done = head["put"], head["done"]
        self._places = np.frombuffer(memory, "i8", 2 * RING_SLOTS, RING_HEADER.itemsize).reshape(
            RING_SLOTS, 2
        )
        self._room = np.frombuffer(memory, np.uint8, offset=RING_DATA_START)
        self._readable = memoryview(memory).toreadonly()[RING_DATA_START:]
        self._barrier = threading.Lock()

    def __len__(self) -> int:
        return len(self._room)

    def _fence(self) -> None:
        """Order memory: earlier writes are visible before later ones."""
        if not STORES_IN_ORDER:
            for _ in range(2):
                with self._barrier:
                    pass


class RingWriter(SharedMemoryRing):
    """The writer's end."""

    def __init__(self, memory: mmap.mmap) -> None:
        super().__init__(memory)
        self._under_way: deque[tuple[int, int]] = deque()
        """Start and end of the records that may still be read, the oldest first."""
        self._count = self._bytes = 0

    def put(self, record: EncodedRecord) -> bool:
        """Write a record if there is room now."""
        if (start := self._place(record.size)) is None:
            return False
        record.write(self._room[start : start + record.size])
        self._places[self._count % RING_SLOTS] = start, record.size
        self._under_way.append((start, start + record.size))
        self._bytes += record.size
        self._count += 1
        self._fence()
        self._put[0] = self._count
        return True

    def _place(self, size: int) -> int | None:
        """Return the place at which so many bytes are free, or None.

        As near to the beginning as can be: what was read a moment ago is still in the cache.
        """
        waiting = self._count - int(self._done[0])
        while len(self._under_way) > waiting:
            start, end = self._under_way.popleft()
            self._bytes -= end - start
        if waiting >= RING_SLOTS or (waiting >= 2 and self._bytes + size > MAX_AHEAD_BYTES):
            return None
        place = 0
        for start, end in sorted(self._under_way):
            if place + size <= start:
                return place
            place = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        return place if place + size <= len(self) else None


class RingReader(SharedMemoryRing):
    """The reader's end: it goes on after the records that an earlier look was done with."""

    def __init__(self, memory: mmap.mmap) -> None:
        super().__init__(memory)
        self._count = int(self._done[0])

    @property
    def has_record(self) -> bool:
        """True if a record is available."""
        return int(self._put[0]) > self._count

    def get(self) -> Record:
        """The oldest record, which must be there; its arrays lie in the segment.

        Raises:
            DataError: what lies there is none.
        """
        start, size = self._places[self._count % RING_SLOTS].tolist()
        self._count += 1
        if not 0 <= start < start + size <= len(self):
            raise DataError("malformed record: not in the segment")
        return decode_record(self._readable[start : start + size])

    def release(self) -> None:
        """The records that were taken are done with: their memory is used again."""
        self._fence()
        self._done[0] = self._count


CHECK_INTERVAL_S = 1.0
MIN_POLL_S, MAX_POLL_S = 2e-5, 1e-3
"""How often to check shared memory for a record, or for room."""
SEGMENT_KEY = "segment"
"""Key in a peer's description for the shared memory that holds its records."""


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
    """The end of the process that hosts the channel and reads it; the channel ends with it.

    ``malformed`` counts messages and records that were dropped because they could not be read.

    Args:
        folder: the run's folder for channels; made with mode 0700, holds keys and addresses.
        interface: where to listen, as for :func:`rlinf.channels.curve_sockets.listen`.
        timeout_s: how long a peer may be silent before its state is dropped, and a host before its
            peers give up.
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
        """By peer: the records that lie in its shared memory."""
        self._segments: dict[str, str] = {}
        self._departed: set[str] = set()
        """Peers whose memory is let go once no record is left there."""
        self._silent: set[str] = set()
        """Those that may have been stopped: what they put goes into the same memory when they go
        on, and they may leave before they are heard again."""
        self._looked = 0.0
        self._in_hand: RingReader | None = None
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
        """True if the last record lies in its writer's memory, which the next ``get`` releases.

        Copy whatever must stay.
        """
        return self._in_hand is not None

    def get(self) -> Record:
        if self._in_hand is not None:
            self._in_hand.release()
            self._in_hand = None
        nap = MIN_POLL_S
        while True:
            for ring in list(self._rings.values()):
                if ring.has_record:
                    try:
                        record = ring.get()
                    except DataError as error:
                        self._malformed.count_dropped(error)
                        ring.release()
                        continue
                    self._in_hand = ring
                    return record
            if self._records:
                return self._records.popleft()
            self._release_segments()
            for event in self.poll_events(nap if self._rings else CHECK_INTERVAL_S):
                self._happened(event)
            nap = min(1.5 * nap, MAX_POLL_S)

    def _release_segments(self) -> None:
        """Release memory that no writer fills any more and that was read to its end."""
        if self._silent and (now := time.monotonic()) - self._looked > CHECK_INTERVAL_S:
            self._looked = now
            segments = {name: self._segments.get(name) for name in self._silent}
            over = {
                name for name, segment in segments.items() if not segment or is_orphaned(segment)
            }
            self._silent -= over
            self._departed |= over
        for name in list(self._departed):
            # It was put before they were gone.
            if (ring := self._rings.get(name)) is None or not ring.has_record:
                self._rings.pop(name, None)
                self._segments.pop(name, None)
                self._departed.discard(name)

    def _happened(self, event: PeerEvent) -> None:
        if isinstance(event, PeerReport):
            self._records.append(event.content)
        elif isinstance(event, PeerLost):
            self.forget_peer(event.worker)
            if event.reason in (REASON_DEPARTED, REASON_REPLACED):
                self._silent.discard(event.worker)
                self._departed.add(event.worker)
            else:
                self._silent.add(event.worker)
        elif (segment := event.about.get(SEGMENT_KEY)) is not None:
            # Back after it was silent.
            self._silent.discard(event.worker)
            self._departed.discard(event.worker)
            with contextlib.suppress(InputError, OSError):
                self._attach(event.worker, segment)

    def _hello(
        self, frames: list[memoryview], id_: bytes, name: str, about: bytes, status: bytes
    ) -> None:
        # Before it is answered: it may leave at once, and its segment's name with it.
        if (segment := unpack_map(about).get(SEGMENT_KEY)) is not None:
            self._attach(name, segment)
        super()._hello(frames, id_, name, about, status)

    def _retire(self, session: PeerSession, reason: str) -> None:
        heard = session.alive
        super()._retire(session, reason)
        if not heard:
            # It was silent, and is not to come back after all.
            self._events.append(QueuedEvent(session, PeerLost(session.name, reason)))

    def _attach(self, name: str, segment: object) -> None:
        if name not in self._rings:
            self._rings[name] = RingReader(attach_segment(str(segment)))
            self._segments[name] = str(segment)


class SocketSink(MailboxPeer, RecordSink):
    """The end of a process that puts records; any number of threads.

    ``put`` returns when the record is under way, with at most ``peer.WINDOW_BYTES`` not yet with
    the host; ``flush`` waits until all are. Small records travel together. When the host falls
    silent, operations raise ``ChannelFailed`` as long as it does.

    Raises:
        InputError: there is no such channel.
        ChannelFailed: its host does not answer.
    """

    def __init__(self, folder: Path, name: str, *, about: bytes = EMPTY_MAP) -> None:
        pointer, host = find_channel_host(folder, name)
        try:
            address = first_reachable(host.addresses)
        except ValueError as error:
            raise InputError(f"{pointer}: damaged ({error}); start its host again") from None
        if address is None:
            raise ChannelFailed(f"{pointer.name}: no answer at {', '.join(host.addresses)}")
        self._most = host.max_bytes
        own = routing_id().hex()
        super().__init__(pointer, own, _nothing, about=about, host=host, address=address)

    def put(self, record: Record) -> None:
        """See the interface.

        Raises:
            DataError: the record cannot be sent or is larger than the host takes.
        """
        encoded = encode_record(record)
        if encoded.size > self._most:
            raise DataError(
                f"record {tuple(record.identity)} takes {encoded.size} bytes, one of "
                f"{self._pointer.name} may have {self._most}; raise max_bytes"
            )
        self.send_item(encoded.to_bytes(), wait=True)

    def close(self) -> None:
        """Leave once all that was put is with the host, or the host is gone."""
        with contextlib.suppress(ChannelFailed, ChannelClosed):
            self.flush()
        super().close()


def _nothing(item: object) -> None:
    raise DataError("the host of records sends none")


FULL_TIMEOUT_S = 30.0
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
        pointer, host = find_channel_host(folder, name)
        if host.memory != shared_memory_id():
            raise InputError(f"{pointer}: no such channel on this node")
        self._segment = new_segment_name()
        self._ring = RingWriter(create_segment(self._segment, RING_DATA_START + size))
        self._writes = threading.Lock()
        try:
            super().__init__(folder, name, about=msgpack.packb({SEGMENT_KEY: self._segment}))
        except BaseException:
            remove_segment(self._segment)
            raise

    def put(self, record: Record) -> None:
        """See the interface.

        Raises:
            DataError: the record cannot be sent or is larger than the whole segment.
        """
        encoded = encode_record(record)
        if encoded.size > len(self._ring):
            raise DataError(
                f"record {tuple(record.identity)} takes {encoded.size} bytes, the shared memory "
                f"for {self._pointer.name} has {len(self._ring)}"
            )
        deadline, nap = time.monotonic() + FULL_TIMEOUT_S, MIN_POLL_S
        with self._writes:
            while True:
                with self._changed:
                    self._check()
                if self._ring.put(encoded):
                    return
                if time.monotonic() > deadline:
                    raise ChannelFailed(
                        f"{self._pointer.name}: no room for {FULL_TIMEOUT_S:.0f} s: "
                        "its reader hangs"
                    )
                time.sleep(nap)
                nap = min(1.5 * nap, MAX_POLL_S)

    def flush(self) -> None:
        """Wait until the reader knows of the segment: it has what was put, whoever dies."""
        with self._changed:
            while not self._welcome:
                self._check()
                self._changed.wait(MAX_POLL_S)
            self._check()

    def close(self) -> None:
        """Leave; what was put can still be read."""
        super().close()
        remove_segment(self._segment)
