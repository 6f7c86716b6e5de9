"""Transfer of records between workers: a worker fetches them from the workers that produced them.

Each worker serves the method ``records`` (:mod:`rlinf.channels.requests`). A request names an
output folder, a channel, and the cursor: the number of records that the client has already. The
reply has further records of the rank of this worker, or the end of its stream. It is sent once
there are some. A large record is sent in parts: a position is a cursor and the number of bytes of
the next record that come before. A client asks for a reply while the previous one arrives.

Every reply names the stream. If the client's cursor is of another stream, because the worker was
replaced, the reply begins with the first record.

What a worker fetches, records or weights (:class:`Fetch`), is a cache of committed files. If
another worker does not answer, its data is read from disk after the commit.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.channels.channel import ChannelFailed
from rlinf.channels.reply_buffers import Block, Bytes, join, pieces_of
from rlinf.channels.requests import Message, Request, RequestClient, RequestRejected
from rlinf.channels.wire_format import EncodedRecord, decode_record, encode_record
from rlinf.data.record import Record
from rlinf.threads import start_service_thread
from stages.layout import work_item_channel, worker_pointer
from stages.live_store import FetchProgress, LiveStore, RecordStream, StreamEnd
from stages.worker.messages import FetchOutput

RECORDS = "records"
"""Method of a worker's server."""
SOCKET, SHARED_MEMORY = "socket", "shared_memory"
"""The transports of records."""
MAX_REPLY_RECORDS = 512
MAX_REPLY_BYTES = (4 << 20) + (64 << 10)
"""Bytes of records in a reply, or of one part of a record: arrays of 4 MiB and their header. On a
slow network, a reply must arrive before the worker counts as lost."""
MAX_LOCAL_REPLY_BYTES = (8 << 20) + (64 << 10)
"""The same for a reply in shared memory."""
MIN_PIECES_BYTES = 64 << 10
"""Bytes of a record from which it is sent without a copy."""
MAX_OPEN_REQUESTS = 2
"""Requests for one stream that a client sends before it has their replies."""
IDLE_S = 60.0
"""Seconds without any fetch after which a thread and its connection end."""
RETRY_S, GIVE_UP_S = 1.0, 30.0
"""Seconds between two attempts to reach a worker, and after which its data is left to the disk."""
log = logging.getLogger("rlinf")


class RecordServer:
    """Answers requests for the records that this worker has produced."""

    def __init__(self, store: LiveStore) -> None:
        self._live_store = store
        self._large: tuple[Record, EncodedRecord] | None = None
        """The record of which a part was sent last, while there are more parts."""

    def handle(self, request: Request) -> None:
        """Answer a request, now or once there are records.

        Raises:
            KeyError, TypeError, ValueError: the request is malformed.
            DataError: a record cannot be sent.
        """
        out, channel = str(request.arguments["output"]), str(request.arguments["channel"])
        if not out:
            raise ValueError("no output folder")
        self._answer(self._live_store.output(out).stream(channel), request)

    def _answer(self, stream: RecordStream, request: Request) -> None:
        arguments = request.arguments
        position, received = (0, 0), (0, 0)
        if arguments.get("stream") == stream.identity:
            position, received = _position(arguments["position"]), _position(arguments["received"])
        cursor, offset = position
        answer_later = partial(request.handle_later, partial(self._answer, stream))
        own = stream.read_own(cursor, MAX_REPLY_RECORDS, received, answer_later)
        if own is None:
            return
        reply: dict[str, Any] = {"stream": stream.identity}
        if own.is_end:
            request.reply({**reply, "end": own.end})
            return
        reply["position"] = position
        max_bytes = MAX_LOCAL_REPLY_BYTES if request.is_local else MAX_REPLY_BYTES
        encoded = self._encode(own.records, max_bytes)
        if encoded and encoded[0].size > max_bytes:
            stop = min(offset + max_bytes, encoded[0].size)
            if stop == encoded[0].size:
                self._large = None
            part = encoded[0].pieces(offset, stop)
            request.reply({**reply, "size": encoded[0].size}, [part])
        else:
            request.reply(reply, [_to_block(record) for record in encoded])

    def _encode(self, records: list[Record], max_bytes: int) -> list[EncodedRecord]:
        """Return the first records, encoded: as many as a reply may have, or one large record."""
        if records and self._large is not None and self._large[0] is records[0]:
            return [self._large[1]]
        encoded, size = list[EncodedRecord](), 0
        for record in records:
            encoded.append(encode_record(record))
            size += encoded[-1].size
            if size > max_bytes:
                break
        if size <= max_bytes:
            return encoded
        if len(encoded) == 1:
            self._large = (records[0], encoded[0])
        return encoded[:-1] or encoded


def _position(value: Any) -> tuple[int, int]:
    """Return a position in a stream: the number of records and of bytes before it.

    Raises:
        ValueError, TypeError: it is malformed.
    """
    cursor, offset = (int(number) for number in value)
    if cursor < 0 or offset < 0:
        raise ValueError(f"a negative position: {cursor}, {offset}")
    return cursor, offset


def _to_block(record: EncodedRecord) -> Block:
    """Return a record in one piece if it is small, because that takes the least time."""
    return record.to_bytes() if record.size < MIN_PIECES_BYTES else record.pieces(0, record.size)


class RecordReader:
    """Reads the records of one stream: it says what to request, and takes the replies in order.

    Args:
        progress: cursor and identity of the stream; updated when records have been read.
    """

    def __init__(self, output: str, channel: str, progress: FetchProgress) -> None:
        self._output, self._channel, self._progress = output, channel, progress
        self._num_open = 0
        self._cursor = progress.cursor
        """Number of records that have arrived."""
        self._last_position: tuple[int, int] | None = None
        """Position of the last request; None: request nothing ahead of the open requests."""
        self._size = self._num_bytes = self._part_bytes = 0
        """Bytes of the next record, if it is known to be large, how many have arrived, and how many
        each part has."""
        self._large = np.empty(0, np.uint8)
        """The large record of which parts have arrived."""
        self._received = (progress.cursor, 0)
        """Position up to which replies have been read. A worker may forget what a client has
        received, so this is not what has merely arrived."""
        self.is_dropped = False
        """Whether the other worker has dropped the output."""

    @property
    def has_ended(self) -> bool:
        return self._progress.end is not None or self.is_dropped

    def next_request(self) -> dict[str, Any] | None:
        """Return the arguments of the next request; None: there must be a reply first."""
        position = self._next_position()
        if position is None:
            return None
        self._num_open += 1
        self._last_position = position
        return {
            "output": self._output,
            "channel": self._channel,
            "stream": self._progress.stream,
            "position": position,
            "received": self._received,
        }

    def _next_position(self) -> tuple[int, int] | None:
        if self.has_ended or self._num_open >= MAX_OPEN_REQUESTS:
            return None
        if self._num_open == 0:
            return self._cursor, self._num_bytes
        if self._last_position is None or self._last_position[0] != self._cursor or not self._size:
            return None  # the last reply has an unknown number of records
        offset = self._last_position[1] + self._part_bytes
        return (self._cursor, offset) if offset < self._size else (self._cursor + 1, 0)

    def restart(self) -> None:
        """Forget the open requests, because the connection was lost."""
        self._num_open = 0

    def advance(self, reply: Message) -> bool:
        """Note what a reply has; return whether to read it.

        Raises:
            KeyError, TypeError, ValueError: the reply is malformed.
        """
        arguments, progress = reply.arguments, self._progress
        self._num_open -= 1
        if (stream := str(arguments["stream"])) != progress.stream:
            progress.stream, progress.cursor = stream, 0
            self._cursor, self._size, self._num_bytes, self._received = 0, 0, 0, (0, 0)
            self._last_position = None
        if "end" in arguments:
            end = arguments["end"]
            progress.end, self.is_dropped = end and StreamEnd(*end), end is None
            return False
        if _position(arguments["position"]) != (self._cursor, self._num_bytes):
            # An earlier reply was lost, or the stream is another one. The missing part is requested
            # again after all open requests, because one of them may bring it.
            self._last_position = None
            return False
        self._size = int(arguments.get("size", 0))
        if not self._size:
            self._cursor += len(reply.blocks)
            return True
        part_bytes = sum(map(len, pieces_of(reply.blocks[0])))
        if self._num_bytes == 0:
            self._part_bytes = part_bytes
        self._num_bytes += part_bytes
        if self._num_bytes >= self._size:
            self._cursor += 1
            self._size = self._num_bytes = 0
        return True

    def read(self, reply: Message) -> list[Record]:
        """Return the complete records of a reply, after :meth:`advance`.

        Raises:
            DataError, ValueError: they are malformed.
        """
        records = self._read_records(reply)
        self._progress.cursor, self._received = self._cursor, (self._cursor, self._num_bytes)
        return records

    def _read_records(self, reply: Message) -> list[Record]:
        if (size := reply.arguments.get("size")) is None:
            blocks = map(join, reply.blocks)
            return [decode_record(_copy(b) if reply.is_borrowed else b) for b in blocks]
        _, end = reply.arguments["position"]
        if end == 0:
            self._large = np.empty(size, np.uint8)
        for piece in pieces_of(reply.blocks[0]):
            start, end = end, end + len(piece)
            self._large[start:end] = np.frombuffer(piece, np.uint8)
        if end < size:
            return []
        record, self._large = decode_record(self._large.data), np.empty(0, np.uint8)
        return [record]


def _copy(block: Bytes) -> memoryview:
    """Return a copy; NumPy lets the system use large pages for it, ``bytes`` does not."""
    return np.frombuffer(block, np.uint8).copy().data


def fetch_stream(
    folder: Path, worker: str, output: str, channel: str, should_stop: Callable[[], bool]
) -> list[Record]:
    """Fetch all records of a worker's stream, and wait for its end.

    Args:
        folder: the run's folder for channels.

    Raises:
        ChannelFailed: the worker is lost, its stream was closed, or this process must stop.
        DataError: a record is malformed.
    """
    records: list[Record] = []
    reader = RecordReader(output, channel, FetchProgress())
    with closing(RequestClient(worker_pointer(folder, worker), should_stop)) as client:
        while not reader.has_ended:
            while (arguments := reader.next_request()) is not None:
                client.send(RECORDS, arguments)
            _, reply = client.receive()
            if reader.advance(reply):
                records += reader.read(reply)
    if reader.is_dropped:
        raise ChannelFailed(f"{worker} no longer has {channel} of {output}")
    return records


class Fetch(ABC):
    """Data of one worker that is fetched by one or several requests.

    Args:
        output: the output folder of the data, relative to the run folder.
        channel: the name of the data in the worker that produces it.
        way: more about the data. Fetches of one output and channel with different ways are
            independent.
        destination: where the data goes. A further fetch of the same data with an equal destination
            is ignored; one with another destination replaces the earlier one.
    """

    method: str
    """Method of the worker's server."""
    use_shared_memory = False
    """Whether replies may come in shared memory."""

    def __init__(
        self, output: str, channel: str, way: tuple[str, ...] = (), destination: object = None
    ) -> None:
        self.output, self.channel, self.destination = output, channel, destination
        self.key = (output, channel, *way)

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether there is nothing more to fetch."""

    @abstractmethod
    def next_request(self) -> dict[str, Any] | None:
        """Return the arguments of the next request; None: there must be a reply first."""

    @abstractmethod
    def advance(self, reply: Message) -> bool:
        """Note that a reply has arrived, so that the next request can be sent before it is handled.

        Returns whether it must be handled. Any exception, here and in :meth:`handle`, means that
        the reply cannot be used.
        """

    @abstractmethod
    def handle(self, reply: Message) -> None:
        """Use the data of a reply."""

    @abstractmethod
    def restart(self) -> None:
        """Forget the open requests, because the connection was lost."""


class Fetcher:
    """Fetches data from other workers.

    Args:
        folder: the run's folder for channels.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads: dict[str, _FetchThread] = {}
        """Thread by worker."""

    def add(self, worker: str, fetch: Fetch) -> None:
        """Fetch data of a worker from now on; return at once."""
        thread = self._threads.get(worker)
        if thread is None or not thread.add(fetch):
            thread = _FetchThread(worker, worker_pointer(self._folder, worker))
            self._threads[worker] = thread
            thread.add(fetch)

    def drop_outputs(self, folders: Collection[str]) -> None:
        """Stop to fetch committed outputs; they are read from disk from now on."""
        for thread in list(self._threads.values()):
            thread.drop_outputs(folders)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.close()


class _FetchThread:
    """A thread that fetches the data of one worker."""

    def __init__(self, worker: str, pointer: Path) -> None:
        self._worker = worker
        self._client = RequestClient(pointer, lambda: self._is_closed)
        self._changed = threading.Condition()
        self._fetches: dict[tuple[str, ...], Fetch] = {}
        """Fetches that have not ended, by key."""
        self._open: dict[int, Fetch] = {}
        """Fetch of each request without a reply."""
        self._is_closed = False
        self._thread = start_service_thread(f"data of {worker}", self._run)

    def add(self, fetch: Fetch) -> bool:
        """Fetch data from now on; returns False if the thread has ended."""
        with self._changed:
            if self._is_closed:
                return False
            existing = self._fetches.get(fetch.key)
            is_repeated = existing is not None and existing.destination == fetch.destination
            if not is_repeated and not fetch.has_ended:
                self._fetches[fetch.key] = fetch
                self._wake()
        return True

    def drop_outputs(self, folders: Collection[str]) -> None:
        with self._changed:
            for key in [key for key in self._fetches if key[0] in folders]:
                del self._fetches[key]

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._wake()
        self._thread.join(5)

    def _wake(self) -> None:
        self._changed.notify_all()
        self._client.wake()

    def _run(self) -> None:
        failing_since: float | None = None
        while not self._is_closed:
            with self._changed:
                if not self._changed.wait_for(lambda: self._fetches or self._is_closed, IDLE_S):
                    self._is_closed = True
                    break
                fetches = list(self._fetches.values())
            try:
                for fetch in fetches:
                    self._send_requests(fetch)
                self._handle(*self._client.receive())
                failing_since = None
            except RequestRejected as error:
                self._give_up([self._open.pop(error.number)], str(error))
            except ChannelFailed as error:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > GIVE_UP_S:
                    self._give_up(fetches, str(error))
                    failing_since = None
                self._open.clear()
                for fetch in fetches:
                    fetch.restart()
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, RETRY_S)
        self._client.close()

    def _send_requests(self, fetch: Fetch) -> None:
        while (arguments := fetch.next_request()) is not None:
            number = self._client.send(
                fetch.method, arguments, use_shared_memory=fetch.use_shared_memory
            )
            self._open[number] = fetch

    def _handle(self, number: int, reply: Message) -> None:
        fetch = self._open.pop(number, None)
        if fetch is None or not self._is_wanted(fetch):
            return  # woken, or the output was dropped
        try:
            must_handle = fetch.advance(reply)
            try:
                self._send_requests(fetch)
            finally:
                if must_handle:
                    fetch.handle(reply)
        except ChannelFailed:
            raise
        except Exception as error:  # foreign bytes may cause any error
            self._give_up([fetch], f"{type(error).__name__}: {error}")
        else:
            if fetch.has_ended:
                self._remove(fetch)

    def _is_wanted(self, fetch: Fetch) -> bool:
        with self._changed:
            return self._fetches.get(fetch.key) is fetch

    def _give_up(self, fetches: list[Fetch], reason: str) -> None:
        for fetch in filter(self._is_wanted, fetches):
            log.warning(
                "%s of %s from %s: %s; read from disk instead",
                fetch.channel,
                fetch.output,
                self._worker,
                reason,
            )
            self._remove(fetch)

    def _remove(self, fetch: Fetch) -> None:
        with self._changed:
            if self._fetches.get(fetch.key) is fetch:
                del self._fetches[fetch.key]


class RecordFetch(Fetch):
    """Adds the records of one worker to the live store.

    It continues an earlier fetch of the same records.
    """

    method = RECORDS

    def __init__(self, order: FetchOutput, worker: str, store: LiveStore) -> None:
        channel = work_item_channel(order.work_item) if order.work_item else order.channel
        stream = store.output(order.output).stream(order.channel)
        progress = stream.fetched_from[worker, channel]
        super().__init__(order.output, channel, destination=progress)
        self._order, self._live_store, self._progress = order, store, progress
        self._reader = RecordReader(self.output, self.channel, progress)
        self.use_shared_memory = order.transport == SHARED_MEMORY

    @property
    def has_ended(self) -> bool:
        return self._reader.has_ended

    def next_request(self) -> dict[str, Any] | None:
        return self._reader.next_request()

    def restart(self) -> None:
        self._reader.restart()

    def advance(self, reply: Message) -> bool:
        should_read = self._reader.advance(reply)
        end = self._progress.end
        if end is not None and not self._order.work_item:
            self._live_store.output(self.output).stream(self._order.channel).finish_rank(*end)
        return should_read

    def handle(self, reply: Message) -> None:
        order, output = self._order, self._live_store.output(self.output)
        records = self._reader.read(reply)
        if order.source_attempt is not None:
            output.add_source_attempt(order.source_attempt)
        output.stream(order.channel).put_remote(*records)
