"""Transfer of records between workers: a worker fetches them from the workers that produced them.

Each worker serves the method ``records`` (:mod:`rlinf.channels.requests`). A request names an
output folder, a channel, and the cursor: the number of records that the client has already. The
reply has further records of the rank of this worker, or the end of its stream. It is sent once
there are some. A client on the same machine can get the records in shared memory. A large record is
sent in parts, and a request says by ``offset`` how many of its bytes the client has.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlinf.channels.channel import ChannelFailed
from rlinf.channels.requests import Block, Message, Request, RequestClient, RequestRejected
from rlinf.channels.wire_format import ALIGN_BYTES, EncodedRecord, decode_record, encode_record
from rlinf.data.record import Record
from rlinf.errors import DataError, StorageError
from rlinf.shared_memory import (
    attach_segment,
    create_segment,
    new_segment_name,
    remove_segment,
    shared_memory_id,
)
from rlinf.threads import start_service_thread
from stages.layout import work_item_channel, worker_pointer
from stages.live_store import FetchProgress, LiveStore, RecordStream, StreamEnd
from stages.worker.messages import FetchOutput

RECORDS = "records"
"""Method of a worker's server."""
SOCKET, SHARED_MEMORY = "socket", "shared_memory"
"""The transports of records."""
MAX_REPLY_RECORDS = 512
MAX_REPLY_BYTES = 4 << 20
"""Bytes of records in a reply, or of one part of a record; on a slow network, a reply must arrive
before the worker counts as lost."""
MIN_SEGMENT_BYTES = 256 << 10
"""Bytes of records below which a reply is sent by socket, because a process can map only a limited
number of segments (65,530 by default)."""
IDLE_S = 60.0
"""Seconds without any fetch after which a thread and its connection end."""
RETRY_S, GIVE_UP_S = 1.0, 30.0
"""Seconds between two attempts to reach a worker, and after which its data is left to the disk."""
log = logging.getLogger("rlinf")


class RecordServer:
    """Answers requests for the records that this worker has produced."""

    def __init__(self, store: LiveStore) -> None:
        self._live_store = store
        self._segments: dict[tuple[bytes, str, str], str] = {}
        """Shared memory with the last reply, by client, output and channel."""

    def handle(self, request: Request) -> None:
        """Answer a request, now or once there are records.

        Raises:
            KeyError, TypeError, ValueError: the request is malformed.
        """
        arguments = request.arguments
        out, channel = str(arguments["output"]), str(arguments["channel"])
        cursor, offset = int(arguments["cursor"]), int(arguments.get("offset", 0))
        if not out or cursor < 0 or offset < 0:
            raise ValueError("no output folder, or a negative cursor")
        stream = self._live_store.output(out).stream(channel)
        if arguments.get("stream") != stream.identity:
            cursor = offset = 0
        key = (request.client, out, channel)
        self._remove_segment(key)  # the client has read its last reply
        self._answer(_RecordRequest(request, key, stream, cursor, offset))

    def drop_outputs(self, folders: Collection[str]) -> None:
        """Remove the shared memory with records of these outputs."""
        for key in [key for key in list(self._segments) if key[1] in folders]:
            self._remove_segment(key)

    def close(self) -> None:
        for key in list(self._segments):
            self._remove_segment(key)

    def _remove_segment(self, key: tuple[bytes, str, str]) -> None:
        if (name := self._segments.pop(key, None)) is not None:
            remove_segment(name)

    def _answer(self, query: _RecordRequest) -> None:
        request, stream = query.request, query.stream
        own = stream.read_own(
            query.cursor, MAX_REPLY_RECORDS, partial(self._answer, query), query.offset
        )
        if own is None:
            return
        # A failure must neither reach the stage that has produced a record nor other readers.
        try:
            if not own.records:
                request.reply({"stream": stream.identity, "end": own.end})
                return
            encoded = list(_first_records(own.records))
            size = sum(record.size for record in encoded)
            is_local = request.arguments.get("memory") == shared_memory_id()
            if is_local and size >= MIN_SEGMENT_BYTES and self._reply_in_memory(query, encoded):
                return
            blocks = [record.to_bytes() for record in encoded]
            arguments: dict[str, Any] = {"stream": stream.identity}
            if size > MAX_REPLY_BYTES:
                arguments |= {"size": size, "offset": query.offset}
                blocks = [blocks[0][query.offset :][:MAX_REPLY_BYTES]]
            request.reply(arguments, blocks)
        except Exception as error:
            log.warning("records of %s are not sent: %s", query.key[1], error)
            request.reject(f"{type(error).__name__}: {error}")

    def _reply_in_memory(self, query: _RecordRequest, encoded: list[EncodedRecord]) -> bool:
        """Write the records to new shared memory; return False if there is not enough."""
        starts, end = [], 0
        for record in encoded:
            starts.append(end)
            end += -(-record.size // ALIGN_BYTES) * ALIGN_BYTES
        name = new_segment_name()
        try:
            data = np.frombuffer(create_segment(name, end), np.uint8)
        except (StorageError, OSError) as error:
            log.warning("records are sent by socket: %s", error)
            return False
        for start, record in zip(starts, encoded, strict=True):
            record.write(data[start : start + record.size])
        self._segments[query.key] = name
        places = [(start, record.size) for start, record in zip(starts, encoded, strict=True)]
        query.request.reply({"stream": query.stream.identity, "segment": name, "places": places})
        return True


class _RecordRequest(NamedTuple):
    """A request for records; ``key`` has the client, the output and the channel."""

    request: Request
    key: tuple[bytes, str, str]
    stream: RecordStream
    cursor: int
    offset: int


def _first_records(records: list[Record]) -> Iterator[EncodedRecord]:
    """Yield the encoded records of one reply, at least one."""
    size = 0
    for record in records:
        encoded = encode_record(record)
        size += encoded.size
        if size > max(MAX_REPLY_BYTES, encoded.size):
            return
        yield encoded


class RecordReader:
    """Reads the replies with the records of one stream.

    Args:
        progress: cursor and identity of the stream; updated.
    """

    def __init__(self, output: str, channel: str, progress: FetchProgress) -> None:
        self._output, self._channel, self._progress = output, channel, progress
        self._part = bytearray()
        """The first bytes of a large record."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the next request."""
        return {
            "output": self._output,
            "channel": self._channel,
            "stream": self._progress.stream,
            "cursor": self._progress.cursor,
            "offset": len(self._part),
        }

    def read(self, reply: Message) -> list[Record]:
        """Return the complete records of a reply.

        Raises:
            DataError, InputError, OSError: they cannot be read.
        """
        arguments, progress = reply.arguments, self._progress
        if (stream := str(arguments["stream"])) != progress.stream:
            progress.stream, progress.cursor = stream, 0
            self._part.clear()
        records = self._records(arguments, reply.blocks)
        progress.cursor += len(records)
        return records

    def _records(self, arguments: Mapping[str, Any], blocks: Sequence[Block]) -> list[Record]:
        if (size := arguments.get("size")) is not None:
            if arguments["offset"] != len(self._part):
                raise DataError("a part of another place of the record")
            self._part += blocks[0]
            if len(self._part) < size:
                return []
            block, self._part = self._part, bytearray()
            return [decode_record(block)]
        if (segment := arguments.get("segment")) is None:
            return [decode_record(block) for block in blocks]
        # The arrays of the records keep the memory mapped after its name is removed.
        memory = memoryview(attach_segment(str(segment))).toreadonly()
        return [decode_record(memory[start : start + n]) for start, n in arguments["places"]]


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
        while True:
            reply = client.request(RECORDS, reader.arguments())
            if "end" not in reply.arguments:
                records += reader.read(reply)
            elif reply.arguments["end"] is None:
                raise ChannelFailed(f"{worker} no longer has {channel} of {output}")
            else:
                return records


class Fetch(ABC):
    """Data of one worker that is fetched by one or several requests.

    Args:
        output: the output folder of the data, relative to the run folder.
        channel: the name of the data in the worker that produces it.
        destination: where the data goes. A further fetch of the same data with an equal destination
            is ignored; one with another destination replaces the earlier one.
    """

    method: str
    """Method of the worker's server."""

    def __init__(self, output: str, channel: str, destination: object) -> None:
        self.output, self.channel, self.destination = output, channel, destination
        self.number: int | None = None
        """Number of the open request."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether there is nothing more to fetch."""

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the next request."""

    @abstractmethod
    def handle(self, reply: Message) -> None:
        """Handle a reply.

        Any exception means that the reply cannot be used.
        """

    def restart(self) -> None:
        """Start again, because the connection was lost and the worker may have been replaced."""
        self.number = None


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
        self._fetches: dict[tuple[str, str], Fetch] = {}
        """Fetches that have not ended, by output and channel."""
        self._is_closed = False
        self._thread = start_service_thread(f"data of {worker}", self._run)

    def add(self, fetch: Fetch) -> bool:
        """Fetch data from now on; returns False if the thread has ended."""
        key = (fetch.output, fetch.channel)
        with self._changed:
            if self._is_closed:
                return False
            existing = self._fetches.get(key)
            is_repeated = existing is not None and existing.destination == fetch.destination
            if not is_repeated and not fetch.has_ended:
                self._fetches[key] = fetch
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
                    if fetch.number is None:
                        fetch.number = self._client.send(fetch.method, fetch.arguments())
                self._handle(*self._client.receive())
                failing_since = None
            except RequestRejected as error:
                self._give_up([f for f in fetches if f.number == error.number], str(error))
            except ChannelFailed as error:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > GIVE_UP_S:
                    self._give_up(fetches, str(error))
                    failing_since = None
                for fetch in fetches:
                    fetch.restart()
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, RETRY_S)
        self._client.close()

    def _handle(self, number: int, reply: Message) -> None:
        with self._changed:
            fetch = next((f for f in self._fetches.values() if f.number == number), None)
        if fetch is None:
            return  # woken, or the output was dropped
        fetch.number = None
        try:
            fetch.handle(reply)
        except Exception as error:  # foreign bytes may cause any error
            self._give_up([fetch], f"{type(error).__name__}: {error}")
        else:
            if fetch.has_ended:
                self._remove(fetch)

    def _give_up(self, fetches: list[Fetch], reason: str) -> None:
        for fetch in fetches:
            log.warning(
                "%s of %s from %s: %s; read from disk instead",
                fetch.channel,
                fetch.output,
                self._worker,
                reason,
            )
            self._remove(fetch)

    def _remove(self, fetch: Fetch) -> None:
        key = (fetch.output, fetch.channel)
        with self._changed:
            if self._fetches.get(key) is fetch:
                del self._fetches[key]


class RecordFetch(Fetch):
    """Adds the records of one worker to the live store.

    It continues an earlier fetch of the same records.
    """

    method = RECORDS

    def __init__(self, order: FetchOutput, worker: str, store: LiveStore) -> None:
        channel = work_item_channel(order.work_item) if order.work_item else order.channel
        stream = store.output(order.output).stream(order.channel)
        progress = stream.fetched_from[worker, channel]
        super().__init__(order.output, channel, progress)
        self._order, self._live_store, self._progress = order, store, progress
        self._is_dropped = False
        """Whether the other worker has dropped the output."""
        self._reader = RecordReader(self.output, self.channel, progress)

    @property
    def has_ended(self) -> bool:
        return self._progress.has_ended or self._is_dropped

    def arguments(self) -> dict[str, Any]:
        arguments = self._reader.arguments()
        if self._order.transport == SHARED_MEMORY:
            arguments["memory"] = shared_memory_id()
        return arguments

    def handle(self, reply: Message) -> None:
        order, output = self._order, self._live_store.output(self.output)
        if "end" in reply.arguments:
            end = reply.arguments["end"]
            # A dropped output may be produced again, and the next order then fetches it.
            self._is_dropped, self._progress.has_ended = end is None, end is not None
            if end is not None and not order.work_item:
                output.stream(order.channel).finish_rank(*StreamEnd(*end))
            return
        records = self._reader.read(reply)
        if order.source_attempt is not None:
            output.add_source_attempt(order.source_attempt)
        output.stream(order.channel).put_remote(*records)
