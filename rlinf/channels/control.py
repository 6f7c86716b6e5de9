"""The control link: a driver gives orders to resident workers, anywhere in a run.

The :class:`Controller` is the driver's end, a :class:`Link` that of a worker. Orders and reports
are numbered and acknowledged (:mod:`rlinf.channels.numbered`); both ends only answer what they
heard, so nobody is flooded while it is stopped. Drivers and workers may die and be replaced at any
time: the pointer file names the present controller by a *token*, and an *incarnation* is one life
of a worker. Order numbers belong to the two together; words with another token are ignored.

A message is one frame, a msgpack list. From a worker:

    hello  token, name, about, status                               until it is answered
    word   token, received, base, first, [report], status or nil    also the heartbeat
    bye    token

and from the controller, to each of them:

    word     token, received, done, base, first, [order]
    retired  token                       another incarnation has this worker's name

``received`` and ``done`` acknowledge, ``base`` and ``first`` number what follows; ``about``,
``status``, orders and reports are maps, each packed for itself.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import zmq

from rlinf.channels.base import ChannelClosed, ChannelFailed
from rlinf.channels.curve import (
    HEARTBEAT_S,
    Door,
    client_socket,
    host_socket,
    listen,
    reachable,
    routing_id,
    stopped_s,
    write_pointer,
)
from rlinf.channels.keys import run_keys
from rlinf.channels.numbered import Inbox, Outbox
from rlinf.errors import DataError
from rlinf.threads import Malformed, serve

POINTER = "control.json"
MAX_BYTES = 1 << 20
"""The largest order or report, packed."""
MAX_STATUS_BYTES = 1 << 16
"""The largest status or description of a worker: they travel often."""
FRAME_BYTES = MAX_BYTES + 4 * MAX_STATUS_BYTES
CUT_BYTES = 16 * MAX_BYTES
"""Messages up to here are dropped and counted; larger ones end the connection unread."""
MAX_NAME = 200
RESEND_S = HEARTBEAT_S
SILENT_S = 2.5 * HEARTBEAT_S
STATUS_S = 0.1
FLUSH_S = 3.0
LINK_TIMEOUT_S = 5.0
BATCH = 256


class Joined(NamedTuple):
    """A worker is there, for the first time or again; ``incarnation`` is that of its process."""

    worker: str
    about: dict[str, Any]
    incarnation: str


class Report(NamedTuple):
    worker: str
    content: dict[str, Any]


class Lost(NamedTuple):
    """A worker fell silent, left, or was replaced by another process of the same name."""

    worker: str
    reason: str


Event = Joined | Report | Lost


class Seen(NamedTuple):
    """What is known of a worker; ``age_s`` since it was last heard."""

    status: dict[str, Any]
    age_s: float
    about: dict[str, Any]
    alive: bool
    incarnation: str


@dataclass(eq=False)
class _Session:
    """One incarnation of a worker, as its controller knows it.

    ``done`` acknowledges the reports that the driver has handled.
    """

    id: bytes
    name: str
    seen_at: float
    about: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    alive: bool = False
    retired: bool = False
    orders: Outbox = field(default_factory=lambda: Outbox(MAX_BYTES, RESEND_S))
    reports: Inbox = field(default_factory=Inbox)
    done: int = 0


class _Queued(NamedTuple):
    """An event, and for a report the number after its own."""

    session: _Session
    event: Event
    number: int = 0


class Controller:
    """The driver's end. Its thread hears the workers; all methods return at once but ``events``.

    A report counts as handled at the next call of ``events``: if the driver ends before, the next
    controller of the folder gets it again.

    ``refused`` counts connections without the run's key, ``malformed`` messages that were dropped.

    Args:
        folder: the run's folder for channels; made with mode 0700, holds the keys and
            ``control.json``. A new controller takes the workers of the last one over.
        interface: where to listen, as for :func:`rlinf.channels.curve.listen`. The kernel chooses
            the port.
        timeout_s: how long a worker may be silent before it counts as lost.
    """

    def __init__(
        self, folder: Path, *, interface: str | None = None, timeout_s: float = 10.0
    ) -> None:
        keys = run_keys(folder)
        self._malformed = Malformed("controller")
        self._timeout_s = timeout_s
        self._token = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._sessions: dict[bytes, _Session] = {}
        self._workers: dict[str, _Session] = {}
        self._known: dict[str, _Session] = {}
        self._waiting: dict[str, list[bytes]] = {}
        self._events: deque[_Queued] = deque()
        self._handed: list[_Queued] = []
        self._dirty: set[_Session] = set()
        self._closed = False
        self._failure: str | None = None
        self._handlers: dict[str, Callable[..., None]] = {
            "hello": self._hello,
            "word": self._word,
            "bye": self._bye,
        }
        self._context = zmq.Context()
        self._socket = host_socket(self._context, keys, timeout_s=timeout_s, max_bytes=CUT_BYTES)
        self._door = Door(self._context, keys, self._socket)
        self._pointer = folder / POINTER
        try:
            addresses = listen(self._socket, interface)
            write_pointer(self._pointer, {"addresses": addresses, "token": self._token})
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._door.open(addresses)
        self._thread = serve("controller", self._run)
        atexit.register(self.close)

    @property
    def malformed(self) -> int:
        return self._malformed.count

    @property
    def refused(self) -> int:
        return self._door.refused

    def send(self, worker: str, order: Mapping[str, Any]) -> None:
        """Give an order; those of one worker arrive once and in order.

        It is for the incarnation that the driver knows, by the events it took: what that one had
        not received is dropped when another replaces it. For a worker that has not joined or was
        reported lost it is kept until one joins by that name.

        Raises:
            ValueError: it has other values than str, int, float, bool, None, list and dict, or
                takes more than ``MAX_BYTES``.
        """
        item = _pack(f"order for {worker}", order, MAX_BYTES)
        with self._changed:
            self._check()
            session = self._known.get(worker)
            if session is None:
                session = self._workers.get(worker)
                if session is None or not session.alive:
                    self._waiting.setdefault(worker, []).append(item)
                    return
            if not session.retired:
                session.orders.add(item)
                self._dirty.add(session)
                os.eventfd_write(self._wakeup, 1)

    def events(self, timeout_s: float) -> list[Event]:
        """What happened since the last call, in order; waits for something to happen.

        All reports that the last call returned are acknowledged now.
        """
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
        """All workers that ever joined and were not forgotten."""
        with self._changed:
            now = time.monotonic()
            return {
                name: Seen(dict(s.status), now - s.seen_at, dict(s.about), s.alive, s.id.hex())
                for name, s in self._workers.items()
            }

    def forget(self, worker: str) -> None:
        """Drop the orders that a worker has not received; one that is not there is not listed."""
        with self._changed:
            self._waiting.pop(worker, None)
            if session := self._workers.get(worker):
                session.orders.clear()
                if not session.alive:
                    del self._workers[worker]

    def close(self) -> None:
        """Leave; workers go on and wait for the next controller."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wakeup, 1)
        atexit.unregister(self.close)
        self._thread.join()
        pointer = _read_pointer(self._pointer)
        if pointer is not None and pointer.token == self._token:
            self._pointer.unlink(missing_ok=True)
        self._context.term()
        os.close(self._wakeup)

    def _finish(self) -> None:
        """The events handed out before are done with."""
        for session, event, number in self._handed:
            if isinstance(event, Report):
                session.done = number
                self._dirty.add(session)
        if self._handed:
            os.eventfd_write(self._wakeup, 1)
        self._handed = []

    def _check(self) -> None:
        if self._closed:
            raise ChannelClosed("the controller is closed")
        if self._failure is not None:
            raise ChannelFailed(self._failure)

    def _run(self) -> None:
        """The thread that owns the sockets."""
        try:
            self._work()
        except Exception as error:
            self._failure = f"the thread of the controller failed: {error!r}"
            raise
        finally:
            self._socket.close()
            self._door.close()
            with self._changed:
                self._changed.notify_all()

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
                    self._bury(now, stopped_s(checked, now))
                    checked = now
                self._speak(now)
                if len(self._events) > before:
                    self._changed.notify_all()
        with self._changed:
            self._speak(time.monotonic())

    def _receive(self) -> None:
        for _ in range(BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                name, frame = frames
                kind, token, *values = _open(frame)
                if token == self._token:
                    self._handlers[kind](name, *values)
            except Exception as error:  # whatever foreign bytes bring about
                self._malformed.drop(error)

    def _hello(self, id_: bytes, name: str, about: bytes, status: bytes) -> None:
        if type(name) is not str or not 0 < len(name) <= MAX_NAME:
            raise DataError("bad name")
        described, said = _unpack(about), _unpack(status)
        session = self._sessions.get(id_)
        if session is None:
            session = self._sessions[id_] = _Session(id_, name, time.monotonic())
            if old := self._workers.pop(name, None):
                self._retire(old, "replaced")
            self._workers[name] = session
        if session.name != name:
            raise DataError("another name than before")
        session.about, session.status = described, said
        self._hear(session)

    def _word(
        self,
        id_: bytes,
        received: int,
        base: int,
        first: int,
        items: list[bytes],
        status: bytes | None,
    ) -> None:
        session = self._sessions[id_]
        reports = [_unpack(item) for item in items]
        said = session.status if status is None else _unpack(status)
        _check_numbers(received, base, first)
        if not self._hear(session):
            return
        session.orders.hear(received, received, time.monotonic())
        new = session.reports.accept(base, first, reports)
        session.status = said
        for number, content in enumerate(new, session.reports.expected - len(new) + 1):
            self._events.append(_Queued(session, Report(session.name, content), number))

    def _bye(self, id_: bytes) -> None:
        self._retire(self._sessions[id_], "left")

    def _hear(self, session: _Session) -> bool:
        """Note that a worker spoke; whether it still has its name."""
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
                session.orders.add(item)
            joined = Joined(session.name, dict(session.about), session.id.hex())
            self._events.append(_Queued(session, joined))
        return True

    def _retire(self, session: _Session, reason: str) -> None:
        """An incarnation will not come back, or not by its name."""
        session.retired = True
        session.orders.clear()
        self._lose(session, reason)

    def _lose(self, session: _Session, reason: str) -> None:
        if session.alive:
            session.alive = False
            self._events.append(_Queued(session, Lost(session.name, reason)))

    def _bury(self, now: float, pause: float) -> None:
        for session in self._workers.values():
            session.seen_at = min(now, session.seen_at + pause)
            if now - session.seen_at > self._timeout_s:
                self._lose(session, f"silent for {self._timeout_s:g} s")

    def _speak(self, now: float) -> None:
        """Answer who was heard, and send new orders."""
        sessions, self._dirty = self._dirty, set()
        for session in sessions:
            if not session.alive:
                continue
            part = session.orders.take(now)
            while True:
                self._send(session, "word", session.reports.expected, session.done, *part)
                part = session.orders.take(now)
                if not part.items:
                    break

    def _send(self, session: _Session, kind: str, *values: Any) -> None:
        """What does not fit now is dropped, missed and sent again."""
        with contextlib.suppress(zmq.Again):
            frame = msgpack.packb((kind, self._token, *values))
            self._socket.send_multipart([session.id, frame], zmq.NOBLOCK)


class Link:
    """A worker's end. Its thread finds the controller, says that the worker is alive and carries
    orders and reports, while the worker computes.

    Orders that a worker has not taken when another controller appears are dropped: the new driver
    plans anew. Reports that no driver has handled go to the new one.

    Args:
        folder: the run's folder for channels; the controller need not be there yet.
        name: another process that joins by the same name replaces this one.
        about: what the driver should know of the worker; at most ``MAX_STATUS_BYTES``.
    """

    def __init__(self, folder: Path, name: str, about: Mapping[str, Any]) -> None:
        if not 0 < len(name) <= MAX_NAME:
            raise ValueError(f"the name of a worker has 1 to {MAX_NAME} characters")
        self._malformed = Malformed(f"link of {name}")
        self._name, self._about = name, _pack("about", about, MAX_STATUS_BYTES)
        self._pointer = folder / POINTER
        self._keys = run_keys(folder)
        self._id = routing_id()
        self._changed = threading.Condition()
        self._orders: deque[dict[str, Any]] = deque()
        self._inbox = Inbox()
        self._reports = Outbox(MAX_BYTES, RESEND_S)
        self._status = _pack("status", {}, MAX_STATUS_BYTES)
        self._fresh = False
        self._status_at = self._looked = self._said = 0.0
        self._beat = self._heard = time.monotonic()
        self._token: str | None = None
        self._greeted = self._welcome = self._owing = False
        self._failure: str | None = None
        self._leave_by: float | None = None
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = serve("control-link", self._run)
        atexit.register(self.close)

    @property
    def malformed(self) -> int:
        """Messages that were dropped."""
        return self._malformed.count

    @property
    def incarnation(self) -> str:
        """As in :class:`Joined`."""
        return self._id.hex()

    @property
    def silent_s(self) -> float:
        """Since the controller was last heard, without the time this process was stopped."""
        return max(0.0, self._beat - self._heard)

    def orders(self, timeout_s: float) -> list[dict[str, Any]]:
        """The new orders, in order; waits for one.

        Raises:
            ChannelFailed: another process has joined by this worker's name.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._check()
                left = deadline - time.monotonic()
                if self._orders or left <= 0:
                    break
                self._changed.wait(left)
            orders = list(self._orders)
            self._orders.clear()
            return orders

    def report(self, content: Mapping[str, Any]) -> None:
        """Tell the driver; reports arrive in order, and are kept until a driver has handled them.

        Raises:
            ValueError: as for :meth:`Controller.send`.
            ChannelFailed: as for :meth:`orders`.
        """
        item = _pack("report", content, MAX_BYTES)
        with self._changed:
            self._check()
            self._reports.add(item)
            os.eventfd_write(self._wakeup, 1)

    def status(self, content: Mapping[str, Any]) -> None:
        """Say how the worker is doing; only the last status counts.

        Raises:
            ValueError: as for :meth:`report`, above ``MAX_STATUS_BYTES``.
            ChannelFailed: as for :meth:`orders`.
        """
        item = _pack("status", content, MAX_STATUS_BYTES)
        with self._changed:
            self._check()
            self._status = item
            if not self._fresh:
                self._fresh = True
                os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Leave, when the reports were handled or after ``FLUSH_S``."""
        with self._changed:
            if self._leave_by is not None:
                return
            self._leave_by = time.monotonic() + FLUSH_S
            os.eventfd_write(self._wakeup, 1)
        atexit.unregister(self.close)
        self._thread.join()
        self._context.term()
        os.close(self._wakeup)

    def _check(self) -> None:
        if self._leave_by is not None:
            raise ChannelClosed("this worker has left")
        if self._failure is not None:
            raise ChannelFailed(self._failure)

    def _run(self) -> None:
        """The thread that owns the socket."""
        try:
            self._work()
        except Exception as error:
            self._failure = f"the thread of the control link failed: {error!r}"
            raise
        finally:
            if self._socket is not None:
                self._socket.close()
            with self._changed:
                self._changed.notify_all()

    def _work(self) -> None:
        while self._failure is None:
            with self._changed:
                now = time.monotonic()
                self._heard += stopped_s(self._beat, now)
                self._beat = now
                if self._leave_by is not None and (not self._reports or now > self._leave_by):
                    if self._welcome:
                        self._send("bye")
                    return
            self._look(now)
            with self._changed:
                self._speak(now)
                wait_s = HEARTBEAT_S / 2
                if self._fresh and self._welcome:
                    wait_s = min(wait_s, max(0.0, self._status_at + STATUS_S - now))
            poller = zmq.Poller()
            poller.register(self._wakeup, zmq.POLLIN)
            if self._socket is not None:
                # It can be written to once it is connected: the time to say hello.
                poller.register(self._socket, zmq.POLLIN | (0 if self._greeted else zmq.POLLOUT))
            ready = dict(poller.poll(int(wait_s * 1000) + 1))
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
            if self._socket is not None and self._socket in ready:
                with self._changed:
                    self._receive(self._socket)

    def _look(self, now: float) -> None:
        """Look for another controller when the present one is silent.

        The lock is not held while the file is read, which may take long.
        """
        silent_s = now - self._heard
        if self._token is not None and silent_s < SILENT_S:
            return
        # The file is on a shared filesystem: the longer nobody is there the rarer.
        if now - self._looked < min(2.0, max(HEARTBEAT_S, silent_s / 4)):
            return
        self._looked = now
        pointer = _read_pointer(self._pointer)
        if pointer is None or pointer.token == self._token:
            return
        try:
            address = reachable(pointer.addresses)
        except (ValueError, OSError):
            return
        if address is None:
            return
        fresh = client_socket(
            self._context, self._keys, self._id, timeout_s=LINK_TIMEOUT_S, max_bytes=CUT_BYTES
        )
        fresh.immediate = True  # nothing piles up for a controller that is gone
        try:
            fresh.connect(address)
        except zmq.ZMQError:
            fresh.close(linger=0)
            return
        if self._socket is not None:
            self._socket.close(linger=0)
        with self._changed:
            self._socket, self._token = fresh, pointer.token
            self._greeted = self._welcome = self._owing = False
            self._inbox = Inbox()
            self._orders.clear()
            self._reports.restart()

    def _speak(self, now: float) -> None:
        beat = now - self._said >= HEARTBEAT_S
        if not self._welcome:
            if beat or not self._greeted:
                sent = self._send("hello", self._name, self._about, self._status)
                self._greeted = self._greeted or sent
                self._said = now
            return
        with_status = beat or (self._fresh and now - self._status_at >= STATUS_S)
        part = self._reports.take(now)
        due = with_status or self._owing
        while due or part.items:
            status = self._status if with_status else None
            if not self._send("word", self._inbox.expected, *part, status):
                # Cut off; the next heartbeat that gets through carries the status.
                self._reports.rewind()
                self._fresh = False
                break
            if with_status:
                self._status_at, self._fresh = now, False
            if beat:
                self._said = now
            self._owing = with_status = beat = due = False
            part = self._reports.take(now)

    def _send(self, kind: str, *values: Any) -> bool:
        """Whether it is under way."""
        if self._socket is None:
            return False
        try:
            self._socket.send(msgpack.packb((kind, self._token, *values)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(BATCH):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                self._hear(*frames)
            except Exception as error:  # whatever foreign bytes bring about
                self._malformed.drop(error)
        self._changed.notify_all()

    def _hear(self, frame: bytes) -> None:
        kind, token, *values = _open(frame)
        if token != self._token:
            return
        now = time.monotonic()
        if kind == "retired":
            self._failure = f"another process has joined as {self._name}"
            self._orders.clear()
        elif kind == "word":
            received, done, base, first, items = values
            _check_numbers(received, done, base, first)
            orders = [_unpack(item) for item in items]
            self._reports.hear(received, done, now)
            self._orders.extend(self._inbox.accept(base, first, orders))
            self._owing = self._owing or bool(items)
        else:
            raise DataError("unknown kind")
        self._heard, self._welcome = now, True


class _Pointer(NamedTuple):
    addresses: list[str]
    token: str


def _read_pointer(path: Path) -> _Pointer | None:
    """Where the controller is; None when that cannot be read (yet).

    On a shared filesystem the file may be missing, empty or stale for a while.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        pointer = _Pointer(values["addresses"], values["token"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    addresses = pointer.addresses
    whole = type(addresses) is list and all(type(a) is str for a in [*addresses, pointer.token])
    return pointer if whole and addresses else None


def _pack(what: str, content: Mapping[str, Any], limit: int) -> bytes:
    try:
        packed: bytes = msgpack.packb(dict(content))
        msgpack.unpackb(packed)  # refuses what the other end would, such as keys that are no text
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{what}: {error}; only str, int, float, bool, None, list and dict can be sent"
        ) from None
    if len(packed) > limit:
        raise ValueError(f"{what} takes {len(packed)} bytes, at most {limit} can be sent")
    return packed


def _unpack(packed: bytes) -> dict[str, Any]:
    if type(packed) is not bytes or len(packed) > MAX_BYTES:
        raise DataError("not a packed map")
    content = msgpack.unpackb(packed)
    if type(content) is not dict:
        raise DataError("not a packed map")
    return content


def _open(frame: bytes) -> list[Any]:
    if len(frame) > FRAME_BYTES:
        raise DataError("message too large")
    message = msgpack.unpackb(frame)
    if type(message) is not list:
        raise DataError("not a list")
    return message


def _check_numbers(*numbers: int) -> None:
    if any(type(number) is not int for number in numbers):
        raise DataError("not a number")
