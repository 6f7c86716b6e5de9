"""Socket transport: ZeroMQ between processes anywhere in a run, authenticated and encrypted.

One process hosts the channel (usually the one that consumes, which then takes records without a
socket between); the others find its address in the run directory. See :mod:`rlinf.channels.hub` for
the protocol.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import zmq

from rlinf.channels.base import DEFAULT_KEY, Channel, ChannelClosed, ChannelFailed
from rlinf.channels.curve import (
    HEARTBEAT_S,
    client_socket,
    reachable,
    routing_id,
    write_pointer,
)
from rlinf.channels.hub import MAX_CONTROL_BYTES, Hub, send
from rlinf.channels.keys import Keys, run_keys
from rlinf.channels.queue import Batch
from rlinf.channels.wire import decode, encode, split
from rlinf.data.record import Identity, Record
from rlinf.errors import DataError, InputError
from rlinf.threads import Malformed, serve

WINDOW_RECORDS = 1024
WINDOW_BYTES = 64 << 20
MESSAGE_BYTES = 256 << 10
MESSAGE_RECORDS = 512
PREFETCH_S = 0.002
PREFETCH_RECORDS = 256


class _Put(NamedTuple):
    number: int
    key: str
    weight: int
    identity: Identity
    block: bytearray


class _Taken(NamedTuple):
    """A record that arrived, and the request it came with."""

    request: int
    weight: int
    block: Any


class SocketChannel(Channel):
    """One process's end of a channel between processes of a run; any number of threads.

    ``put`` returns when the record is under way, with at most ``WINDOW_RECORDS`` and
    ``WINDOW_BYTES`` not yet in the queue; ``flush`` waits until all are. Small records travel
    together. ``get`` fetches ahead what the process takes in ``PREFETCH_S`` at its own pace: a
    process that takes long over a record holds no other one back.

    What a process took since its last ``get`` goes back to its place when it falls silent for the
    channel's timeout; should it go on later, it loses what it had not yet been handed. When the
    host falls silent, operations raise ``ChannelFailed`` as long as it does.

    ``malformed`` counts records and messages that were dropped because they could not be read.
    """

    @property
    def malformed(self) -> int:
        return self._malformed.count

    @classmethod
    def create(
        cls,
        folder: Path,
        name: str,
        *,
        capacity: int = 0,
        unique: bool = False,
        fail_on_death: bool = False,
        interface: str | None = None,
        timeout_s: float = 5.0,
        max_bytes: int = 1 << 30,
    ) -> SocketChannel:
        """Host the channel ``name`` of a run and take part in it; it ends when the host leaves.

        Args:
            folder: the run's folder for channels; made with mode 0700, holds keys and addresses.
            capacity: most records a key may hold before producers wait; 0 is unbounded.
            unique: drop a record whose (iteration, sample) was already accepted.
            fail_on_death: fail for everybody when a participant falls silent, instead of waiting
                for another to do its work.
            interface: where to listen, as for :func:`rlinf.channels.curve.listen`. The kernel
                chooses the port.
            timeout_s: how long a participant may be silent before it counts as dead.
            max_bytes: the largest message; longer ones end the connection they come by.
        """
        keys = run_keys(folder)
        context = zmq.Context()
        inside = f"inproc://{secrets.token_hex(8)}"
        try:
            hub = Hub(
                context,
                keys,
                inside,
                interface=interface,
                capacity=capacity,
                unique=unique,
                fail_on_death=fail_on_death,
                timeout_s=timeout_s,
                max_bytes=max_bytes,
            )
        except BaseException:
            context.destroy(linger=0)
            raise
        pointer = folder / f"{name}.socket.json"
        values = {"addresses": hub.addresses, "timeout_s": timeout_s, "max_bytes": max_bytes}
        write_pointer(pointer, values)
        channel = cls(context, inside, values, keys, pointer)
        channel.hub = hub
        return channel

    @classmethod
    def open(cls, folder: Path, name: str) -> SocketChannel:
        """Take part in the channel that another process of the run hosts.

        Raises:
            InputError: there is no such channel (yet), or its files are not this user's alone.
            ChannelFailed: its host does not answer.
        """
        pointer = folder / f"{name}.socket.json"
        try:
            values = json.loads(pointer.read_text(encoding="utf-8"))
            address = reachable(values["addresses"])
        except FileNotFoundError:
            raise InputError(
                f"{pointer}: no such channel; its host has not started or has ended"
            ) from None
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{pointer}: damaged ({error!r}); start its host again") from None
        keys = run_keys(folder)
        if address is None:
            raise ChannelFailed(f"{pointer.name}: no answer at {', '.join(values['addresses'])}")
        return cls(zmq.Context(), address, values, keys, pointer)

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        values: dict[str, Any],
        keys: Keys,
        pointer: Path,
    ) -> None:
        self._malformed = Malformed(f"channel {pointer.name}")
        self.hub: Hub | None = None
        self._pointer = pointer
        self._address, self._timeout_s = address, values["timeout_s"]
        self._max_bytes = values["max_bytes"]
        self._context = context
        self._socket = client_socket(
            context,
            keys,
            routing_id(),
            timeout_s=self._timeout_s,
            max_bytes=max(self._max_bytes, MAX_CONTROL_BYTES),
        )
        self._socket.connect(self._address)

        self._changed = threading.Condition()
        self._unsent: deque[_Put] = deque()
        self._unaccepted: dict[int, _Put] = {}
        self._unaccepted_bytes = 0
        self._last_put = -1
        self._controls: deque[tuple[Any, ...]] = deque()
        self._requests = itertools.count()
        self._asked: dict[int, tuple[Any, ...]] = {}
        self._answers: dict[int, tuple[bool, list[_Taken]]] = {}
        self._ahead: dict[str, deque[_Taken]] = defaultdict(deque)
        self._handed: deque[int] = deque()
        self._left_of: dict[int, int] = {}
        self._pace_s = 1.0
        self._handed_at = 0.0
        self._closed = self._refused = self._leaving = False
        self._failure: str | None = None
        self._heard = self._beat = time.monotonic()
        self._nonce = 0
        self._current = True
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = serve("channel-socket", self._run)
        atexit.register(self.leave)

    def put(self, record: Record, weight: int = 1, *, key: str = DEFAULT_KEY) -> None:
        """As the interface says.

        Raises:
            DataError: the record cannot be sent or is larger than a message may be.
        """
        encoded = encode(record)
        if encoded.size > self._max_bytes:
            raise DataError(
                f"record {tuple(record.identity)} takes {encoded.size} bytes, a message of "
                f"{self._pointer.name} at most {self._max_bytes}; raise max_bytes"
            )
        block = encoded.to_bytes()
        with self._changed:
            while True:
                self._check()
                if self._closed or self._refused:
                    raise ChannelClosed("put on a closed channel")
                if not self._unaccepted or (
                    len(self._unaccepted) < WINDOW_RECORDS
                    and self._unaccepted_bytes + len(block) <= WINDOW_BYTES
                ):
                    break
                self._changed.wait(HEARTBEAT_S)
            self._last_put += 1
            put = _Put(self._last_put, key, weight, record.identity, block)
            self._unaccepted[put.number] = put
            self._unaccepted_bytes += len(block)
            self._unsent.append(put)
            if len(self._unsent) == 1:
                os.eventfd_write(self._wakeup, 1)

    def get(self, *, key: str = DEFAULT_KEY) -> Record:
        while True:
            with self._changed:
                self._begin_get()
                ahead = self._ahead[key]
                if not ahead:
                    count = int(PREFETCH_S / max(self._pace_s, 1e-6))
                    over, taken = self._ask(key, min(max(1, count), PREFETCH_RECORDS), 0, None)
                    if over and not taken:
                        raise ChannelClosed("channel is closed and empty")
                    ahead.extend(taken)
                records = self._hand_out([ahead.popleft()] if ahead else [])
                if not ahead:
                    self._ahead.pop(key, None)
            if records:
                return records[0]

    def get_batch(self, target_weight: int, *, key: str = DEFAULT_KEY) -> list[Record]:
        while True:
            with self._changed:
                self._begin_get()
                batch = Batch(target_weight)
                ahead = self._ahead[key]
                while ahead and not batch.full and batch.takes(ahead[0].weight):
                    batch.add(ahead[0], ahead.popleft().weight)
                if not ahead and not batch.full:
                    self._ahead.pop(key, None)
                    over, taken = self._ask(key, 0, target_weight, batch.total)
                    if over and not taken and not batch.items:
                        raise ChannelClosed("channel is closed and empty")
                    batch.items.extend(taken)
                records = self._hand_out(batch.items)
            if records:
                return records

    def flush(self) -> None:
        with self._changed:
            while self._unaccepted:
                self._check()
                self._changed.wait(HEARTBEAT_S)
            self._check()
            if self._refused:
                raise ChannelClosed("records were put after the channel was closed")

    def close(self) -> None:
        with self._changed:
            while not self._closed:
                self._check()
                self._tell("close", self._last_put)
                self._changed.wait(HEARTBEAT_S)

    def fail(self, reason: str) -> None:
        with self._changed:
            self._failure = self._failure or reason
            self._tell("fail", reason)
            self._changed.notify_all()

    def leave(self) -> None:
        """As the interface says, after all records are in the queue; ends the channel if hosted."""
        if self._leaving:
            return
        atexit.unregister(self.leave)
        with contextlib.suppress(ChannelFailed, ChannelClosed):
            self.flush()
        with self._changed:
            self._finish()
            self._tell("leave", list(self._left_of.items()))
            self._leaving = True
            self._changed.notify_all()
        self._thread.join()
        if self.hub is not None:
            self.hub.stop()
            self._pointer.unlink(missing_ok=True)
        self._context.term()
        os.close(self._wakeup)

    def _ask(
        self, key: str, count: int, target: int, taken: int | None
    ) -> tuple[bool, list[_Taken]]:
        """Ask the hub for records and wait; whether the channel is over, and the records."""
        number = next(self._requests)
        self._asked[number] = ("get", number, key, count, target, taken)
        try:
            self._tell_asked(number)
            while number not in self._answers:
                self._check()
                self._changed.wait(HEARTBEAT_S)
            return self._answers.pop(number)
        finally:
            self._asked.pop(number, None)

    def _hand_out(self, taken: list[_Taken]) -> list[Record]:
        records = []
        for _, _, block in taken:
            try:
                records.append(decode(block))
            except DataError as error:
                self._malformed.drop(error)
        self._handed.extend(request for request, _, _ in taken)
        self._handed_at = time.monotonic()
        return records

    def _begin_get(self) -> None:
        self._check()
        self._finish()
        while self._was_stopped(time.monotonic()) or not self._current:
            self._check()
            self._changed.wait(HEARTBEAT_S / 10)

    def _finish(self) -> None:
        """What was handed out before is done; learn the pace."""
        if self._handed:
            self._pace_s += 0.5 * (time.monotonic() - self._handed_at - self._pace_s)
        while self._handed:
            request = self._handed.popleft()
            if request in self._left_of:
                self._left_of[request] -= 1
                if not self._left_of[request]:
                    del self._left_of[request]

    def _check(self) -> None:
        if self._failure is not None:
            raise ChannelFailed(self._failure)
        if self._leaving:
            raise ChannelClosed("this process has left the channel")
        silent_s = self._beat - self._heard
        if silent_s > self._timeout_s:
            raise ChannelFailed(
                f"{self._pointer.name}: nothing heard from the host at {self._address} for "
                f"{silent_s:.0f} s: it is dead, stopped or cut off"
            )

    def _open(self) -> list[int]:
        """Requests that are not done with."""
        return [*self._asked, *self._left_of]

    def _tell(self, *message: Any) -> None:
        self._controls.append(message)
        os.eventfd_write(self._wakeup, 1)

    def _tell_asked(self, number: int) -> None:
        self._tell(*self._asked[number], self._open())

    def _run(self) -> None:
        """The thread that owns the socket."""
        try:
            self._work()
        except Exception as error:
            self._failure = self._failure or f"{self._pointer.name}: its thread failed: {error!r}"
            raise
        finally:
            self._socket.close()
            with self._changed:
                self._changed.notify_all()

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        label = f"process {os.getpid()} on {socket.gethostname()}"
        pinged = 0.0
        while True:
            with self._changed:
                now = self._beat
                if now - pinged > HEARTBEAT_S:
                    pinged = now
                    last = self._unsent[0].number - 1 if self._unsent else self._last_put
                    self._controls.append(("ping", last, self._open(), label, self._nonce))
                    for number in self._asked:
                        self._tell_asked(number)
                leaving = self._leaving
            self._send_all()
            if leaving:
                return
            ready = dict(poller.poll(int(HEARTBEAT_S * 1000 / 2)))
            with self._changed:
                now = time.monotonic()
                if self._was_stopped(now):
                    self._heard, self._current = now, False
                    self._nonce += 1
                self._beat = now
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
            if self._socket in ready:
                self._receive_all()

    def _was_stopped(self, now: float) -> bool:
        """Whether this process rested so long that others may have its records.

        What it received before is then not to be handed out until the host has spoken again.
        """
        return now - self._beat > self._timeout_s / 2

    def _send_all(self) -> None:
        while True:
            with self._changed:
                puts: list[_Put] = []
                size = 0
                while self._unsent and len(puts) < MESSAGE_RECORDS and size < MESSAGE_BYTES:
                    puts.append(self._unsent.popleft())
                    size += len(puts[-1].block)
                controls, self._controls = (
                    ([], self._controls)
                    if puts
                    else (
                        list(self._controls),
                        deque(),
                    )
                )
            if puts:
                entries = [(p.key, p.weight, p.identity, len(p.block)) for p in puts]
                self._send(("put", puts[0].number, entries), [p.block for p in puts])
            for control in controls:
                self._send(control)
            if not puts:
                return

    def _send(self, message: tuple[Any, ...], blocks: Sequence[Any] = ()) -> None:
        send(self._socket, [msgpack.packb(message)], blocks)

    def _receive_all(self) -> None:
        with self._changed:
            for _ in range(256):
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._heard = time.monotonic()
                try:
                    self._hear(*(frame.buffer for frame in frames))
                except Exception as error:  # whatever foreign bytes bring about
                    self._malformed.drop(error)
            self._changed.notify_all()

    def _hear(self, control: memoryview, *data: memoryview) -> None:
        """Take in a message of the hub."""
        kind, *values = msgpack.unpackb(control, use_list=False)
        if kind == "accepted":
            self._forget_puts(values[0])
        elif kind == "records" and self._current:
            number, over, sizes = values
            self._answer(number, over, sizes, data)
        elif kind == "resend":
            self._unsent = deque(
                put for put in self._unaccepted.values() if put.number >= values[0]
            )
            os.eventfd_write(self._wakeup, 1)
        elif kind == "refused":
            self._refused = True
            self._unsent.clear()
            self._forget_puts([n for n in self._unaccepted if n >= values[0]])
        elif kind == "pong":
            closed, nonce, expected, waiting = values
            self._closed = self._closed or closed
            self._current = self._current or nonce == self._nonce
            there = self._unaccepted.keys() - set(waiting)
            self._forget_puts([number for number in there if number < expected])
        elif kind == "closed":
            self._closed = True
        elif kind == "failed":
            self._failure = self._failure or str(values[0])
        elif kind == "revoked":
            # Given up for dead meanwhile: others have these records now.
            self._ahead.clear()
            self._left_of.clear()
            self._answers = dict.fromkeys(self._answers, (False, []))

    def _forget_puts(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if put := self._unaccepted.pop(number, None):
                self._unaccepted_bytes -= len(put.block)

    def _answer(
        self,
        number: int,
        over: bool,
        sizes: tuple[tuple[int, int], ...],
        frames: Sequence[memoryview],
    ) -> None:
        if number not in self._asked:
            return
        blocks = split([size for size, _ in sizes], frames)
        taken = [_Taken(number, int(size[1]), b) for size, b in zip(sizes, blocks, strict=True)]
        # Not before all is in order: what was asked for is asked for until it has come.
        del self._asked[number]
        self._answers[number] = (over, taken)
        if taken:
            self._left_of[number] = len(taken)
