"""A peer's end of a mailbox (:mod:`rlinf.channels.mailbox`, which has the protocol)."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import zmq

from rlinf.channels.base import ChannelClosed, ChannelFailed
from rlinf.channels.curve import (
    HEARTBEAT_S,
    client_socket,
    reachable,
    routing_id,
    stopped_s,
)
from rlinf.channels.keys import run_keys
from rlinf.channels.mailbox import BATCH, Decode
from rlinf.channels.messages import (
    MAX_NAME,
    Pointer,
    check_numbers,
    opened,
    pieces_of,
    read_pointer,
    send,
)
from rlinf.channels.numbered import Block, Inbox, Outbox, Part, Piece
from rlinf.errors import DataError
from rlinf.threads import Malformed, serve

WINDOW_BYTES = 64 << 20
SILENT_S = 2.5 * HEARTBEAT_S
STATUS_S = 0.1
FLUSH_S = 3.0
EMPTY = msgpack.packb({})
LINK_TIMEOUT_S = 5.0


class Peer:
    """One peer of a mailbox. Its thread finds the host, says that the peer is alive and carries
    items both ways, while its process computes.

    Items of the host that were not taken when another host appears are dropped: the new one plans
    anew. Items that no host has handled go to the new one.

    ``malformed`` counts messages that were dropped.

    Args:
        pointer: the file of the host, which need not be there yet.
        name: another process that joins by the same name replaces this one.
        decode: reads an item of the host.
        about: what the host is to know of the peer, a packed map.
        status: how it is at first, too.
        host: the one host there is to be: when it is gone, so is the mailbox. None: whichever the
            pointer names.
        address: where that host answered.
        beat_s: how often to say that the peer is alive, where it has nothing else to say.
    """

    def __init__(
        self,
        pointer: Path,
        name: str,
        decode: Decode,
        *,
        about: bytes = EMPTY,
        status: bytes = EMPTY,
        host: Pointer | None = None,
        address: str | None = None,
        beat_s: float = HEARTBEAT_S,
    ) -> None:
        if not 0 < len(name) <= MAX_NAME:
            raise ValueError(f"a name has 1 to {MAX_NAME} characters")
        self._pointer, self._name, self._decode, self._about = pointer, name, decode, about
        self._host, self._address, self._beat_s = host, address, beat_s
        self._malformed = Malformed(f"{name}, {pointer.name}")
        self._keys = run_keys(pointer.parent)
        self._id = routing_id()
        self._changed = threading.Condition()
        self._items: deque[Any] = deque()
        self._inbox, self._outbox = Inbox(0), Outbox()
        self._status, self._fresh = status, False
        self._status_at = self._looked = self._said = 0.0
        self._beat = self._heard = time.monotonic()
        self._token: str | None = None
        self._greeted = self._welcome = self._owing = False
        self._failure: str | None = None
        self._leave_by: float | None = None
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = serve("mailbox-peer", self._run)
        atexit.register(self.close)

    @property
    def malformed(self) -> int:
        return self._malformed.count

    @property
    def incarnation(self) -> str:
        """As in :class:`rlinf.channels.session.Joined`."""
        return self._id.hex()

    @property
    def silent_s(self) -> float:
        """Since the host was last heard, without the time this process was stopped."""
        return max(0.0, self._beat - self._heard)

    def take(self, timeout_s: float) -> list[Any]:
        """The new items of the host, in order; waits for one.

        Raises:
            ChannelFailed: another process has joined by this name, or there will be no host.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._check()
                left = deadline - time.monotonic()
                if self._items or left <= 0:
                    break
                self._changed.wait(left)
            items = list(self._items)
            self._items.clear()
            return items

    def give(self, item: Block, *, wait: bool = False) -> None:
        """Send an item; they arrive in order, and are kept until a host has handled them.

        Args:
            wait: until no more than ``WINDOW`` items and ``WINDOW_BYTES`` are under way, if any.

        Raises:
            ChannelFailed: as for :meth:`take`.
        """
        with self._changed:
            while wait and self._outbox.full(len(item), WINDOW_BYTES):
                self._check()
                self._changed.wait(HEARTBEAT_S)
            self._check()
            if self._outbox.add(item):
                os.eventfd_write(self._wakeup, 1)

    def flush(self) -> None:
        """Wait until the host has handled all items.

        Raises:
            ChannelFailed: as for :meth:`take`.
        """
        with self._changed:
            while self._outbox:
                self._check()
                self._changed.wait(HEARTBEAT_S)
            self._check()

    def say(self, status: bytes) -> None:
        """Say how the peer is doing; only the last status counts.

        Raises:
            ChannelFailed: as for :meth:`take`.
        """
        with self._changed:
            self._check()
            self._status = status
            if not self._fresh:
                self._fresh = True
                os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Leave, when the items were handled or after ``FLUSH_S``."""
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
            raise ChannelClosed(f"{self._name} has left {self._pointer.name}")
        if (reason := self._failure or self._host_is_silent()) is not None:
            raise ChannelFailed(reason)

    def _host_is_silent(self) -> str | None:
        if self._host is None or self.silent_s <= self._host.timeout_s:
            return None
        return (
            f"{self._pointer.name}: nothing heard from the host at {self._address} for "
            f"{self.silent_s:.0f} s: it is dead, stopped or cut off"
        )

    def _run(self) -> None:
        """The thread that owns the socket."""
        try:
            self._work()
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
                if self._leave_by is not None:
                    late = now > self._leave_by or self._host_is_silent() is not None
                    if late or not self._outbox:
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
        """Find the host, and another one when it is silent.

        The lock is not held while the file is read, which may take long.
        """
        if self._host is not None and self._address is not None:
            if self._token is None:
                self._connect(self._host, self._address)
            return
        silent_s = now - self._heard
        if self._token is not None and silent_s < SILENT_S:
            return
        # The file is on a shared filesystem: the longer nobody is there the rarer.
        if now - self._looked < min(2.0, max(HEARTBEAT_S, silent_s / 4)):
            return
        self._looked = now
        pointer = read_pointer(self._pointer)
        if pointer is None or pointer.token == self._token:
            return
        try:
            address = reachable(pointer.addresses)
        except (ValueError, OSError):
            return
        if address is not None:
            self._connect(pointer, address)

    def _connect(self, host: Pointer, address: str) -> None:
        fresh = client_socket(self._context, self._keys, self._id, timeout_s=LINK_TIMEOUT_S)
        fresh.immediate = True  # nothing piles up for a host that is gone
        try:
            fresh.connect(address)
        except zmq.ZMQError:
            fresh.close(linger=0)
            return
        if self._socket is not None:
            self._socket.close(linger=0)
        with self._changed:
            self._socket, self._token = fresh, host.token
            self._greeted = self._welcome = self._owing = False
            self._inbox = Inbox(host.max_bytes)
            self._items.clear()
            self._outbox.restart()

    def _speak(self, now: float) -> None:
        beat = now - self._said >= self._beat_s
        if not self._welcome:
            if beat or not self._greeted:
                sent = self._send("hello", self._name, self._about, self._status)
                self._greeted = self._greeted or sent
                self._said = now
            return
        with_status = beat or (self._fresh and now - self._status_at >= STATUS_S)
        part = self._outbox.take()
        due = with_status or self._owing
        while due or part.pieces:
            heard = (self._inbox.expected, self._inbox.gap)
            status = self._status if with_status else None
            if not self._send("word", *heard, *part[:3], status, pieces=part.pieces):
                # Cut off, or the wire is slow; the next heartbeat carries the status.
                self._outbox.put_back(part)
                self._fresh = False
                break
            if with_status:
                self._status_at, self._fresh = now, False
            if beat:
                self._said = now
            self._owing = with_status = beat = due = False
            part = self._outbox.take()

    def _send(self, kind: str, *values: Any, pieces: Sequence[Piece] | None = None) -> bool:
        """Whether it is under way."""
        if self._socket is None:
            return False
        return send(self._socket, [], (kind, self._token, *values), pieces)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(BATCH):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                self._hear(*(frame.buffer for frame in frames))
            except Exception as error:  # whatever foreign bytes bring about
                self._malformed.drop(error)
        self._changed.notify_all()

    def _hear(self, control: memoryview, *frames: memoryview) -> None:
        kind, token, *values = opened(control)
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
        elif kind == "word":
            received, done, gap, base, first, turn, lefts = values
            check_numbers(received, done, base, first, turn)
            part = Part(base, first, turn, pieces_of(lefts, frames))
            self._outbox.hear(received, done, gap)
            for _, item in self._inbox.accept(part):
                try:
                    self._items.append(self._decode(item))
                except Exception as error:  # as above: what comes after it is taken
                    self._malformed.drop(error)
            self._owing = self._owing or bool(lefts)
        else:
            raise DataError("unknown kind")
        self._heard, self._welcome = now, True
