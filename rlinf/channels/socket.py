"""Socket transport of records: a mailbox (:mod:`rlinf.channels.mailbox`) whose host alone reads.

Its peers find it in the run directory; they may be anywhere in the run.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path

from rlinf.channels.base import ChannelClosed, ChannelFailed, Sink, Source
from rlinf.channels.curve import reachable, routing_id
from rlinf.channels.mailbox import Mailbox, Queued
from rlinf.channels.messages import Pointer, read_pointer, unpacked
from rlinf.channels.peer import EMPTY, Peer
from rlinf.channels.ring import Reading
from rlinf.channels.session import LEFT, REPLACED, Event, Lost, Report, Session
from rlinf.channels.wire import decode, encode
from rlinf.data.record import Record
from rlinf.errors import DataError, InputError
from rlinf.segments import attach, is_over

LOOK_S = 1.0
SHORTEST_NAP_S, LONGEST_NAP_S = 2e-5, 1e-3
"""How soon to look again whether there is a record, or room, in shared memory."""
SEGMENT = "segment"
"""In what a peer says of itself: its shared memory, in which its records lie."""


def pointer_of(folder: Path, name: str) -> Path:
    """The file by which a channel of a run is found."""
    return folder / f"{name}.socket.json"


def host_of(folder: Path, name: str) -> tuple[Path, Pointer]:
    """The pointer to the host of a channel, and what it says.

    Raises:
        InputError: there is no such channel.
    """
    pointer = pointer_of(folder, name)
    if (host := read_pointer(pointer)) is None:
        if pointer.exists():
            raise InputError(f"{pointer}: damaged; start its host again")
        raise InputError(f"{pointer}: no such channel; its host has not started or has ended")
    return pointer, host


class SocketSource(Mailbox, Source):
    """The end of the process that hosts the channel and reads it; the channel ends with it.

    ``malformed`` counts messages and records that were dropped because they could not be read.

    Args:
        folder: the run's folder for channels; made with mode 0700, holds keys and addresses.
        interface: where to listen, as for :func:`rlinf.channels.curve.listen`.
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
        self._rings: dict[str, Reading] = {}
        """By peer: the records that lie in its shared memory."""
        self._segments: dict[str, str] = {}
        self._gone: set[str] = set()
        """Peers whose memory is let go once no record is left there."""
        self._silent: set[str] = set()
        """Those that may have been stopped: what they put goes into the same memory when they go
        on, and they may leave before they are heard again."""
        self._looked = 0.0
        self._in_hand: Reading | None = None
        super().__init__(
            pointer_of(folder, name),
            decode,
            interface=interface,
            timeout_s=timeout_s,
            max_bytes=max_bytes,
            keeps=False,
        )

    @property
    def lent(self) -> bool:
        """Whether the record taken last lies in memory of its writer, which is used again from the
        next ``get`` on: copy what must stay."""
        return self._in_hand is not None

    def get(self) -> Record:
        if self._in_hand is not None:
            self._in_hand.release()
            self._in_hand = None
        nap = SHORTEST_NAP_S
        while True:
            for ring in list(self._rings.values()):
                if ring.waiting:
                    try:
                        record = ring.get()
                    except DataError as error:
                        self._malformed.drop(error)
                        ring.release()
                        continue
                    self._in_hand = ring
                    return record
            if self._records:
                return self._records.popleft()
            self._let_go()
            for event in self.events(nap if self._rings else LOOK_S):
                self._happened(event)
            nap = min(1.5 * nap, LONGEST_NAP_S)

    def _let_go(self) -> None:
        """Let go of memory that nothing more is put into, and that was read to its end."""
        if self._silent and (now := time.monotonic()) - self._looked > LOOK_S:
            self._looked = now
            segments = {name: self._segments.get(name) for name in self._silent}
            over = {name for name, segment in segments.items() if not segment or is_over(segment)}
            self._silent -= over
            self._gone |= over
        for name in list(self._gone):
            # It was put before they were gone.
            if (ring := self._rings.get(name)) is None or not ring.waiting:
                self._rings.pop(name, None)
                self._segments.pop(name, None)
                self._gone.discard(name)

    def _happened(self, event: Event) -> None:
        if isinstance(event, Report):
            self._records.append(event.content)
        elif isinstance(event, Lost):
            self.forget(event.worker)
            if event.reason in (LEFT, REPLACED):
                self._silent.discard(event.worker)
                self._gone.add(event.worker)
            else:
                self._silent.add(event.worker)
        elif (segment := event.about.get(SEGMENT)) is not None:
            # Back after it was silent.
            self._silent.discard(event.worker)
            self._gone.discard(event.worker)
            with contextlib.suppress(InputError, OSError):
                self._attach(event.worker, segment)

    def _hello(
        self, frames: list[memoryview], id_: bytes, name: str, about: bytes, status: bytes
    ) -> None:
        # Before it is answered: it may leave at once, and its segment's name with it.
        if (segment := unpacked(about).get(SEGMENT)) is not None:
            self._attach(name, segment)
        super()._hello(frames, id_, name, about, status)

    def _retire(self, session: Session, reason: str) -> None:
        heard = session.alive
        super()._retire(session, reason)
        if not heard:
            # It was silent, and is not to come back after all.
            self._events.append(Queued(session, Lost(session.name, reason)))

    def _attach(self, name: str, segment: object) -> None:
        if name not in self._rings:
            self._rings[name] = Reading(attach(str(segment)))
            self._segments[name] = str(segment)


class SocketSink(Peer, Sink):
    """The end of a process that puts records; any number of threads.

    ``put`` returns when the record is under way, with at most ``peer.WINDOW_BYTES`` not yet with
    the host; ``flush`` waits until all are. Small records travel together. When the host falls
    silent, operations raise ``ChannelFailed`` as long as it does.

    Raises:
        InputError: there is no such channel.
        ChannelFailed: its host does not answer.
    """

    def __init__(self, folder: Path, name: str, *, about: bytes = EMPTY) -> None:
        pointer, host = host_of(folder, name)
        try:
            address = reachable(host.addresses)
        except ValueError as error:
            raise InputError(f"{pointer}: damaged ({error}); start its host again") from None
        if address is None:
            raise ChannelFailed(f"{pointer.name}: no answer at {', '.join(host.addresses)}")
        self._most = host.max_bytes
        own = routing_id().hex()
        super().__init__(pointer, own, _nothing, about=about, host=host, address=address)

    def put(self, record: Record) -> None:
        """As the interface says.

        Raises:
            DataError: the record cannot be sent or is larger than the host takes.
        """
        encoded = encode(record)
        if encoded.size > self._most:
            raise DataError(
                f"record {tuple(record.identity)} takes {encoded.size} bytes, one of "
                f"{self._pointer.name} may have {self._most}; raise max_bytes"
            )
        self.give(encoded.to_bytes(), wait=True)

    def close(self) -> None:
        """Leave once all that was put is with the host, or the host is gone."""
        with contextlib.suppress(ChannelFailed, ChannelClosed):
            self.flush()
        super().close()


def _nothing(item: object) -> None:
    raise DataError("the host of records sends none")
