"""Where the processes of a group find each other: a key-value store that rank 0 holds for them.

The one that torch brings listens for everybody. This one is a CURVE socket of the run at a port
that the kernel chooses; a file of the run says where.

A request is one msgpack list, number, verb and arguments, and its answer number and value. All are
answered at once: who waits for a key asks again. What got no answer is sent again by the same
number, and done once.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import zmq
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from rlinf.channels.curve import (
    HEARTBEAT_S,
    Door,
    client_socket,
    host_socket,
    listen,
    own_addresses,
    reachable,
    routing_id,
    write_pointer,
)
from rlinf.channels.keys import Keys, run_keys
from rlinf.errors import StageError
from rlinf.threads import Malformed, serve

SOONEST_S, LATEST_S = 0.002, 0.25
"""How long to wait before asking again for what is not there."""
LOOK_S = 0.5
"""The same for the file, on a shared filesystem."""
AGAIN_S = 1.0
SILENT_S = 30.0
"""How long rank 0 may leave a request unanswered."""
LINK_TIMEOUT_S = 10.0
MAX_BYTES = 1 << 24
Do = Callable[..., Any]
"""What carries out a request: verb and arguments."""


class Table:
    """The keys and their values; any number of threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._verbs: dict[str, Do] = {
            "set": self._set,
            "value": self._values.get,
            "missing": lambda keys: [key for key in keys if key not in self._values],
            "add": self._add,
            "compare_set": self._compare_set,
            "delete": lambda key: self._values.pop(key, None) is not None,
            "count": self._values.__len__,
        }

    def do(self, verb: str, *arguments: Any) -> Any:
        """Carry out a request.

        Raises:
            KeyError, TypeError, ValueError: there is none such.
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


class Host:
    """Rank 0's end: a thread that answers the others until :meth:`close`.

    ``refused`` counts connections without the run's key, ``malformed`` messages that were dropped.
    """

    def __init__(self, keys: Keys) -> None:
        self._malformed = Malformed("rendezvous")
        self.do = Table().do
        self._context = zmq.Context()
        self._socket = host_socket(
            self._context, keys, timeout_s=LINK_TIMEOUT_S, max_bytes=MAX_BYTES
        )
        self._door = Door(self._context, keys, self._socket)
        try:
            self.addresses = listen(self._socket, None)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._answered: dict[bytes, tuple[int, bytes]] = {}
        """By client, the last number and the answer."""
        self._closed = False
        self._door.open(self.addresses)
        self._thread = serve("rendezvous", self._run)

    @property
    def malformed(self) -> int:
        return self._malformed.count

    @property
    def refused(self) -> int:
        return self._door.refused

    def close(self) -> None:
        """Answer nobody any more; may be called twice."""
        self._closed = True
        self._thread.join()
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        while not self._closed:
            ready = dict(poller.poll(int(HEARTBEAT_S * 1000 / 2)))
            if self._socket in ready:
                self._answer()
        self._socket.close()
        self._door.close()

    def _answer(self) -> None:
        frames = self._socket.recv_multipart()
        try:
            client, frame = frames
            number, verb, *arguments = msgpack.unpackb(frame)
            before, answer = self._answered.get(client, (-1, b""))
            if number > before:
                answer = msgpack.packb((number, self.do(verb, *arguments)))
                self._answered[client] = number, answer
        except Exception as error:  # whatever foreign bytes bring about
            self._malformed.drop(error)
            return
        # One that does not fit now is asked for again.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([client, answer], zmq.NOBLOCK)


class Guest:
    """The end of another rank; any number of threads, one request after the other."""

    def __init__(self, keys: Keys, address: str) -> None:
        self._address, self._number = address, 0
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket = client_socket(
            self._context, keys, routing_id(), timeout_s=LINK_TIMEOUT_S, max_bytes=MAX_BYTES
        )
        self._socket.connect(address)

    def do(self, verb: str, *arguments: Any) -> Any:
        """Have rank 0 carry out a request.

        Raises:
            DistStoreError: it does not answer, or this end is closed.
        """
        with self._lock:
            if self._socket.closed:
                raise DistStoreError("the process is ending: it has left the rendezvous")
            self._number += 1
            request = msgpack.packb((self._number, verb, *arguments))
            deadline = time.monotonic() + SILENT_S
            while time.monotonic() < deadline:
                self._socket.send(request)
                while self._socket.poll(int(AGAIN_S * 1000)):
                    number, value = msgpack.unpackb(self._socket.recv())
                    if number == self._number:
                        return value
        raise DistStoreError(
            f"rank 0 at {self._address} has not answered for {SILENT_S:g} s: it has ended, is "
            "stopped or cut off; its log says more"
        )

    def close(self) -> None:
        """Ask nothing any more; may be called twice."""
        with self._lock:
            self._socket.close()
        self._context.term()


class Rendezvous(Store):
    """The store as torch wants it.

    Args:
        do: carries out requests.
        timeout_s: how long to wait for a key that nobody has set.
    """

    def __init__(self, do: Do, timeout_s: float) -> None:
        super().__init__()
        self._do, self._timeout_s = do, timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        self._do("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._do("value", key)
        return value

    def add(self, key: str, value: int) -> int:
        return int(self._do("add", key, value))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        value: bytes = self._do("compare_set", key, _bytes(expected_value), _bytes(desired_value))
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self._do("delete", key))

    def num_keys(self) -> int:
        return int(self._do("count"))

    def check(self, keys: Sequence[str]) -> bool:
        return not self._do("missing", list(keys))

    def clone(self) -> Rendezvous:
        return self

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        if missing := self.missing(keys, limit):
            raise DistStoreError(f"nobody has set {', '.join(missing)} for {limit:g} s")

    def missing(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Wait for keys; those that were not set in time."""
        deadline, pause = time.monotonic() + timeout_s, SOONEST_S
        wanted = list(keys)
        while wanted := self._do("missing", wanted):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, pause))
            pause = min(2 * pause, LATEST_S)
        return wanted


def meet(pointer: Path, rank: int, size: int, timeout_s: float) -> tuple[Rendezvous, str]:
    """Wait for all ranks; returns their store, and an address of rank 0 that others reach it by.

    Nobody forms a group before: a process that waits for its peers at an open port would wait for
    whoever comes first.

    Args:
        pointer: where rank 0 says where it is; no other group, nor a former attempt at this one,
            ever had the name. Its folder holds the run's keys.

    Raises:
        StageError: not all came in time; names who is missing.
    """
    deadline = time.monotonic() + timeout_s
    keys = run_keys(pointer.parent)
    end: Host | Guest
    if rank == 0:
        end = host = Host(keys)
        reached, own = "", _host_of(host.addresses[0])
        write_pointer(pointer, {"addresses": host.addresses})
    else:
        address = _find(pointer, rank, timeout_s)
        end, reached = Guest(keys, address), _host_of(address)
    store = Rendezvous(end.do, timeout_s)
    # Torch keeps but its own half of the store, so this holds the other one until Python ends.
    atexit.register(_leave, end, store)
    try:
        # From its own node any of its addresses will do, of which the others may reach but one.
        store.set(_here(rank), "" if reached in own_addresses() else reached)
        late = store.missing([_here(r) for r in range(size)], deadline - time.monotonic())
        if late:
            ranks = ", ".join(key.removeprefix(_here("")) for key in late)
            raise StageError(
                f"rank {rank} waited {timeout_s:g} s for all {size} ranks of its group; these "
                f"never came: {ranks}. Their logs, or the state of their nodes, say why"
            )
        if rank == 0:
            said = (store.get(_here(other)).decode() for other in range(1, size))
            store.set(_VIA, next(filter(None, said), own))
        return store, store.get(_VIA).decode()
    except BaseException:
        end.close()
        raise
    finally:
        if rank == 0:
            pointer.unlink(missing_ok=True)


def _leave(end: Host | Guest, store: Rendezvous) -> None:
    end.close()


_VIA = "via"


def _here(rank: int | str) -> str:
    return f"here/{rank}"


def _find(pointer: Path, rank: int, timeout_s: float) -> str:
    """The address where rank 0 answers."""
    deadline, pause, known = time.monotonic() + timeout_s, SOONEST_S, None
    while True:
        # NFS remembers for a minute that a file is not there, unless its folder is opened.
        os.close(os.open(pointer.parent, os.O_RDONLY | os.O_DIRECTORY))
        with contextlib.suppress(FileNotFoundError):
            known = json.loads(pointer.read_text(encoding="utf-8"))["addresses"]
            if (address := reachable(known)) is not None:
                return str(address)
        if time.monotonic() > deadline:
            break
        time.sleep(pause)
        pause = min(2 * pause, LOOK_S)
    found = f"it answers at none of {', '.join(known)}" if known else f"there is no {pointer}"
    raise StageError(
        f"rank {rank} waited {timeout_s:g} s for rank 0 of its group: {found}. Its log, or the "
        "state of its node, says why"
    )


def _host_of(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0]


def _check(key: str, *values: bytes) -> None:
    if type(key) is not str or any(type(value) is not bytes for value in values):
        raise TypeError("keys are text and values are bytes")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
