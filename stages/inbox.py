"""Records on their way from a stage in one worker to the boards of others.

Every worker has one inbox, a socket channel that it hosts; a record says which output it belongs
to. What arrives is kept on the worker's board.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlinf.channels.base import Channel, ChannelClosed, ChannelFailed
from rlinf.channels.socket import SocketChannel
from rlinf.data.record import Identity, Record, Scalar
from rlinf.errors import InputError
from stages.board import Board

AGAIN_S, PATIENCE_S = 0.5, 10.0
TO, RANK, RANKS = "_to", "_rank", "_ranks"
Taker = Callable[[str, Record], None]
log = logging.getLogger("rlinf")


class Inbox:
    """Takes what other workers send; a thread of its own puts it on the board.

    Args:
        takers: of what is no stream of records, by channel: given the output and what came.
    """

    def __init__(
        self, folder: Path, name: str, board: Board, takers: Mapping[str, Taker] | None = None
    ) -> None:
        self._board, self._takers = board, takers or {}
        self.failure: str | None = None
        """Why nothing comes any more: its worker is of no use then."""
        self._channel = SocketChannel.create(folder, name)
        self._thread = threading.Thread(target=self._work, name="inbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(ChannelFailed):
            self._channel.close()
        self._thread.join(5)
        self._channel.leave()

    def _work(self) -> None:
        failures, heard = 0, time.monotonic()
        while failures * AGAIN_S < PATIENCE_S:
            try:
                for record in self._channel:
                    heard = time.monotonic()
                    self._take(record)
                return
            except ChannelFailed as error:
                # A process that rested hears nothing of its own host for a while.
                failures = failures + 1 if time.monotonic() - heard < 2 * AGAIN_S else 1
                heard, reason = time.monotonic(), str(error)
                time.sleep(AGAIN_S)
        self.failure = f"records of other workers no longer arrive: {reason}"
        self._board.fail(self.failure)

    def _take(self, record: Record) -> None:
        info = dict(record.info)
        folder, _, channel = str(info.pop(TO)).rpartition(":")
        if channel in self._takers:
            self._takers[channel](folder, replace(record, info=info))
            return
        stream = self._board.output(folder).stream(channel)
        if RANKS in info:
            stream.end(int(info[RANK]), int(info[RANKS]))
        else:
            stream.arrived(replace(record, info=info))


class Outbox:
    """Opens the inboxes of other workers, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Channel] = {}
        self._lock = threading.Lock()

    def writer(self, to: str, workers: Iterable[str], rank: int, ranks: int) -> Sender:
        """Sends the records of output ``to`` to the boards of some workers."""
        channels = {}
        for name in workers:
            with contextlib.suppress(InputError, ChannelFailed), self._lock:
                if name not in self._open:
                    self._open[name] = SocketChannel.open(self._folder, name)
                channels[name] = self._open[name]
        return Sender(to, channels, self, rank, ranks, whole=set(channels) == set(workers))

    def drop(self, name: str) -> None:
        """Forget a worker that does not answer."""
        with self._lock:
            channel = self._open.pop(name, None)
        if channel is not None:
            # Beside the stage, which need not wait until the connection has ended.
            threading.Thread(target=_leave, args=(channel,), daemon=True).start()

    def close(self) -> None:
        with self._lock:
            channels, self._open = list(self._open.values()), {}
        for channel in channels:
            _leave(channel)


def _leave(channel: Channel) -> None:
    """Leave once all that was put is there, or at once if the channel has failed."""
    with contextlib.suppress(ChannelClosed, ChannelFailed):
        channel.flush()
    with contextlib.suppress(ChannelClosed, ChannelFailed):
        channel.leave()


class Sender:
    """A worker that is gone is left out: who takes its place reads what is on disk."""

    def __init__(
        self,
        to: str,
        channels: dict[str, Channel],
        outbox: Outbox,
        rank: int,
        ranks: int,
        *,
        whole: bool,
    ) -> None:
        self._to, self._channels, self._outbox = to, channels, outbox
        self._rank, self._ranks, self._whole = rank, ranks, whole

    def put(self, record: Record, weight: int = 1) -> None:
        if self._channels:
            self._send([replace(record, info={**record.info, TO: self._to})], weight)

    def close(self) -> None:
        info: dict[str, Scalar] = {TO: self._to, RANK: self._rank, RANKS: self._ranks}
        if self._channels:
            self._send([Record(Identity(0, -1, 0), info=info)], 1)

    def flush(self) -> bool:
        """Wait until all that was put is in the inboxes; whether every worker has everything."""
        for name, channel in list(self._channels.items()):
            with self._leaving_out(name):
                channel.flush()
        return self._whole

    def _send(self, records: Sequence[Record], weight: int) -> None:
        for name, channel in list(self._channels.items()):
            with self._leaving_out(name):
                for record in records:
                    channel.put(record, weight)

    @contextlib.contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ChannelClosed, ChannelFailed) as error:
            log.warning("%s no longer takes records: %s", name, error)
            self._whole = False
            del self._channels[name]
            self._outbox.drop(name)
