"""Links over which a worker sends messages about weights to other workers.

A message is a record (:mod:`stages.worker.weight_transfer`). A worker that cannot be reached reads
the weights from disk after their commit.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rlinf.channels.channel import ChannelClosed, ChannelFailed
from rlinf.channels.record_streams import SocketSink, SocketSource
from rlinf.data.record import Record
from rlinf.errors import InputError
from rlinf.threads import MalformedCounter, start_service_thread

OUTPUT = "_output"
"""Key of a message's ``info``: the output folder of the weights, relative to the run folder."""
log = logging.getLogger("rlinf")


class WeightLinks:
    """The links to other workers, one per worker.

    Args:
        folder: the run's folder for channels.
        name: the name of this worker.
    """

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.name = folder, name
        self._sinks: dict[str, SocketSink] = {}
        self._lock = threading.Lock()

    def send(self, out: str, workers: Sequence[str], record: Record) -> None:
        """Send a message about an output's weights; a lost worker gets no message."""
        message = replace(record, info={**record.info, OUTPUT: out})
        for worker in workers:
            try:
                self._connect(worker).put(message)
            except (ChannelClosed, ChannelFailed, InputError) as error:
                log.warning("%s gets no weights: %s", worker, error)
                with self._lock:
                    sink = self._sinks.pop(worker, None)
                if sink is not None:
                    # Run it in a thread, so that nobody waits until the connection has ended.
                    threading.Thread(target=_close, args=(sink,), daemon=True).start()

    def _connect(self, worker: str) -> SocketSink:
        with self._lock:
            if worker not in self._sinks:
                self._sinks[worker] = SocketSink(self.folder, worker)
            return self._sinks[worker]

    def close(self) -> None:
        """Close the links after all messages have arrived."""
        for sink in self._sinks.values():
            _close(sink)


def _close(sink: SocketSink) -> None:
    with contextlib.suppress(ChannelClosed, ChannelFailed):
        sink.close()


class WeightMessageReceiver:
    """Receives messages about weights in its own thread.

    Args:
        handle: called with the output folder and each message.
    """

    def __init__(self, folder: Path, name: str, handle: Callable[[str, Record], None]) -> None:
        self._handle = handle
        self._source = SocketSource(folder, name)
        self._malformed = MalformedCounter(f"receiver of {name}")
        self._thread = start_service_thread("receiver", self._run)

    @property
    def num_malformed(self) -> int:
        """The number of invalid messages that were dropped."""
        return self._malformed.count + self._source.malformed

    def close(self) -> None:
        self._source.close()
        self._thread.join(5)

    def _run(self) -> None:
        for record in self._source:
            info = dict(record.info)
            try:
                out = str(info.pop(OUTPUT))
            except KeyError as error:
                self._malformed.count_dropped(error)
                continue
            self._handle(out, replace(record, info=info))
