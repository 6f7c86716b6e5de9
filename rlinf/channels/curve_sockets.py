"""Authenticated and encrypted sockets of a run, and the addresses at which they are reached.

A host listens, and clients connect to one of its addresses, which a pointer file in the run's
folder contains. CURVE (https://rfc.zeromq.org/spec/26/) encrypts all messages and authenticates
both ends with the run's keys. A member is a client with the run's client key.
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
import zmq.utils.garbage  # imported first: its atexit handler then runs after ours
from zmq.utils import z85

from rlinf.artifacts import write_atomic
from rlinf.channels import INTERFACE_VARIABLE
from rlinf.errors import ConfigError, InputError, did_you_mean
from rlinf.threads import start_service_thread

KEYS_FILE = "curve-keys.json"


class CurveKeys(NamedTuple):
    """CURVE key pairs (https://rfc.zeromq.org/spec/26/) of the hosts and the clients, Z85 text.

    Every user who can read the keys file may join. A client must know the host's public key, and a
    host admits only the run's client key.
    """

    host_public: str
    host_secret: str
    client_public: str
    client_secret: str


def run_keys(folder: Path) -> CurveKeys:
    """Return the keys in a run's ``folder`` (mode 0700); the first caller creates them.

    Raises:
        InputError: the folder or file belongs to another user, other users may change the folder
            or read the file, or the file is damaged.
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
        _create_keys(path)
    with os.fdopen(_open_keys_file(path), encoding="utf-8") as file:
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


def _open_keys_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InputError(f"{path}: is a link; delete it and start the run again") from None


def _create_keys(path: Path) -> None:
    pairs = [key.decode() for _ in range(2) for key in zmq.curve_keypair()]
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(CurveKeys(*pairs)._asdict(), file)
        file.flush()
        os.fsync(file.fileno())
    try:
        # Fails if another process was first; all processes use its keys.
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


HEARTBEAT_S = 0.5
"""Interval at which ends of a connection show that they live."""
PIECE_BYTES = 512 << 10
"""Maximum bytes of a frame. Smaller frames suit slow networks but cost more work on fast ones."""
PROBE_TIMEOUT_S = 1.0
"""How long a host may take to answer at one of its addresses."""
ZAP_DOMAIN = b"rlinf"
LINGER_MS = 1000
"""How long a closed socket may still send its messages."""
FRAME_BYTES = PIECE_BYTES + (1 << 10)
"""Limit of a frame, with some bytes for encryption; a larger frame ends its connection unread. It
also limits the memory for a connection that has not presented the run's key."""
HANDSHAKE_MS = 5000
"""How long a connection may take to present the run's key."""
MAX_UNAUTHENTICATED = 512
"""Maximum number of unauthenticated connections; less if the process may open few files."""
MIN_AUTHENTICATED_BYTES = 64 + 170 + 32
"""Minimum bytes that the host has sent to a client with the key: greeting, WELCOME and READY. A
client with another key gets a dozen bytes instead of READY; a client without the host's key gets
only the greeting. Sent bytes are counted because received bytes prove nothing, and the socket
monitor does not name the connection of a successful handshake."""
TCP_INFO_BYTES, BYTES_ACKED = 128, 120
"""``struct tcp_info`` (linux/tcp.h): bytes to read, and offset of ``tcpi_bytes_acked``."""
log = logging.getLogger("rlinf")


class Authenticator:
    """Admits connections with the run's client key to a host socket.

    A thread answers authentication requests, so that no client waits for a busy host. Connections
    that have not presented the key are few and short-lived: they end after ``HANDSHAKE_MS``, or
    when ``limit`` newer connections exist. Strangers can thus not exhaust the files that the
    process may open. A member whose connection was dropped reconnects by itself.

    ``rejected`` counts connections with another key. ``dropped`` counts connections without the key
    that ended because of newer connections.
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
        self._client_credentials = [z85.decode(keys.client_public)]
        self._limit = limit or min(
            MAX_UNAUTHENTICATED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8
        )
        self._recent: deque[int] = deque()
        """File descriptors of the last ``limit`` connections, authenticated or not, oldest first.
        """
        self._port = 0
        self._zap_requests = context.socket(zmq.REP)
        self._zap_requests.bind("inproc://zeromq.zap.01")
        self._monitor = host.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._stop_event: int | None = None
        self._thread: threading.Thread | None = None

    def open(self, addresses: Sequence[str]) -> None:
        """Start to admit members; the host listens at these addresses."""
        self._port = int(addresses[0].rpartition(":")[2])
        self._stop_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = start_service_thread("authenticator", self._serve)

    def close(self) -> None:
        """Stop the thread. The host socket must be closed already."""
        if self._thread is not None and self._stop_event is not None:
            os.eventfd_write(self._stop_event, 1)
            self._thread.join()
            os.close(self._stop_event)
        self._zap_requests.close()
        self._monitor.close(linger=0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._zap_requests, self._monitor, self._stop_event):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_event in ready:
                return
            if self._zap_requests in ready:
                self._answer_zap()
            if self._monitor in ready:
                self._track_connections()

    def _answer_zap(self) -> None:
        """Answer one authentication request (https://rfc.zeromq.org/spec/27/)."""
        version, request, _, _, _, mechanism, *credentials = self._zap_requests.recv_multipart()
        is_member = mechanism == b"CURVE" and credentials == self._client_credentials
        self.rejected += not is_member
        status = (b"200", b"OK") if is_member else (b"400", b"unknown key")
        self._zap_requests.send_multipart([version, request, *status, b"", b""])

    def _track_connections(self) -> None:
        """Record new connections; drop the oldest one if too many have not presented the key."""
        with contextlib.suppress(zmq.Again):
            while True:
                event, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
                self._recent.append(struct.unpack("=Hi", event)[1])
                if len(self._recent) > self._limit:
                    self._drop_unauthenticated(self._recent.popleft())

    def _drop_unauthenticated(self, descriptor: int) -> None:
        """End a connection of this host unless it has presented the key."""
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            return  # the connection has ended
        try:
            # The descriptor may be that of another file now.
            if connection.family != socket.AF_INET or connection.getsockname()[1] != self._port:
                return
            tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            if struct.unpack_from("=Q", tcp_info, BYTES_ACKED)[0] >= MIN_AUTHENTICATED_BYTES:
                return
            self.dropped += 1
            if self.dropped == 1:
                log.warning(
                    "port %d: many connections without the run's key; from now on the oldest "
                    "of them are dropped",
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
    """Return an unbound ROUTER socket for many clients; it needs an :class:`Authenticator`.

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
    """Return an unconnected DEALER socket that accepts only the run's host."""
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
    """Bind to a port that the kernel chooses; return the addresses that clients may try.

    Args:
        interface: as for :func:`interface_address`; None: the value of ``RLINF_INTERFACE``, or all
            interfaces. A login node often has one interface to the internet and another interface
            to the compute nodes, which may have no route to the internet.

    Raises:
        ConfigError: this node is not on such a network.
    """
    interface = interface or os.environ.get(INTERFACE_VARIABLE)
    address = interface_address(interface) if interface else None
    host.bind(f"tcp://{address or '0.0.0.0'}:*")
    port = host.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return [f"tcp://{ip}:{port}" for ip in ([address] if address else local_addresses())]


def interface_address(interface: str) -> str:
    """Return this node's IPv4 address on a network.

    Args:
        interface: name of an interface (``ib0``), address of this node, or a network, which may be
            the same for all nodes (``10.1.0.0/16``).

    Raises:
        ConfigError: this node is not on such a network.
    """
    interfaces = _interfaces()
    matches = [ip for ip, name in interfaces.items() if name == interface]
    if not matches:
        try:
            network = ipaddress.ip_network(interface, strict=False)
            matches = [ip for ip in local_addresses() if ipaddress.ip_address(ip) in network]
        except ValueError:
            pass
    if not matches:
        raise ConfigError(
            f"cluster.network_interface: {socket.gethostname()} has no network {interface!r}"
            f"{did_you_mean(interface, [*interfaces.values(), *interfaces])}"
        )
    return matches[0]


def local_addresses() -> list[str]:
    """Return this node's IPv4 addresses: first that of the default route, last the loopback one."""
    interfaces = _interfaces()
    default = _address_towards("192.0.2.1")
    addresses = sorted(interfaces, key=lambda ip: (ip.startswith("127."), ip != default, ip))
    return addresses or ["127.0.0.1"]


def interface_towards(address: str) -> str | None:
    """Return the name of the interface that has this IPv4 address, or else the interface on the
    route to it. None: there is no route."""
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


class HostPointer(NamedTuple):
    """Content of a pointer file."""

    addresses: list[str]
    """Addresses at which the host may be reached."""
    token: str
    """A random name of the host's process."""
    memory: str
    """Shared-memory id of its node; see :func:`rlinf.shared_memory.shared_memory_id`."""


def write_pointer(path: Path, pointer: HostPointer) -> None:
    """Publish the addresses of a host."""
    write_atomic(path, json.dumps(pointer._asdict()), private=True)


def read_pointer(path: Path) -> HostPointer | None:
    """Return the content of a pointer file, or None if it cannot be read (yet).

    On a shared filesystem the file may be missing, empty or stale for a while.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        pointer = HostPointer(*(values[name] for name in HostPointer._fields))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    addresses = pointer.addresses
    texts = [*addresses, pointer.token, pointer.memory] if type(addresses) is list else [None]
    is_valid = all(type(text) is str for text in texts)
    return pointer if is_valid and addresses else None


def first_reachable(addresses: Sequence[str], timeout_s: float = PROBE_TIMEOUT_S) -> str | None:
    """Return the first of a host's addresses that answers; None: none answers now.

    Addresses that this node has too are tried last: if the host is on another node, such an address
    (of a container bridge, for example) leads to this node instead.
    """
    if len(addresses) == 1:
        return addresses[0]
    local = set(local_addresses())
    endpoints = [(address, *address.removeprefix("tcp://").rsplit(":", 1)) for address in addresses]
    endpoints.sort(key=lambda endpoint: endpoint[1] in local)
    selector = selectors.DefaultSelector()
    answers: dict[str, bool] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(selector)
        for address, ip, port in endpoints:
            probe = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.setblocking(False)
            if probe.connect_ex((ip, int(port))) in (0, errno.EINPROGRESS):
                selector.register(probe, selectors.EVENT_READ, address)
            else:
                answers[address] = False  # no route
        deadline = time.monotonic() + timeout_s
        while True:
            # The first address that has not failed; it may still answer.
            candidate = next((a for a, *_ in endpoints if answers.get(a, True)), None)
            if candidate is None or candidate in answers:
                return candidate
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return next((address for address, *_ in endpoints if answers.get(address)), None)
            for key, _ in selector.select(remaining_s):
                answers[key.data] = _is_zeromq(cast(socket.socket, key.fileobj))
                selector.unregister(key.fileobj)


def refuses_connections(address: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Return whether a node says that no process listens at this address of its own."""
    ip, port = address.removeprefix("tcp://").rsplit(":", 1)
    try:
        socket.create_connection((ip, int(port)), timeout_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass  # no answer: the process may be there
    return False


def _is_zeromq(probe: socket.socket) -> bool:
    """Return whether the other end is a ZeroMQ socket, not a firewall that accepts connections.

    A ZeroMQ socket sends a greeting that begins with %xFF (https://rfc.zeromq.org/spec/37/).
    """
    try:
        return probe.recv(1) == b"\xff"
    except OSError:
        return False


def paused_s(previous: float, now: float) -> float:
    """Return how long a thread that polls each ``HEARTBEAT_S`` was paused between two polls; 0.0 if
    it was not.

    During a pause the thread received nothing, so the pause does not count as silence of its peers.

    Args:
        previous: monotonic time of the first poll; ``now`` is that of the second.
    """
    pause = now - previous - HEARTBEAT_S
    return pause if pause > 2 * HEARTBEAT_S else 0.0


def _set_limits(endpoint: zmq.Socket[bytes], timeout_s: float) -> None:
    endpoint.maxmsgsize = FRAME_BYTES
    endpoint.linger = LINGER_MS
    endpoint.heartbeat_ivl = 1000
    endpoint.heartbeat_timeout = int(timeout_s * 1000)
