"""A mailbox: one host and many peers on any node of a run, which send items to each other.

Items arrive once and in order in both directions (:mod:`rlinf.channels.mailbox_protocol`), even if
connections break. Peers find the host by a pointer file. Lost items are resent only when the other
end reports a gap, not on a timer, so that a stopped process is not flooded. Hosts and peers may die
and be replaced at any time. The pointer names the current host by a *token*; an *incarnation* is
one process of a peer. Items travel as numbered pieces. Each pair of token and incarnation has its
own numbers; messages with another token are ignored.

A message is a msgpack list, followed by a frame with pieces of items. From a peer to the host:

    hello  token, name, description, status                           repeated until answered
    data   token, received, gap, base, first, turn, status, [size]    pieces; also the heartbeat
    bye    token

From the host to a peer:

    data     token, received, done, gap, base, first, turn, [size]    pieces
    retired  token                     another incarnation has this peer's name
    over     token, reason             the host has left for good; answered by bye

All pieces below ``received`` have arrived, and the host has handled all below ``done``. ``first``
is the number of the first piece in the frame; pieces below ``base`` will not be sent again;
``turn`` counts how often the sender has gone back to a lost piece. If pieces are missing before the
frame that arrived last, ``gap`` is the ``turn`` of that frame; else it is nil. Each ``size`` counts
the bytes from the start of a piece to the end of its item. An unchanged ``status`` is nil.
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

import msgpack
import zmq

from rlinf.channels.channel import ChannelClosed, ChannelFailed
from rlinf.channels.curve_sockets import (
    HEARTBEAT_S,
    Authenticator,
    client_socket,
    first_reachable,
    host_socket,
    listen,
    paused_s,
    routing_id,
    run_keys,
)
from rlinf.channels.mailbox_protocol import (
    MAX_NAME,
    REASON_DEPARTED,
    REASON_REPLACED,
    Block,
    HostPointer,
    ItemPiece,
    PeerEvent,
    PeerJoined,
    PeerLost,
    PeerReport,
    PeerSession,
    PeerStatus,
    PieceBatch,
    ReliableReceiver,
    ReliableSender,
    check_numbers,
    read_pointer,
    send_message,
    split_pieces,
    unpack_list,
    unpack_map,
    write_pointer,
)
from rlinf.errors import DataError
from rlinf.shared_memory import shared_memory_id
from rlinf.threads import MalformedCounter, start_service_thread

MAX_MESSAGES_PER_POLL = 256
LEAVE_TIMEOUT_S = 1.0
"""How long a leaving host waits for the ``bye`` of its peers."""
PARTIAL_ITEM_TIMEOUT_S = 60.0
"""How long a partial item is kept for a silent peer."""
Decode = Callable[[Block], Any]


class QueuedEvent(NamedTuple):
    """An event. For an item, ``number`` is the number of the first piece after the item."""

    session: PeerSession
    event: PeerEvent
    number: int = 0


class MailboxHost:
    """The host of a mailbox. Its thread serves the peers; only ``poll_events`` blocks.

    ``rejected`` counts connections without the run's key. ``malformed`` counts messages and items
    that were dropped.

    Args:
        pointer: the file by which peers find the host. Its folder is created with mode 0700 and
            contains the keys of the run.
        decode: decodes an item. An item for which it raises is dropped and counted.
        interface: where to listen, as for :func:`rlinf.channels.curve_sockets.listen`. The kernel
            chooses the port.
        timeout_s: how long a peer may be silent before it counts as lost.
        max_bytes: the largest item.
        ack_on_poll: True: an item counts as handled at the next call of ``poll_events``; if the
            host ends before that, the next host gets the item again. False: an item counts as
            handled on arrival, and no host follows this one.
    """

    def __init__(
        self,
        pointer: Path,
        decode: Decode,
        *,
        interface: str | None,
        timeout_s: float,
        max_bytes: int,
        ack_on_poll: bool,
    ) -> None:
        keys = run_keys(pointer.parent)
        self._pointer, self._decode, self._ack_on_poll = pointer, decode, ack_on_poll
        self._malformed = MalformedCounter(f"host of {pointer.name}")
        self._timeout_s, self._max_bytes = timeout_s, max_bytes
        self._token = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._sessions: dict[bytes, PeerSession] = {}
        """Sessions by incarnation."""
        self._sessions_by_name: dict[str, PeerSession] = {}
        """The session of the newest incarnation of each peer."""
        self._receivers: dict[str, PeerSession] = {}
        """The session of each peer whose PeerJoined was polled last; items go to it."""
        self._waiting_items: dict[str, list[Block]] = {}
        """Items for peers that have not joined, by name."""
        self._events: deque[QueuedEvent] = deque()
        self._polled: list[QueuedEvent] = []
        """The events that the last call of ``poll_events`` returned."""
        self._dirty: set[PeerSession] = set()
        """Sessions with something to send: items or an acknowledgement."""
        self._closed = False
        self._handlers: dict[str, Callable[..., None]] = {
            "hello": self._on_hello,
            "data": self._on_data,
            "bye": self._on_bye,
        }
        self._context = zmq.Context()
        self._socket = host_socket(self._context, keys, timeout_s=timeout_s)
        self._authenticator = Authenticator(self._context, keys, self._socket)
        try:
            self.addresses = listen(self._socket, interface)
            host_pointer = HostPointer(
                self.addresses, self._token, timeout_s, max_bytes, shared_memory_id()
            )
            write_pointer(pointer, host_pointer)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._authenticator.open(self.addresses)
        self._thread = start_service_thread("mailbox", self._run)
        atexit.register(self.close)

    @property
    def malformed(self) -> int:
        return self._malformed.count

    @property
    def rejected(self) -> int:
        return self._authenticator.rejected

    def send_item(self, peer: str, item: Block) -> None:
        """Send an item to a peer; the items of one peer arrive once and in order.

        The receiver is the incarnation whose :class:`PeerJoined` was polled last. If another
        incarnation replaces it, items that it has not received are dropped. For a peer that has not
        joined or was reported lost, the item waits until a peer of that name joins.
        """
        with self._changed:
            self._raise_if_failed()
            session = self._receivers.get(peer)
            if session is None:
                session = self._sessions_by_name.get(peer)
                if session is None or not session.alive:
                    self._waiting_items.setdefault(peer, []).append(item)
                    return
            if not session.retired:
                session.sender.add(item)
                self._dirty.add(session)
                os.eventfd_write(self._wakeup, 1)

    def poll_events(self, timeout_s: float) -> list[PeerEvent]:
        """Wait for events and return them. Acknowledge the events of the previous call."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._acknowledge_polled()
            while True:
                self._raise_if_failed()
                remaining_s = deadline - time.monotonic()
                if self._events or remaining_s <= 0:
                    break
                self._changed.wait(remaining_s)
            self._polled = list(self._events)
            self._events.clear()
            for session, event, _ in self._polled:
                if isinstance(event, PeerJoined):
                    self._receivers[event.worker] = session
                elif isinstance(event, PeerLost):
                    self._receivers.pop(event.worker, None)
            return [queued.event for queued in self._polled]

    def known_peers(self) -> dict[str, PeerStatus]:
        """Return the state of all peers that have joined and were not forgotten."""
        with self._changed:
            now = time.monotonic()
            return {
                name: PeerStatus(
                    dict(s.status), now - s.last_heard, dict(s.description), s.alive, s.id.hex()
                )
                for name, s in self._sessions_by_name.items()
            }

    def forget_peer(self, peer: str) -> None:
        """Drop a peer's undelivered items, and the peer itself if it is not connected."""
        with self._changed:
            self._waiting_items.pop(peer, None)
            if session := self._sessions_by_name.get(peer):
                session.sender.clear()
                if not session.alive:
                    del self._sessions_by_name[peer]

    def close(self) -> None:
        """Leave the mailbox. With ``ack_on_poll``, peers wait for the next host."""
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

    def _acknowledge_polled(self) -> None:
        """Mark the events of the previous call of ``poll_events`` as handled."""
        if self._ack_on_poll and self._polled:
            for session, event, number in self._polled:
                if isinstance(event, PeerReport):
                    session.acknowledged = number
                    self._dirty.add(session)
            os.eventfd_write(self._wakeup, 1)
        self._polled = []

    def _raise_if_failed(self) -> None:
        if self._closed:
            raise ChannelClosed(f"{self._pointer.name}: closed by its host")

    def _run(self) -> None:
        """Run the thread that owns the sockets."""
        try:
            self._serve()
        finally:
            self._socket.close()
            self._authenticator.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._wakeup):
            poller.register(source, zmq.POLLIN)
        last_check = time.monotonic()
        while not self._closed:
            ready = dict(poller.poll(int(HEARTBEAT_S * 1000 / 2)))
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
            with self._changed:
                num_events = len(self._events)
                if self._socket in ready:
                    self._receive()
                now = time.monotonic()
                if now - last_check > HEARTBEAT_S:
                    self._drop_silent_peers(now, paused_s(last_check, now))
                    last_check = now
                self._send_pending()
                if len(self._events) > num_events:
                    self._changed.notify_all()
        with self._changed:
            self._send_pending()
        if not self._ack_on_poll:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        """Announce to all peers that no host follows this one, and wait for their replies.

        A socket that closes with unread messages resets its connections. Its peers then lose the
        messages that they have not read.
        """
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        with self._changed:
            for session in self._sessions.values():
                self._send(session, "over", "its host has left it")
        while (remaining_s := deadline - time.monotonic()) > 0:
            with self._changed:
                if not any(session.alive for session in self._sessions.values()):
                    return
            self._socket.poll(int(remaining_s * 1000) + 1)
            with self._changed:
                self._receive()

    def _receive(self) -> None:
        for _ in range(MAX_MESSAGES_PER_POLL):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                id_, control, *data = (frame.buffer for frame in frames)
                kind, token, *values = unpack_list(control)
                if token == self._token:
                    self._handlers[kind](data, bytes(id_), *values)
            except Exception as error:  # foreign bytes may cause any error
                self._malformed.count_dropped(error)

    def _on_hello(
        self, frames: list[memoryview], id_: bytes, name: str, description: bytes, status: bytes
    ) -> None:
        if frames or type(name) is not str or not 0 < len(name) <= MAX_NAME:
            raise DataError("bad name")
        new_description, new_status = unpack_map(description), unpack_map(status)
        session = self._sessions.get(id_)
        if session is None:
            receiver = ReliableReceiver(self._max_bytes)
            session = self._sessions[id_] = PeerSession(id_, name, time.monotonic(), receiver)
            if previous := self._sessions_by_name.pop(name, None):
                self._retire(previous, REASON_REPLACED)
            self._sessions_by_name[name] = session
        if session.name != name:
            raise DataError("the peer has changed its name")
        session.description, session.status = new_description, new_status
        self._on_message(session)

    def _on_data(
        self,
        frames: list[memoryview],
        id_: bytes,
        received: int,
        gap: int | None,
        base: int,
        first: int,
        turn: int,
        status: bytes | None,
        sizes: list[int],
    ) -> None:
        session = self._sessions[id_]
        batch = PieceBatch(base, first, turn, split_pieces(sizes, frames))
        new_status = session.status if status is None else unpack_map(status)
        check_numbers(received, base, first, turn)
        if not self._on_message(session):
            return
        session.sender.acknowledge(received, received, gap)
        items = session.receiver.accept(batch)
        session.status = new_status
        for number, item in items:
            try:
                content = self._decode(item)
            except Exception as error:  # foreign bytes may cause any error
                self._malformed.count_dropped(error)
            else:
                self._queue_item(session, content, number)
        if not self._ack_on_poll:
            session.acknowledged = session.receiver.complete

    def _queue_item(self, session: PeerSession, content: Any, number: int) -> None:
        """Queue the event of an item; ``number``: see :class:`QueuedEvent`."""
        self._events.append(QueuedEvent(session, PeerReport(session.name, content), number))

    def _on_bye(self, frames: list[memoryview], id_: bytes) -> None:
        self._retire(self._sessions.pop(id_), REASON_DEPARTED)

    def _on_message(self, session: PeerSession) -> bool:
        """Record a message of a peer; return whether the peer still owns its name."""
        if not session.retired:
            # A forgotten peer gets its name back, unless another peer has it now.
            owner = self._sessions_by_name.setdefault(session.name, session)
            session.retired = owner is not session
        if session.retired:
            self._send(session, "retired")
            return False
        session.last_heard = time.monotonic()
        self._dirty.add(session)
        if not session.alive:
            session.alive = True
            for item in self._waiting_items.pop(session.name, ()):
                session.sender.add(item)
            joined = PeerJoined(session.name, dict(session.description), session.id.hex())
            self._events.append(QueuedEvent(session, joined))
        return True

    def _retire(self, session: PeerSession, reason: str) -> None:
        """End an incarnation that has left or has lost its name."""
        session.retired = True
        session.sender.clear()
        session.receiver.drop_partial()
        self._mark_lost(session, reason)

    def _mark_lost(self, session: PeerSession, reason: str) -> None:
        if session.alive:
            session.alive = False
            self._events.append(QueuedEvent(session, PeerLost(session.name, reason)))

    def _drop_silent_peers(self, now: float, pause: float) -> None:
        for session in self._sessions.values():
            session.last_heard = min(now, session.last_heard + pause)
            if now - session.last_heard > self._timeout_s:
                self._mark_lost(session, f"silent for {self._timeout_s:g} s")
            if now - session.last_heard > PARTIAL_ITEM_TIMEOUT_S:
                session.receiver.drop_partial()

    def _send_pending(self) -> None:
        """Acknowledge received messages and send new items."""
        sessions, self._dirty = self._dirty, set()
        for session in sessions:
            if not session.alive:
                continue
            batch = session.sender.next_batch()
            while True:
                acknowledgement = (
                    session.receiver.expected,
                    session.acknowledged,
                    session.receiver.gap,
                )
                self._send(session, "data", *acknowledgement, *batch[:3], pieces=batch.pieces)
                batch = session.sender.next_batch()
                if not batch.pieces:
                    break

    def _send(
        self,
        session: PeerSession,
        kind: str,
        *values: Any,
        pieces: Sequence[ItemPiece] | None = None,
    ) -> None:
        """Send a message. A full socket drops it; the peer then reports a gap, and it is resent."""
        send_message(self._socket, [session.id], (kind, self._token, *values), pieces)


WINDOW_BYTES = 64 << 20
"""Maximum bytes in flight after ``send_item(wait=True)``."""
HOST_SILENT_S = 2.5 * HEARTBEAT_S
"""Silence of the host after which the pointer file is read again."""
STATUS_INTERVAL_S = 0.1
"""Minimum interval between two changes of the status that are sent."""
FLUSH_TIMEOUT_S = 3.0
EMPTY_MAP = msgpack.packb({})
LINK_TIMEOUT_S = 5.0
"""Silence after which ZeroMQ ends a connection."""


class MailboxPeer:
    """A peer of a mailbox. Its thread finds the host, sends heartbeats and transfers items.

    When a new host appears, unread items of the old host are dropped, because the new host decides
    anew what to send. Items that no host has handled go to the new host.

    ``malformed`` counts messages that were dropped.

    Args:
        pointer: the pointer file of the host; it need not exist yet.
        name: the peer's name. A process that joins later under the same name replaces this one.
        decode: decodes an item of the host.
        description: what the host should know of this peer, a packed map.
        status: the first status, a packed map.
        host: the only host; the mailbox ends with it. None: any host that the pointer names.
        address: the address at which ``host`` answered.
        heartbeat_s: interval of heartbeats while nothing else is sent.
    """

    def __init__(
        self,
        pointer: Path,
        name: str,
        decode: Decode,
        *,
        description: bytes = EMPTY_MAP,
        status: bytes = EMPTY_MAP,
        host: HostPointer | None = None,
        address: str | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        if not 0 < len(name) <= MAX_NAME:
            raise ValueError(f"a name has 1 to {MAX_NAME} characters")
        self._pointer, self._name = pointer, name
        self._decode, self._description = decode, description
        self._host, self._address, self._heartbeat_s = host, address, heartbeat_s
        self._malformed = MalformedCounter(f"{name}, {pointer.name}")
        self._keys = run_keys(pointer.parent)
        self._id = routing_id()
        self._changed = threading.Condition()
        self._items: deque[Any] = deque()
        self._receiver, self._sender = ReliableReceiver(0), ReliableSender()
        self._status, self._status_changed = status, False
        self._status_time = self._pointer_read_time = self._last_heartbeat = 0.0
        """When a status was sent, the pointer file read, and a heartbeat sent; monotonic times."""
        self._last_loop = self._last_heard = time.monotonic()
        """Times of the last loop and the last message; later pauses are added to the latter."""
        self._token: str | None = None
        self._hello_sent = self._is_connected = self._must_acknowledge = False
        self._failure: str | None = None
        self._leave_deadline: float | None = None
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = start_service_thread("mailbox-peer", self._run)
        atexit.register(self.close)

    @property
    def malformed(self) -> int:
        return self._malformed.count

    @property
    def incarnation(self) -> str:
        """See :class:`rlinf.channels.mailbox_protocol.PeerJoined`."""
        return self._id.hex()

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the host, without pauses of this process."""
        return max(0.0, self._last_loop - self._last_heard)

    def receive_items(self, timeout_s: float) -> list[Any]:
        """Wait for items of the host and return them, in order.

        Raises:
            ChannelFailed: another process has joined under this name, or the host has left.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._raise_if_failed()
                remaining_s = deadline - time.monotonic()
                if self._items or remaining_s <= 0:
                    break
                self._changed.wait(remaining_s)
            items = list(self._items)
            self._items.clear()
            return items

    def send_item(self, item: Block, *, wait: bool = False) -> None:
        """Send an item; items arrive in order and are kept until a host has handled them.

        Args:
            wait: block until at most ``WINDOW_PIECES`` pieces and ``WINDOW_BYTES`` are in flight.

        Raises:
            ChannelFailed: as for :meth:`receive_items`.
        """
        with self._changed:
            while wait and self._sender.is_full(len(item), WINDOW_BYTES):
                self._raise_if_failed()
                self._changed.wait(HEARTBEAT_S)
            self._raise_if_failed()
            if self._sender.add(item):
                os.eventfd_write(self._wakeup, 1)

    def flush(self) -> None:
        """Wait until the host has handled all items.

        Raises:
            ChannelFailed: as for :meth:`receive_items`.
        """
        with self._changed:
            while self._sender:
                self._raise_if_failed()
                self._changed.wait(HEARTBEAT_S)
            self._raise_if_failed()

    def set_status(self, status: bytes) -> None:
        """Set the status that the host sees; only the last status is sent.

        Raises:
            ChannelFailed: as for :meth:`receive_items`.
        """
        with self._changed:
            self._raise_if_failed()
            self._status = status
            if not self._status_changed:
                self._status_changed = True
                os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Leave the mailbox once all items are handled, or after ``FLUSH_TIMEOUT_S``."""
        with self._changed:
            if self._leave_deadline is not None:
                return
            self._leave_deadline = time.monotonic() + FLUSH_TIMEOUT_S
            os.eventfd_write(self._wakeup, 1)
        atexit.unregister(self.close)
        self._thread.join()
        self._context.term()
        os.close(self._wakeup)

    def _raise_if_failed(self) -> None:
        if self._leave_deadline is not None:
            raise ChannelClosed(f"{self._name} has left {self._pointer.name}")
        if (reason := self._failure or self._silence_error()) is not None:
            raise ChannelFailed(reason)

    def _silence_error(self) -> str | None:
        """Return the error for a silent host; None if it is not silent or may be replaced."""
        if self._host is None or self.silent_s <= self._host.timeout_s:
            return None
        return (
            f"{self._pointer.name}: nothing heard from the host at {self._address} for "
            f"{self.silent_s:.0f} s: it is dead, stopped or cut off"
        )

    def _run(self) -> None:
        """Run the thread that owns the socket."""
        try:
            self._serve()
        finally:
            if self._socket is not None:
                self._socket.close()
            with self._changed:
                self._changed.notify_all()

    def _serve(self) -> None:
        while self._failure is None:
            with self._changed:
                now = time.monotonic()
                self._last_heard += paused_s(self._last_loop, now)
                self._last_loop = now
                if self._leave_deadline is not None:
                    is_overdue = now > self._leave_deadline or self._silence_error() is not None
                    if is_overdue or not self._sender:
                        if self._is_connected:
                            self._send("bye")
                        return
            self._find_host(now)
            with self._changed:
                self._send_pending(now)
                wait_s = HEARTBEAT_S / 2
                if self._status_changed and self._is_connected:
                    wait_s = min(wait_s, max(0.0, self._status_time + STATUS_INTERVAL_S - now))
            poller = zmq.Poller()
            poller.register(self._wakeup, zmq.POLLIN)
            if self._socket is not None:
                # The socket is writable once it is connected: send hello.
                poller.register(self._socket, zmq.POLLIN | (0 if self._hello_sent else zmq.POLLOUT))
            ready = dict(poller.poll(int(wait_s * 1000) + 1))
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
            if self._socket is not None and self._socket in ready:
                with self._changed:
                    self._receive(self._socket)

    def _find_host(self, now: float) -> None:
        """Find the host, or its successor if it is silent.

        The lock is not held here, because reading the pointer file may take long.
        """
        if self._host is not None and self._address is not None:
            if self._token is None:
                self._connect(self._host, self._address)
            return
        silent_s = now - self._last_heard
        if self._token is not None and silent_s < HOST_SILENT_S:
            return
        # The file is on a shared filesystem, so the interval grows while there is no host.
        if now - self._pointer_read_time < min(2.0, max(HEARTBEAT_S, silent_s / 4)):
            return
        self._pointer_read_time = now
        pointer = read_pointer(self._pointer)
        if pointer is None or pointer.token == self._token:
            return
        try:
            address = first_reachable(pointer.addresses)
        except (ValueError, OSError):
            return
        if address is not None:
            self._connect(pointer, address)

    def _connect(self, host: HostPointer, address: str) -> None:
        socket = client_socket(self._context, self._keys, self._id, timeout_s=LINK_TIMEOUT_S)
        socket.immediate = True  # no messages pile up for a dead host
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close(linger=0)
            return
        if self._socket is not None:
            self._socket.close(linger=0)
        with self._changed:
            self._socket, self._token = socket, host.token
            self._hello_sent = self._is_connected = self._must_acknowledge = False
            self._receiver = ReliableReceiver(host.max_bytes)
            self._items.clear()
            self._sender.restart()

    def _send_pending(self, now: float) -> None:
        heartbeat_due = now - self._last_heartbeat >= self._heartbeat_s
        if not self._is_connected:
            if heartbeat_due or not self._hello_sent:
                sent = self._send("hello", self._name, self._description, self._status)
                self._hello_sent = self._hello_sent or sent
                self._last_heartbeat = now
            return
        with_status = heartbeat_due or (
            self._status_changed and now - self._status_time >= STATUS_INTERVAL_S
        )
        batch = self._sender.next_batch()
        must_send = with_status or self._must_acknowledge
        while must_send or batch.pieces:
            acknowledgement = (self._receiver.expected, self._receiver.gap)
            status = self._status if with_status else None
            if not self._send("data", *acknowledgement, *batch[:3], status, pieces=batch.pieces):
                # Disconnected, or the network is slow. The next heartbeat carries the status.
                self._sender.requeue(batch)
                self._status_changed = False
                break
            if with_status:
                self._status_time, self._status_changed = now, False
            if heartbeat_due:
                self._last_heartbeat = now
            self._must_acknowledge = with_status = heartbeat_due = must_send = False
            batch = self._sender.next_batch()

    def _send(self, kind: str, *values: Any, pieces: Sequence[ItemPiece] | None = None) -> bool:
        """Send a message to the host; return whether the socket accepted it."""
        if self._socket is None:
            return False
        return send_message(self._socket, [], (kind, self._token, *values), pieces)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(MAX_MESSAGES_PER_POLL):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                self._on_message(*(frame.buffer for frame in frames))
            except Exception as error:  # foreign bytes may cause any error
                self._malformed.count_dropped(error)
        self._changed.notify_all()

    def _on_message(self, control: memoryview, *frames: memoryview) -> None:
        kind, token, *values = unpack_list(control)
        if token != self._token:
            return
        now = time.monotonic()
        if kind == "retired":
            self._failure = f"another process has joined as {self._name}"
            self._items.clear()
        elif kind == "over":
            self._send("bye")
            if self._host is not None:
                self._failure = f"{self._pointer.name}: {values[0]}"
        elif kind == "data":
            received, done, gap, base, first, turn, sizes = values
            check_numbers(received, done, base, first, turn)
            batch = PieceBatch(base, first, turn, split_pieces(sizes, frames))
            self._sender.acknowledge(received, done, gap)
            for _, item in self._receiver.accept(batch):
                try:
                    self._items.append(self._decode(item))
                except Exception as error:  # foreign bytes; later items are still decoded
                    self._malformed.count_dropped(error)
            self._must_acknowledge = self._must_acknowledge or bool(sizes)
        else:
            raise DataError("unknown kind")
        self._last_heard, self._is_connected = now, True
