"""The control link: a driver sends orders to resident workers on any node of a run.

A worker polls the driver by the method ``exchange`` (:mod:`rlinf.channels.requests`). The request
has the worker's status and reports, and the reply has orders. It is sent once there are some, or
when the worker's next request arrives. Orders and reports are numbered; they are repeated until
the other side has them, and repeated ones are dropped. Drivers and workers may die and be replaced
at any time.
"""

from __future__ import annotations

import atexit
import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from rlinf.channels.channel import ChannelClosed, ChannelFailed
from rlinf.channels.curve_sockets import HEARTBEAT_S, paused_s
from rlinf.channels.reply_buffers import Bytes, join
from rlinf.channels.requests import Message, Request, RequestClient, RequestServer
from rlinf.errors import DataError
from rlinf.threads import start_service_thread

CONTROL_POINTER = "control.json"
EXCHANGE, LEAVE = "exchange", "leave"
"""Methods of the driver's server."""
MAX_BYTES = 1 << 20
"""Maximum size of a packed order or report."""
MAX_STATUS_BYTES = 1 << 16
"""Maximum size of a worker's status or description, which are sent often."""
MAX_EXCHANGE_BYTES = 64 << 10
"""Bytes of orders or reports after which an exchange gets no further one; a bad connection may
break during a larger one."""
FLUSH_TIMEOUT_S, LEAVE_TIMEOUT_S = 3.0, 1.0
"""Seconds that a leaving worker waits until its reports are handled, and until the driver knows."""
RETRY_S = 0.2
"""Seconds between two attempts to find a driver; up to ten times as long while there is none."""
REASON_DEPARTED, REASON_REPLACED = "left", "replaced"
"""Reasons of a loss after which a process does not return."""


class PeerJoined(NamedTuple):
    """A worker joined, for the first time or again; ``incarnation`` identifies its process."""

    worker: str
    description: dict[str, Any]
    incarnation: str


class PeerReport(NamedTuple):
    """A report of a worker."""

    worker: str
    content: dict[str, Any]


class PeerLost(NamedTuple):
    """A worker became silent, left, or was replaced by another process of the same name."""

    worker: str
    reason: str


PeerEvent = PeerJoined | PeerReport | PeerLost


class PeerStatus(NamedTuple):
    """The last known state of a worker; ``age_s`` counts from its last message."""

    status: dict[str, Any]
    age_s: float
    description: dict[str, Any]
    alive: bool
    incarnation: str


class SendQueue:
    """Numbered items that are kept until the other side has them."""

    def __init__(self) -> None:
        self._items: deque[Bytes] = deque()
        self.first = 1
        """Number of the first item that is kept."""

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Bytes) -> None:
        self._items.append(item)

    def acknowledge(self, number: int) -> None:
        """Drop all items up to a number."""
        while self._items and self.first <= number:
            self._items.popleft()
            self.first += 1

    def clear(self) -> None:
        self.acknowledge(self.last)

    @property
    def last(self) -> int:
        """Number of the last item."""
        return self.first + len(self._items) - 1

    def after(self, number: int) -> list[Bytes]:
        """Return the items after a number, as many as fit in an exchange."""
        items, size = list[Bytes](), 0
        for item in list(self._items)[max(0, number + 1 - self.first) :]:
            size += len(item)
            if items and size > MAX_EXCHANGE_BYTES:
                break
            items.append(item)
        return items


@dataclass(eq=False)
class _Peer:
    """The driver's state of one process of a worker."""

    name: str
    incarnation: str
    last_heard: float
    """Time (monotonic) of the last message; pauses of the driver are added to it."""
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    """The name of the sequence of order numbers."""
    description: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    alive: bool = False
    """False before it joins and while it is reported lost."""
    retired: bool = False
    """True once it has left or another process has its name."""
    orders: SendQueue = field(default_factory=SendQueue)
    num_arrived: int = 0
    """Number of the last order that has arrived."""
    request: Request | None = None
    """The last request, without a reply."""
    received: int = 0
    """Number of the last report that has arrived."""
    handled: int = 0
    """Number of the last report that was handled."""
    reported_handled: int = 0
    """The value of ``handled`` in the last reply."""


class Controller:
    """The driver's end of the control link.

    A report counts as handled at the next call of ``poll_events``. If the driver ends before that,
    the next controller of the folder gets the report again.

    Args:
        folder: the run's folder for channels. A new controller takes over the workers of the
            previous one.
        interface: where to listen, as for :func:`rlinf.channels.curve_sockets.listen`.
        timeout_s: how long a worker may be silent before it counts as lost.
    """

    def __init__(
        self, folder: Path, *, interface: str | None = None, timeout_s: float = 10.0
    ) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._peers: dict[str, _Peer] = {}
        """The newest process of each worker."""
        self._receivers: dict[str, _Peer] = {}
        """The process of each worker whose PeerJoined was polled last; it gets the orders."""
        self._waiting: dict[str, list[Bytes]] = {}
        """Orders for workers that have not joined, by name."""
        self._retired: set[str] = set()
        """Processes that were replaced."""
        self._events: deque[tuple[_Peer, PeerEvent, int]] = deque()
        """Events, each with the number of its report."""
        self._polled: list[tuple[_Peer, PeerEvent, int]] = []
        """The events that the last call of ``poll_events`` returned."""
        self._closed = False
        self._server = RequestServer(folder / CONTROL_POINTER, self._handle, interface=interface)
        start_service_thread("control link", self._watch)
        atexit.register(self.close)

    @property
    def malformed(self) -> int:
        return self._server.malformed

    @property
    def rejected(self) -> int:
        return self._server.rejected

    def send_order(self, worker: str, order: Mapping[str, Any]) -> None:
        """Send an order to a worker; the orders of one worker arrive once and in order.

        The receiver is the process whose :class:`PeerJoined` was polled last. If another process
        replaces it, orders that it has not received are dropped. For a worker that has not joined
        or was reported lost, the order waits until a worker of that name joins.

        Raises:
            ValueError: the order has a value other than str, int, float, bool, None, list and dict,
                or is larger than ``MAX_BYTES``.
        """
        item = _pack(f"order for {worker}", order, MAX_BYTES)
        with self._changed:
            self._raise_if_closed()
            peer = self._receivers.get(worker) or self._peers.get(worker)
            if peer is None or not (worker in self._receivers or peer.alive):
                self._waiting.setdefault(worker, []).append(item)
            elif not peer.retired:
                peer.orders.add(item)
                self._answer(peer)

    def poll_events(self, timeout_s: float) -> list[PeerEvent]:
        """Wait for events and return them. Acknowledge the events of the previous call."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            for peer, _, number in self._polled:
                peer.handled = max(peer.handled, number)
            for peer in {peer for peer, _, _ in self._polled}:
                self._answer(peer)
            self._polled = []
            while True:
                self._raise_if_closed()
                remaining_s = deadline - time.monotonic()
                if self._events or remaining_s <= 0:
                    break
                self._changed.wait(remaining_s)
            self._polled = list(self._events)
            self._events.clear()
            for peer, event, _ in self._polled:
                if isinstance(event, PeerJoined):
                    self._receivers[event.worker] = peer
                elif isinstance(event, PeerLost):
                    self._receivers.pop(event.worker, None)
            return [event for _, event, _ in self._polled]

    def known_peers(self) -> dict[str, PeerStatus]:
        """Return the state of all workers that have joined and were not forgotten."""
        with self._changed:
            now = time.monotonic()
            return {
                name: PeerStatus(
                    dict(p.status),
                    now - p.last_heard,
                    dict(p.description),
                    p.alive,
                    p.incarnation,
                )
                for name, p in self._peers.items()
            }

    def forget_peer(self, worker: str) -> None:
        """Drop a worker's undelivered orders, and the worker itself if it is not connected."""
        with self._changed:
            self._waiting.pop(worker, None)
            if peer := self._peers.get(worker):
                peer.orders.clear()
                if not peer.alive:
                    del self._peers[worker]

    def close(self) -> None:
        """Close the link; workers wait for the next driver."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        atexit.unregister(self.close)
        self._server.close()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ChannelClosed(f"{CONTROL_POINTER}: closed by its driver")

    def _watch(self) -> None:
        """Report silent workers; the time in which this process was stopped is not silence."""
        last_check = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, HEARTBEAT_S)
                if self._closed:
                    return
                now = time.monotonic()
                pause_s, last_check = paused_s(last_check, now), now
                for peer in self._peers.values():
                    peer.last_heard += pause_s
                    if peer.alive and now - peer.last_heard > self._timeout_s:
                        self._lose(peer, f"silent for {self._timeout_s:g} s")

    def _lose(self, peer: _Peer, reason: str) -> None:
        peer.alive = False
        self._events.append((peer, PeerLost(peer.name, reason), 0))
        self._changed.notify_all()

    def _handle(self, request: Request) -> None:
        """Handle a request of a worker, in the server's thread."""
        worker, incarnation = _text(request, "worker"), _text(request, "process")
        with self._changed:
            peer = self._peers.get(worker)
            if incarnation in self._retired or self._closed:
                request.reply({"retired": not self._closed})
                return
            if request.method == LEAVE:
                if peer is not None and peer.incarnation == incarnation:
                    self._retire(peer, REASON_DEPARTED)
                request.reply()
            elif request.method == EXCHANGE:
                self._exchange(peer, worker, incarnation, request)
            else:
                raise DataError(f"no method {request.method!r}")

    def _retire(self, peer: _Peer, reason: str) -> None:
        self._retired.add(peer.incarnation)
        peer.retired = True
        if peer.request is not None:
            peer.request.reply({"retired": True})
            peer.request = None
        if peer.alive:
            self._lose(peer, reason)

    def _exchange(
        self, peer: _Peer | None, worker: str, incarnation: str, request: Request
    ) -> None:
        arguments = request.arguments
        description, status = dict(arguments["description"]), dict(arguments["status"])
        session, first = str(arguments["session"]), int(arguments["first"])
        arrived, read = int(arguments["arrived"]), int(arguments["read"])
        contents = [_unpack_map(join(block)) for block in request.blocks]
        if peer is not None and peer.incarnation != incarnation:
            self._retire(peer, REASON_REPLACED)
            peer = None
        if peer is None:
            peer = self._peers[worker] = _Peer(worker, incarnation, time.monotonic())
            peer.received = peer.handled = first - 1
        peer.last_heard, peer.status, peer.description = time.monotonic(), status, description
        if not peer.alive:
            peer.alive = True
            for order in self._waiting.pop(worker, []):
                peer.orders.add(order)
            self._events.append((peer, PeerJoined(worker, description, incarnation), 0))
        is_current = session == peer.session
        peer.num_arrived = arrived if is_current else 0
        peer.orders.acknowledge(read if is_current else 0)
        for number, content in enumerate(contents, first):
            if number == peer.received + 1:
                peer.received = number
                self._events.append((peer, PeerReport(worker, content), number))
        if peer.request is not None:
            self._reply(peer)
        peer.request = request
        if peer.received > first + len(contents) - 1:
            self._reply(peer)
        self._answer(peer)
        self._changed.notify_all()

    def _answer(self, peer: _Peer) -> None:
        """Reply to a waiting worker if there is something new."""
        has_orders = peer.orders.last > peer.num_arrived
        if peer.request is not None and (has_orders or peer.handled > peer.reported_handled):
            self._reply(peer)

    def _reply(self, peer: _Peer) -> None:
        assert peer.request is not None
        peer.reported_handled = peer.handled
        arguments = {
            "session": peer.session,
            "first": max(peer.orders.first, peer.num_arrived + 1),
            "received": peer.received,
            "handled": peer.handled,
        }
        peer.request.reply(arguments, peer.orders.after(peer.num_arrived))
        peer.request = None


class WorkerLink:
    """A worker's end of the control link. Its thread exchanges orders and reports.

    Args:
        folder: the run's folder for channels; the controller need not have started.
        name: the worker's name. A process that joins later under the same name replaces this one.
        description: what the driver should know of the worker; at most ``MAX_STATUS_BYTES``.
    """

    def __init__(self, folder: Path, name: str, description: Mapping[str, Any]) -> None:
        _pack("description", description, MAX_STATUS_BYTES)
        self._name, self._description = name, dict(description)
        self.incarnation = secrets.token_hex(16)
        """See :class:`PeerJoined`."""
        self._changed = threading.Condition()
        self._status: dict[str, Any] = {}
        self._reports = SendQueue()
        self._num_sent = 0
        """Number of the last report that was sent."""
        self._orders: deque[dict[str, Any]] = deque()
        self._session, self._arrived, self._read = "", 0, 0
        """Sequence of the orders, and numbers of the last order that has arrived and of the last
        one that was read; a new driver replaces orders that were not read."""
        self._is_dirty = True
        """Whether the driver must hear something new."""
        self._failure: str | None = None
        self._leave_deadline: float | None = None
        self._last_loop = self._last_heard = time.monotonic()
        """Times of the last loop and the last message; later pauses are added to the latter."""
        self._client = RequestClient(folder / CONTROL_POINTER, self._must_stop)
        self._thread = start_service_thread("worker link", self._run)
        atexit.register(self.close)

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the driver, without pauses of this process."""
        return max(0.0, self._last_loop - self._last_heard)

    def receive_orders(self, timeout_s: float) -> list[dict[str, Any]]:
        """Wait for new orders and return them in sequence.

        Raises:
            ChannelFailed: another process has joined under this worker's name.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._raise_if_failed()
                remaining_s = deadline - time.monotonic()
                if self._orders or remaining_s <= 0:
                    break
                self._changed.wait(remaining_s)
            orders = list(self._orders)
            self._orders.clear()
            if orders:
                self._read = self._arrived
                self._wake()
            return orders

    def send_report(self, content: Mapping[str, Any]) -> None:
        """Send a report; reports arrive in order and are kept until a driver has handled them.

        Raises:
            ValueError: as for :meth:`Controller.send_order`.
            ChannelFailed: as for :meth:`receive_orders`.
        """
        item = _pack("report", content, MAX_BYTES)
        with self._changed:
            self._raise_if_failed()
            self._reports.add(item)
            self._wake()

    def send_status(self, content: Mapping[str, Any]) -> None:
        """Set the worker's status; only the last status is sent.

        Raises:
            ValueError: as for :meth:`send_report`, above ``MAX_STATUS_BYTES``.
            ChannelFailed: as for :meth:`receive_orders`.
        """
        packed = _pack("status", content, MAX_STATUS_BYTES)
        with self._changed:
            self._raise_if_failed()
            self._status = _unpack_map(packed)

    def close(self) -> None:
        """Leave once all reports are handled, or after ``FLUSH_TIMEOUT_S``."""
        with self._changed:
            if self._leave_deadline is not None:
                return
            self._leave_deadline = time.monotonic() + FLUSH_TIMEOUT_S
            self._wake()
        atexit.unregister(self.close)
        self._thread.join()

    def _raise_if_failed(self) -> None:
        if self._leave_deadline is not None:
            raise ChannelClosed(f"{self._name} has left {CONTROL_POINTER}")
        if self._failure is not None:
            raise ChannelFailed(self._failure)

    def _wake(self) -> None:
        self._is_dirty = True
        self._changed.notify_all()
        self._client.wake()

    def _must_stop(self) -> bool:
        """Return whether the thread must leave although reports may not be handled."""
        deadline = self._leave_deadline
        return deadline is not None and time.monotonic() > deadline + LEAVE_TIMEOUT_S

    def _should_leave(self) -> bool:
        deadline = self._leave_deadline
        if deadline is None:
            return False
        return not len(self._reports) or time.monotonic() > deadline

    def _run(self) -> None:
        last_sent, retry_s = 0.0, RETRY_S
        while self._failure is None and not self._should_leave():
            with self._changed:
                now = time.monotonic()
                self._last_heard += paused_s(self._last_loop, now)
                self._last_loop = now
                is_due = self._is_dirty or now - last_sent > HEARTBEAT_S
            try:
                if is_due or not self._client.num_open:
                    last_sent = now
                    self._send_exchange()
                number, reply = self._client.receive(HEARTBEAT_S / 2)
                if number:
                    self._handle(reply)
                retry_s = RETRY_S
            except ChannelFailed:
                with self._changed:
                    self._num_sent = self._reports.first - 1
                    self._orders.clear()
                    self._arrived = self._read
                    if self._leave_deadline is None:
                        self._changed.wait_for(lambda: self._leave_deadline is not None, retry_s)
                    else:
                        self._changed.wait(RETRY_S)  # each attempt reads the shared file system
                retry_s = min(2 * retry_s, 10 * RETRY_S)
        if self._failure is None:
            arguments = {"worker": self._name, "process": self.incarnation}
            with contextlib.suppress(ChannelFailed, DataError):
                self._client.send(LEAVE, arguments)
                self._client.receive(LEAVE_TIMEOUT_S)
        self._client.close()
        with self._changed:
            self._changed.notify_all()

    def _send_exchange(self) -> None:
        with self._changed:
            first = self._num_sent + 1
            blocks = self._reports.after(self._num_sent)
            self._num_sent += len(blocks)
            self._is_dirty = self._num_sent < self._reports.last
            arguments = {
                "worker": self._name,
                "process": self.incarnation,
                "description": self._description,
                "status": self._status,
                "session": self._session,
                "arrived": self._arrived,
                "read": self._read,
                "first": first,
            }
        self._client.send(EXCHANGE, arguments, blocks)

    def _handle(self, reply: Message) -> None:
        arguments = reply.arguments
        with self._changed:
            self._last_heard = time.monotonic()
            if arguments.get("retired"):
                self._failure = f"another process has joined as {self._name}"
                self._orders.clear()
            elif "session" in arguments:
                if arguments["session"] != self._session:
                    # Another driver decides anew what to send.
                    self._session, self._arrived, self._read = arguments["session"], 0, 0
                    self._orders.clear()
                self._add_orders(arguments["first"], map(join, reply.blocks))
                self._reports.acknowledge(arguments["handled"])
                # Send reports again that have not arrived, but none that were handled and dropped.
                num_arrived = min(self._num_sent, arguments["received"])
                self._num_sent = max(num_arrived, self._reports.first - 1)
            self._changed.notify_all()

    def _add_orders(self, first: int, blocks: Iterable[Bytes]) -> None:
        for number, block in enumerate(blocks, first):
            if number > self._arrived:
                self._arrived = number
                self._orders.append(_unpack_map(block))


def _text(request: Request, name: str) -> str:
    value = request.arguments[name]
    if type(value) is not str or not 0 < len(value) <= 200:
        raise DataError(f"no {name}")
    return value


def _unpack_map(packed: Bytes) -> dict[str, Any]:
    content = msgpack.unpackb(packed)
    if type(content) is not dict:
        raise DataError("not a packed map")
    return content


def _pack(content_name: str, content: Mapping[str, Any], limit: int) -> bytes:
    try:
        packed: bytes = msgpack.packb(dict(content))
        msgpack.unpackb(packed)  # fails where the other end would, as for keys that are not text
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{content_name}: {error}; only str, int, float, bool, None, list and dict can be sent"
        ) from None
    if len(packed) > limit:
        raise ValueError(f"{content_name} takes {len(packed)} bytes, at most {limit} can be sent")
    return packed
