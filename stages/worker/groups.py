"""Weights to the boards of other workers through a process group, by Gloo or NCCL.

The worker that publishes them forms a group with those that want them, maybe of another pool. What
comes next and the digest of it the members learn from their inboxes, and they find each other by a
store that the publisher holds (:mod:`rlinf.channels.rendezvous`), both encrypted and authenticated;
the weights themselves travel as the backend sends them, open to everybody who can read the network,
or join in where it listens. A group that fails, because a member is gone or has no such backend, is
given up, and the weights go another way.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from rlinf.channels.curve import INTERFACE, address_on, own_addresses
from rlinf.channels.rendezvous import meet
from rlinf.channels.world import INTERFACES
from rlinf.data.record import Identity, Record
from rlinf.errors import ConfigError, StageError, TransferError
from rlinf.models.device import local_device
from rlinf.weights.broadcast import TIMEOUT_S, Broadcast, Group
from stages.board import keep_newest
from stages.parts import WEIGHTS
from stages.worker.inbox import Outbox
from stages.worker.messages import (
    GroupEnds,
    GroupForms,
    GroupSends,
    GroupSent,
    OfGroup,
    OfWeights,
)

GLOO, NCCL = "gloo", "nccl"
BACKENDS = (GLOO, NCCL)
DATA = "data"
"""In a record about weights: the bytes of what it says."""
NAME = re.compile(r"group-[0-9a-f]{16}")
KEEP = 4
"""Groups at a time; one more takes the place of the oldest."""
PATIENCE_S = 1.0
"""What a thread may need beyond that to end."""
FAULTS = (TransferError, StageError, ConfigError, RuntimeError)
"""What ends a group."""
Ready = Callable[[str, int, str, dict[str, Tensor]], None]
"""Told of weights that arrived whole: output, version, attempt, tensors."""
log = logging.getLogger("rlinf")


def say(
    outbox: Outbox,
    out: str,
    workers: Sequence[str],
    number: int,
    message: OfWeights,
    data: np.ndarray | None = None,
    part: int = 0,
) -> None:
    """Tell workers of weights that are made as version ``number``."""
    context = {} if data is None else {DATA: data}
    record = Record(Identity(number, part), context=context, info=message.packed())
    outbox.writer(f"{out}:{WEIGHTS}", workers, 0, 1).put(record)


class Groups:
    """The process groups that this worker sends or takes weights in.

    Args:
        dtype: what float32 tensors are sent as; None: as they are.
    """

    def __init__(self, outbox: Outbox, dtype: torch.dtype | None = None) -> None:
        self._outbox, self._dtype = outbox, dtype
        self._lock = threading.Lock()
        self._ends: dict[tuple[str, ...], tuple[str, _End]] = {}
        """By backend and members: those this worker sends in, and their names."""
        self._failed: dict[tuple[str, ...], None] = {}
        self._members: dict[str, _Member] = {}
        """By name: those it takes weights in."""
        self._left: list[_Member] = []
        """Those that are over, as long as their threads run."""
        self._closed = False

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
            to = (self._outbox, out, workers, number)
            say(*to, GroupSends(group=name, attempt=attempt))
            digest = end.broadcast.send(number, tensors, dtype=self._dtype)
            say(*to, GroupSent(group=name, digest=digest))
        except FAULTS as error:
            log.warning("no %s with %s: %s", backend, ", ".join(workers), error)
            self._failed[group] = None
            keep_newest(self._failed, KEEP)
            self._drop(group)
            return False
        return True

    def take(self, out: str, number: int, message: OfGroup, ready: Ready) -> None:
        """What is said of a group; called by the inbox alone. Returns at once.

        Args:
            ready: told of what arrived whole: output, version, attempt, tensors.

        Raises:
            TransferError: it makes no sense.
        """
        name = message.group
        if isinstance(message, GroupForms):
            members = message.members.split(",")
            if not NAME.fullmatch(name) or self._outbox.name not in members:
                raise TransferError(f"no group of this worker: {name!r}")
            rank = members.index(self._outbox.name)
            with self._lock:
                if not self._closed:
                    form = (message.backend, self._pointer(name), rank, len(members))
                    self._members[name] = _Member(form, ready)
            while len(self._members) > KEEP:
                self._over(next(iter(self._members)))
        elif isinstance(message, GroupEnds):
            self._over(name)
        elif (member := self._members.get(name)) is not None:
            member.next.put((out, number, message))

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

    def _form(self, group: tuple[str, ...]) -> tuple[str, _End]:
        backend, _, *workers = group
        device_of(backend)
        name = f"group-{secrets.token_hex(8)}"
        members = ",".join(group[1:])
        message = GroupForms(group=name, members=members, backend=backend)
        say(self._outbox, name, workers, 0, message)
        self._ends[group] = name, _End(backend, self._pointer(name), 0, len(workers) + 1)
        while len(self._ends) > KEEP:
            self._drop(next(iter(self._ends)))
        return self._ends[group]

    def _pointer(self, name: str) -> Path:
        return self._outbox.folder / f"{name}.json"

    def _drop(self, group: tuple[str, ...]) -> None:
        if group in self._ends:
            name, end = self._ends.pop(group)
            say(self._outbox, name, group[2:], 0, GroupEnds(group=name))
            end.close()


class _End:
    """This worker's end of one group; made when all members are there.

    Raises:
        TransferError, StageError, ConfigError, RuntimeError: it has no such backend or network, or
            not all came.
    """

    def __init__(self, backend: str, pointer: Path, rank: int, size: int) -> None:
        device = device_of(backend)
        self._store, _ = meet(pointer, rank, size, TIMEOUT_S)
        try:
            group = form(backend, self._store, rank, size)
        except BaseException:
            self._store.close()
            raise
        self.broadcast = Broadcast(group, 0, device)

    def close(self) -> None:
        self.broadcast.close()
        self._store.close()


class _Member:
    """Takes what the source of one group sends, in a thread of its own."""

    def __init__(self, form: tuple[str, Path, int, int], ready: Ready) -> None:
        self.next: queue.SimpleQueue[tuple[str, int, OfGroup] | None] = queue.SimpleQueue()
        self._ready = ready
        self._thread = threading.Thread(target=self._work, args=form, name="group", daemon=True)
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

    def _work(self, backend: str, pointer: Path, rank: int, size: int) -> None:
        end = None
        try:
            end = _End(backend, pointer, rank, size)
            while (coming := self.next.get()) is not None:
                self._take(*coming, end.broadcast)
        except (*FAULTS, queue.Empty) as error:
            log.warning("no weights by %s: %r", backend, error)
        finally:
            if end is not None:
                end.close()

    def _take(self, out: str, number: int, message: OfGroup, broadcast: Broadcast) -> None:
        if not isinstance(message, GroupSends):
            return
        received = broadcast.receive()
        # The sender says so when all have it: if that does not come, it has failed.
        match self.next.get(timeout=TIMEOUT_S):
            case (_, _, GroupSent(digest=sent)):
                if (received.version, received.digest) != (number, sent):
                    raise TransferError(f"version {received.version} is not what was sent")
            case _:
                raise TransferError("the group is over")
        self._ready(out, received.version, message.attempt, received.tensors)


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
    """A group of its own beside those of the workers' pools; all members are there.

    Raises:
        ConfigError: this node has no network as ``cluster.interface`` says.
        RuntimeError: it cannot be formed.
    """
    limit = timedelta(seconds=TIMEOUT_S)
    if backend == GLOO:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = limit
        device = dist.ProcessGroupGloo.create_device
        if names := os.environ.get(INTERFACES):
            options._devices = [device(interface=name) for name in names.split(",")]
        else:
            # Gloo's own choice, what the host's name stands for, often is the loopback.
            chosen = os.environ.get(INTERFACE)
            address = address_on(chosen) if chosen else own_addresses()[0]
            options._devices = [device(hostname=address)]
        return cast(Group, dist.ProcessGroupGloo(store, rank, size, options))
    # NCCL's watchdog would end the process when another one is gone; here that is noticed where
    # it is waited for (:mod:`rlinf.weights.broadcast`).
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
