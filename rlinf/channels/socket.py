"""Socket transport of records: a mailbox (:mod:`rlinf.channels.mailbox`) whose host alone reads.

Its peers find it in the run directory; they may be anywhere in the run.
"""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path

from rlinf.channels.base import ChannelClosed, ChannelFailed, Sink, Source
from rlinf.channels.curve import reachable, routing_id
from rlinf.channels.mailbox import Lost, Mailbox, Report
from rlinf.channels.messages import read_pointer
from rlinf.channels.peer import Peer
from rlinf.channels.wire import decode, encode
from rlinf.data.record import Record
from rlinf.errors import DataError, InputError

LOOK_S = 1.0


def pointer_of(folder: Path, name: str) -> Path:
    """The file by which a channel of a run is found."""
    return folder / f"{name}.socket.json"


class SocketSource(Mailbox, Source):
    """The end of the process that hosts the channel and reads it; the channel ends with it.

    ``malformed`` counts messages and records that were dropped because they could not be read.

    Args:
        folder: the run's folder for channels; made with mode 0700, holds keys and addresses.
        interface: where to listen, as for :func:`rlinf.channels.curve.listen`.
        timeout_s: how long a peer may be silent before its state is dropped, and a host before its
            peers give up.
        max_bytes: the largest record; a larger message ends the connection it comes by.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        interface: str | None = None,
        timeout_s: float = 5.0,
        max_bytes: int = 1 << 30,
    ) -> None:
        self._records: deque[Record] = deque()
        super().__init__(
            pointer_of(folder, name),
            decode,
            interface=interface,
            timeout_s=timeout_s,
            max_bytes=max_bytes,
            keeps=False,
        )

    def get(self) -> Record:
        while not self._records:
            for event in self.events(LOOK_S):
                if isinstance(event, Report):
                    self._records.append(event.content)
                elif isinstance(event, Lost):
                    self.forget(event.worker)
        return self._records.popleft()


class SocketSink(Peer, Sink):
    """The end of a process that puts records; any number of threads.

    ``put`` returns when the record is under way, with at most ``peer.WINDOW_BYTES`` not yet with
    the host; ``flush`` waits until all are. Small records travel together. When the host falls
    silent, operations raise ``ChannelFailed`` as long as it does.

    Raises:
        InputError: there is no such channel.
        ChannelFailed: its host does not answer.
    """

    def __init__(self, folder: Path, name: str) -> None:
        pointer = pointer_of(folder, name)
        host = read_pointer(pointer)
        if host is None:
            if pointer.exists():
                raise InputError(f"{pointer}: damaged; start its host again")
            raise InputError(f"{pointer}: no such channel; its host has not started or has ended")
        try:
            address = reachable(host.addresses)
        except ValueError as error:
            raise InputError(f"{pointer}: damaged ({error}); start its host again") from None
        if address is None:
            raise ChannelFailed(f"{pointer.name}: no answer at {', '.join(host.addresses)}")
        self._most = host.max_bytes
        super().__init__(pointer, routing_id().hex(), _nothing, host=host, address=address)

    def put(self, record: Record) -> None:
        """As the interface says.

        Raises:
            DataError: the record cannot be sent or is larger than a message may be.
        """
        encoded = encode(record)
        if encoded.size > self._most:
            raise DataError(
                f"record {tuple(record.identity)} takes {encoded.size} bytes, a message of "
                f"{self._pointer.name} at most {self._most}; raise max_bytes"
            )
        self.give(encoded.to_bytes(), wait=True)

    def close(self) -> None:
        """Leave once all that was put is with the host, or the host is gone."""
        with contextlib.suppress(ChannelFailed, ChannelClosed):
            self.flush()
        super().close()


def _nothing(item: object) -> None:
    raise DataError("the host of records sends none")
