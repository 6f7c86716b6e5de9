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

from rlinf.channels.base import ChannelClosed, ChannelFailed, Sink
from rlinf.channels.shared_memory import SharedMemorySink
from rlinf.channels.socket import SocketSink, SocketSource
from rlinf.data.record import Identity, Record, Scalar
from rlinf.errors import DataError, InputError, RlinfError, StorageError
from rlinf.threads import Malformed, serve
from stages.board import Board

AGAIN_S = 0.5
TO, FROM, RANK, RANKS, COUNT = "_to", "_from", "_rank", "_ranks", "_count"
MADE_OF = "_made_of"
"""Of a record that was made of what was not committed yet: by which attempt that was."""
SOCKET, SHARED_MEMORY = "socket", "shared_memory"
SHARED_BYTES = 128 << 20
"""Shared memory of a worker for records to another one; none may be larger."""
Taker = Callable[[str, Record], None]
Passing = Callable[[str, str, Record], None]
TRANSFER_FAULTS = (RlinfError, ChannelClosed, OSError)
"""What may go wrong when records or weights are sent: stages that wait for them read the disk."""
log = logging.getLogger("rlinf")


class Inbox:
    """Takes what other workers send; a thread of its own puts it on the board.

    Args:
        takers: of what is no stream of records, by channel: given the output and what came.
        passing: given all that belongs to streams: output and channel, the maker, what came.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        board: Board,
        takers: Mapping[str, Taker] | None = None,
        *,
        passing: Passing = lambda *_: None,
    ) -> None:
        self._board, self._takers, self._passing = board, takers or {}, passing
        self._channel = SocketSource(folder, name)
        self._malformed = Malformed(f"inbox of {name}")
        self._thread = serve("inbox", self._work)

    @property
    def malformed(self) -> int:
        """Records and messages that were dropped because they made no sense."""
        return self._malformed.count + self._channel.malformed

    def close(self) -> None:
        self._channel.close()
        self._thread.join(5)

    def _work(self) -> None:
        for record in self._channel:
            # The board keeps it for longer than its writer can do without the memory.
            self._take(copied(record) if self._channel.lent else record)

    def _take(self, record: Record) -> None:
        info = dict(record.info)
        try:
            to, maker = str(info.pop(TO)), str(info.pop(FROM, ""))
            folder, separator, channel = to.rpartition(":")
            if not (folder and separator and channel):
                raise ValueError(f"no output and channel: {to[:80]!r}")
            if RANKS in info:
                count, rank, ranks = (int(info[name]) for name in (COUNT, RANK, RANKS))
        except (KeyError, ValueError) as error:
            self._malformed.drop(error)
            return
        if channel in self._takers:
            self._takers[channel](folder, replace(record, info=info))
            return
        output = self._board.output(folder)
        if (made_of := info.pop(MADE_OF, None)) is not None:
            output.made_of(str(made_of))
        stream = output.stream(channel)
        if RANKS in info:
            stream.end(count, rank, ranks)
        else:
            stream.arrived(replace(record, info=info))
        self._passing(to, maker, record)


def copied(record: Record) -> Record:
    """The record with arrays of its own."""
    steps, context = (
        {name: array.copy() for name, array in columns.items()}
        for columns in (record.steps, record.context)
    )
    return replace(record, steps=steps, context=context)


class Outbox:
    """Sends records to the boards of other workers; opens the inbox of each once.

    Args:
        cut: told of a worker that does not take records any more.
        name: of this worker.
    """

    def __init__(
        self, folder: Path, cut: Callable[[str], None] = lambda _: None, name: str = ""
    ) -> None:
        self.folder, self._cut, self.name = folder, cut, name
        self._open: dict[tuple[str, str], Sink] = {}
        """By worker and way."""
        self._wanted: dict[str, dict[str, str]] = {}
        self._senders: dict[str, Sender] = {}
        self._parting: set[str] = set()
        """Of whom the driver is about to be told."""
        self._lock = threading.Lock()

    def stream(self, to: str, rank: int, ranks: int, made: Callable[[], list[Record]]) -> Sender:
        """For records made here, to whoever wants them or will (:meth:`want`).

        Args:
            to: output and channel.
            made: the records that were made already.
        """
        with self._lock:
            sender = self._senders[to] = Sender(to, self, rank, ranks, made)
            wanted = dict(self._wanted.get(to, {}))
        sender.admit(wanted)
        return sender

    def want(self, to: str, ways: Mapping[str, str]) -> None:
        """Workers that want what an output holds, made or still to be made, and how it gets there.

        Returns at once.
        """
        with self._lock:
            self._wanted.setdefault(to, {}).update(ways)
            sender = self._senders.get(to)
        if sender is not None:
            # Beside the stage and the worker's orders, which need not wait for it.
            threading.Thread(target=sender.admit, args=(dict(ways),), daemon=True).start()

    def forget(self, folders: Collection[str]) -> None:
        """Forget outputs that are committed: their records are read from disk from now on."""
        with self._lock:
            for known in (self._senders, self._wanted):
                for to in [to for to in known if to.rpartition(":")[0] in folders]:
                    del known[to]

    def writer(self, to: str, workers: Collection[str], rank: int, ranks: int) -> Sender:
        """Sends records to these workers, by socket."""
        sender = Sender(to, self, rank, ranks)
        sender.admit(dict.fromkeys(workers, SOCKET))
        return sender

    def open(self, name: str, way: str) -> Sink | None:
        """The inbox of a worker, its socket where it has no shared memory here.

        None: it has no inbox, or none that answers.
        """
        with contextlib.suppress(InputError, ChannelFailed), self._lock:
            if (name, way) not in self._open:
                self._open[name, way] = self._opened(name, way)
            return self._open[name, way]
        return self.open(name, SOCKET) if way == SHARED_MEMORY else None

    def _opened(self, name: str, way: str) -> Sink:
        if way == SHARED_MEMORY:
            try:
                return SharedMemorySink(self.folder, name, size=SHARED_BYTES)
            except StorageError as error:
                log.warning("records go to %s by socket: %s", name, error)
        return SocketSink(self.folder, name)

    def drop(self, name: str, channel: Sink | None) -> None:
        """Forget a connection to a worker that does not answer."""
        with self._lock:
            keys = [key for key, known in self._open.items() if known is channel]
            for key in keys:
                del self._open[key]
            # A sender of many things finds out with each of them.
            tell = name not in self._parting
            self._parting.add(name)
        # Beside the stage, which need not wait until the connection has ended.
        left = channel if keys else None
        threading.Thread(target=self._parted, args=(name, left, tell), daemon=True).start()

    def _parted(self, name: str, channel: Sink | None, tell: bool) -> None:
        try:
            if channel is not None:
                _leave(channel)
        finally:
            if tell:
                time.sleep(AGAIN_S)
                with self._lock:
                    self._parting.discard(name)
                self._cut(name)

    def close(self) -> None:
        with self._lock:
            channels, self._open = list(self._open.values()), {}
        for channel in channels:
            _leave(channel)


def _leave(channel: Sink) -> None:
    """Leave once all that was put is there, or at once if the channel has failed."""
    with contextlib.suppress(ChannelClosed, ChannelFailed):
        channel.flush()
    with contextlib.suppress(ChannelFailed):
        channel.close()


class Sender:
    """A worker that is gone is left out: it or its successor asks anew, or reads the disk.

    One that comes late is sent what was made before.
    """

    def __init__(
        self,
        to: str,
        outbox: Outbox,
        rank: int,
        ranks: int,
        made: Callable[[], list[Record]] = list,
    ) -> None:
        self._to, self._outbox, self._made = to, outbox, made
        self._channels: dict[str, Sink] = {}
        # No record may come between those made before and the next one, or after the end.
        self._lock = threading.Lock()
        self._whole = True
        self._about: dict[str, Scalar] = {TO: to, FROM: outbox.name, RANK: rank, RANKS: ranks}
        self._put: set[int] = set()
        self._end: Record | None = None

    def admit(self, ways: Mapping[str, str]) -> None:
        """Send to further workers: what was made so far, and what will be."""
        for name, way in sorted(ways.items()):
            channel = self._outbox.open(name, way)
            with self._lock:
                if name in self._channels:
                    continue
                if channel is None:
                    self._whole = False
                    self._outbox.drop(name, None)
                    continue
                self._channels[name] = channel
                before = [self._addressed(record) for record in self._made()]
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
            self._end = Record(Identity(0, -1, 0), info=info)
            for name in list(self._channels):
                self._send(name, [self._end])

    def flush(self) -> bool:
        """Wait until all that was put is in the inboxes; whether every worker has everything."""
        for name, channel in list(self._channels.items()):
            with self._leaving_out(name):
                channel.flush()
        return self._whole

    def _addressed(self, record: Record) -> Record:
        # What is passed on names its maker already.
        return replace(record, info={FROM: self._outbox.name, **record.info, TO: self._to})

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
            self._whole = False
            self._outbox.drop(name, self._channels.pop(name))
