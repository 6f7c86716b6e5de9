"""Transfer of records between workers: a worker fetches them from the workers that produced them.

Each worker serves the method ``records`` (:mod:`rlinf.channels.requests`). A request names an
output folder, a channel, and the cursor: the number of records that the client has already. The
reply has further records of the rank of this worker, or the end of its stream. It is sent once
there are some. A client on the same machine can get the records in shared memory.

What a worker fetches, records or weights (:class:`Fetch`), is a cache of committed files. If
another worker does not answer, its data is read from disk after the commit.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.channels.channel import ChannelFailed
from rlinf.channels.requests import Message, Request, RequestClient, RequestRejected
from rlinf.channels.wire_format import ALIGN_BYTES, EncodedRecord, decode_record, encode_record
from rlinf.data.record import Record
from rlinf.errors import DataError, RlinfError, StorageError
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
MAX_REPLY_BYTES = 4 << 20
"""Bytes of records after which a reply gets no further record; on a slow network, it must arrive
before the worker counts as lost."""
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


class Fetch(ABC):
    """Data of one worker that is fetched by one or several requests.

    Args:
        output: the output folder of the data, relative to the run folder.
        channel: the name of the data in the worker that produces it.
        destination: where the data goes. A further fetch with the same destination is ignored.
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

        Raises:
            RlinfError, OSError: the reply cannot be used.
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
        if worker not in self._threads:
            self._threads[worker] = _FetchThread(worker, worker_pointer(self._folder, worker))
        self._threads[worker].add(fetch)

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

    def add(self, fetch: Fetch) -> None:
        key = (fetch.output, fetch.channel)
        with self._changed:
            existing = self._fetches.get(key)
            is_repeated = existing is not None and existing.destination is fetch.destination
            if not is_repeated and not fetch.has_ended:
                self._fetches[key] = fetch
                self._wake()

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
                while not self._fetches and not self._is_closed:
                    self._changed.wait()
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
        except (RlinfError, OSError) as error:
            self._give_up([fetch], str(error))
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

    @property
    def has_ended(self) -> bool:
        return self._progress.has_ended

    def arguments(self) -> dict[str, Any]:
        cursor = self._progress.cursor
        arguments = {"output": self.output, "channel": self.channel, "cursor": cursor}
        if self._order.transport == SHARED_MEMORY:
            arguments["memory"] = shared_memory_id()
        return arguments

    def handle(self, reply: Message) -> None:
        order, output = self._order, self._live_store.output(self.output)
        if "end" in reply.arguments:
            self._progress.has_ended = True
            if (end := reply.arguments["end"]) is not None and not order.work_item:
                output.stream(order.channel).finish_rank(*StreamEnd(*end))
            return
        records = _read_reply(reply)
        if order.source_attempt is not None:
            output.add_source_attempt(order.source_attempt)
        output.stream(order.channel).put_remote(*records)
        self._progress.cursor += len(records)

    def restart(self) -> None:
        super().restart()
        self._progress.cursor = 0  # a new process may have the records in another order
