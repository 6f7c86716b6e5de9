"""A mailbox: one host and many peers, anywhere in a run, that send each other items.

Items arrive once and in order in both directions (:mod:`rlinf.channels.numbered`), over
connections that break. Peers find the host by a pointer file; both ends only answer what they
heard, so nobody is flooded while it is stopped. Hosts and peers may die and be replaced at any
time: the pointer names the present host by a *token*, and an *incarnation* is one life of a peer.
Numbers belong to the two together; words with another token are ignored.

A message is a msgpack list and, behind it, a frame of pieces of items. From a peer:

    hello  token, name, about, status                                 until it is answered
    word   token, received, gap, base, first, turn, status, [left]    also the heartbeat; pieces
    bye    token

and from the host, to each of them:

    word     token, received, done, gap, base, first, turn, [left]    pieces
    retired  token                     another incarnation has this peer's name
    over     token, reason             the host has left, and no other is to come; answered by bye

``received`` and ``done`` acknowledge, ``gap`` is the turn in which what was heard came after
something that was lost, or nil; ``base``, ``first`` and ``turn`` number what follows, and each
``left`` is the number of bytes to the end of a piece's item. An unchanged ``status`` is nil.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from rlinf.channels.base import ChannelClosed
from rlinf.channels.curve import (
    HEARTBEAT_S,
    Authenticator,
    host_socket,
    listen,
    stopped_s,
)
from rlinf.channels.keys import run_keys
from rlinf.channels.messages import (
    MAX_NAME,
    Pointer,
    check_numbers,
    opened,
    pieces_of,
    read_pointer,
    send,
    unpacked,
    write_pointer,
)
from rlinf.channels.numbered import Block, Inbox, Part, Piece
from rlinf.channels.session import (
    LEFT,
    REPLACED,
    Event,
    Joined,
    Lost,
    Report,
    Seen,
    Session,
)
from rlinf.errors import DataError
from rlinf.segments import this_memory
from rlinf.threads import Malformed, serve

BATCH = 256
LEAVE_S = 1.0
"""How long a host that leaves waits for its peers to have heard it."""
UNFINISHED_S = 60.0
"""How long the beginning of an item is kept for a peer that is silent."""
Decode = Callable[[Block], Any]


class Queued(NamedTuple):
    """An event, and for an item the number after its own."""

    session: Session
    event: Event
    number: int = 0


class Mailbox:
    """The host's end. Its thread hears the peers; all methods return at once but ``events``.

    ``refused`` counts connections without the run's key, ``malformed`` messages and items that
    were dropped.

    Args:
        pointer: the file by which peers find the host; its folder is made with mode 0700 and holds
            the keys of the run.
        decode: reads an item; one it raises for is dropped and counted.
        interface: where to listen, as for :func:`rlinf.channels.curve.listen`. The kernel chooses
            the port.
        timeout_s: how long a peer may be silent before it counts as lost.
        max_bytes: the largest item.
        keeps: an item counts as handled only at the next call of ``events``: if the host ends
            before, the next one gets it again. Else it does once it is here, and none comes next.
    """

    def __init__(
        self,
        pointer: Path,
        decode: Decode,
        *,
        interface: str | None,
        timeout_s: float,
        max_bytes: int,
        keeps: bool,
    ) -> None:
        keys = run_keys(pointer.parent)
        self._pointer, self._decode, self._keeps = pointer, decode, keeps
        self._malformed = Malformed(f"host of {pointer.name}")
        self._timeout_s, self._max_bytes = timeout_s, max_bytes
        self._token = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._sessions: dict[bytes, Session] = {}
        self._workers: dict[str, Session] = {}
        self._known: dict[str, Session] = {}
        self._waiting: dict[str, list[Block]] = {}
        self._events: deque[Queued] = deque()
        self._handed: list[Queued] = []
        self._dirty: set[Session] = set()
        self._closed = False
        self._handlers: dict[str, Callable[..., None]] = {
            "hello": self._hello,
            "word": self._word,
            "bye": self._bye,
        }
        self._context = zmq.Context()
        self._socket = host_socket(self._context, keys, timeout_s=timeout_s)
        self._authenticator = Authenticator(self._context, keys, self._socket)
        try:
            self.addresses = listen(self._socket, interface)
            where = Pointer(self.addresses, self._token, timeout_s, max_bytes, this_memory())
            write_pointer(pointer, where)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._authenticator.open(self.addresses)
        self._thread = serve("mailbox", self._run)
        atexit.register(self.close)

    @property
    def malformed(self) -> int:
        return self._malformed.count

    @property
    def refused(self) -> int:
        return self._authenticator.refused

    def deliver(self, worker: str, item: Block) -> None:
        """Send an item; those of one peer arrive once and in order.

        It is for the incarnation that is known here, by the events that were taken: what that one
        had not received is dropped when another replaces it. For a peer that has not joined or was
        reported lost it is kept until one joins by that name.
        """
        with self._changed:
            self._check()
            session = self._known.get(worker)
            if session is None:
                session = self._workers.get(worker)
                if session is None or not session.alive:
                    self._waiting.setdefault(worker, []).append(item)
                    return
            if not session.retired:
                session.outbox.add(item)
                self._dirty.add(session)
                os.eventfd_write(self._wakeup, 1)

    def events(self, timeout_s: float) -> list[Event]:
        """What happened since the last call, all of which is acknowledged now; waits for it."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._finish()
            while True:
                self._check()
                left = deadline - time.monotonic()
                if self._events or left <= 0:
                    break
                self._changed.wait(left)
            self._handed = list(self._events)
            self._events.clear()
            for session, event, _ in self._handed:
                if isinstance(event, Joined):
                    self._known[event.worker] = session
                elif isinstance(event, Lost):
                    self._known.pop(event.worker, None)
            return [queued.event for queued in self._handed]

    def workers(self) -> dict[str, Seen]:
        """All peers that ever joined and were not forgotten."""
        with self._changed:
            now = time.monotonic()
            return {
                name: Seen(dict(s.status), now - s.seen_at, dict(s.about), s.alive, s.id.hex())
                for name, s in self._workers.items()
            }

    def forget(self, worker: str) -> None:
        """Drop the items that a peer has not received; one that is not there is not listed."""
        with self._changed:
            self._waiting.pop(worker, None)
            if session := self._workers.get(worker):
                session.outbox.clear()
                if not session.alive:
                    del self._workers[worker]

    def close(self) -> None:
        """Leave; peers wait for the next host where one may come."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wakeup, 1)
            self._changed.notify_all()
        atexit.unregister(self.close)
        self._thread.join()
        pointer = read_pointer(self._pointer)
        if pointer is not None and pointer.token == self._token:
            self._pointer.unlink(missing_ok=True)
        self._context.term()
        os.close(self._wakeup)

    def _finish(self) -> None:
        """The events handed out before are done with."""
        if self._keeps and self._handed:
            for session, event, number in self._handed:
                if isinstance(event, Report):
                    session.done = number
                    self._dirty.add(session)
            os.eventfd_write(self._wakeup, 1)
        self._handed = []

    def _check(self) -> None:
        if self._closed:
            raise ChannelClosed(f"{self._pointer.name}: closed by its host")

    def _run(self) -> None:
        """The thread that owns the sockets."""
        try:
            self._work()
        finally:
            self._socket.close()
            self._authenticator.close()

    def _work(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._wakeup):
            poller.register(source, zmq.POLLIN)
        checked = time.monotonic()
        while not self._closed:
            ready = dict(poller.poll(int(HEARTBEAT_S * 1000 / 2)))
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
            with self._changed:
                before = len(self._events)
                if self._socket in ready:
                    self._receive()
                now = time.monotonic()
                if now - checked > HEARTBEAT_S:
                    self._look_for_the_silent(now, stopped_s(checked, now))
                    checked = now
                self._speak()
                if len(self._events) > before:
                    self._changed.notify_all()
        with self._changed:
            self._speak()
        if not self._keeps:
            self._take_leave()

    def _take_leave(self) -> None:
        """Tell all peers that nobody comes after this host, and wait until they have heard it.

        A socket that closes with unread messages resets its connections, and what a peer had not
        read by then is lost to it.
        """
        deadline = time.monotonic() + LEAVE_S
        with self._changed:
            for session in self._sessions.values():
                self._send(session, "over", "its host has left it")
        while (left := deadline - time.monotonic()) > 0:
            with self._changed:
                if not any(session.alive for session in self._sessions.values()):
                    return
            self._socket.poll(int(left * 1000) + 1)
            with self._changed:
                self._receive()

    def _receive(self) -> None:
        for _ in range(BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                id_, control, *data = (frame.buffer for frame in frames)
                kind, token, *values = opened(control)
                if token == self._token:
                    self._handlers[kind](data, bytes(id_), *values)
            except Exception as error:  # whatever foreign bytes bring about
                self._malformed.drop(error)

    def _hello(
        self, frames: list[memoryview], id_: bytes, name: str, about: bytes, status: bytes
    ) -> None:
        if frames or type(name) is not str or not 0 < len(name) <= MAX_NAME:
            raise DataError("bad name")
        described, said = unpacked(about), unpacked(status)
        session = self._sessions.get(id_)
        if session is None:
            inbox = Inbox(self._max_bytes)
            session = self._sessions[id_] = Session(id_, name, time.monotonic(), inbox)
            if old := self._workers.pop(name, None):
                self._retire(old, REPLACED)
            self._workers[name] = session
        if session.name != name:
            raise DataError("another name than before")
        session.about, session.status = described, said
        self._hear(session)

    def _word(
        self,
        frames: list[memoryview],
        id_: bytes,
        received: int,
        gap: int | None,
        base: int,
        first: int,
        turn: int,
        status: bytes | None,
        lefts: list[int],
    ) -> None:
        session = self._sessions[id_]
        part = Part(base, first, turn, pieces_of(lefts, frames))
        said = session.status if status is None else unpacked(status)
        check_numbers(received, base, first, turn)
        if not self._hear(session):
            return
        session.outbox.hear(received, received, gap)
        new = session.inbox.accept(part)
        session.status = said
        for number, item in new:
            try:
                content = self._decode(item)
            except Exception as error:  # whatever foreign bytes bring about
                self._malformed.drop(error)
            else:
                self._arrived(session, content, number)
        if not self._keeps:
            session.done = session.inbox.whole

    def _arrived(self, session: Session, content: Any, number: int) -> None:
        """An item came, once; the next piece of its peer has this number."""
        self._events.append(Queued(session, Report(session.name, content), number))

    def _bye(self, frames: list[memoryview], id_: bytes) -> None:
        self._retire(self._sessions.pop(id_), LEFT)

    def _hear(self, session: Session) -> bool:
        """Note that a peer spoke; whether it still has its name."""
        if not session.retired:
            # One that was forgotten has its name again, if nobody took it meanwhile.
            holder = self._workers.setdefault(session.name, session)
            session.retired = holder is not session
        if session.retired:
            self._send(session, "retired")
            return False
        session.seen_at = time.monotonic()
        self._dirty.add(session)
        if not session.alive:
            session.alive = True
            for item in self._waiting.pop(session.name, ()):
                session.outbox.add(item)
            joined = Joined(session.name, dict(session.about), session.id.hex())
            self._events.append(Queued(session, joined))
        return True

    def _retire(self, session: Session, reason: str) -> None:
        """An incarnation will not come back, or not by its name."""
        session.retired = True
        session.outbox.clear()
        session.inbox.drop()
        self._lose(session, reason)

    def _lose(self, session: Session, reason: str) -> None:
        if session.alive:
            session.alive = False
            self._events.append(Queued(session, Lost(session.name, reason)))

    def _look_for_the_silent(self, now: float, pause: float) -> None:
        for session in self._sessions.values():
            session.seen_at = min(now, session.seen_at + pause)
            if now - session.seen_at > self._timeout_s:
                self._lose(session, f"silent for {self._timeout_s:g} s")
            if now - session.seen_at > UNFINISHED_S:
                session.inbox.drop()

    def _speak(self) -> None:
        """Answer those that were heard, and send new items."""
        sessions, self._dirty = self._dirty, set()
        for session in sessions:
            if not session.alive:
                continue
            part = session.outbox.take()
            while True:
                heard = (session.inbox.expected, session.done, session.inbox.gap)
                self._send(session, "word", *heard, *part[:3], pieces=part.pieces)
                part = session.outbox.take()
                if not part.pieces:
                    break

    def _send(
        self, session: Session, kind: str, *values: Any, pieces: Sequence[Piece] | None = None
    ) -> None:
        """What does not fit now is dropped, missed and sent again."""
        send(self._socket, [session.id], (kind, self._token, *values), pieces)
