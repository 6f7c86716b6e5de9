"""The control link: a driver sends orders to resident workers, anywhere in a run.

It is a mailbox (:mod:`rlinf.channels.mailbox`): the :class:`Controller` is the driver's end, a
:class:`WorkerLink` that of a worker. Drivers and workers may die and be replaced at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from rlinf.channels.mailbox import MailboxHost, MailboxPeer
from rlinf.channels.mailbox_protocol import (
    PeerEvent,
    PeerJoined,
    PeerLost,
    PeerReport,
    PeerStatus,
    unpack_map,
)

__all__ = [
    "Controller",
    "PeerEvent",
    "PeerJoined",
    "PeerLost",
    "PeerReport",
    "PeerStatus",
    "WorkerLink",
]

CONTROL_POINTER = "control.json"
MAX_BYTES = 1 << 20
"""Maximum size of a packed order or report."""
MAX_STATUS_BYTES = 1 << 16
"""Maximum size of a worker's status or description, which are sent often."""


class Controller(MailboxHost):
    """The driver's end.

    A report counts as handled at the next call of ``events``: if the driver ends before, the next
    controller of the folder gets it again.

    Args:
        folder: the run's folder for channels. A new controller takes the workers of the last one
            over.
        interface: where to listen, as for :func:`rlinf.channels.curve_sockets.listen`.
        timeout_s: how long a worker may be silent before it counts as lost.
    """

    def __init__(
        self, folder: Path, *, interface: str | None = None, timeout_s: float = 10.0
    ) -> None:
        super().__init__(
            folder / CONTROL_POINTER,
            unpack_map,
            interface=interface,
            timeout_s=timeout_s,
            max_bytes=MAX_BYTES,
            ack_on_poll=True,
        )

    def send_order(self, worker: str, order: Mapping[str, Any]) -> None:
        """Send an order to a worker, as :meth:`rlinf.channels.mailbox.MailboxHost.send_item` does.

        Raises:
            ValueError: it has other values than str, int, float, bool, None, list and dict, or
                takes more than ``MAX_BYTES``.
        """
        self.send_item(worker, _pack(f"order for {worker}", order, MAX_BYTES))


class WorkerLink(MailboxPeer):
    """A worker's end.

    Args:
        folder: the run's folder for channels; the controller need not be there yet.
        name: another process that joins by the same name replaces this one.
        about: what the driver should know of the worker; at most ``MAX_STATUS_BYTES``.
    """

    def __init__(self, folder: Path, name: str, about: Mapping[str, Any]) -> None:
        super().__init__(
            folder / CONTROL_POINTER,
            name,
            unpack_map,
            about=_pack("about", about, MAX_STATUS_BYTES),
            status=_pack("status", {}, MAX_STATUS_BYTES),
        )

    def receive_orders(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return the new orders, in order; waits for one.

        Raises:
            ChannelFailed: another process has joined under this worker's name.
        """
        return self.receive_items(timeout_s)

    def send_report(self, content: Mapping[str, Any]) -> None:
        """Send a report; reports arrive in order and are kept until a driver has handled them.

        Raises:
            ValueError: as for :meth:`Controller.send_order`.
            ChannelFailed: as for :meth:`receive_orders`.
        """
        self.send_item(_pack("report", content, MAX_BYTES))

    def send_status(self, content: Mapping[str, Any]) -> None:
        """Set the worker's status; only the last one counts.

        Raises:
            ValueError: as for :meth:`send_report`, above ``MAX_STATUS_BYTES``.
            ChannelFailed: as for :meth:`receive_orders`.
        """
        self.set_status(_pack("status", content, MAX_STATUS_BYTES))


def _pack(what: str, content: Mapping[str, Any], limit: int) -> bytes:
    try:
        packed: bytes = msgpack.packb(dict(content))
        msgpack.unpackb(packed)  # refuses what the other end would, such as keys that are no text
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{what}: {error}; only str, int, float, bool, None, list and dict can be sent"
        ) from None
    if len(packed) > limit:
        raise ValueError(f"{what} takes {len(packed)} bytes, at most {limit} can be sent")
    return packed
