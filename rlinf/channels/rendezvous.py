"""Rendezvous of a process group: a key-value store that rank 0 serves.

Torch's own store listens for everybody. This one is a mailbox of the run
(:mod:`rlinf.channels.mailbox`), which only processes with the run's keys can use and which
delivers every message once. A file of the run holds its location.

A request is one msgpack list (number, verb, arguments), and its reply is number and value. All
requests are answered at once; a rank that waits for a key sends its request again.
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

from rlinf.channels.channel import ChannelClosed, ChannelFailed
from rlinf.channels.curve_sockets import first_reachable, local_addresses, run_keys
from rlinf.channels.mailbox import MailboxHost, MailboxPeer
from rlinf.channels.mailbox_protocol import Block, HostPointer, PeerSession, read_pointer
from rlinf.errors import DataError, StageError

MIN_RETRY_S, MAX_RETRY_S = 0.002, 0.25
"""Minimum and maximum wait before a missing key is requested again."""
FILE_POLL_S = 0.5
"""Maximum wait between two reads of the pointer file, on a shared filesystem."""
REQUEST_TIMEOUT_S = 30.0
"""How long rank 0 may leave a request unanswered."""
HEARTBEAT_FRACTION = 1 / 15
"""Heartbeat interval of each rank, as a fraction of the host's timeout."""
MAX_BYTES = 1 << 24
"""Maximum size of a request or reply."""
MAX_VALUE_BYTES = MAX_BYTES - (1 << 10)
"""Maximum size of a key and its value, which share a reply with a little overhead."""
Execute = Callable[..., Any]
"""Executes a request: verb and arguments."""


class KeyValueTable:
    """The keys and their values, for any number of threads."""

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
        _check(key, value)
        self._values[key] = value

    def _add(self, key: str, amount: int) -> int:
        _check(key, b"")
        total = int(self._values.get(key, b"0")) + amount
        if type(amount) is not int or abs(total) >= 1 << 63:
            raise ValueError("not a number of 64 bits")
        self._values[key] = b"%d" % total
        return total

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        _check(key, expected, desired)
        known = self._values.get(key)
        if known == expected or (known is None and not expected):
            self._values[key] = known = desired
        return expected if known is None else known


class RendezvousHost(MailboxHost):
    """Rank 0's end: the mailbox's thread answers the other ranks until :meth:`close`.

    Invalid requests get no reply and count as ``malformed``.
    """

    def __init__(self, pointer: Path) -> None:
        self.execute = KeyValueTable().execute
        super().__init__(
            pointer,
            self._execute_request,
            interface=None,
            timeout_s=REQUEST_TIMEOUT_S,
            max_bytes=MAX_BYTES,
            ack_on_poll=False,
        )

    def _execute_request(self, request: Block) -> bytes:
        # Executed while items are decoded, so that an invalid request is dropped and counted.
        number, verb, *arguments = _unpacked(request)
        answer: bytes = msgpack.packb((number, self.execute(verb, *arguments)))
        return answer

    def _arrived(self, session: PeerSession, content: bytes, number: int) -> None:
        session.sender.add(content)


class RendezvousClient(MailboxPeer):
    """The end of another rank, for any number of threads; one request at a time."""

    def __init__(self, pointer: Path, name: str, host: HostPointer, address: str) -> None:
        self._number, self._request_lock = 0, threading.Lock()
        beat_s = host.timeout_s * HEARTBEAT_FRACTION
        super().__init__(pointer, name, _unpacked, host=host, address=address, beat_s=beat_s)

    def execute(self, verb: str, *arguments: Any) -> Any:
        """Send a request to rank 0 and return its reply.

        Raises:
            DistStoreError: rank 0 does not answer, this end is closed, or the request is too large.
            ValueError: a key with its value is too large.
        """
        if verb in ("set", "compare_set"):
            # Rank 0 would drop a request that is too large, and seem to have ended.
            _check(*arguments)
        with self._request_lock:
            self._number += 1
            deadline = time.monotonic() + REQUEST_TIMEOUT_S
            request = msgpack.packb((self._number, verb, *arguments))
            if len(request) > MAX_BYTES:
                raise DistStoreError(
                    f"{verb} of {len(request)} bytes: a rendezvous carries at most {MAX_BYTES}"
                )
            try:
                self.send_item(request)
                while (left := deadline - time.monotonic()) > 0:
                    for number, value in self.receive_items(left):
                        if number == self._number:
                            return value
            except ChannelClosed:
                reason = "the process is ending: it has left the rendezvous"
                raise DistStoreError(reason) from None
            except ChannelFailed as error:
                raise DistStoreError(f"{error}; the log of rank 0 says more") from None
        raise DistStoreError(
            f"rank 0 at {self._address} has not answered for {REQUEST_TIMEOUT_S:g} s: it has "
            "ended, is stopped or cut off; its log says more"
        )


class RendezvousStore(Store):
    """The key-value store in torch's interface.

    Torch keeps a reference only to its own half of the object, so the caller must keep this one
    alive while torch uses it.

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
        """Send and answer no further requests; may be called twice."""
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
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        if missing := self.wait_missing(keys, limit):
            raise DistStoreError(f"no rank has set {', '.join(missing)} for {limit:g} s")

    def wait_missing(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Wait for keys; returns those that were not set in time."""
        deadline, pause = time.monotonic() + timeout_s, MIN_RETRY_S
        wanted = list(keys)
        while wanted := self._execute("missing", wanted):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, pause))
            pause = min(2 * pause, MAX_RETRY_S)
        return wanted


def join_rendezvous(
    pointer: Path, rank: int, size: int, timeout_s: float
) -> tuple[RendezvousStore, str]:
    """Wait for all ranks; returns their store and an address by which others reach rank 0.

    The store lives until it is closed or Python ends. No rank forms a group earlier, because a
    process that waits at an open port would accept any connection.

    Args:
        pointer: file in which rank 0 publishes its location; its name is unique to this attempt of
            this group. Its folder holds the run's keys.

    Raises:
        StageError: a rank did not arrive in time; names the missing ones.
    """
    deadline = time.monotonic() + timeout_s
    run_keys(pointer.parent)  # any rank may be the first to create the folder of a new run
    end: RendezvousHost | RendezvousClient
    if rank == 0:
        end = host = RendezvousHost(pointer)
        reached, own = "", _host_of(host.addresses[0])
    else:
        target, address = _find_rank_0(pointer, rank, timeout_s)
        end, reached = RendezvousClient(pointer, f"rank {rank}", target, address), _host_of(address)
    store = RendezvousStore(end.execute, timeout_s, end.close)
    atexit.register(store.close)
    try:
        # On its own node any address works; other nodes may reach only one of them.
        store.set(_joined_key(rank), "" if reached in local_addresses() else reached)
        late = store.wait_missing(
            [_joined_key(r) for r in range(size)], deadline - time.monotonic()
        )
        if late:
            ranks = ", ".join(key.removeprefix(_joined_key("")) for key in late)
            raise StageError(
                f"rank {rank} waited {timeout_s:g} s for all {size} ranks of its group; these "
                f"never joined: {ranks}. Their logs, or the state of their nodes, say why"
            )
        if rank == 0:
            reported = (store.get(_joined_key(other)).decode() for other in range(1, size))
            store.set(_VIA, next(filter(None, reported), own))
        return store, store.get(_VIA).decode()
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


_VIA = "via"


def _joined_key(rank: int | str) -> str:
    return f"here/{rank}"


def _find_rank_0(pointer: Path, rank: int, timeout_s: float) -> tuple[HostPointer, str]:
    """Return the location of rank 0 and the address at which it answers."""
    deadline, pause, known = time.monotonic() + timeout_s, MIN_RETRY_S, None
    while True:
        # NFS caches for a minute that a file is missing, unless its folder is opened.
        os.close(os.open(pointer.parent, os.O_RDONLY | os.O_DIRECTORY))
        known = read_pointer(pointer) or known
        if known is not None and (address := first_reachable(known.addresses)) is not None:
            return known, address
        if time.monotonic() > deadline:
            break
        time.sleep(pause)
        pause = min(2 * pause, FILE_POLL_S)
    reason = f"it answers at none of {', '.join(known.addresses)}" if known else f"no {pointer}"
    raise StageError(
        f"rank {rank} waited {timeout_s:g} s for rank 0 of its group: {reason}. Its log, or the "
        "state of its node, says why"
    )


def _host_of(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0]


def _unpacked(message: Block) -> list[Any]:
    content = msgpack.unpackb(message)
    if type(content) is not list:
        raise DataError("not a list")
    return content


def _check(key: str, *values: bytes) -> None:
    if type(key) is not str or any(type(value) is not bytes for value in values):
        raise TypeError("keys are text and values are bytes")
    if any(len(key) + len(value) > MAX_VALUE_BYTES for value in values):
        raise ValueError(f"{key[:80]!r}: keys and values have at most {MAX_VALUE_BYTES} bytes")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
