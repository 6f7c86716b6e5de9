"""Transfer of records from a stage in one worker to the live stores of other workers.

Every worker receives all records on one socket. The ``info`` of a record has the *target*: the
output folder, relative to the run folder, and the output channel (``FOLDER:CHANNEL``). The worker
adds received records to its live store. A producer ends its stream with a record without steps,
whose ``info`` has the number of records.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlinf.channels.channel import ChannelClosed, ChannelFailed, RecordSink
from rlinf.channels.record_streams import SharedMemorySink, SocketSink, SocketSource
from rlinf.data.record import Record, RecordId, Scalar
from rlinf.errors import DataError, InputError, RlinfError, StorageError
from rlinf.threads import BackgroundWorker, MalformedCounter, start_service_thread
from stages.live_store import LiveStore

REPORT_DELAY_S = 0.5
"""Seconds before a lost worker is reported, so that all its streams cause one report."""
TARGET, PRODUCER, RANK, NUM_RANKS, COUNT = "_to", "_from", "_rank", "_ranks", "_count"
"""Keys of ``info``: target and producing worker; at the end of a stream also the producer's rank,
the number of ranks, and the number of records."""
SOURCE_ATTEMPT = "_source_attempt"
"""Key of ``info``, if the record was computed from an uncommitted output: the attempt that produced
this output."""
SOCKET, SHARED_MEMORY = "socket", "shared_memory"
"""The transports of records."""
SHARED_MEMORY_BYTES = 128 << 20
"""Shared memory for the records from one worker to another; no record can be larger."""
RecordHandler = Callable[[str, Record], None]
"""Called with output folder and record."""
ForwardCallback = Callable[[str, str, Record], None]
"""Called with target, producer and record."""
TRANSFER_ERRORS = (RlinfError, ChannelClosed, OSError)
"""Errors of sending records or weights; the stages that wait for them then read from disk."""
log = logging.getLogger("rlinf")


class RecordReceiver:
    """A receiver of records from other workers, with a thread that adds them to the store.

    Args:
        folder: the run's folder for channels.
        name: the name of this worker.
        handlers: handlers of channels that are not record streams, by channel.
        forward: called with each record of a stream, including its end.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        store: LiveStore,
        handlers: Mapping[str, RecordHandler] | None = None,
        *,
        forward: ForwardCallback = lambda *_: None,
    ) -> None:
        self._live_store, self._handlers, self._forward = store, handlers or {}, forward
        self._source = SocketSource(folder, name)
        self._malformed = MalformedCounter(f"receiver of {name}")
        self._thread = start_service_thread("receiver", self._run)

    @property
    def num_malformed(self) -> int:
        """The number of invalid records and messages that were dropped."""
        return self._malformed.count + self._source.malformed

    def close(self) -> None:
        self._source.close()
        self._thread.join(5)

    def _run(self) -> None:
        for record in self._source:
            # Copy, because the sender reuses this memory while the live store has the record.
            self._handle(copy_record(record) if self._source.is_borrowed else record)

    def _handle(self, record: Record) -> None:
        info = dict(record.info)
        try:
            target, producer = str(info.pop(TARGET)), str(info.pop(PRODUCER, ""))
            out, separator, channel = target.rpartition(":")
            if not (out and separator and channel):
                raise ValueError(f"no output and channel: {target[:80]!r}")
            if NUM_RANKS in info:
                count, rank, ranks = (int(info[name]) for name in (COUNT, RANK, NUM_RANKS))
        except (KeyError, ValueError) as error:
            self._malformed.count_dropped(error)
            return
        if channel in self._handlers:
            self._handlers[channel](out, replace(record, info=info))
            return
        output = self._live_store.output(out)
        if (source_attempt := info.pop(SOURCE_ATTEMPT, None)) is not None:
            output.add_source_attempt(str(source_attempt))
        stream = output.stream(channel)
        if NUM_RANKS in info:
            stream.finish_rank(count, rank, ranks)
        else:
            stream.put_remote(replace(record, info=info))
        self._forward(target, producer, record)


def copy_record(record: Record) -> Record:
    """Return the record with copies of its arrays."""
    steps, context = (
        {name: array.copy() for name, array in columns.items()}
        for columns in (record.steps, record.context)
    )
    return replace(record, steps=steps, context=context)


class RecordSender:
    """Sends records to the live stores of other workers; one connection per worker and transport.

    Args:
        folder: the run's folder for channels.
        on_connection_lost: called with the name of a worker that no longer receives records.
        name: the name of this worker.
    """

    def __init__(
        self,
        folder: Path,
        on_connection_lost: Callable[[str], None] = lambda _: None,
        name: str = "",
    ) -> None:
        self.folder, self._on_connection_lost, self.name = folder, on_connection_lost, name
        self._connections: dict[tuple[str, str], RecordSink] = {}
        """Connections by worker and transport."""
        self._subscribers: dict[str, dict[str, str]] = {}
        """Transport of each subscribed worker, by target."""
        self._streams: dict[str, StreamSender] = {}
        """Open streams of this worker's records, by target."""
        self._lost_workers: set[str] = set()
        """Workers whose loss will be reported soon."""
        self._lock = threading.Lock()

    def open_stream(
        self, target: str, rank: int, num_ranks: int, get_records: Callable[[], list[Record]]
    ) -> StreamSender:
        """Open a stream of this worker's records to its current and future subscribers.

        Args:
            target: output folder and channel.
            get_records: returns the existing records.
        """
        with self._lock:
            sender = self._streams[target] = StreamSender(
                target, self, rank, num_ranks, get_records
            )
            subscribers = dict(self._subscribers.get(target, {}))
        sender.add_receivers(subscribers)
        return sender

    def subscribe(self, target: str, transports: Mapping[str, str]) -> None:
        """Send the existing and future records of a target to workers; return at once.

        Args:
            transports: transport by name of the worker.
        """
        with self._lock:
            self._subscribers.setdefault(target, {}).update(transports)
            sender = self._streams.get(target)
        if sender is not None:
            # Run it in a thread, so that the stage and the worker's orders do not wait.
            threading.Thread(
                target=sender.add_receivers, args=(dict(transports),), daemon=True
            ).start()

    def drop_outputs(self, folders: Collection[str]) -> None:
        """Drop committed outputs, because their records are read from disk from now on."""
        with self._lock:
            for table in (self._streams, self._subscribers):
                for target in [target for target in table if target.rpartition(":")[0] in folders]:
                    del table[target]

    def stream_to(
        self, target: str, workers: Collection[str], rank: int, num_ranks: int
    ) -> StreamSender:
        """Return a new stream of records to these workers only, by socket."""
        sender = StreamSender(target, self, rank, num_ranks)
        sender.add_receivers(dict.fromkeys(workers, SOCKET))
        return sender

    def connect(self, name: str, transport: str) -> RecordSink | None:
        """Return a connection to a worker; by socket if there is no shared memory with it.

        Returns None if the worker has no receiver, or if its receiver does not answer.
        """
        with contextlib.suppress(InputError, ChannelFailed), self._lock:
            if (name, transport) not in self._connections:
                self._connections[name, transport] = self._connect(name, transport)
            return self._connections[name, transport]
        return self.connect(name, SOCKET) if transport == SHARED_MEMORY else None

    def _connect(self, name: str, transport: str) -> RecordSink:
        if transport == SHARED_MEMORY:
            try:
                return SharedMemorySink(self.folder, name, size=SHARED_MEMORY_BYTES)
            except StorageError as error:
                log.warning("records go to %s by socket: %s", name, error)
        return SocketSink(self.folder, name)

    def disconnect(self, name: str, connection: RecordSink | None) -> None:
        """Drop the connection to a worker that does not answer, and report it."""
        with self._lock:
            keys = [key for key, other in self._connections.items() if other is connection]
            for key in keys:
                del self._connections[key]
            # Each stream to this worker calls this method, but one report suffices.
            should_report = name not in self._lost_workers
            self._lost_workers.add(name)
        # Run it in a thread, so that the stage does not wait until the connection has ended.
        dropped = connection if keys else None
        threading.Thread(
            target=self._close_and_report, args=(name, dropped, should_report), daemon=True
        ).start()

    def _close_and_report(self, name: str, sink: RecordSink | None, should_report: bool) -> None:
        try:
            if sink is not None:
                _close_connection(sink)
        finally:
            if should_report:
                time.sleep(REPORT_DELAY_S)
                with self._lock:
                    self._lost_workers.discard(name)
                self._on_connection_lost(name)

    def close(self) -> None:
        with self._lock:
            connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            _close_connection(connection)


def _close_connection(connection: RecordSink) -> None:
    """Close a connection after its records have arrived, or at once if it has failed."""
    with contextlib.suppress(ChannelClosed, ChannelFailed):
        connection.flush()
    with contextlib.suppress(ChannelFailed):
        connection.close()


class StreamSender:
    """A stream of records to receivers; a receiver that is added late gets earlier records too.

    A lost receiver gets no more records. It, or the worker that replaces it, subscribes again or
    reads from disk.
    """

    def __init__(
        self,
        target: str,
        sender: RecordSender,
        rank: int,
        num_ranks: int,
        get_records: Callable[[], list[Record]] = list,
    ) -> None:
        self._target, self._record_sender, self._get_records = target, sender, get_records
        self._connections: dict[str, RecordSink] = {}
        """Connections by receiver."""
        self._lock = threading.Lock()
        """Ensures that a receiver gets earlier records, then new ones, then the stream's end."""
        self._all_delivered = True
        """Whether no receiver was lost so far."""
        self._stream_info: dict[str, Scalar] = {
            TARGET: target,
            PRODUCER: sender.name,
            RANK: rank,
            NUM_RANKS: num_ranks,
        }
        self._sent_samples: set[int] = set()
        self._end_record: Record | None = None
        """The record that ends the stream; None: the stream is open."""

    def add_receivers(self, transports: Mapping[str, str]) -> None:
        """Add receivers, by name with their transports; they get all earlier and later records."""
        for name, transport in sorted(transports.items()):
            connection = self._record_sender.connect(name, transport)
            with self._lock:
                if name in self._connections:
                    continue
                if connection is None:
                    self._all_delivered = False
                    self._record_sender.disconnect(name, None)
                    continue
                self._connections[name] = connection
                earlier = [self._addressed(record) for record in self._get_records()]
                self._send(
                    name, earlier if self._end_record is None else [*earlier, self._end_record]
                )

    def put(self, record: Record) -> None:
        with self._lock:
            self._sent_samples.add(record.identity.sample)
            if self._connections:
                addressed = self._addressed(record)
                for name in list(self._connections):
                    self._send(name, [addressed])

    def close(self) -> None:
        with self._lock:
            info = {**self._stream_info, COUNT: len(self._sent_samples)}
            self._end_record = Record(RecordId(0, -1, 0), info=info)
            for name in list(self._connections):
                self._send(name, [self._end_record])

    def flush(self) -> bool:
        """Wait for delivery; return whether every receiver got all records."""
        for name, connection in list(self._connections.items()):
            with self._skip_if_lost(name):
                connection.flush()
        return self._all_delivered

    def _addressed(self, record: Record) -> Record:
        """Return a record with its target and producer."""
        # A forwarded record already names its producer.
        return replace(
            record, info={PRODUCER: self._record_sender.name, **record.info, TARGET: self._target}
        )

    def _send(self, name: str, records: Sequence[Record]) -> None:
        with self._skip_if_lost(name):
            for record in records:
                try:
                    self._connections[name].put(record)
                except DataError as error:
                    raise DataError(
                        f"{self._target}: {error}; for records of this size, leave shared_memory "
                        "out of the plan's transports"
                    ) from None

    @contextlib.contextmanager
    def _skip_if_lost(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ChannelClosed, ChannelFailed) as error:
            log.warning("%s no longer receives records: %s", name, error)
            self._all_delivered = False
            self._record_sender.disconnect(name, self._connections.pop(name))


class RecordForwarder:
    """Forwards received records in its own thread, so that a slow receiver delays no stage."""

    def __init__(self, sender: RecordSender) -> None:
        self._record_sender = sender
        self._thread = BackgroundWorker("forwarding", TRANSFER_ERRORS)
        self._streams: dict[str, dict[str, _ForwardedStream]] = {}
        """Forwarded streams by target, then by producer."""

    def subscribe(self, target: str, producer: str, transports: Mapping[str, str]) -> None:
        """Forward the earlier and later records of a producer to workers; return at once."""
        self._thread.submit(
            f"{target} of {producer}", self._subscribe, target, producer, dict(transports)
        )

    def forward(self, target: str, producer: str, record: Record) -> None:
        """Forward a received record, or the end of a stream; return at once."""
        self._thread.submit(f"a record of {target}", self._forward_record, target, producer, record)

    def drop_outputs(self, folders: Collection[str]) -> None:
        """Drop committed outputs, because their records are read from disk from now on."""
        self._thread.submit("outputs", self._drop_streams, folders)

    def close(self) -> None:
        """Stop forwarding. A transfer in progress ends with its connection."""
        self._thread.close(wait=False)

    def _subscribe(self, target: str, producer: str, transports: Mapping[str, str]) -> None:
        self._stream(target, producer).sender.add_receivers(transports)

    def _forward_record(self, target: str, producer: str, record: Record) -> None:
        self._stream(target, producer).put(record)

    def _drop_streams(self, folders: Collection[str]) -> None:
        for target in [target for target in self._streams if target.rpartition(":")[0] in folders]:
            del self._streams[target]

    def _stream(self, target: str, producer: str) -> _ForwardedStream:
        streams = self._streams.setdefault(target, {})
        if producer not in streams:
            streams[producer] = _ForwardedStream(target, self._record_sender)
        return streams[producer]


class _ForwardedStream:
    """The forwarded records of one producer for one target."""

    def __init__(self, target: str, record_sender: RecordSender) -> None:
        self._records: dict[int, Record] = {}
        """Records by sample number; the record that ends the stream has number -1."""
        self.sender = StreamSender(
            target, record_sender, 0, 1, lambda: list(self._records.values())
        )

    def put(self, record: Record) -> None:
        """Forward a record, unless it was forwarded before; a producer may send a record twice."""
        if record.identity.sample not in self._records:
            self._records[record.identity.sample] = record
            self.sender.put(record)
