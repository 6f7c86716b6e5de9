"""Transfer of records between workers: a worker fetches them from the workers that produced them.

Each worker serves the method ``records`` (:mod:`rlinf.channels.requests`). A request names an
output folder, a channel, and the cursor: the number of records that the client has already. The
reply has further records of the rank of this worker, or the end of its stream. It is sent once
there are some. A client on the same machine can get the records in shared memory.

The live store is a cache: if a worker does not answer, its records are read from disk after the
commit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.channels.channel import ChannelFailed
from rlinf.channels.requests import Message, Request, RequestClient, RequestRejected
from rlinf.channels.wire_format import ALIGN_BYTES, EncodedRecord, decode_record, encode_record
from rlinf.data.record import Record
from rlinf.errors import DataError, InputError, StorageError
from rlinf.shared_memory import (
    attach_segment,
    create_segment,
    new_segment_name,
    remove_segment,
    shared_memory_id,
)
from rlinf.threads import start_service_thread
from stages.layout import work_item_channel, worker_pointer
from stages.live_store import LiveStore, RecordStream, StreamEnd
from stages.worker.messages import FetchOutput

RECORDS = "records"
"""Method of a worker's server."""
SOCKET, SHARED_MEMORY = "socket", "shared_memory"
"""The transports of records."""
MAX_REPLY_RECORDS = 512
MAX_REPLY_BYTES = 16 << 20
"""Bytes of records after which a reply gets no further record."""
RETRY_S, GIVE_UP_S = 1.0, 30.0
"""Seconds between two attempts to reach a worker, and after which its records are left to the
disk."""
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
        cursor = int(arguments["cursor"])
        if not out or cursor < 0:
            raise ValueError("no output folder, or a negative cursor")
        # The client has read its last reply.
        self._remove_segment((request.client, out, channel))
        self._answer(request, self._live_store.output(out).stream(channel), cursor)

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

    def _answer(self, request: Request, stream: RecordStream, cursor: int) -> None:
        answer_later = partial(self._answer, request, stream, cursor)
        own = stream.read_own(cursor, MAX_REPLY_RECORDS, answer_later)
        if own is None:
            return
        try:
            if not own.records:
                request.reply({"end": own.end})
                return
            encoded = list(_first_records(own.records))
            is_local = request.arguments.get("memory") == shared_memory_id()
            if not (is_local and self._reply_in_shared_memory(request, encoded)):
                request.reply(blocks=[record.to_bytes() for record in encoded])
        except DataError as error:
            request.reject(str(error))

    def _reply_in_shared_memory(self, request: Request, encoded: list[EncodedRecord]) -> bool:
        """Write the records to new shared memory; return False if there is not enough."""
        starts, end = [], 0
        for record in encoded:
            starts.append(end)
            end += -(-record.size // ALIGN_BYTES) * ALIGN_BYTES
        name = new_segment_name()
        try:
            data = np.frombuffer(create_segment(name, end), np.uint8)
        except StorageError as error:
            log.warning("records are sent by socket: %s", error)
            return False
        for start, record in zip(starts, encoded, strict=True):
            record.write(data[start : start + record.size])
        arguments = request.arguments
        self._segments[request.client, arguments["output"], arguments["channel"]] = name
        places = [(start, record.size) for start, record in zip(starts, encoded, strict=True)]
        request.reply({"segment": name, "places": places})
        return True


def _first_records(records: list[Record]) -> Iterator[EncodedRecord]:
    """Yield the encoded records of one reply, at least one."""
    size = 0
    for record in records:
        encoded = encode_record(record)
        size += encoded.size
        if size > max(MAX_REPLY_BYTES, encoded.size):
            return
        yield encoded


def _read_reply(reply: Message) -> list[Record]:
    """Return the records of a reply.

    Raises:
        DataError, InputError, OSError: they cannot be read.
    """
    segment = reply.arguments.get("segment")
    if segment is None:
        return [decode_record(block) for block in reply.blocks]
    # The arrays of the records keep the memory mapped after its name is removed.
    memory = memoryview(attach_segment(str(segment))).toreadonly()
    places = reply.arguments["places"]
    return [decode_record(memory[start : start + size]) for start, size in places]


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
    with closing(RequestClient(worker_pointer(folder, worker), should_stop)) as client:
        while True:
            arguments = {"output": output, "channel": channel, "cursor": len(records)}
            reply = client.request(RECORDS, arguments)
            if "end" not in reply.arguments:
                records += _read_reply(reply)
            elif reply.arguments["end"] is None:
                raise ChannelFailed(f"{worker} no longer has {channel} of {output}")
            else:
                return records


class RecordFetcher:
    """Fetches records from other workers into the live store, with one thread per worker.

    Args:
        folder: the run's folder for channels.
    """

    def __init__(self, folder: Path, store: LiveStore) -> None:
        self._folder, self._live_store = folder, store
        self._producers: dict[str, _Producer] = {}
        self._lock = threading.Lock()

    def fetch(self, order: FetchOutput) -> None:
        """Fetch an output's records from now on; return at once."""
        self._live_store.output(order.output)  # replaces an invalidated output
        for worker in order.producers:
            with self._lock:
                if worker not in self._producers:
                    pointer = worker_pointer(self._folder, worker)
                    self._producers[worker] = _Producer(worker, pointer, self._live_store)
                self._producers[worker].fetch(order)

    def drop_outputs(self, folders: Collection[str]) -> None:
        """Stop to fetch committed outputs; they are read from disk from now on."""
        for producer in list(self._producers.values()):
            producer.drop_outputs(folders)

    def close(self) -> None:
        for producer in self._producers.values():
            producer.close()


@dataclass(eq=False)
class _FetchedStream:
    order: FetchOutput
    channel: str
    """The channel in the worker that produces the records."""
    cursor: int = 0
    request: int | None = None
    """Number of the open request."""


class _Producer:
    """Fetches the records of one worker in its own thread."""

    def __init__(self, worker: str, pointer: Path, store: LiveStore) -> None:
        self._worker, self._live_store = worker, store
        self._client = RequestClient(pointer, lambda: self._is_closed)
        self._changed = threading.Condition()
        self._streams: dict[tuple[str, str], _FetchedStream] = {}
        """Streams that have not ended, by output and channel in the worker."""
        self._is_closed = False
        self._thread = start_service_thread(f"records of {worker}", self._run)

    def fetch(self, order: FetchOutput) -> None:
        channel = work_item_channel(order.work_item) if order.work_item else order.channel
        with self._changed:
            # An earlier order for the same records may be for an output that was invalidated.
            self._streams[order.output, channel] = _FetchedStream(order, channel)
            self._wake()

    def drop_outputs(self, folders: Collection[str]) -> None:
        with self._changed:
            for key in [key for key in self._streams if key[0] in folders]:
                del self._streams[key]

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
                while not self._streams and not self._is_closed:
                    self._changed.wait()
                streams = list(self._streams.values())
            try:
                self._request(streams)
                number, reply = self._client.receive()
                self._handle(number, reply)
                failing_since = None
            except RequestRejected as error:
                self._drop([s for s in streams if s.request == error.number], str(error))
            except ChannelFailed as error:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > GIVE_UP_S:
                    self._drop(streams, str(error))
                    failing_since = None
                # A new process of the same name may have the records in another order.
                for stream in streams:
                    stream.cursor, stream.request = 0, None
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, RETRY_S)
        self._client.close()

    def _request(self, streams: list[_FetchedStream]) -> None:
        for stream in streams:
            if stream.request is None:
                arguments: dict[str, Any] = {
                    "output": stream.order.output,
                    "channel": stream.channel,
                    "cursor": stream.cursor,
                }
                if stream.order.transport == SHARED_MEMORY:
                    arguments["memory"] = shared_memory_id()
                stream.request = self._client.send(RECORDS, arguments)

    def _handle(self, number: int, reply: Message) -> None:
        with self._changed:
            stream = next((s for s in self._streams.values() if s.request == number), None)
        if stream is None:
            return  # woken, or the stream was dropped
        stream.request = None
        order = stream.order
        if "end" in reply.arguments:
            if (end := reply.arguments["end"]) is not None and not order.work_item:
                live = self._live_store.output(order.output).stream(order.channel)
                live.finish_rank(*StreamEnd(*end))
            self._remove(stream)
            return
        try:
            records = _read_reply(reply)
        except (DataError, InputError, OSError) as error:
            self._drop([stream], str(error))
            return
        output = self._live_store.output(order.output)
        if order.source_attempt is not None:
            output.add_source_attempt(order.source_attempt)
        output.stream(order.channel).put_remote(*records)
        stream.cursor += len(records)

    def _drop(self, streams: list[_FetchedStream], reason: str) -> None:
        for stream in streams:
            order = stream.order
            log.warning(
                "%s of %s from %s: %s; read from disk instead",
                order.channel,
                order.output,
                self._worker,
                reason,
            )
            self._remove(stream)

    def _remove(self, stream: _FetchedStream) -> None:
        key = (stream.order.output, stream.channel)
        with self._changed, suppress(KeyError):
            if self._streams[key] is stream:
                del self._streams[key]
