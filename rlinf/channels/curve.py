"""Sockets of a run that strangers cannot speak to, and how they are found.

CURVE (https://rfc.zeromq.org/spec/26/) encrypts and authenticates both ends with the run's keys; a
pointer file in the run's folder says where the host listens.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from rlinf.artifacts import write_atomic
from rlinf.channels.keys import Keys

HEARTBEAT_S = 0.5
ZAP_DOMAIN = b"rlinf"
LINGER_MS = 1000


class Door:
    """Says who may connect to the sockets of a context: those with the run's client key.

    The owner's thread polls ``socket`` and calls :meth:`answer`; ``refused`` counts the others.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self.refused = 0
        self._known = [z85.decode(keys.client_public)]
        self.socket = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer one question of https://rfc.zeromq.org/spec/27/."""
        version, request, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
        admitted = mechanism == b"CURVE" and credentials == self._known
        self.refused += not admitted
        status = (b"200", b"OK") if admitted else (b"400", b"unknown key")
        self.socket.send_multipart([version, request, *status, b"", b""])

    def close(self) -> None:
        self.socket.close()


def host_socket(
    context: zmq.Context[zmq.Socket[bytes]], keys: Keys, *, timeout_s: float, max_bytes: int
) -> zmq.Socket[bytes]:
    """A ROUTER for many clients; needs a :class:`Door` in the same context, and to be bound.

    A peer that is silent for ``timeout_s`` or sends more than ``max_bytes`` is disconnected.
    """
    host = context.socket(zmq.ROUTER)
    host.curve_server = True
    host.curve_secretkey = keys.host_secret.encode()
    host.zap_domain = ZAP_DOMAIN
    host.router_handover = True
    _set_limits(host, timeout_s, max_bytes)
    return host


def client_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    keys: Keys,
    routing_id: bytes,
    *,
    timeout_s: float,
    max_bytes: int,
) -> zmq.Socket[bytes]:
    """A DEALER that speaks to the run's host alone; needs to be connected."""
    client = context.socket(zmq.DEALER)
    client.curve_serverkey = keys.host_public.encode()
    client.curve_publickey = keys.client_public.encode()
    client.curve_secretkey = keys.client_secret.encode()
    client.routing_id = routing_id
    client.reconnect_ivl_max = 1000
    _set_limits(client, timeout_s, max_bytes)
    return client


def routing_id() -> bytes:
    """A name no other client has."""
    return b"c" + secrets.token_bytes(15)


def outward_address() -> str:
    """The address of the interface that leads out of this node; nothing is sent to learn it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def write_pointer(pointer: Path, values: Mapping[str, Any]) -> None:
    """Say where a host is; only the owner of the run can read it."""
    write_atomic(pointer, json.dumps(values))
    pointer.chmod(0o600)


def stopped_s(before: float, now: float) -> float:
    """How long a thread that looks every ``HEARTBEAT_S`` was itself stopped between two looks.

    It heard nobody meanwhile, and must not take the others for silent.
    """
    pause = now - before - HEARTBEAT_S
    return pause if pause > 2 * HEARTBEAT_S else 0.0


def _set_limits(end: zmq.Socket[bytes], timeout_s: float, max_bytes: int) -> None:
    end.maxmsgsize = max_bytes
    end.linger = LINGER_MS
    end.heartbeat_ivl = 1000
    end.heartbeat_timeout = int(timeout_s * 1000)
