"""Sockets of a run that strangers cannot speak to, and how they are found.

CURVE (https://rfc.zeromq.org/spec/26/) encrypts and authenticates both ends with the run's keys; a
pointer file in the run's folder says where the host listens.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import os
import resource
import secrets
import selectors
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import psutil
import zmq
from zmq.utils import z85

from rlinf.channels import INTERFACE_VARIABLE
from rlinf.channels.mailbox_protocol import PIECE_BYTES
from rlinf.errors import ConfigError, InputError, did_you_mean
from rlinf.threads import start_service_thread

KEYS_FILE = "curve-keys.json"


class CurveKeys(NamedTuple):
    """CURVE key pairs (https://rfc.zeromq.org/spec/26/) of the hosts and the clients, Z85 text.

    Whoever can read the run directory may take part. A client must know the host's public key, and
    a host admits only the run's client key.
    """

    host_public: str
    host_secret: str
    client_public: str
    client_secret: str


def run_keys(folder: Path) -> CurveKeys:
    """Return the keys in a run's ``folder`` (mode 0700); the first caller creates them.

    Raises:
        InputError: folder or file belong to another user, others may change the folder or read the
            file, or the file is damaged.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o022:
        raise InputError(
            f"{folder}: holds the run's keys, and others may put files there (owner "
            f"{info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o}); it must be yours with mode "
            f"0700: delete it, or chmod 0700 if nobody else was there, and start the run again"
        )
    path = folder / KEYS_FILE
    if not path.exists():
        _make(path)
    with os.fdopen(_open(path), encoding="utf-8") as file:
        info = os.fstat(file.fileno())
        if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise InputError(
                f"{path}: the run's keys must belong to you alone (mode 0600); "
                "they may be known to others, so delete the file and start the run again"
            )
        try:
            keys = CurveKeys(**json.load(file))
            for key in keys:
                z85.decode(key)
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}: damaged ({error}); delete it and start again") from None
    return keys


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InputError(f"{path}: is a link; delete it and start the run again") from None


def _make(path: Path) -> None:
    pairs = [key.decode() for _ in range(2) for key in zmq.curve_keypair()]
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(CurveKeys(*pairs)._asdict(), file)
        file.flush()
        os.fsync(file.fileno())
    try:
        # Fails when another process was first: all use one set of keys.
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


HEARTBEAT_S = 0.5
PROBE_TIMEOUT_S = 1.0
"""How long a host may take to answer at one of its addresses."""
ZAP_DOMAIN = b"rlinf"
LINGER_MS = 1000
FRAME_BYTES = PIECE_BYTES + (1 << 10)
"""A larger part of a message ends its connection unread; encryption makes one some bytes larger.
It is also the most that is held for a connection that has not shown the run's key."""
HANDSHAKE_MS = 5000
"""How long a connection may take to present the run's key."""
MAX_UNAUTHENTICATED = 512
"""Maximum number of unauthenticated connections; fewer if the process may open few files."""
MIN_AUTHENTICATED_BYTES = 64 + 170 + 32
"""Least that a client with the key has got from the host: greeting, WELCOME and READY. One with
another key gets a dozen in place of the last, one without the host's the greeting alone. What it
has sent says nothing, it may be anything; and the socket's monitor, which tells of every handshake
that succeeded, does not say of which connection."""
TCP_INFO_BYTES, BYTES_ACKED = 128, 120
"""Of ``struct tcp_info`` (linux/tcp.h): how much of it is read, and where the number stands."""
log = logging.getLogger("rlinf")


class Authenticator:
    """Says who may connect to a host socket: those with the run's client key.

    A thread of its own answers, so that nobody waits for a host that is busy. Connections that have
    not shown the key are few and short-lived: they end after ``HANDSHAKE_MS``, or as soon as
    ``limit`` others have come after them, so that strangers cannot use up the files that the
    process may open. A member that is cut off so tries again by itself.

    ``refused`` counts connections with another key, ``dropped`` those that ended because others
    came.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: CurveKeys,
        host: zmq.Socket[bytes],
        *,
        limit: int | None = None,
    ) -> None:
        self.rejected = self.dropped = 0
        self._known = [z85.decode(keys.client_public)]
        self._limit = limit or min(
            MAX_UNAUTHENTICATED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8
        )
        self._recent: deque[int] = deque()
        """File descriptors of the last connections, known by now or not."""
        self._port = 0
        self._questions = context.socket(zmq.REP)
        self._questions.bind("inproc://zeromq.zap.01")
        self._accepted = host.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._leave: int | None = None
        self._thread: threading.Thread | None = None

    def open(self, addresses: Sequence[str]) -> None:
        """Let members in; the host listens at these addresses."""
        self._port = int(addresses[0].rpartition(":")[2])
        self._leave = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = start_service_thread("authenticator", self._work)

    def close(self) -> None:
        """Let nobody in any more. The host socket must be closed already."""
        if self._thread is not None and self._leave is not None:
            os.eventfd_write(self._leave, 1)
            self._thread.join()
            os.close(self._leave)
        self._questions.close()
        self._accepted.close(linger=0)

    def _work(self) -> None:
        poller = zmq.Poller()
        for source in (self._questions, self._accepted, self._leave):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._leave in ready:
                return
            if self._questions in ready:
                self._answer()
            if self._accepted in ready:
                self._note()

    def _answer(self) -> None:
        """Answer one question of https://rfc.zeromq.org/spec/27/."""
        version, request, _, _, _, mechanism, *credentials = self._questions.recv_multipart()
        admitted = mechanism == b"CURVE" and credentials == self._known
        self.rejected += not admitted
        status = (b"200", b"OK") if admitted else (b"400", b"unknown key")
        self._questions.send_multipart([version, request, *status, b"", b""])

    def _note(self) -> None:
        """Note a new connection; drop the oldest of those that have shown no key."""
        with contextlib.suppress(zmq.Again):
            while True:
                event, _ = self._accepted.recv_multipart(zmq.NOBLOCK)
                self._recent.append(struct.unpack("=Hi", event)[1])
                if len(self._recent) > self._limit:
                    self._drop(self._recent.popleft())

    def _drop(self, file: int) -> None:
        """End a connection of this host that has not shown the key."""
        try:
            connection = socket.socket(fileno=file)
        except OSError:
            return  # it ended before
        try:
            # The number may be that of another file by now.
            if connection.family != socket.AF_INET or connection.getsockname()[1] != self._port:
                return
            facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            if struct.unpack_from("=Q", facts, BYTES_ACKED)[0] >= MIN_AUTHENTICATED_BYTES:
                return
            self.dropped += 1
            if self.dropped == 1:
                log.warning(
                    "port %d: many connections without the run's key; the oldest of them are "
                    "dropped, here and from now on",
                    self._port,
                )
            connection.shutdown(socket.SHUT_RDWR)
        except (OSError, struct.error):
            return
        finally:
            connection.detach()


def host_socket(
    context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys, *, timeout_s: float
) -> zmq.Socket[bytes]:
    """Return a ROUTER socket for many clients, which needs an :class:`Authenticator` and a bind.

    A peer that completes no frame for ``timeout_s`` is disconnected.
    """
    host = context.socket(zmq.ROUTER)
    host.curve_server = True
    host.curve_secretkey = keys.host_secret.encode()
    host.zap_domain = ZAP_DOMAIN
    host.router_handover = True
    host.handshake_ivl = HANDSHAKE_MS
    _set_limits(host, timeout_s)
    return host


def client_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    keys: CurveKeys,
    routing_id: bytes,
    *,
    timeout_s: float,
) -> zmq.Socket[bytes]:
    """Return a DEALER socket that talks only to the run's host; it needs a connect."""
    client = context.socket(zmq.DEALER)
    client.curve_serverkey = keys.host_public.encode()
    client.curve_publickey = keys.client_public.encode()
    client.curve_secretkey = keys.client_secret.encode()
    client.routing_id = routing_id
    client.reconnect_ivl_max = 1000
    _set_limits(client, timeout_s)
    return client


def routing_id() -> bytes:
    """Return a unique name for a client."""
    return b"c" + secrets.token_bytes(15)


def listen(host: zmq.Socket[bytes], interface: str | None) -> list[str]:
    """Bind at a port that the kernel chooses; returns the addresses by which others may try.

    Args:
        interface: as for :func:`interface_address`; None: the value of ``RLINF_INTERFACE``, or all
            interfaces. A login node often has one interface to the internet and another one to the
            compute nodes, which may have no route to the internet.

    Raises:
        ConfigError: this node has no such network.
    """
    interface = interface or os.environ.get(INTERFACE_VARIABLE)
    address = interface_address(interface) if interface else None
    host.bind(f"tcp://{address or '0.0.0.0'}:*")
    port = host.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return [f"tcp://{ip}:{port}" for ip in ([address] if address else local_addresses())]


def interface_address(interface: str) -> str:
    """Return this node's IPv4 address on a network.

    Args:
        interface: name of an interface (``ib0``), address of this node, or a network
            (``10.1.0.0/16``), which is the same for all nodes.

    Raises:
        ConfigError: this node is not on such a network.
    """
    found = _interfaces()
    named = [ip for ip, name in found.items() if name == interface]
    if not named:
        try:
            network = ipaddress.ip_network(interface, strict=False)
            named = [ip for ip in local_addresses() if ipaddress.ip_address(ip) in network]
        except ValueError:
            pass
    if not named:
        raise ConfigError(
            f"cluster.network_interface: {socket.gethostname()} has no network {interface!r}"
            f"{did_you_mean(interface, [*found.values(), *found])}"
        )
    return named[0]


def local_addresses() -> list[str]:
    """Return this node's IPv4 addresses: the one with the default route first, loopback last."""
    found = _interfaces()
    outward = _address_towards("192.0.2.1")
    order = sorted(found, key=lambda ip: (ip.startswith("127."), ip != outward, ip))
    return order or ["127.0.0.1"]


def interface_towards(address: str) -> str | None:
    """Return the interface by which an IPv4 address is reached, or that has it itself.

    None: no network of this node leads there.
    """
    names = _interfaces()
    return names.get(address) or names.get(_address_towards(address))


def _interfaces() -> dict[str, str]:
    """Return the names of active interfaces by IPv4 address."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family == socket.AF_INET
    }


def _address_towards(address: str) -> str:
    """Return this node's source address for packets to an address; empty: no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def first_reachable(addresses: Sequence[str], timeout_s: float = PROBE_TIMEOUT_S) -> str | None:
    """Return the first of a host's addresses that answers. None: none of them answers now.

    Addresses that this node has too come last, because on another node they belong to another
    machine, such as a bridge for containers.
    """
    if len(addresses) == 1:
        return addresses[0]
    own = set(local_addresses())
    ends = [(address, *address.removeprefix("tcp://").rsplit(":", 1)) for address in addresses]
    ends.sort(key=lambda end: end[1] in own)
    waiting = selectors.DefaultSelector()
    answers: dict[str, bool] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(waiting)
        for address, ip, port in ends:
            probe = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.setblocking(False)
            if probe.connect_ex((ip, int(port))) in (0, errno.EINPROGRESS):
                waiting.register(probe, selectors.EVENT_READ, address)
            else:
                answers[address] = False  # no network of this node leads there
        deadline = time.monotonic() + timeout_s
        while True:
            # The first that did not refuse; it may still answer.
            best = next((address for address, *_ in ends if answers.get(address, True)), None)
            if best is None or best in answers:
                return best
            left = deadline - time.monotonic()
            if left <= 0:
                return next((address for address, *_ in ends if answers.get(address)), None)
            for key, _ in waiting.select(left):
                answers[key.data] = _greets(cast(socket.socket, key.fileobj))
                waiting.unregister(key.fileobj)


def _greets(probe: socket.socket) -> bool:
    """Return whether a ZeroMQ socket is at the other end, which sends first; a firewall may only
    accept.

    A greeting begins with %xFF (https://rfc.zeromq.org/spec/37/).
    """
    try:
        return probe.recv(1) == b"\xff"
    except OSError:
        return False


def paused_s(before: float, now: float) -> float:
    """Return how long a thread with period ``HEARTBEAT_S`` was paused between two polls.

    It received nothing meanwhile, so it must not count its peers as silent.
    """
    pause = now - before - HEARTBEAT_S
    return pause if pause > 2 * HEARTBEAT_S else 0.0


def _set_limits(end: zmq.Socket[bytes], timeout_s: float) -> None:
    end.maxmsgsize = FRAME_BYTES
    end.linger = LINGER_MS
    end.heartbeat_ivl = 1000
    end.heartbeat_timeout = int(timeout_s * 1000)
