"""The host's side of a socket channel: one thread that owns the queue.

Clients number their records; the hub accepts each number once and in order, asks for what is
missing, and confirms a record when it is in the queue. A reply to a request stays *in hand* until
the client no longer lists it as open; what a client that fell silent had in hand goes back to its
place. Every message is idempotent, so a lost connection costs a repetition and nothing else.

A message is one msgpack list and, where records travel, the frames of their blocks:

    put    first, [(key, weight, identity, size)], blocks     -> accepted [number]
    get    request, key, count, target, taken, open           -> records request, over,
                                                                 [(size, weight)], blocks
    ping   last put, open, label, nonce                       -> pong closed, nonce,
                                                                 next number, [not in the queue]
    close  last put                                           -> closed, to all
    fail   reason                                             -> failed reason, to all
    leave  [(request, records not taken)]

``resend`` and ``refused`` answer with a first record: it is missing, or came after the end. A
client that was given up and speaks again hears ``revoked``.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq

from rlinf.channels.curve import HEARTBEAT_S, Door, host_socket, listen, stopped_s
from rlinf.channels.keys import Keys
from rlinf.channels.queue import Batch, Entry, KeyedQueue, Seen
from rlinf.channels.wire import join, split
from rlinf.data.record import Identity
from rlinf.errors import DataError
from rlinf.threads import Malformed, serve

MAX_CONTROL_BYTES = 1 << 20
ZERO_COPY_BYTES = 1 << 16


@dataclass(eq=False)
class _Client:
    """What the hub knows of one client; ``expected`` is the number of its next record."""

    name: bytes
    seen_at: float
    label: str = "?"
    alive: bool = True
    expected: int = 0
    pending: deque[tuple[int, str, int, Identity, Any]] = field(default_factory=deque)
    in_hand: dict[int, list[Entry]] = field(default_factory=dict)


@dataclass(eq=False)
class _Request:
    """``count`` records at most (0: a batch by weight), filled as they come."""

    client: _Client
    number: int
    count: int
    batch: Batch


class Hub:
    """Owns the queue of one channel; runs in a thread of the host until :meth:`stop`.

    ``refused`` counts connections without the run's key, ``malformed`` messages that were dropped,
    ``lost`` clients that fell silent.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: Keys,
        inside: str,
        *,
        interface: str | None,
        capacity: int,
        unique: bool,
        fail_on_death: bool,
        timeout_s: float,
        max_bytes: int,
    ) -> None:
        self.lost = 0
        self._malformed = Malformed("host of a channel")
        self._timeout_s, self._fail_on_death = timeout_s, fail_on_death
        self._queue = KeyedQueue(capacity)
        self._unique = Seen() if unique else None
        self._clients: dict[bytes, _Client] = {}
        self._requests: dict[str, deque[_Request]] = defaultdict(deque)
        self._askers: dict[str, set[bytes]] = defaultdict(set)
        self._dirty: set[str] = set()
        self._closed = False
        self._failure: str | None = None
        self._stopping = False
        self._socket = host_socket(
            context, keys, timeout_s=timeout_s, max_bytes=max(max_bytes, MAX_CONTROL_BYTES)
        )
        self._door = Door(context, keys, self._socket)
        # What is under way is bounded by the clients' windows and requests; a limit here would
        # drop messages without a word.
        self._socket.set_hwm(0)
        self._socket.bind(inside)
        self.addresses = listen(self._socket, interface)
        self._handlers: dict[str, Callable[..., None]] = {
            "put": self._put,
            "get": self._get,
            "ping": self._ping,
            "close": self._close,
            "fail": self._fail_by,
            "leave": self._leave,
        }
        self._door.open(self.addresses)
        self._thread = serve("channel-hub", self._run)

    @property
    def malformed(self) -> int:
        return self._malformed.count

    @property
    def refused(self) -> int:
        return self._door.refused

    def stop(self) -> None:
        """End the channel for everybody."""
        self._stopping = True
        self._thread.join()

    def depths(self) -> dict[str, int]:
        """Records waiting, by key."""
        return self._queue.depths()

    def _run(self) -> None:
        try:
            self._work()
            self._fail("the host of the channel has left it")
        except Exception as error:
            self._fail(f"the host of the channel failed: {error!r}")
            raise
        finally:
            self._socket.close()
            self._door.close()

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        checked = time.monotonic()
        while not self._stopping:
            ready = dict(poller.poll(int(HEARTBEAT_S * 1000 / 2)))
            if self._socket in ready:
                self._receive()
            self._serve()
            now = time.monotonic()
            if now - checked > HEARTBEAT_S:
                self._bury(now, stopped_s(checked, now))
                checked = now

    def _receive(self) -> None:
        for _ in range(256):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                name, control, *data = (frame.buffer for frame in frames)
                if len(control) > MAX_CONTROL_BYTES:
                    raise DataError("control too large")
                kind, *values = msgpack.unpackb(control, use_list=False)
                handler = self._handlers[kind]
                handler(self._client(bytes(name)), *values, *data)
            except Exception as error:  # whatever foreign bytes bring about
                self._malformed.drop(error)

    def _client(self, name: bytes) -> _Client:
        now = time.monotonic()
        client = self._clients.setdefault(name, _Client(name, now))
        client.seen_at = now
        if not client.alive:
            client.alive = True
            self._send(client, "revoked")
        return client

    def _put(
        self, client: _Client, first: int, entries: tuple[Any, ...], *frames: memoryview
    ) -> None:
        blocks = split([size for _, _, _, size in entries], frames)
        records = []
        for number, (key, weight, identity, _) in enumerate(entries, first):
            if type(key) is not str or not all(_is_number(n) for n in (weight, *identity)):
                raise DataError("bad entry")
            record = (number, key, weight, Identity(*identity), blocks[number - first])
            records.append(record)
        if first > client.expected:
            self._send(client, "resend", client.expected)
            return
        fresh = [record for record in records if record[0] >= client.expected]
        if self._closed and fresh:
            self._send(client, "refused", client.expected)
            return
        client.expected = max(client.expected, first + len(entries))
        client.pending.extend(fresh)
        self._dirty.update(record[1] for record in fresh)

    def _get(
        self,
        client: _Client,
        number: int,
        key: str,
        count: int,
        target: int,
        taken: int | None,
        open_: tuple[int, ...],
    ) -> None:
        values = (number, count, target, 0 if taken is None else taken)
        numbers = all(_is_number(value) for value in (*values, *open_))
        if type(key) is not str or not numbers or type(open_) is not tuple:
            raise DataError("bad request")
        self._forget_done(client, open_)
        if number in client.in_hand:
            self._reply(client, number, client.in_hand[number])
        elif all(r.client is not client or r.number != number for r in self._requests[key]):
            self._requests[key].append(_Request(client, number, count, Batch(target, taken)))
            self._askers[key].add(client.name)
            self._dirty.add(key)

    def _ping(
        self, client: _Client, last: int, open_: tuple[int, ...], label: str, nonce: int
    ) -> None:
        if not all(_is_number(value) for value in (last, *open_)):
            raise DataError("bad ping")
        self._forget_done(client, open_)
        client.label = str(label)[:100]
        if last >= client.expected:
            self._send(client, "refused" if self._closed else "resend", client.expected)
        pending = [record[0] for record in client.pending]
        self._send(client, "pong", self._closed, nonce, client.expected, pending)
        if self._failure is not None:
            self._send(client, "failed", self._failure)

    def _close(self, client: _Client, last: int) -> None:
        if last >= client.expected and not self._closed:
            self._send(client, "resend", client.expected)
            return
        self._closed = True
        self._dirty.update(self._requests)
        self._broadcast("closed")

    def _fail_by(self, client: _Client, reason: str) -> None:
        self._fail(str(reason))

    def _leave(self, client: _Client, untaken: tuple[tuple[int, int], ...]) -> None:
        for number, count in untaken:
            entries = client.in_hand.get(number, [])
            self._give_back(entries[len(entries) - count :])
        client.in_hand.clear()
        self._drop_requests(client)
        client.alive = False
        if not client.pending:
            del self._clients[client.name]

    def _serve(self) -> None:
        """Move records from producers into the queue, and from there to requests."""
        while self._dirty:
            keys, self._dirty = self._dirty, set()
            self._admit(keys)
            for key in keys:
                requests = self._requests.get(key)
                while requests and self._fill(requests[0], key):
                    request = requests.popleft()
                    request.client.in_hand[request.number] = request.batch.items
                    self._reply(request.client, request.number, request.batch.items)
                if not requests:
                    self._requests.pop(key, None)
                    if not self._queue.depth(key):
                        self._askers.pop(key, None)

    def _admit(self, keys: set[str]) -> None:
        for client in self._clients.values():
            accepted: list[int] = []
            kept: deque[tuple[int, str, int, Identity, Any]] = deque()
            for record in client.pending:
                number, key, weight, identity, block = record
                if key not in keys or self._queue.full(key):
                    kept.append(record)
                    continue
                accepted.append(number)
                if self._unique is None or self._unique.add(identity):
                    self._queue.push(key, block, weight)
            if accepted:
                client.pending = kept
                self._send(client, "accepted", accepted)

    def _fill(self, request: _Request, key: str) -> bool:
        """Take what is there; whether the request can be answered."""
        batch, count = request.batch, request.count
        if count:
            share = -(-self._queue.depth(key) // max(1, len(self._askers[key])))
            count = max(1, min(count, share))
        while not (len(batch.items) >= count if count else batch.full):
            entry = self._queue.take(key, (lambda _: True) if count else batch.takes)
            if entry is None:
                break
            batch.add(entry, entry.weight)
            self._dirty.add(key)
        else:
            return True
        if self._queue.depth(key) or (count and batch.items):
            return True
        pending = any(r[1] == key for c in self._clients.values() for r in c.pending)
        return self._closed and not pending

    def _reply(self, client: _Client, number: int, entries: list[Entry]) -> None:
        sizes = [(len(entry.item), entry.weight) for entry in entries]
        blocks = [entry.item for entry in entries]
        self._send(client, "records", number, self._closed, sizes, blocks=blocks)

    def _forget_done(self, client: _Client, open_: tuple[int, ...]) -> None:
        for number in client.in_hand.keys() - set(open_):
            del client.in_hand[number]

    def _give_back(self, entries: list[Entry]) -> None:
        self._queue.give_back(entries)
        self._dirty.update(entry.key for entry in entries)

    def _drop_requests(self, client: _Client) -> None:
        for key, requests in list(self._requests.items()):
            for request in [r for r in requests if r.client is client]:
                self._give_back(request.batch.items)
                requests.remove(request)
            self._dirty.add(key)
        for askers in self._askers.values():
            askers.discard(client.name)

    def _bury(self, now: float, pause: float) -> None:
        for client in self._clients.values():
            client.seen_at = min(now, client.seen_at + pause)
            if client.alive and now - client.seen_at > self._timeout_s:
                client.alive = False
                self.lost += 1
                for entries in client.in_hand.values():
                    self._give_back(entries)
                client.in_hand.clear()
                self._drop_requests(client)
                if self._fail_on_death:
                    self._fail(
                        f"{client.label} has been silent for {self._timeout_s:g} s: dead, stopped "
                        "or cut off"
                    )

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._broadcast("failed", self._failure)

    def _broadcast(self, *message: Any) -> None:
        for client in self._clients.values():
            self._send(client, *message)

    def _send(self, client: _Client, *message: Any, blocks: Sequence[Any] = ()) -> None:
        send(self._socket, [client.name, msgpack.packb(message)], blocks)


def send(socket: zmq.Socket[bytes], head: list[bytes], blocks: Sequence[Any]) -> None:
    """Send a message; one that does not fit now is dropped, missed and sent again.

    Only large frames are worth the bookkeeping of a send without a copy.
    """
    frames = join(blocks)
    with contextlib.suppress(zmq.Again):
        for i, frame in enumerate([*head, *frames], 1 - len(head) - len(frames)):
            more = zmq.SNDMORE if i else 0
            socket.send(frame, zmq.NOBLOCK | more, copy=len(frame) < ZERO_COPY_BYTES)


def _is_number(value: object) -> bool:
    return type(value) is int and abs(value) < 1 << 62
