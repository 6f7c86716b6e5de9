"""Weights to the boards of other workers through a process group, by Gloo or NCCL.

The worker that publishes them forms a group with those who want them, which may be of another pool.
How its members find each other, what comes next and the digest of it they learn from their inboxes,
which are encrypted and authenticated; the weights themselves travel as the backend sends them, open
to whoever can read the network, or join in where it listens. A group that fails, because one of it
is gone or has no such backend, is given up, and the weights go another way.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from rlinf.channels.curve import own_addresses
from rlinf.channels.world import INTERFACES
from rlinf.data.record import Identity, Record, Scalar
from rlinf.errors import TransferError
from rlinf.models.device import local_device
from rlinf.weights.broadcast import TIMEOUT_S, Broadcast, Group
from stages.board import keep_newest
from stages.parts import WEIGHTS
from stages.worker.inbox import Outbox

GLOO, NCCL = "gloo", "nccl"
BACKENDS = (GLOO, NCCL)
FORM, TOLD, COMES, CAME, OVER = "group", "group told", "group comes", "group came", "group over"
ABOUT_GROUPS = frozenset({FORM, TOLD, COMES, CAME, OVER})
"""What a record of weights says that is for :class:`Groups`."""
WHAT, ATTEMPT, NAME, DIGEST = "_what", "_attempt", "_name", "_digest"
MEMBERS, BACKEND, KEY = "_members", "_backend", "_key"
KEEP = 4
"""Groups at a time; one more takes the place of the oldest."""
PATIENCE_S = 1.0
"""What a thread may need beyond that to end."""
Ready = Callable[[str, int, str, dict[str, Tensor]], None]
"""Told of weights that arrived whole: output, version, attempt, tensors."""
log = logging.getLogger("rlinf")


class Mail(Store):
    """What the members of a group tell all others to find each other: a store without a server."""

    def __init__(self) -> None:
        super().__init__()
        self.tell: Callable[[str, bytes], None] = lambda *_: None
        self._told: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.told(key, data)
        self.tell(key, data)

    def told(self, key: str, value: bytes) -> None:
        """Another member has set a key."""
        with self._changed:
            self._told[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._told[key]

    def clone(self) -> Mail:
        return self

    def check(self, keys: Collection[str]) -> bool:
        return all(key in self._told for key in keys)

    def wait(self, keys: Collection[str], timeout: timedelta | None = None) -> None:
        limit = TIMEOUT_S if timeout is None else timeout.total_seconds()
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), limit):
                missing = [key for key in keys if key not in self._told]
                raise RuntimeError(f"not all members came: {missing} missing after {limit:g} s")


class Groups:
    """The process groups that this worker sends or takes weights in.

    Args:
        dtype: what float32 tensors are sent as; None: as they are.
    """

    def __init__(self, outbox: Outbox, dtype: torch.dtype | None = None) -> None:
        self._outbox, self._dtype = outbox, dtype
        self._lock = threading.Lock()
        self._ends: dict[tuple[str, ...], tuple[str, Broadcast]] = {}
        """By backend and members: those this worker sends in, and their names."""
        self._failed: dict[tuple[str, ...], None] = {}
        self._members: dict[str, _Member] = {}
        """By name: those it takes weights in."""
        self._left: list[_Member] = []
        """Those that are over, as long as their threads run."""
        self._closed = False
        self._mail: dict[str, Mail] = {}

    def send(
        self,
        out: str,
        attempt: str,
        number: int,
        tensors: Mapping[str, Tensor],
        workers: Sequence[str],
        backend: str,
    ) -> bool:
        """Send a version; False if that failed, now or before in the same group."""
        group = (backend, self._outbox.name, *workers)
        if group in self._failed:
            return False
        try:
            name, end = self._ends.get(group) or self._form(group)
            self._say(out, workers, number, {WHAT: COMES, NAME: name, ATTEMPT: attempt})
            digest = end.send(number, tensors, dtype=self._dtype)
            self._say(out, workers, number, {WHAT: CAME, NAME: name, DIGEST: digest})
        except (TransferError, RuntimeError) as error:
            log.warning("no %s with %s: %s", backend, ", ".join(workers), error)
            self._failed[group] = None
            keep_newest(self._failed, KEEP)
            self._drop(group)
            return False
        return True

    def take(self, out: str, record: Record, ready: Ready) -> None:
        """A record about a group; called by the inbox alone. Returns at once.

        Args:
            ready: told of what arrived whole: output, version, attempt, tensors.
        """
        what, name = record.info[WHAT], str(record.info[NAME])
        if what == TOLD:
            key = str(record.info[KEY])
            self._mail_of(name).told(key, record.context[KEY].tobytes())
        elif what == FORM:
            members = str(record.info[MEMBERS]).split(",")
            backend = str(record.info[BACKEND])
            mail = self._mail_of(name, out, [m for m in members if m != self._outbox.name])
            rank = members.index(self._outbox.name)
            with self._lock:
                if not self._closed:
                    self._members[name] = _Member(backend, mail, rank, len(members), ready)
            while len(self._members) > KEEP:
                self._over(next(iter(self._members)))
        elif what == OVER:
            self._over(name)
        elif (member := self._members.get(name)) is not None:
            member.next.put((out, record))

    def close(self) -> None:
        """Give up all groups. Gloo ends the process if some are left when Python ends."""
        with self._lock:
            self._closed = True
        for group in list(self._ends):
            self._drop(group)
        for name in list(self._members):
            self._over(name)
        for member in self._left:
            member.join()

    def _over(self, name: str) -> None:
        with self._lock:
            if (member := self._members.pop(name, None)) is not None:
                member.leave()
                self._left = [left for left in [*self._left, member] if left.runs]

    def _form(self, group: tuple[str, ...]) -> tuple[str, Broadcast]:
        backend, _, *workers = group
        name = f"group-{secrets.token_hex(8)}"
        device = device_of(backend)
        mail = self._mail_of(name, name, workers)
        members = ",".join(group[1:])
        self._say(name, workers, 0, {WHAT: FORM, NAME: name, MEMBERS: members, BACKEND: backend})
        formed = form(backend, mail, 0, len(workers) + 1)
        self._ends[group] = (name, Broadcast(formed, 0, device))
        while len(self._ends) > KEEP:
            self._drop(next(iter(self._ends)))
        return self._ends[group]

    def _drop(self, group: tuple[str, ...]) -> None:
        if group in self._ends:
            name, end = self._ends.pop(group)
            self._say(name, group[2:], 0, {WHAT: OVER, NAME: name})
            end.close()

    def _mail_of(self, name: str, out: str = "", others: Sequence[str] = ()) -> Mail:
        """The mail of a group; some of it may come before the group is known here."""
        with self._lock:
            mail = self._mail.setdefault(name, Mail())
            keep_newest(self._mail, 2 * KEEP)
        if others:

            def tell(key: str, value: bytes) -> None:
                info: dict[str, Scalar] = {WHAT: TOLD, NAME: name, KEY: key}
                self._say(out, others, 0, info, {KEY: np.frombuffer(value, np.uint8)})

            mail.tell = tell
        return mail

    def _say(
        self,
        out: str,
        workers: Sequence[str],
        number: int,
        info: Mapping[str, Scalar],
        context: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        writer = self._outbox.writer(f"{out}:{WEIGHTS}", workers, 0, 1)
        writer.put(Record(Identity(number, 0), context=dict(context or {}), info=dict(info)))


class _Member:
    """Takes what the source of one group sends, in a thread of its own."""

    def __init__(self, backend: str, mail: Mail, rank: int, size: int, ready: Ready) -> None:
        self.next: queue.SimpleQueue[tuple[str, Record] | None] = queue.SimpleQueue()
        self._ready = ready
        self._thread = threading.Thread(
            target=self._work, args=(backend, mail, rank, size), name="group", daemon=True
        )
        self._thread.start()

    def leave(self) -> None:
        """There is nothing more to take."""
        self.next.put(None)

    @property
    def runs(self) -> bool:
        """Whether something is still under way in it."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait until it has left: no longer than one bucket, or a member, may take."""
        self._thread.join(TIMEOUT_S + PATIENCE_S)

    def _work(self, backend: str, mail: Mail, rank: int, size: int) -> None:
        end = None
        try:
            device = device_of(backend)
            end = Broadcast(form(backend, mail, rank, size), 0, device)
            while (coming := self.next.get()) is not None:
                out, record = coming
                self._take(out, record, end)
        except (TransferError, RuntimeError, queue.Empty, LookupError) as error:
            log.warning("no weights by %s: %r", backend, error)
        finally:
            if end is not None:
                end.close()

    def _take(self, out: str, record: Record, broadcast: Broadcast) -> None:
        received = broadcast.receive()
        # Who sends says so when all have it: one that does not come has failed.
        after = self.next.get(timeout=TIMEOUT_S)
        if after is None:
            raise TransferError("the group is over")
        if (received.version, received.digest) != (
            record.identity.iteration,
            after[1].info.get(DIGEST),
        ):
            raise TransferError(f"version {received.version} is not what was sent")
        self._ready(out, received.version, str(record.info[ATTEMPT]), received.tensors)


def device_of(backend: str) -> torch.device:
    """Where buckets of a backend travel.

    Raises:
        TransferError: this process has no such backend.
    """
    if backend == GLOO:
        return torch.device("cpu")
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise TransferError("NCCL needs a GPU in every worker and a torch that was built with it")
    return local_device("cuda")


def form(backend: str, store: Store, rank: int, size: int) -> Group:
    """A group of its own beside those of the workers' pools; waits for all members.

    Raises:
        RuntimeError: not all came.
    """
    limit = timedelta(seconds=TIMEOUT_S)
    # NCCL itself would wait for a member that never comes without a limit.
    store.set(f"here/{rank}", "1")
    store.wait([f"here/{other}" for other in range(size)], limit)
    if backend == GLOO:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = limit
        device = dist.ProcessGroupGloo.create_device
        if names := os.environ.get(INTERFACES):
            options._devices = [device(interface=name) for name in names.split(",")]
        else:
            # Gloo's own choice, what the host's name stands for, often is the loopback.
            options._devices = [device(hostname=own_addresses()[0])]
        return cast(Group, dist.ProcessGroupGloo(store, rank, size, options))
    # NCCL's watchdog would end the process when another one is gone; here that is noticed by who
    # waits (:mod:`rlinf.weights.broadcast`).
    handling = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(handling)
    os.environ[handling] = "0"
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return cast(Group, dist.ProcessGroupNCCL(store, rank, size, options))
    finally:
        if before is None:
            del os.environ[handling]
        else:
            os.environ[handling] = before
