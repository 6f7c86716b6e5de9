"""Requests between the processes of a run: a client sends a request and waits for the reply.

A server names itself by a pointer file in the run's folder (:mod:`rlinf.channels.curve_sockets` has
keys and sockets). A request has a method, arguments and blocks of bytes, and so has a reply.

While a client waits, it asks every two seconds whether the server still has its requests. A request
that was lost with a connection is sent again. If the server does not answer for eight seconds, the
client raises, and may turn to the server's successor. A message must arrive within this time. A
request must have the same effect if it is handled twice. Nothing else is guaranteed: what a server
holds in memory is also on disk, or can be computed again.

A message is a msgpack list, followed by the bytes of all blocks, one after another, in frames of at
most 512 KiB:

    request  token, number, method, arguments, [size], buffer or nil
    reply    token, number, error or nil, arguments, [size], buffer or nil

``token`` names the process of the server, ``number`` the request. Other messages are dropped. A
request may name a buffer in shared memory (:mod:`rlinf.channels.reply_buffers`). If the reply names
it too, the blocks are there.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import zmq

from rlinf.channels.channel import ChannelFailed
from rlinf.channels.curve_sockets import (
    HEARTBEAT_S,
    PIECE_BYTES,
    Authenticator,
    HostPointer,
    client_socket,
    first_reachable,
    host_socket,
    listen,
    read_pointer,
    refuses_connections,
    routing_id,
    run_keys,
    write_pointer,
)
from rlinf.channels.reply_buffers import Block, Bytes, ReplyBuffers, ReplyBufferWriter, pieces_of
from rlinf.errors import DataError
from rlinf.shared_memory import shared_memory_id
from rlinf.threads import MalformedCounter, WakeupEvent, start_service_thread

MAX_MESSAGE_BYTES = 1 << 30
"""Maximum bytes of all blocks of one message."""
MAX_REQUESTS_PER_POLL = 256
SERVER_TIMEOUT_S = 8.0
"""Seconds without an answer to a check after which a server counts as lost."""
PING_S = 2.0
"""Seconds between two checks whether the server still has the requests of a waiting client."""
PING = "ping"
"""Method of such a check. The reply's ``open`` lists the numbers of the client's open requests."""


class Message(NamedTuple):
    """Arguments (numbers, texts, lists and maps) and blocks of a request or reply."""

    arguments: dict[str, Any]
    blocks: Sequence[Block] = ()
    is_borrowed: bool = False
    """Whether the blocks are only valid until the client calls :meth:`RequestClient.receive`."""


class Request:
    """A request that a server has received; any thread may reply, once."""

    def __init__(
        self,
        server: RequestServer,
        client: bytes,
        number: int,
        method: str,
        message: Message,
        buffer: str | None,
    ) -> None:
        self._server, self._client, self._number = server, client, number
        self._buffer = buffer
        self.is_local = buffer is not None
        """Whether the reply may come in shared memory."""
        self.method, self.arguments, self.blocks = method, message.arguments, message.blocks

    def reply(self, arguments: Mapping[str, Any] = {}, blocks: Sequence[Block] = ()) -> None:
        """Send the reply; its blocks must not change any more.

        Raises:
            DataError: the blocks are larger than ``MAX_MESSAGE_BYTES``.
        """
        message = Message(dict(arguments), blocks)
        self._server.send(self._client, self._number, None, message, self._buffer)

    def reject(self, reason: str) -> None:
        """Let the client's call raise :class:`RequestRejected`."""
        self._server.send(self._client, self._number, reason[:8000], Message({}))

    def handle_later(self, handle: Callable[[Request], None]) -> None:
        """Let the thread of the server call ``handle`` with this request, soon."""
        self._server.handle_later(self, handle)


class RequestRejected(ChannelFailed):
    """The server has received the request ``number`` and cannot fulfil it."""

    def __init__(self, reason: str, number: int) -> None:
        super().__init__(reason)
        self.number = number


class RequestServer:
    """A server of requests. Its thread calls ``handle`` for each request.

    ``handle`` must return soon. It replies at once, or passes the request on to another thread that
    replies. An exception rejects the request with its text.

    ``addresses`` are those at which it listens. ``rejected`` counts connections without the run's
    key, ``malformed`` dropped messages.

    Args:
        pointer: the file by which clients find the server. Its folder has the keys of the run.
        interface: where to listen, as for :func:`rlinf.channels.curve_sockets.listen`.
    """

    def __init__(
        self, pointer: Path, handle: Callable[[Request], None], *, interface: str | None = None
    ) -> None:
        keys = run_keys(pointer.parent)
        self._pointer, self._handle = pointer, handle
        self._token = secrets.token_hex(8)
        self._malformed = MalformedCounter(f"server of {pointer.name}")
        self._open: set[tuple[bytes, int]] = set()
        """Client and number of the requests without a reply."""
        self._replies: deque[list[Any]] = deque()
        self._later: deque[tuple[Request, Callable[[Request], None]]] = deque()
        self._buffers = ReplyBufferWriter()
        self._closed = False
        self._context = zmq.Context()
        self._socket = host_socket(self._context, keys, timeout_s=SERVER_TIMEOUT_S)
        self._authenticator = Authenticator(self._context, keys, self._socket)
        try:
            self.addresses = listen(self._socket, interface)
            host = HostPointer(self.addresses, self._token, shared_memory_id())
            write_pointer(pointer, host)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wakeup = WakeupEvent()
        self._authenticator.open(self.addresses)
        self._thread = start_service_thread("requests", self._run)

    @property
    def rejected(self) -> int:
        return self._authenticator.rejected

    @property
    def malformed(self) -> int:
        return self._malformed.count

    def send(
        self,
        client: bytes,
        number: int,
        error: str | None,
        message: Message,
        buffer: str | None = None,
    ) -> None:
        """Send a reply; :class:`Request` calls this, in any thread."""
        frames: list[Bytes] = []
        if buffer is None or not self._buffers.write(buffer, message.blocks):
            buffer, frames = None, _frames(message.blocks)
        head = _pack_head([self._token, number, error], message, buffer)
        self._replies.append([client, head, *frames])
        self._open.discard((client, number))
        self._wakeup.set()

    def handle_later(self, request: Request, handle: Callable[[Request], None]) -> None:
        """Handle a request in the thread of the server; :class:`Request` calls this."""
        self._later.append((request, handle))
        self._wakeup.set()

    def close(self) -> None:
        """Stop the server and reject all open requests."""
        if self._closed:
            return
        self._closed = True
        self._wakeup.set()
        self._thread.join()
        pointer = read_pointer(self._pointer)
        if pointer is not None and pointer.token == self._token:
            self._pointer.unlink(missing_ok=True)
        self._context.term()
        self._wakeup.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._wakeup):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._closed:
                ready = dict(poller.poll(1000))
                if self._wakeup.fileno() in ready:
                    self._wakeup.clear()
                while self._later:
                    self._answer(*self._later.popleft())
                if self._socket in ready:
                    self._receive()
                self._send_replies()
        finally:
            for client, number in list(self._open):
                self.send(client, number, "the server has closed", Message({}))
            self._send_replies()
            self._socket.close()
            self._authenticator.close()

    def _receive(self) -> None:
        for _ in range(MAX_REQUESTS_PER_POLL):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                client, *parts = (frame.buffer for frame in frames)
                (token, number, method), arguments, sizes, buffer = _read_head(parts)
                message = Message(arguments, _read_blocks(sizes, parts[1:]))
                if token != self._token or type(number) is not int or type(method) is not str:
                    raise DataError("not a request to this server")
            except Exception as error:  # foreign bytes may cause any error
                self._malformed.count_dropped(error)
                continue
            id_ = bytes(client)
            request = Request(self, id_, number, method, message, buffer)
            if method == PING:
                request.reply({"open": [n for other, n in list(self._open) if other == id_]})
                continue
            if (id_, number) in self._open:
                continue  # sent again, although it has arrived
            self._open.add((id_, number))
            self._answer(request, self._handle)

    def _answer(self, request: Request, handle: Callable[[Request], None]) -> None:
        try:
            handle(request)
        except Exception as error:
            request.reject(f"{type(error).__name__}: {error}")
        self._send_replies()

    def _send_replies(self) -> None:
        while self._replies:
            parts = self._replies.popleft()
            # A full socket drops the reply; the client then sends its request again.
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(parts, zmq.NOBLOCK, copy=len(parts) < 3)


class RequestClient:
    """A client of one server, for one thread.

    Args:
        pointer: the pointer file of the server.
        should_stop: checked while waiting; when it is True, the wait ends with ``ChannelFailed``.
        server: the only server, and the address at which it answered; None: any server that the
            pointer names.
        timeout_s: seconds without an answer to a ping after which the server counts as lost; None:
            ``SERVER_TIMEOUT_S``.
    """

    def __init__(
        self,
        pointer: Path,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        server: tuple[HostPointer, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._pointer, self._should_stop = pointer, should_stop
        self._malformed = MalformedCounter(f"client of {pointer.name}")
        self._only_server, self._timeout_s = server, timeout_s
        self._keys = run_keys(pointer.parent)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._host: HostPointer | None = None
        self._address = ""
        self._number = 0
        self._open: dict[int, _OpenRequest] = {}
        """Requests without a reply, by number."""
        self._buffers = ReplyBuffers()
        self._borrowed: str | None = None
        """The buffer with the blocks of the last reply."""
        self._last_heard = self._last_ping = 0.0
        self._unanswered_ping: float | None = None
        """Time of the first ping since the last message; None: there was none."""
        self._wakeup = WakeupEvent()

    def request(
        self, method: str, arguments: Mapping[str, Any] = {}, blocks: Sequence[Block] = ()
    ) -> Message:
        """Send a request and return the reply; no other request may be open.

        Raises:
            RequestRejected, ChannelFailed, DataError: as for :meth:`receive` and :meth:`send`.
        """
        self.send(method, arguments, blocks)
        return self.receive()[1]

    def send(
        self,
        method: str,
        arguments: Mapping[str, Any] = {},
        blocks: Sequence[Block] = (),
        *,
        use_shared_memory: bool = False,
    ) -> int:
        """Send a request and return its number.

        Args:
            use_shared_memory: let the blocks of a large reply come in shared memory, if the server
                is on this machine.

        Raises:
            ChannelFailed: there is no server.
            DataError: the blocks are larger than ``MAX_MESSAGE_BYTES``.
        """
        socket, host = self._connect()
        if not self._open:
            self._last_heard = time.monotonic()
        self._number += 1
        is_local = use_shared_memory and host.memory == shared_memory_id()
        buffer = self._buffers.take() if is_local else None
        message = Message(dict(arguments), blocks)
        head = _pack_head([host.token, self._number, method], message, buffer)
        frames = [head, *_frames(blocks)]
        self._open[self._number] = _OpenRequest(frames, buffer)
        self._send(socket, frames)
        return self._number

    def wake(self) -> None:
        """Let :meth:`receive` return; any thread may call this."""
        self._wakeup.set()

    @property
    def num_open(self) -> int:
        """The number of requests without a reply."""
        return len(self._open)

    def receive(self, timeout_s: float = math.inf) -> tuple[int, Message]:
        """Wait for the next reply and return it with the number of its request.

        After a call of :meth:`wake` or ``timeout_s``, return number 0 and an empty message.

        Raises:
            RequestRejected: the server cannot fulfil the request.
            ChannelFailed: the server is lost, or this process must stop.
        """
        socket, host = self._socket, self._host
        if socket is None or host is None:
            raise self._failed("no request was sent")
        if self._borrowed is not None:
            self._buffers.release(self._borrowed)
            self._borrowed = None
        poller = zmq.Poller()
        for source in (socket, self._wakeup):
            poller.register(source, zmq.POLLIN)
        deadline = time.monotonic() + timeout_s
        while True:
            if self._should_stop():
                raise self._failed("this process stops")
            wait_s = min(HEARTBEAT_S, deadline - time.monotonic())
            if wait_s <= 0:
                return 0, Message({})
            ready = dict(poller.poll(int(1000 * wait_s) + 1))
            if self._wakeup.fileno() in ready:
                self._wakeup.clear()
                return 0, Message({})
            if socket not in ready:
                self._check_server(socket, host)
                continue
            frames = [frame.buffer for frame in socket.recv_multipart(copy=False)]
            try:
                (token, number, error), arguments, sizes, buffer = _read_head(frames)
                blocks = _read_blocks(sizes, frames[1:]) if buffer is None else []
            except Exception as error:  # foreign bytes may cause any error
                self._malformed.count_dropped(error)
                continue
            if token != host.token:
                continue
            self._last_heard, self._unanswered_ping = time.monotonic(), None
            if number == 0:
                # The server replies in order, so these requests were lost.
                for lost in self._open.keys() - set(arguments["open"]):
                    self._send(socket, self._open[lost].frames)
            elif (request := self._open.pop(number, None)) is not None:
                if buffer is not None and buffer == request.buffer:
                    blocks = [*self._buffers.read(buffer, sizes)]
                    self._borrowed = buffer
                elif request.buffer is not None:
                    self._buffers.release(request.buffer)
                if error is not None:
                    raise RequestRejected(f"{self._pointer.name}: {error}", number)
                return number, Message(arguments, blocks, self._borrowed is not None)

    def _check_server(self, socket: zmq.Socket[bytes], host: HostPointer) -> None:
        """Ping the server if it is silent.

        Only unanswered pings count as silence: this process may have been busy or paused.

        Raises:
            ChannelFailed: the server is lost.
        """
        now, timeout_s = time.monotonic(), self._timeout_s or SERVER_TIMEOUT_S
        if self._unanswered_ping is not None and now - self._unanswered_ping > timeout_s:
            raise self._failed(f"nothing heard for {timeout_s:g} s")
        if now - max(self._last_ping, self._last_heard) > PING_S:
            current = None if self._only_server else read_pointer(self._pointer)
            if current is not None and current.token != host.token:
                raise self._failed("another server has replaced it")
            if self._unanswered_ping is not None and refuses_connections(self._address):
                raise self._failed("its process has ended")
            self._last_ping = now
            self._unanswered_ping = self._unanswered_ping or now
            self._send(socket, [_pack_head([host.token, 0, PING], Message({}), None)])

    def close(self) -> None:
        """Close the connection."""
        self._disconnect()
        self._buffers.close()
        self._context.term()
        self._wakeup.close()

    def _connect(self) -> tuple[zmq.Socket[bytes], HostPointer]:
        """Return a socket to the server; look for a new server after a pause without requests."""
        is_in_use = self._open or time.monotonic() - self._last_heard < PING_S
        if self._socket is not None and self._host is not None and is_in_use:
            return self._socket, self._host
        host, address = self._only_server or (read_pointer(self._pointer), None)
        if host is None:
            raise self._failed("there is no server")
        if self._socket is None or self._host is None or host.token != self._host.token:
            self._disconnect()
            try:
                address = address or first_reachable(host.addresses)
                if address is None:
                    raise self._failed(f"no answer at {', '.join(host.addresses)}")
                self._socket = client_socket(
                    self._context, self._keys, routing_id(), timeout_s=SERVER_TIMEOUT_S
                )
                self._socket.connect(address)
            except (ValueError, OSError, zmq.ZMQError) as error:
                raise self._failed(f"damaged ({error})") from None
            self._host, self._address, self._unanswered_ping = host, address, None
        return self._socket, host

    @staticmethod
    def _send(socket: zmq.Socket[bytes], frames: list[Bytes]) -> None:
        # A request that a full or broken connection drops is sent again after the next ping.
        with contextlib.suppress(zmq.Again):
            socket.send_multipart(frames, zmq.NOBLOCK, copy=len(frames) < 2)

    def _disconnect(self) -> None:
        for request in self._open.values():
            if request.buffer is not None:
                self._buffers.drop(request.buffer)
        self._open.clear()
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def _failed(self, reason: str) -> ChannelFailed:
        self._disconnect()
        return ChannelFailed(f"{self._pointer.name}: {reason}")


class _OpenRequest(NamedTuple):
    """The frames of a request without a reply, and the name of its buffer."""

    frames: list[Bytes]
    buffer: str | None


def _pack_head(head: list[Any], message: Message, buffer: str | None) -> bytes:
    """Return the first frame of a message."""
    sizes = [sum(map(len, pieces_of(block))) for block in message.blocks]
    if sum(sizes) > MAX_MESSAGE_BYTES:
        raise DataError(f"a message of {sum(sizes)} bytes; at most {MAX_MESSAGE_BYTES} are sent")
    packed: bytes = msgpack.packb([*head, message.arguments, sizes, buffer])
    return packed


def _frames(blocks: Sequence[Block]) -> list[Bytes]:
    """Return frames with these blocks. Small pieces share frames, because each frame costs time."""
    frames, small, small_bytes = list[Bytes](), list[Bytes](), 0
    for piece in chain.from_iterable(map(pieces_of, blocks)):
        size = len(piece)
        if small and small_bytes + size > PIECE_BYTES:
            frames.append(b"".join(small))
            small, small_bytes = [], 0
        if size <= PIECE_BYTES:
            small.append(piece)
            small_bytes += size
        else:
            view = memoryview(piece)
            frames += [view[start : start + PIECE_BYTES] for start in range(0, size, PIECE_BYTES)]
    if small_bytes:
        frames.append(small[0] if len(small) == 1 else b"".join(small))
    return frames


def _read_head(
    frames: Sequence[memoryview],
) -> tuple[list[Any], dict[str, Any], list[int], str | None]:
    """Return the first three values of a message, its arguments, sizes and buffer.

    Raises:
        DataError: malformed.
    """
    content = msgpack.unpackb(frames[0])
    if type(content) is not list or len(content) != 6 or type(content[3]) is not dict:
        raise DataError("not a message")
    *head, arguments, sizes, buffer = content
    if any(type(size) is not int or size < 0 for size in sizes):
        raise DataError("sizes are not numbers")
    if buffer is not None and type(buffer) is not str:
        raise DataError("the name of the buffer is not text")
    return head, arguments, sizes, buffer


def _read_blocks(sizes: Sequence[int], frames: Sequence[memoryview]) -> list[Block]:
    """Return the blocks that arrived in frames, without a copy.

    Raises:
        DataError: malformed.
    """
    if sum(sizes) != sum(map(len, frames)):
        raise DataError("sizes and frames differ")
    blocks: list[Block] = []
    frame, later_frames = memoryview(b""), iter(frames)
    for size in sizes:
        pieces, missing = list[memoryview](), size
        while missing:
            frame = frame or next(later_frames)
            pieces.append(frame[:missing])
            frame, missing = frame[missing:], missing - len(pieces[-1])
        blocks.append(pieces[0] if len(pieces) == 1 else pieces)
    return blocks
