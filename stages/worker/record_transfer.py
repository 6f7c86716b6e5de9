"""Records on their way from a stage in one worker to the boards of others.

Every worker has one inbox, a channel that it hosts; a record says which output it belongs to. What
arrives is kept on the worker's board.
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
TARGET, PRODUCER, RANK, NUM_RANKS, COUNT = "_to", "_from", "_rank", "_ranks", "_count"
SOURCE_ATTEMPT = "_made_of"
"""Of a record that was made of what was not committed yet: by which attempt that was."""
SOCKET, SHARED_MEMORY = "socket", "shared_memory"
SHARED_MEMORY_BYTES = 128 << 20
"""Shared memory of a worker for records to another one; none may be larger."""
RecordHandler = Callable[[str, Record], None]
ForwardCallback = Callable[[str, str, Record], None]
TRANSFER_ERRORS = (RlinfError, ChannelClosed, OSError)
"""What may go wrong when records or weights are sent: stages that wait for them read the disk."""
log = logging.getLogger("rlinf")


class RecordReceiver:
    """Takes what other workers send; a thread of its own puts it on the board.

    Args:
        takers: of what is no stream of records, by channel: given the output and what came.
        passing: given all that belongs to streams: output and channel, the maker, what came.
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
        self._board, self._takers, self._passing = store, handlers or {}, forward
        self._channel = SocketSource(folder, name)
        self._malformed = MalformedCounter(f"inbox of {name}")
        self._thread = start_service_thread("inbox", self._work)

    @property
    def num_malformed(self) -> int:
        """Records and messages that were dropped because they made no sense."""
        return self._malformed.count + self._channel.malformed

    def close(self) -> None:
        self._channel.close()
        self._thread.join(5)

    def _work(self) -> None:
        for record in self._channel:
            # The board keeps it for longer than its writer can do without the memory.
            self._take(copy_record(record) if self._channel.is_borrowed else record)

    def _take(self, record: Record) -> None:
        info = dict(record.info)
        try:
            to, maker = str(info.pop(TARGET)), str(info.pop(PRODUCER, ""))
            folder, separator, channel = to.rpartition(":")
            if not (folder and separator and channel):
                raise ValueError(f"no output and channel: {to[:80]!r}")
            if NUM_RANKS in info:
                count, rank, ranks = (int(info[name]) for name in (COUNT, RANK, NUM_RANKS))
        except (KeyError, ValueError) as error:
            self._malformed.count_dropped(error)
            return
        if channel in self._takers:
            self._takers[channel](folder, replace(record, info=info))
            return
        output = self._board.output(folder)
        if (source_attempt := info.pop(SOURCE_ATTEMPT, None)) is not None:
            output.depends_on(str(source_attempt))
        stream = output.stream(channel)
        if NUM_RANKS in info:
            stream.finish_rank(count, rank, ranks)
        else:
            stream.put_remote(replace(record, info=info))
        self._passing(to, maker, record)


def copy_record(record: Record) -> Record:
    """The record with arrays of its own."""
    steps, context = (
        {name: array.copy() for name, array in columns.items()}
        for columns in (record.steps, record.context)
    )
    return replace(record, steps=steps, context=context)


class RecordSender:
    """Sends records to the boards of other workers; opens the inbox of each once.

    Args:
        cut: told of a worker that does not take records any more.
        name: of this worker.
    """

    def __init__(
        self,
        folder: Path,
        on_connection_lost: Callable[[str], None] = lambda _: None,
        name: str = "",
    ) -> None:
        self.folder, self._cut, self.name = folder, on_connection_lost, name
        self._open: dict[tuple[str, str], RecordSink] = {}
        """By worker and way."""
        self._wanted: dict[str, dict[str, str]] = {}
        self._senders: dict[str, StreamSender] = {}
        self._parting: set[str] = set()
        """Of whom the driver is about to be told."""
        self._lock = threading.Lock()

    def open_stream(
        self, target: str, rank: int, num_ranks: int, get_records: Callable[[], list[Record]]
    ) -> StreamSender:
        """For records made here, to whoever wants them or will (:meth:`want`).

        Args:
            to: output and channel.
            made: the records that were made already.
        """
        with self._lock:
            sender = self._senders[target] = StreamSender(
                target, self, rank, num_ranks, get_records
            )
            wanted = dict(self._wanted.get(target, {}))
        sender.add_receivers(wanted)
        return sender

    def subscribe(self, target: str, transports: Mapping[str, str]) -> None:
        """Workers that want what an output holds, made or still to be made, and how it gets there.

        Returns at once.
        """
        with self._lock:
            self._wanted.setdefault(target, {}).update(transports)
            sender = self._senders.get(target)
        if sender is not None:
            # Beside the stage and the worker's orders, which need not wait for it.
            threading.Thread(
                target=sender.add_receivers, args=(dict(transports),), daemon=True
            ).start()

    def drop_outputs(self, folders: Collection[str]) -> None:
        """Forget outputs that are committed: their records are read from disk from now on."""
        with self._lock:
            for known in (self._senders, self._wanted):
                for to in [to for to in known if to.rpartition(":")[0] in folders]:
                    del known[to]

    def stream_to(
        self, target: str, workers: Collection[str], rank: int, num_ranks: int
    ) -> StreamSender:
        """Sends records to these workers, by socket."""
        sender = StreamSender(target, self, rank, num_ranks)
        sender.add_receivers(dict.fromkeys(workers, SOCKET))
        return sender

    def connect(self, name: str, transport: str) -> RecordSink | None:
        """The inbox of a worker, its socket where it has no shared memory here.

        None: it has no inbox, or none that answers.
        """
        with contextlib.suppress(InputError, ChannelFailed), self._lock:
            if (name, transport) not in self._open:
                self._open[name, transport] = self._opened(name, transport)
            return self._open[name, transport]
        return self.connect(name, SOCKET) if transport == SHARED_MEMORY else None

    def _opened(self, name: str, way: str) -> RecordSink:
        if way == SHARED_MEMORY:
            try:
                return SharedMemorySink(self.folder, name, size=SHARED_MEMORY_BYTES)
            except StorageError as error:
                log.warning("records go to %s by socket: %s", name, error)
        return SocketSink(self.folder, name)

    def disconnect(self, name: str, channel: RecordSink | None) -> None:
        """Forget a connection to a worker that does not answer."""
        with self._lock:
            keys = [key for key, known in self._open.items() if known is channel]
            for key in keys:
                del self._open[key]
            # A sender of many things finds out with each of them.
            tell = name not in self._parting
            self._parting.add(name)
        # Beside the stage, which need not wait until the connection has ended.
        closed_channel = channel if keys else None
        threading.Thread(
            target=self._close_and_report, args=(name, closed_channel, tell), daemon=True
        ).start()

    def _close_and_report(self, name: str, channel: RecordSink | None, tell: bool) -> None:
        try:
            if channel is not None:
                _leave(channel)
        finally:
            if tell:
                time.sleep(REPORT_DELAY_S)
                with self._lock:
                    self._parting.discard(name)
                self._cut(name)

    def close(self) -> None:
        with self._lock:
            channels, self._open = list(self._open.values()), {}
        for channel in channels:
            _leave(channel)


def _leave(channel: RecordSink) -> None:
    """Leave once all that was put is there, or at once if the channel has failed."""
    with contextlib.suppress(ChannelClosed, ChannelFailed):
        channel.flush()
    with contextlib.suppress(ChannelFailed):
        channel.close()


class StreamSender:
    """A worker that is gone is left out: it or its successor asks anew, or reads the disk.

    One that comes late is sent what was made before.
    """

    def __init__(
        self,
        target: str,
        sender: RecordSender,
        rank: int,
        num_ranks: int,
        get_records: Callable[[], list[Record]] = list,
    ) -> None:
        self._to, self._outbox, self._get_records = target, sender, get_records
        self._channels: dict[str, RecordSink] = {}
        # No record may come between those made before and the next one, or after the end.
        self._lock = threading.Lock()
        self._all_delivered = True
        self._about: dict[str, Scalar] = {
            TARGET: target,
            PRODUCER: sender.name,
            RANK: rank,
            NUM_RANKS: num_ranks,
        }
        self._put: set[int] = set()
        self._end: Record | None = None

    def add_receivers(self, transports: Mapping[str, str]) -> None:
        """Send to further workers: what was made so far, and what will be."""
        for name, way in sorted(transports.items()):
            channel = self._outbox.connect(name, way)
            with self._lock:
                if name in self._channels:
                    continue
                if channel is None:
                    self._all_delivered = False
                    self._outbox.disconnect(name, None)
                    continue
                self._channels[name] = channel
                before = [self._addressed(record) for record in self._get_records()]
                self._send(name, before if self._end is None else [*before, self._end])

    def put(self, record: Record) -> None:
        with self._lock:
            self._put.add(record.identity.sample)
            if self._channels:
                addressed = self._addressed(record)
                for name in list(self._channels):
                    self._send(name, [addressed])

    def close(self) -> None:
        with self._lock:
            info = {**self._about, COUNT: len(self._put)}
            self._end = Record(RecordId(0, -1, 0), info=info)
            for name in list(self._channels):
                self._send(name, [self._end])

    def flush(self) -> bool:
        """Wait until all that was put is in the inboxes; whether every worker has everything."""
        for name, channel in list(self._channels.items()):
            with self._leaving_out(name):
                channel.flush()
        return self._all_delivered

    def _addressed(self, record: Record) -> Record:
        # What is passed on names its maker already.
        return replace(record, info={PRODUCER: self._outbox.name, **record.info, TARGET: self._to})

    def _send(self, name: str, records: Sequence[Record]) -> None:
        with self._leaving_out(name):
            for record in records:
                try:
                    self._channels[name].put(record)
                except DataError as error:
                    raise DataError(
                        f"{self._to}: {error}; where records are that large, leave shared_memory "
                        "out of the plan's transports"
                    ) from None

    @contextlib.contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ChannelClosed, ChannelFailed) as error:
            log.warning("%s no longer takes records: %s", name, error)
            self._all_delivered = False
            self._outbox.disconnect(name, self._channels.pop(name))


class RecordForwarder:
    """Sends on, in a thread of its own: inboxes are emptied whatever others do with theirs."""

    def __init__(self, sender: RecordSender) -> None:
        self._outbox = sender
        self._thread = BackgroundWorker("relays", TRANSFER_ERRORS)
        self._relays: dict[str, dict[str, _Relay]] = {}
        """By output and channel, and by the worker that makes it."""

    def subscribe(self, target: str, producer: str, transports: Mapping[str, str]) -> None:
        """Workers that get from here what a worker makes, what came before too; returns at once."""
        self._thread.submit(
            f"{target} of {producer}", self._want, target, producer, dict(transports)
        )

    def forward(self, target: str, producer: str, record: Record) -> None:
        """A record, or the end of them, as it came from the inbox; returns at once."""
        self._thread.submit(f"a record of {target}", self._arrived, target, producer, record)

    def drop_outputs(self, folders: Collection[str]) -> None:
        """Forget outputs that are committed: they are read from disk from now on."""
        self._thread.submit("outputs", self._forget, folders)

    def close(self) -> None:
        """Pass on nothing more; what is just being sent ends with its connection."""
        self._thread.close(wait=False)

    def _want(self, to: str, maker: str, ways: Mapping[str, str]) -> None:
        self._relay(to, maker).sender.add_receivers(ways)

    def _arrived(self, to: str, maker: str, record: Record) -> None:
        self._relay(to, maker).put(record)

    def _forget(self, folders: Collection[str]) -> None:
        for to in [to for to in self._relays if to.rpartition(":")[0] in folders]:
            del self._relays[to]

    def _relay(self, to: str, maker: str) -> _Relay:
        relays = self._relays.setdefault(to, {})
        if maker not in relays:
            relays[maker] = _Relay(to, self._outbox)
        return relays[maker]


class _Relay:
    """What one worker makes of one output."""

    def __init__(self, to: str, outbox: RecordSender) -> None:
        self._came: dict[int, Record] = {}
        """By sample; the end is one of its own."""
        self.sender = StreamSender(to, outbox, 0, 1, lambda: list(self._came.values()))

    def put(self, record: Record) -> None:
        """Pass a record on, once: whoever makes it may have to send it again."""
        if record.identity.sample not in self._came:
            self._came[record.identity.sample] = record
            self.sender.put(record)
