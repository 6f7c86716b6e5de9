"""Transfer of weights from the worker that computed them to the live stores of others.

A version is announced to the workers that subscribed to it. Workers on the sender's node read it
from shared memory; others receive its buckets as records, or by a process group if the plan
requests that (:class:`BroadcastGroups`).

A worker forwards each bucket at once to its own subscribers, so that the buckets travel down a
tree. A worker that receives a damaged bucket, or none, reads the committed folder instead: only
complete versions are served.
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
from rlinf.models.base import local_device
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
"""Key of a record about weights: the bytes of its message."""
GROUP_NAME = re.compile(r"group-[0-9a-f]{16}")
MAX_GROUPS = 4
"""Maximum number of groups; one more replaces the oldest."""
JOIN_GRACE_S = 1.0
"""Additional time for the thread of a group to end."""
GROUP_ERRORS = (WeightTransferError, StageError, ConfigError, RuntimeError)
"""Errors that end a group."""
WeightsCallback = Callable[[str, int, str, dict[str, Tensor]], None]
"""Called with complete weights: output, version, attempt, tensors."""


def send_weight_message(
    sender: RecordSender,
    out: str,
    workers: Sequence[str],
    number: int,
    message: WeightMessage,
    data: np.ndarray | None = None,
    part: int = 0,
) -> None:
    """Send a message about version ``number`` of the weights to workers."""
    context = {} if data is None else {PAYLOAD: data}
    record = Record(RecordId(number, part), context=context, info=message.to_dict())
    sender.stream_to(f"{out}:{WEIGHTS}", workers, 0, 1).put(record)


class BroadcastGroups:
    """The process groups in which this worker sends or receives weights.

    Args:
        dtype: dtype in which float32 tensors are sent; None: unchanged.
    """

    def __init__(self, sender: RecordSender, dtype: torch.dtype | None = None) -> None:
        self._record_sender, self._dtype = sender, dtype
        self._lock = threading.Lock()
        self._ends: dict[tuple[str, ...], tuple[str, _GroupEnd]] = {}
        """By backend and members: the groups in which this worker sends, with their names."""
        self._failed: dict[tuple[str, ...], None] = {}
        self._members: dict[str, _GroupReceiver] = {}
        """By name: the groups in which this worker receives."""
        self._closing: list[_GroupReceiver] = []
        """Closed groups whose threads still run."""
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
        """Send a version; returns False if this or an earlier send of the group failed."""
        group = (backend, self._record_sender.name, *workers)
        if group in self._failed:
            return False
        try:
            name, end = self._ends.get(group) or self._form(group)
            to = (self._record_sender, out, workers, number)
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
        """Handle a message about a group; called by the receiver alone. Returns at once.

        Args:
            on_weights: called with complete weights: output, version, attempt, tensors.

        Raises:
            WeightTransferError: the message names no group of this worker.
        """
        name = message.group
        if isinstance(message, GroupFormed):
            members = message.members.split(",")
            if not GROUP_NAME.fullmatch(name) or self._record_sender.name not in members:
                raise WeightTransferError(f"no group of this worker: {name!r}")
            rank = members.index(self._record_sender.name)
            with self._lock:
                if not self._closed:
                    form = (message.backend, self._pointer(name), rank, len(members))
                    self._members[name] = _GroupReceiver(form, on_weights)
            while len(self._members) > MAX_GROUPS:
                self._leave_group(next(iter(self._members)))
        elif isinstance(message, GroupClosed):
            self._leave_group(name)
        elif (member := self._members.get(name)) is not None:
            member.next.put((out, number, message))

    def close(self) -> None:
        """Close all groups. Gloo aborts the process if some are open when Python ends."""
        with self._lock:
            self._closed = True
        for group in list(self._ends):
            self._drop(group)
        for name in list(self._members):
            self._leave_group(name)
        for member in self._closing:
            member.join()

    def _leave_group(self, name: str) -> None:
        with self._lock:
            if (member := self._members.pop(name, None)) is not None:
                member.leave()
                self._closing = [member for member in [*self._closing, member] if member.is_alive]

    def _form(self, group: tuple[str, ...]) -> tuple[str, _GroupEnd]:
        backend, _, *workers = group
        backend_device(backend)
        name = f"group-{secrets.token_hex(8)}"
        members = ",".join(group[1:])
        message = GroupFormed(group=name, members=members, backend=backend)
        send_weight_message(self._record_sender, name, workers, 0, message)
        self._ends[group] = name, _GroupEnd(backend, self._pointer(name), 0, len(workers) + 1)
        while len(self._ends) > MAX_GROUPS:
            self._drop(next(iter(self._ends)))
        return self._ends[group]

    def _pointer(self, name: str) -> Path:
        return self._record_sender.folder / f"{name}.json"

    def _drop(self, group: tuple[str, ...]) -> None:
        if group in self._ends:
            name, end = self._ends.pop(group)
            send_weight_message(self._record_sender, name, group[2:], 0, GroupClosed(group=name))
            end.close()


class _GroupEnd:
    """This worker's end of one group; the constructor waits for all members.

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


class _GroupReceiver:
    """Receives the weights of one group in its own thread."""

    def __init__(self, form: tuple[str, Path, int, int], ready: WeightsCallback) -> None:
        self.next: queue.SimpleQueue[tuple[str, int, GroupMessage] | None] = queue.SimpleQueue()
        self._ready = ready
        self._thread = threading.Thread(target=self._work, args=form, name="group", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """End the thread after its current version."""
        self.next.put(None)

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread to end, at most for the timeout of one bucket."""
        self._thread.join(BUCKET_TIMEOUT_S + JOIN_GRACE_S)

    def _work(self, backend: str, pointer: Path, rank: int, size: int) -> None:
        end = None
        try:
            end = _GroupEnd(backend, pointer, rank, size)
            while (message := self.next.get()) is not None:
                self._receive(*message, end.broadcast)
        except (*GROUP_ERRORS, queue.Empty) as error:
            log.warning("no weights by %s: %r", backend, error)
        finally:
            if end is not None:
                end.close()

    def _receive(
        self, out: str, number: int, message: GroupMessage, broadcast: WeightBroadcast
    ) -> None:
        if not isinstance(message, GroupSendStarted):
            return
        received = broadcast.receive()
        # The sender confirms that all members have it; no confirmation means that it has failed.
        match self.next.get(timeout=BUCKET_TIMEOUT_S):
            case (_, _, GroupSendDone(digest=sent)):
                if (received.version, received.digest) != (number, sent):
                    raise WeightTransferError(f"version {received.version} is not what was sent")
            case _:
                raise WeightTransferError("the group was closed")
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
    """Create a group beside those of the workers' pools; all members must be ready.

    Raises:
        ConfigError: this node has no network as ``cluster.network_interface`` says.
        RuntimeError: it cannot be created.
    """
    limit = timedelta(seconds=BUCKET_TIMEOUT_S)
    if backend == GLOO:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = limit
        device = dist.ProcessGroupGloo.create_device
        if names := os.environ.get(GLOO_INTERFACE_VARIABLE):
            options._devices = [device(interface=name) for name in names.split(",")]
        else:
            # By default Gloo uses the address of the host name, which is often the loopback.
            chosen = os.environ.get(INTERFACE_VARIABLE)
            address = interface_address(chosen) if chosen else local_addresses()[0]
            options._devices = [device(hostname=address)]
        return cast(BroadcastGroup, dist.ProcessGroupGloo(store, rank, size, options))
    # NCCL's watchdog would end the process when another one dies. Here the waiting side detects it
    # (:mod:`rlinf.weights.broadcast`).
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
"""Announced versions to remember; some of them never arrive completely."""
log = logging.getLogger("rlinf")


class _Version(NamedTuple):
    out: str
    attempt: str
    number: int
    tensors: Mapping[str, Tensor]


@dataclass
class _SharedSegment:
    """Shared memory, and the output and attempt that were last written to it."""

    name: str
    layout: BucketLayout
    writer: SharedWeightsWriter
    number: int = -1
    holds: tuple[str, str] = ("", "")


class WeightPublisher:
    """Sends the weights of this worker to their subscribers, in its own thread.

    Args:
        dtype: dtype in which float32 tensors are sent; None: unchanged.
    """

    def __init__(self, sender: RecordSender, dtype: torch.dtype | None = None) -> None:
        self._record_sender, self._dtype = sender, dtype
        self.groups = BroadcastGroups(sender, dtype)
        self._lock = threading.Lock()
        self._thread = BackgroundWorker("weights", TRANSFER_ERRORS)
        self._subscribers: dict[str, dict[str, str]] = {}
        self._versions: dict[str, _Version] = {}
        self._memory: _SharedSegment | None = None

    def subscribe(self, out: str, transports: Mapping[str, str]) -> None:
        """Subscribe workers to the present or future weights of an output, by transport."""
        with self._lock:
            self._subscribers[out] = self._subscribers.get(out, {}) | dict(transports)
            if out in self._versions:
                self._thread.submit(f"weights of {out}", self._send, out, dict(transports))

    def publish(self, out: str, attempt: str, number: int, objects: Mapping[str, Any]) -> None:
        """Send the weights of an output, which must not change afterwards. Returns at once."""
        if WEIGHTS not in objects:
            return
        with self._lock:
            self._versions[out] = _Version(out, attempt, number, objects[WEIGHTS])
            while len(self._versions) > MAX_VERSIONS:
                dropped = next(iter(self._versions))
                del self._versions[dropped]
                self._subscribers.pop(dropped, None)
            if subscribers := self._subscribers.get(out):
                self._thread.submit(f"weights of {out}", self._send, out, dict(subscribers))

    def drop_subscribers(self, outs: Collection[str]) -> None:
        """Drop the subscribers of committed outputs, which read the disk from now on."""
        with self._lock:
            for out in outs:
                self._subscribers.pop(out, None)

    def pop_socket_subscribers(self, out: str) -> list[str]:
        """Remove and return the subscribers of an output by socket.

        They receive the forwarded buckets; :meth:`publish` serves the others and later subscribers.
        """
        with self._lock:
            subscribers = self._subscribers.get(out, {})
            far = [worker for worker, way in subscribers.items() if way == SOCKET]
            for worker in far:
                del subscribers[worker]
        return far

    def forward(self, out: str, workers: Sequence[str], record: Record) -> None:
        """Forward a record about an output's weights. Returns at once."""
        if workers:
            self._thread.submit(f"weights of {out}", self._forward, out, workers, record)

    def close(self) -> None:
        self._thread.close()
        self.groups.close()
        if self._memory is not None:
            self._memory.writer.close()

    def _forward(self, out: str, workers: Sequence[str], record: Record) -> None:
        self._record_sender.stream_to(f"{out}:{WEIGHTS}", workers, 0, 1).put(record)

    def _send(self, out: str, ways: Mapping[str, str]) -> None:
        # A dropped version is not sent any more: it is on disk.
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
        send_weight_message(self._record_sender, version.out, workers, version.number, message)
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
        to = (self._record_sender, version.out, workers, version.number)
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
class _PartialVersion:
    attempt: str
    number: int
    text: bytes
    layout: BucketLayout
    flat: Tensor
    sums: dict[int, int] = field(default_factory=dict)

    def destination(self, bucket: int) -> Tensor:
        """Return the destination of a bucket; empty if there is no such bucket."""
        exists = 0 <= bucket < self.layout.num_buckets
        return self.flat[self.layout.bucket_slice(bucket)] if exists else self.flat[:0]


def _data(record: Record) -> np.ndarray:
    """Return the payload of a record about weights, uint8.

    Raises:
        WeightTransferError: it has none.
    """
    data = record.context.get(PAYLOAD)
    if data is None or data.dtype != np.uint8:
        raise WeightTransferError("a message with weights has no payload")
    return data


@contextlib.contextmanager
def _translate_out_of_memory() -> Iterator[None]:
    """Raise WeightTransferError for the ``RuntimeError`` of torch when memory is exhausted."""
    try:
        yield
    except RuntimeError as error:
        raise WeightTransferError(f"not enough memory for weights ({error})") from None


class WeightReceiver:
    """Adds complete received weights to the live store; called by the record receiver alone.

    Args:
        publisher: forwards received weights to their subscribers.
        extra_versions: how many versions may arrive while an older one is in use.
        on_arrival: called with output, attempt and version of new weights in the live store.
    """

    def __init__(
        self,
        store: LiveStore,
        publisher: WeightPublisher,
        extra_versions: int = 0,
        on_arrival: Callable[[str, str, int], None] = lambda *_: None,
    ) -> None:
        self._live_store, self._publisher, self._max_versions = (
            store,
            publisher,
            MAX_VERSIONS + extra_versions,
        )
        self._on_arrival = on_arrival
        self._forward_to: dict[str, list[str]] = {}
        """By output: the workers to which each bucket is forwarded."""
        self._partial: dict[str, _PartialVersion] = {}
        self._stored: dict[int, tuple[str, str]] = {}
        """By stored version: its output and attempt."""
        self._reader: tuple[str, SharedWeightsReader] | None = None
        self._announced: dict[int, tuple[str, str]] = {}
        """By version: the output and attempt that were announced last."""
        self._lock = threading.RLock()
        """Groups add weights in their own threads."""

    def handle_record(self, out: str, record: Record) -> None:
        """Handle a record about an output's weights. After an error the version is dropped with a
        warning."""
        try:
            with self._lock:
                self._handle(out, record)
        except (RlinfError, OSError) as error:
            self._partial.pop(out, None)
            log.warning("weights of %s: %s; waiting for its commit", out, error)

    def _handle(self, out: str, record: Record) -> None:
        message, number = read_weight_message(record.info), record.identity.iteration
        if self._reader is not None and self._reader[1].is_closed:
            # Release it before the next weights: two versions take much memory of a node.
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
                partial = self._partial.get(out)
                # It may belong to an abandoned attempt.
                if partial and (partial.attempt, partial.number) == (message.attempt, number):
                    self._continue(out, partial, message, record)
            case _:
                self._publisher.groups.handle_message(out, number, message, self._ready)

    def _begin(self, out: str, number: int, attempt: str, record: Record) -> None:
        text = _data(record).tobytes()
        layout = BucketLayout.from_json(text)
        with _translate_out_of_memory():
            flat = torch.empty(layout.nbytes, dtype=torch.uint8)
        self._partial[out] = _PartialVersion(attempt, number, text, layout, flat)
        self._forward_to[out] = [
            *self._forward_to.get(out, ()),
            *self._publisher.pop_socket_subscribers(out),
        ]
        evict_oldest(self._forward_to, MAX_ANNOUNCED)
        self._publisher.forward(out, self._forward_to[out], record)

    def _continue(
        self,
        out: str,
        partial: _PartialVersion,
        message: WeightsBucket | WeightsEnd,
        record: Record,
    ) -> None:
        number, receivers = partial.number, self._forward_to.get(out, ())
        if isinstance(message, WeightsBucket):
            bucket = record.identity.sample
            part, destination = torch.from_numpy(_data(record).copy()), partial.destination(bucket)
            partial.sums[bucket] = int(bucket_checksum(part))
            if f"{partial.sums[bucket]:x}" != message.checksum or part.shape != destination.shape:
                raise WeightTransferError(f"bucket {bucket} of version {number} arrived damaged")
            destination.copy_(part)
            # The forwarded record shares the memory of the version.
            record = replace(record, context={PAYLOAD: destination.numpy()})
            self._publisher.forward(out, receivers, record)
            return
        sums = [sum for _, sum in sorted(partial.sums.items())]
        if version_digest(number, partial.text, sums) != message.digest:
            raise WeightTransferError(f"version {number} is not what was sent")
        del self._partial[out]
        self._publisher.forward(out, receivers, record)
        self._ready(out, number, partial.attempt, partial.layout.tensor_views(partial.flat))

    def _from_memory(self, name: str, number: int) -> dict[str, Tensor]:
        if not SEGMENT_NAME.fullmatch(name):
            raise WeightTransferError(f"no name of shared memory: {name!r}")
        if self._reader is None or self._reader[0] != name:
            self._reader = None  # first, because memory may not suffice for both
            self._reader = (name, SharedWeightsReader(name))
        view = self._reader[1].newest(after=number - 1)
        if view is None:
            raise WeightTransferError(f"version {number} is no longer in shared memory")
        with view:
            if view.version != number:
                raise WeightTransferError(f"version {number} was replaced by {view.version}")
            # Copied: the engine may be busy for longer than the sender can spare the memory.
            with _translate_out_of_memory():
                copies = {id(tensor): tensor.clone() for tensor in view.tensors.values()}
            return {name: copies[id(tensor)] for name, tensor in view.tensors.items()}

    def _ready(self, out: str, number: int, attempt: str, tensors: dict[str, Tensor]) -> None:
        with self._lock:
            self._arrived(out, number, attempt, tensors)

    def _arrived(self, out: str, number: int, attempt: str, tensors: dict[str, Tensor]) -> None:
        for old in [old for old, partial in self._partial.items() if partial.number <= number]:
            del self._partial[old]  # its remaining buckets will not arrive any more
        late = len(self._stored) >= self._max_versions and number < min(self._stored)
        # An earlier announcement may arrive later.
        other = self._announced.get(number) != (out, attempt)
        if late or other or self._stored.get(number) == (out, attempt):
            return
        self._stored[number] = (out, attempt)
        while len(self._stored) > self._max_versions:
            dropped, _ = self._stored.pop(min(self._stored))
            if dropped in self._live_store:
                self._live_store.output(dropped).objects.pop(WEIGHTS, None)
        output = self._live_store.output(out)
        output.put(attempt, WEIGHTS, tensors)
        log.info("weights of %s arrived", out)
        self._on_arrival(out, attempt, number)
        self._publisher.publish(out, attempt, number, output.objects)
