"""Rendezvous of a process group: a key-value store that rank 0 serves.

Torch's own store accepts connections from anybody. This store is a server of the run
(:mod:`rlinf.channels.requests`): only processes with the run's keys can use it. The ranks find it
by a pointer file of the run.

The method of a request is its verb, and its block has the packed arguments. Rank 0 answers every
request immediately, so a rank that waits for a missing key repeats its request.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from rlinf.channels.channel import ChannelFailed
from rlinf.channels.curve_sockets import (
    HostPointer,
    first_reachable,
    local_addresses,
    read_pointer,
    run_keys,
)
from rlinf.channels.reply_buffers import Bytes, join
from rlinf.channels.requests import (
    Request,
    RequestClient,
    RequestRejected,
    RequestServer,
)
from rlinf.errors import DataError, StageError

MIN_RETRY_S, MAX_RETRY_S = 0.002, 0.25
"""Minimum and maximum wait before a missing key is requested again."""
FILE_POLL_S = 0.5
"""Maximum wait between two reads of the pointer file, which is on a shared filesystem."""
REQUEST_TIMEOUT_S = 30.0
"""How long a rank waits for rank 0 to answer a request."""
MAX_BYTES = 1 << 24
"""Maximum size of a request or reply."""
MAX_VALUE_BYTES = MAX_BYTES - (1 << 10)
"""Maximum size of a key with its value; the rest of a reply is overhead."""
Execute = Callable[..., Any]
"""A function that executes a request: its arguments are the verb and the verb's arguments."""


class KeyValueTable:
    """A thread-safe table of keys and values."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._verbs: dict[str, Execute] = {
            "set": self._set,
            "value": self._values.get,
            "missing": lambda keys: [key for key in keys if key not in self._values],
            "add": self._add,
            "compare_set": self._compare_set,
            "delete": lambda key: self._values.pop(key, None) is not None,
            "count": self._values.__len__,
        }

    def execute(self, verb: str, *arguments: Any) -> Any:
        """Execute a request.

        Raises:
            KeyError, TypeError, ValueError: the request is invalid.
        """
        with self._lock:
            return self._verbs[verb](*arguments)

    def _set(self, key: str, value: bytes) -> None:
        _check_sizes(key, value)
        self._values[key] = value

    def _add(self, key: str, amount: int) -> int:
        _check_sizes(key, b"")
        total = int(self._values.get(key, b"0")) + amount
        if type(amount) is not int or abs(total) >= 1 << 63:
            raise ValueError("not a number of 64 bits")
        self._values[key] = b"%d" % total
        return total

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        _check_sizes(key, expected, desired)
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._values[key] = current = desired
        return expected if current is None else current


class RendezvousHost:
    """Rank 0's end, which answers the other ranks until :meth:`close`."""

    def __init__(self, pointer: Path) -> None:
        self.execute = KeyValueTable().execute
        self._last_replies: dict[str, tuple[int, bytes]] = {}
        """Number and reply of the last request of each rank."""
        self.server = RequestServer(pointer, self._handle)

    def close(self) -> None:
        self.server.close()

    def _handle(self, request: Request) -> None:
        rank, number = str(request.arguments["rank"]), int(request.arguments["number"])
        last_number, answer = self._last_replies.get(rank, (0, b""))
        if number != last_number:
            answer = msgpack.packb(self.execute(request.method, *_unpack(join(request.blocks[0]))))
            self._last_replies[rank] = (number, answer)
        # A request whose reply was lost arrives again, and must not count twice.
        request.reply({}, [answer])


class RendezvousClient:
    """The end of another rank, for any number of threads; one request at a time.

    Args:
        name: the name of the rank.
        address: the address at which ``host`` answered.
    """

    def __init__(self, pointer: Path, name: str, host: HostPointer, address: str) -> None:
        self._name, self._address = name, address
        self._number, self._lock, self._is_closed = 0, threading.Lock(), False
        self._client = RequestClient(
            pointer,
            lambda: self._is_closed,
            server=(host, address),
            timeout_s=REQUEST_TIMEOUT_S,
        )

    def execute(self, verb: str, *arguments: Any) -> Any:
        """Send a request to rank 0 and return its reply.

        Raises:
            DistStoreError: rank 0 does not answer, the client is closed, or the request is too
                large.
            ValueError: a key with its value is too large.
        """
        if verb in ("set", "compare_set"):
            _check_sizes(*arguments)
        request = msgpack.packb(arguments)
        if len(request) > MAX_BYTES:
            raise DistStoreError(
                f"{verb} of {len(request)} bytes: a rendezvous carries at most {MAX_BYTES}"
            )
        with self._lock:
            self._number += 1
            numbered = {"rank": self._name, "number": self._number}
            try:
                if not self._is_closed:
                    reply = self._client.request(verb, numbered, [request])
                    return msgpack.unpackb(join(reply.blocks[0]))
            except RequestRejected as error:
                raise DistStoreError(f"{verb}: {error}") from None
            except ChannelFailed as error:
                if not self._is_closed:
                    raise DistStoreError(
                        f"rank 0 at {self._address} does not answer ({error}): it has ended, is "
                        "stopped or cut off; its log says more"
                    ) from None
        raise DistStoreError("the process is ending: it has left the rendezvous")

    def close(self) -> None:
        """Close the connection; a waiting request fails."""
        self._is_closed = True
        self._client.wake()
        with self._lock:
            self._client.close()


class RendezvousStore(Store):
    """The key-value store in torch's interface.

    Torch keeps a reference to the C++ part of the object only, so the caller must keep the Python
    object alive while torch uses the store.

    Args:
        execute: executes requests.
        timeout_s: how long to wait for a missing key.
        close_client: closes the client that sends requests.
    """

    def __init__(
        self, execute: Execute, timeout_s: float, close_client: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._execute, self._timeout_s, self._close_client = execute, timeout_s, close_client

    def close(self) -> None:
        """Stop sending and answering requests; may be called twice."""
        atexit.unregister(self.close)
        self._close_client()

    def set(self, key: str, value: str | bytes) -> None:
        self._execute("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._execute("value", key)
        return value

    def add(self, key: str, value: int) -> int:
        return int(self._execute("add", key, value))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        value: bytes = self._execute(
            "compare_set", key, _bytes(expected_value), _bytes(desired_value)
        )
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self._execute("delete", key))

    def num_keys(self) -> int:
        return int(self._execute("count"))

    def check(self, keys: Sequence[str]) -> bool:
        return not self._execute("missing", list(keys))

    def clone(self) -> RendezvousStore:
        return self

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        if missing := self.wait_missing(keys, timeout_s):
            raise DistStoreError(f"no rank has set {', '.join(missing)} for {timeout_s:g} s")

    def wait_missing(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Wait for keys; return the keys that were not set in time."""
        deadline, pause = time.monotonic() + timeout_s, MIN_RETRY_S
        missing = list(keys)
        while missing := self._execute("missing", missing):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                break
            time.sleep(min(remaining_s, pause))
            pause = min(2 * pause, MAX_RETRY_S)
        return missing


def join_rendezvous(
    pointer: Path, rank: int, size: int, timeout_s: float
) -> tuple[RendezvousStore, str]:
    """Wait for all ranks; return their store and an address at which other nodes reach rank 0.

    The store exists until it is closed or Python ends. The process group is formed only after all
    ranks have joined, because its processes wait at open ports that accept any connection.

    Args:
        pointer: file in which rank 0 publishes its location; its name is unique to this attempt of
            this group. Its folder holds the run's keys.

    Raises:
        StageError: ranks did not join in time; the message lists them.
    """
    deadline = time.monotonic() + timeout_s
    run_keys(pointer.parent)  # any rank may be the first to create the folder of a new run
    endpoint: RendezvousHost | RendezvousClient
    if rank == 0:
        endpoint = host = RendezvousHost(pointer)
        rank_0_host, own_host = "", _host_name(host.server.addresses[0])
    else:
        location, address = _find_rank_0(pointer, rank, timeout_s)
        endpoint = RendezvousClient(pointer, f"rank {rank}", location, address)
        rank_0_host = _host_name(address)
    store = RendezvousStore(endpoint.execute, timeout_s, endpoint.close)
    atexit.register(store.close)
    try:
        # Every rank reports the address at which it reached rank 0; "" on the node of rank 0, where
        # any address works. Other nodes may reach only one of the addresses.
        store.set(_rank_key(rank), "" if rank_0_host in local_addresses() else rank_0_host)
        missing = store.wait_missing(
            [_rank_key(r) for r in range(size)], deadline - time.monotonic()
        )
        if missing:
            ranks = ", ".join(key.removeprefix(_rank_key("")) for key in missing)
            raise StageError(
                f"rank {rank} waited {timeout_s:g} s for all {size} ranks of its group; these "
                f"never joined: {ranks}. Their logs, or the state of their nodes, say why"
            )
        if rank == 0:
            reported_hosts = (store.get(_rank_key(r)).decode() for r in range(1, size))
            store.set(_ADDRESS_KEY, next(filter(None, reported_hosts), own_host))
        return store, store.get(_ADDRESS_KEY).decode()
    except DistStoreError as error:
        store.close()
        raise StageError(
            f"rank {rank} waited for all {size} ranks of its group and lost rank 0: {error}"
        ) from error
    except BaseException:
        store.close()
        raise
    finally:
        if rank == 0:
            pointer.unlink(missing_ok=True)


_ADDRESS_KEY = "address"
"""Key of the address that all ranks return."""


def _rank_key(rank: int | str) -> str:
    return f"joined/{rank}"


def _find_rank_0(pointer: Path, rank: int, timeout_s: float) -> tuple[HostPointer, str]:
    """Return the location of rank 0 and the address at which it answers."""
    deadline, pause, host = time.monotonic() + timeout_s, MIN_RETRY_S, None
    while True:
        # NFS caches the absence of a file for a minute, unless its folder is opened.
        os.close(os.open(pointer.parent, os.O_RDONLY | os.O_DIRECTORY))
        host = read_pointer(pointer) or host
        if host is not None and (address := first_reachable(host.addresses)) is not None:
            return host, address
        if time.monotonic() > deadline:
            break
        time.sleep(pause)
        pause = min(2 * pause, FILE_POLL_S)
    reason = f"it answers at none of {', '.join(host.addresses)}" if host else f"no {pointer}"
    raise StageError(
        f"rank {rank} waited {timeout_s:g} s for rank 0 of its group: {reason}. Its log, or the "
        "state of its node, says why"
    )


def _host_name(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0]


def _unpack(message: Bytes) -> list[Any]:
    content = msgpack.unpackb(message)
    if type(content) is not list:
        raise DataError("not a list")
    return content


def _check_sizes(key: str, *values: bytes) -> None:
    if type(key) is not str or any(type(value) is not bytes for value in values):
        raise TypeError("keys are text and values are bytes")
    if any(len(key) + len(value) > MAX_VALUE_BYTES for value in values):
        raise ValueError(f"{key[:80]!r}: keys and values have at most {MAX_VALUE_BYTES} bytes")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
