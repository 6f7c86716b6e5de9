"""The control link: a driver sends orders to resident workers on any node of a run.

It is a mailbox (:mod:`rlinf.channels.mailbox`). The :class:`Controller` is the driver's end, and
a :class:`WorkerLink` is the end of one worker. Drivers and workers may die and be replaced at any
time.
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
    """The driver's end of the control link.

    A report counts as handled at the next call of ``poll_events``. If the driver ends before that,
    the next controller of the folder gets the report again.

    Args:
        folder: the run's folder for channels. A new controller takes over the workers of the
            previous one.
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
            ValueError: the order has a value other than str, int, float, bool, None, list and dict,
                or is larger than ``MAX_BYTES``.
        """
        self.send_item(worker, _pack(f"order for {worker}", order, MAX_BYTES))


class WorkerLink(MailboxPeer):
    """A worker's end of the control link.

    Args:
        folder: the run's folder for channels; the controller need not have started.
        name: the worker's name. A process that joins later under the same name replaces this one.
        description: what the driver should know of the worker; at most ``MAX_STATUS_BYTES``.
    """

    def __init__(self, folder: Path, name: str, description: Mapping[str, Any]) -> None:
        super().__init__(
            folder / CONTROL_POINTER,
            name,
            unpack_map,
            description=_pack("description", description, MAX_STATUS_BYTES),
            status=_pack("status", {}, MAX_STATUS_BYTES),
        )

    def receive_orders(self, timeout_s: float) -> list[dict[str, Any]]:
        """Wait for new orders and return them in sequence.

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
        """Set the worker's status; only the last status is sent.

        Raises:
            ValueError: as for :meth:`send_report`, above ``MAX_STATUS_BYTES``.
            ChannelFailed: as for :meth:`receive_orders`.
        """
        self.set_status(_pack("status", content, MAX_STATUS_BYTES))


def _pack(content_name: str, content: Mapping[str, Any], limit: int) -> bytes:
    try:
        packed: bytes = msgpack.packb(dict(content))
        msgpack.unpackb(packed)  # fails where the other end would, as for keys that are not text
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{content_name}: {error}; only str, int, float, bool, None, list and dict can be sent"
        ) from None
    if len(packed) > limit:
        raise ValueError(f"{content_name} takes {len(packed)} bytes, at most {limit} can be sent")
    return packed
