"""Weights on their way from the worker that made them to the boards of others.

A version is announced to the inboxes of the workers that want it. On the sender's node it then lies
in shared memory, elsewhere its buckets follow as records. Where the plan says so it comes by a
process group (:mod:`stages.worker.weight_transfer`).

A worker that gets buckets passes each on at once to the workers it was told of, so that many are
reached as a tree. One that finds a part damaged, or gets none, takes the committed folder instead:
only what arrived whole is served.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from rlinf.channels import INTERFACE_VARIABLE
from rlinf.channels.curve_sockets import interface_address, local_addresses
from rlinf.channels.process_group import GLOO_INTERFACE_VARIABLE
from rlinf.channels.rendezvous import join_rendezvous
from rlinf.data.record import Record, RecordId
from rlinf.errors import ConfigError, RlinfError, StageError, WeightTransferError
from rlinf.models.device import local_device
from rlinf.shared_memory import SEGMENT_NAME, new_segment_name
from rlinf.threads import BackgroundWorker
from rlinf.weights.broadcast import BUCKET_TIMEOUT_S, BroadcastGroup, WeightBroadcast
from rlinf.weights.buckets import BucketLayout, bucket_checksum, version_digest
from rlinf.weights.shared_weights import SharedWeightsReader, SharedWeightsWriter
from stages.factory import WEIGHTS
from stages.live_store import LiveStore, evict_oldest
from stages.worker.messages import (
    GroupClosed,
    GroupFormed,
    GroupMessage,
    GroupSendDone,
    GroupSendStarted,
    WeightMessage,
    WeightsBucket,
    WeightsEnd,
    WeightsInSharedMemory,
    WeightsStart,
    read_weight_message,
)
from stages.worker.record_transfer import SHARED_MEMORY, SOCKET, TRANSFER_ERRORS, RecordSender

GLOO, NCCL = "gloo", "nccl"
BACKENDS = (GLOO, NCCL)
PAYLOAD = "data"
"""In a record about weights: the bytes of what it says."""
GROUP_NAME = re.compile(r"group-[0-9a-f]{16}")
MAX_GROUPS = 4
"""Groups at a time; one more takes the place of the oldest."""
JOIN_GRACE_S = 1.0
"""What a thread may need beyond that to end."""
GROUP_ERRORS = (WeightTransferError, StageError, ConfigError, RuntimeError)
"""What ends a group."""
WeightsCallback = Callable[[str, int, str, dict[str, Tensor]], None]
"""Told of weights that arrived whole: output, version, attempt, tensors."""


def send_weight_message(
    sender: RecordSender,
    out: str,
    workers: Sequence[str],
    number: int,
    message: WeightMessage,
    data: np.ndarray | None = None,
    part: int = 0,
) -> None:
    """Tell workers of weights that are made as version ``number``."""
    context = {} if data is None else {PAYLOAD: data}
    record = Record(RecordId(number, part), context=context, info=message.to_dict())
    sender.stream_to(f"{out}:{WEIGHTS}", workers, 0, 1).put(record)


class BroadcastGroups:
    """The process groups that this worker sends or takes weights in.

    Args:
        dtype: what float32 tensors are sent as; None: as they are.
    """

    def __init__(self, sender: RecordSender, dtype: torch.dtype | None = None) -> None:
        self._outbox, self._dtype = sender, dtype
        self._lock = threading.Lock()
        self._ends: dict[tuple[str, ...], tuple[str, _End]] = {}
        """By backend and members: those this worker sends in, and their names."""
        self._failed: dict[tuple[str, ...], None] = {}
        self._members: dict[str, _Member] = {}
        """By name: those it takes weights in."""
        self._closing: list[_Member] = []
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
            send_weight_message(*to, GroupSendStarted(group=name, attempt=attempt))
            digest = end.broadcast.send(number, tensors, dtype=self._dtype)
            send_weight_message(*to, GroupSendDone(group=name, digest=digest))
        except GROUP_ERRORS as error:
            log.warning("no %s with %s: %s", backend, ", ".join(workers), error)
            self._failed[group] = None
            evict_oldest(self._failed, MAX_GROUPS)
            self._drop(group)
            return False
        return True

    def handle_message(
        self, out: str, number: int, message: GroupMessage, on_weights: WeightsCallback
    ) -> None:
        """Handle a message about a group; called by the inbox alone. Returns at once.

        Args:
            ready: told of what arrived whole: output, version, attempt, tensors.

        Raises:
            WeightTransferError: it makes no sense.
        """
        name = message.group
        if isinstance(message, GroupFormed):
            members = message.members.split(",")
            if not GROUP_NAME.fullmatch(name) or self._outbox.name not in members:
                raise WeightTransferError(f"no group of this worker: {name!r}")
            rank = members.index(self._outbox.name)
            with self._lock:
                if not self._closed:
                    form = (message.backend, self._pointer(name), rank, len(members))
                    self._members[name] = _Member(form, on_weights)
            while len(self._members) > MAX_GROUPS:
                self._over(next(iter(self._members)))
        elif isinstance(message, GroupClosed):
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
        for member in self._closing:
            member.join()

    def _over(self, name: str) -> None:
        with self._lock:
            if (member := self._members.pop(name, None)) is not None:
                member.leave()
                self._closing = [member for member in [*self._closing, member] if member.runs]

    def _form(self, group: tuple[str, ...]) -> tuple[str, _End]:
        backend, _, *workers = group
        backend_device(backend)
        name = f"group-{secrets.token_hex(8)}"
        members = ",".join(group[1:])
        message = GroupFormed(group=name, members=members, backend=backend)
        send_weight_message(self._outbox, name, workers, 0, message)
        self._ends[group] = name, _End(backend, self._pointer(name), 0, len(workers) + 1)
        while len(self._ends) > MAX_GROUPS:
            self._drop(next(iter(self._ends)))
        return self._ends[group]

    def _pointer(self, name: str) -> Path:
        return self._outbox.folder / f"{name}.json"

    def _drop(self, group: tuple[str, ...]) -> None:
        if group in self._ends:
            name, end = self._ends.pop(group)
            send_weight_message(self._outbox, name, group[2:], 0, GroupClosed(group=name))
            end.close()


class _End:
    """This worker's end of one group; made when all members are there.

    Raises:
        WeightTransferError, StageError, ConfigError, RuntimeError: this process lacks the backend
            or the network, or a member did not join.
    """

    def __init__(self, backend: str, pointer: Path, rank: int, size: int) -> None:
        device = backend_device(backend)
        self._store, _ = join_rendezvous(pointer, rank, size, BUCKET_TIMEOUT_S)
        try:
            group = create_process_group(backend, self._store, rank, size)
        except BaseException:
            self._store.close()
            raise
        self.broadcast = WeightBroadcast(group, 0, device)

    def close(self) -> None:
        self.broadcast.close()
        self._store.close()


class _Member:
    """Takes what the source of one group sends, in a thread of its own."""

    def __init__(self, form: tuple[str, Path, int, int], ready: WeightsCallback) -> None:
        self.next: queue.SimpleQueue[tuple[str, int, GroupMessage] | None] = queue.SimpleQueue()
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
        self._thread.join(BUCKET_TIMEOUT_S + JOIN_GRACE_S)

    def _work(self, backend: str, pointer: Path, rank: int, size: int) -> None:
        end = None
        try:
            end = _End(backend, pointer, rank, size)
            while (coming := self.next.get()) is not None:
                self._take(*coming, end.broadcast)
        except (*GROUP_ERRORS, queue.Empty) as error:
            log.warning("no weights by %s: %r", backend, error)
        finally:
            if end is not None:
                end.close()

    def _take(
        self, out: str, number: int, message: GroupMessage, broadcast: WeightBroadcast
    ) -> None:
        if not isinstance(message, GroupSendStarted):
            return
        received = broadcast.receive()
        # The sender says so when all have it: if that does not come, it has failed.
        match self.next.get(timeout=BUCKET_TIMEOUT_S):
            case (_, _, GroupSendDone(digest=sent)):
                if (received.version, received.digest) != (number, sent):
                    raise WeightTransferError(f"version {received.version} is not what was sent")
            case _:
                raise WeightTransferError("the group is over")
        self._ready(out, received.version, message.attempt, received.tensors)


def backend_device(backend: str) -> torch.device:
    """Return the device on which buckets of a backend travel.

    Raises:
        WeightTransferError: this process has no such backend.
    """
    if backend == GLOO:
        return torch.device("cpu")
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise WeightTransferError(
            "NCCL needs a GPU in every worker and a torch that was built with it"
        )
    return local_device("cuda")


def create_process_group(backend: str, store: Store, rank: int, size: int) -> BroadcastGroup:
    """A group of its own beside those of the workers' pools; all members are there.

    Raises:
        ConfigError: this node has no network as ``cluster.network_interface`` says.
        RuntimeError: it cannot be formed.
    """
    limit = timedelta(seconds=BUCKET_TIMEOUT_S)
    if backend == GLOO:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = limit
        device = dist.ProcessGroupGloo.create_device
        if names := os.environ.get(GLOO_INTERFACE_VARIABLE):
            options._devices = [device(interface=name) for name in names.split(",")]
        else:
            # Gloo's own choice, what the host's name stands for, often is the loopback.
            chosen = os.environ.get(INTERFACE_VARIABLE)
            address = interface_address(chosen) if chosen else local_addresses()[0]
            options._devices = [device(hostname=address)]
        return cast(BroadcastGroup, dist.ProcessGroupGloo(store, rank, size, options))
    # NCCL's watchdog would end the process when another one is gone; here that is noticed where
    # it is waited for (:mod:`rlinf.weights.broadcast`).
    handling = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(handling)
    os.environ[handling] = "0"
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return cast(BroadcastGroup, dist.ProcessGroupNCCL(store, rank, size, options))
    finally:
        if before is None:
            del os.environ[handling]
        else:
            os.environ[handling] = before


MAX_VERSIONS = 2
"""Versions kept in memory; an older one is on disk."""
MAX_ANNOUNCED = 64
"""Versions that were announced; some of them never come whole."""
log = logging.getLogger("rlinf")


class _Version(NamedTuple):
    out: str
    attempt: str
    number: int
    tensors: Mapping[str, Tensor]


@dataclass
class _SharedSegment:
    """Shared memory and what was last written to it."""

    name: str
    layout: BucketLayout
    writer: SharedWeightsWriter
    number: int = -1
    holds: tuple[str, str] = ("", "")


class WeightPublisher:
    """Sends the weights made here, in a thread of its own, to the workers that want them.

    Args:
        dtype: what float32 tensors are sent as; None: as they are.
    """

    def __init__(self, sender: RecordSender, dtype: torch.dtype | None = None) -> None:
        self._outbox, self._dtype = sender, dtype
        self.groups = BroadcastGroups(sender, dtype)
        self._lock = threading.Lock()
        self._thread = BackgroundWorker("weights", TRANSFER_ERRORS)
        self._wanted: dict[str, dict[str, str]] = {}
        self._versions: dict[str, _Version] = {}
        self._memory: _SharedSegment | None = None

    def subscribe(self, out: str, transports: Mapping[str, str]) -> None:
        """Workers that want the weights of an output, made or still to be made, and how."""
        with self._lock:
            self._wanted[out] = self._wanted.get(out, {}) | dict(transports)
            if out in self._versions:
                self._thread.submit(f"weights of {out}", self._send, out, dict(transports))

    def publish(self, out: str, attempt: str, number: int, objects: Mapping[str, Any]) -> None:
        """Send the weights among what an output holds; they do not change. Returns at once."""
        if WEIGHTS not in objects:
            return
        with self._lock:
            self._versions[out] = _Version(out, attempt, number, objects[WEIGHTS])
            while len(self._versions) > MAX_VERSIONS:
                dropped = next(iter(self._versions))
                del self._versions[dropped]
                self._wanted.pop(dropped, None)
            if wanted := self._wanted.get(out):
                self._thread.submit(f"weights of {out}", self._send, out, dict(wanted))

    def drop_subscribers(self, outs: Collection[str]) -> None:
        """Forget subscribers of outputs that are committed: those without them read the disk."""
        with self._lock:
            for out in outs:
                self._wanted.pop(out, None)

    def pop_socket_subscribers(self, out: str) -> list[str]:
        """The subscribers of an output by socket, which this one no longer serves.

        They get it bucket by bucket from where it is passed on; :meth:`publish` serves the others,
        and those that come later.
        """
        with self._lock:
            wanted = self._wanted.get(out, {})
            far = [worker for worker, way in wanted.items() if way == SOCKET]
            for worker in far:
                del wanted[worker]
        return far

    def forward(self, out: str, workers: Sequence[str], record: Record) -> None:
        """Send on a record about an output's weights. Returns at once."""
        if workers:
            self._thread.submit(f"weights of {out}", self._forward, out, workers, record)

    def close(self) -> None:
        self._thread.close()
        self.groups.close()
        if self._memory is not None:
            self._memory.writer.close()

    def _forward(self, out: str, workers: Sequence[str], record: Record) -> None:
        self._outbox.stream_to(f"{out}:{WEIGHTS}", workers, 0, 1).put(record)

    def _send(self, out: str, ways: Mapping[str, str]) -> None:
        # What waits to be sent is kept no longer than versions are: one that is late is on disk.
        if (version := self._versions.get(out)) is None:
            return
        by = {way: [w for w in ways if ways[w] == way] for way in set(ways.values())}
        far = by.get(SOCKET, [])
        if (near := by.get(SHARED_MEMORY)) and not self._share(version, near):
            far += near
        for backend in BACKENDS:
            if (members := by.get(backend)) and not self.groups.send(*version, members, backend):
                far += members
        if far:
            self._stream(version, far)

    def _share(self, version: _Version, workers: list[str]) -> bool:
        layout, segment = (
            BucketLayout.from_tensors(version.tensors, dtype=self._dtype),
            self._memory,
        )
        try:
            if segment is None or segment.holds != (version.out, version.attempt):
                if segment is None or segment.layout != layout or segment.number >= version.number:
                    segment = self._renew(layout)
                segment.writer.publish(version.number, version.tensors)
                segment.holds, segment.number = (version.out, version.attempt), version.number
        except WeightTransferError as error:
            log.warning("%s", error)
            return False
        message = WeightsInSharedMemory(attempt=version.attempt, segment=segment.name)
        send_weight_message(self._outbox, version.out, workers, version.number, message)
        return True

    def _renew(self, layout: BucketLayout) -> _SharedSegment:
        if self._memory is not None:
            self._memory.writer.close()
            self._memory = None
        name = new_segment_name()
        self._memory = _SharedSegment(name, layout, SharedWeightsWriter(name, layout))
        return self._memory

    def _stream(self, version: _Version, workers: list[str]) -> None:
        layout = BucketLayout.from_tensors(version.tensors, dtype=self._dtype)
        text = layout.to_json().encode()
        to = (self._outbox, version.out, workers, version.number)
        send_weight_message(
            *to, WeightsStart(attempt=version.attempt), np.frombuffer(text, np.uint8)
        )
        sums: list[int] = []
        for bucket in range(layout.num_buckets):
            span = layout.bucket_slice(bucket)
            part = torch.zeros(span.stop - span.start, dtype=torch.uint8)
            layout.pack_bucket(bucket, version.tensors, part)
            sums.append(int(bucket_checksum(part)))
            message = WeightsBucket(attempt=version.attempt, checksum=f"{sums[-1]:x}")
            send_weight_message(*to, message, part.numpy(), bucket)
        send_weight_message(
            *to,
            WeightsEnd(attempt=version.attempt, digest=version_digest(version.number, text, sums)),
        )


@dataclass
class _Coming:
    attempt: str
    number: int
    text: bytes
    layout: BucketLayout
    flat: Tensor
    sums: dict[int, int] = field(default_factory=dict)

    def place(self, bucket: int) -> Tensor:
        """Return the place of a bucket; empty: there is no such bucket."""
        there = 0 <= bucket < self.layout.num_buckets
        return self.flat[self.layout.bucket_slice(bucket)] if there else self.flat[:0]


def _data(record: Record) -> np.ndarray:
    """The bytes that a record about weights brings, uint8.

    Raises:
        WeightTransferError: it brings none.
    """
    data = record.context.get(PAYLOAD)
    if data is None or data.dtype != np.uint8:
        raise WeightTransferError("a message that is to bring weights brings none")
    return data


@contextlib.contextmanager
def _room() -> Iterator[None]:
    """Torch says by a ``RuntimeError`` that there is no memory for a tensor."""
    try:
        yield
    except RuntimeError as error:
        raise WeightTransferError(f"no room for weights ({error})") from None


class WeightReceiver:
    """Puts the weights that arrive whole on the board; called by the inbox alone.

    Args:
        publisher: sends on what arrives, to those whom it was told of.
        behind: versions that come before the one in use is done with.
        tell: told of what is on the board: output, attempt, version.
    """

    def __init__(
        self,
        store: LiveStore,
        publisher: WeightPublisher,
        extra_versions: int = 0,
        on_arrival: Callable[[str, str, int], None] = lambda *_: None,
    ) -> None:
        self._board, self._publisher, self._keep = store, publisher, MAX_VERSIONS + extra_versions
        self._tell = on_arrival
        self._others: dict[str, list[str]] = {}
        """By output: the workers that get each bucket as it comes."""
        self._coming: dict[str, _Coming] = {}
        self._here: dict[int, tuple[str, str]] = {}
        """By version: its output and attempt."""
        self._reader: tuple[str, SharedWeightsReader] | None = None
        self._announced: dict[int, tuple[str, str]] = {}
        """By version: the output and attempt that were announced last."""
        self._lock = threading.RLock()
        """Groups bring weights in threads of their own."""

    def handle_record(self, out: str, record: Record) -> None:
        """A record about an output's weights; damage and want of room are logged and forget it."""
        try:
            with self._lock:
                self._take(out, record)
        except (RlinfError, OSError) as error:
            self._coming.pop(out, None)
            log.warning("weights of %s: %s; waiting for its commit", out, error)

    def _take(self, out: str, record: Record) -> None:
        message, number = read_weight_message(record.info), record.identity.iteration
        if self._reader is not None and self._reader[1].is_closed:
            # Whatever way the next weights come: two states take much of a node.
            self._reader = None
        if isinstance(message, WeightsInSharedMemory | WeightsStart | GroupSendStarted):
            self._announced[number] = (out, message.attempt)
            evict_oldest(self._announced, MAX_ANNOUNCED)
        match message:
            case WeightsInSharedMemory():
                tensors = self._from_memory(message.segment, number)
                self._ready(out, number, message.attempt, tensors)
            case WeightsStart():
                self._begin(out, number, message.attempt, record)
            case WeightsBucket() | WeightsEnd():
                coming = self._coming.get(out)
                # It may be of an attempt that was given up.
                if coming and (coming.attempt, coming.number) == (message.attempt, number):
                    self._go_on(out, coming, message, record)
            case _:
                self._publisher.groups.handle_message(out, number, message, self._ready)

    def _begin(self, out: str, number: int, attempt: str, record: Record) -> None:
        text = _data(record).tobytes()
        layout = BucketLayout.from_json(text)
        with _room():
            flat = torch.empty(layout.nbytes, dtype=torch.uint8)
        self._coming[out] = _Coming(attempt, number, text, layout, flat)
        self._others[out] = [
            *self._others.get(out, ()),
            *self._publisher.pop_socket_subscribers(out),
        ]
        evict_oldest(self._others, MAX_ANNOUNCED)
        self._publisher.forward(out, self._others[out], record)

    def _go_on(
        self, out: str, coming: _Coming, message: WeightsBucket | WeightsEnd, record: Record
    ) -> None:
        number, others = coming.number, self._others.get(out, ())
        if isinstance(message, WeightsBucket):
            bucket = record.identity.sample
            part, here = torch.from_numpy(_data(record).copy()), coming.place(bucket)
            coming.sums[bucket] = int(bucket_checksum(part))
            if f"{coming.sums[bucket]:x}" != message.checksum or part.shape != here.shape:
                raise WeightTransferError(f"bucket {bucket} of version {number} arrived damaged")
            here.copy_(part)
            # What waits to be sent on takes no memory of its own.
            record = replace(record, context={PAYLOAD: here.numpy()})
            self._publisher.forward(out, others, record)
            return
        sums = [sum for _, sum in sorted(coming.sums.items())]
        if version_digest(number, coming.text, sums) != message.digest:
            raise WeightTransferError(f"version {number} is not what was sent")
        del self._coming[out]
        self._publisher.forward(out, others, record)
        self._ready(out, number, coming.attempt, coming.layout.tensor_views(coming.flat))

    def _from_memory(self, name: str, number: int) -> dict[str, Tensor]:
        if not SEGMENT_NAME.fullmatch(name):
            raise WeightTransferError(f"no name of shared memory: {name!r}")
        if self._reader is None or self._reader[0] != name:
            self._reader = None  # first: there may be no room for both
            self._reader = (name, SharedWeightsReader(name))
        view = self._reader[1].newest(after=number - 1)
        if view is None:
            raise WeightTransferError(f"version {number} is no longer in shared memory")
        with view:
            if view.version != number:
                raise WeightTransferError(f"version {number} was replaced by {view.version}")
            # Copied: the engine may be busy for longer than the sender can spare the memory.
            with _room():
                copies = {id(tensor): tensor.clone() for tensor in view.tensors.values()}
            return {name: copies[id(tensor)] for name, tensor in view.tensors.items()}

    def _ready(self, out: str, number: int, attempt: str, tensors: dict[str, Tensor]) -> None:
        with self._lock:
            self._arrived(out, number, attempt, tensors)

    def _arrived(self, out: str, number: int, attempt: str, tensors: dict[str, Tensor]) -> None:
        for old in [old for old, coming in self._coming.items() if coming.number <= number]:
            del self._coming[old]  # the rest of it does not come any more
        late = len(self._here) >= self._keep and number < min(self._here)
        # What was announced before it can take longer on its way.
        other = self._announced.get(number) != (out, attempt)
        if late or other or self._here.get(number) == (out, attempt):
            return
        self._here[number] = (out, attempt)
        while len(self._here) > self._keep:
            dropped, _ = self._here.pop(min(self._here))
            if dropped in self._board:
                self._board.output(dropped).objects.pop(WEIGHTS, None)
        output = self._board.output(out)
        output.put(attempt, WEIGHTS, tensors)
        log.info("weights of %s arrived", out)
        self._tell(out, attempt, number)
        self._publisher.publish(out, attempt, number, output.objects)
