"""Transfer of weights from the worker that computed them to the live stores of other workers.

A version of the weights is the output of one publish stage: ``out`` is its output folder, relative
to the run folder, ``attempt`` the attempt that produced it, and ``number`` the iteration, from 0
(elsewhere these weights are version ``number + 1``). The tensors are packed into one buffer, which
is sent in pieces of some MiB, the *buckets*.

A version is announced to the workers that subscribed to its output. Workers on the sender's
machine read it from shared memory. Other workers receive its buckets as records, or through a
process group if the plan requests that (:class:`BroadcastGroups`).

A worker forwards each bucket at once to its own subscribers, so that the workers form a tree. Only
complete versions enter the live store. If a bucket is damaged or missing, the worker reads the
committed folder instead.
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
from stages.worker.record_transfer import SHARED_MEMORY, SOCKET
from stages.worker.weight_links import WeightLinks

GLOO, NCCL = "gloo", "nccl"
BACKENDS = (GLOO, NCCL)
"""Transports of a plan that use a process group."""
PAYLOAD = "data"
"""Key of a record's context: the payload of a message about weights."""
GROUP_NAME = re.compile(r"group-[0-9a-f]{16}")
MAX_GROUPS = 4
"""Maximum number of groups in which a worker sends; also of those in which it receives. A further
group replaces the oldest."""
JOIN_GRACE_S = 1.0
"""Seconds that the thread of a closed group may take beyond the timeout of one bucket."""
TRANSFER_ERRORS = (RlinfError, OSError)
"""Errors of sending weights; the stages that wait for them then read from disk."""
GROUP_ERRORS = (WeightTransferError, StageError, ConfigError, RuntimeError)
"""Errors that end a group."""
WeightsCallback = Callable[[str, int, str, dict[str, Tensor]], None]
"""Called with complete weights: output, number (from 0), attempt, tensors."""


def send_weight_message(
    links: WeightLinks,
    out: str,
    workers: Sequence[str],
    number: int,
    message: WeightMessage,
    data: np.ndarray | None = None,
    bucket: int = 0,
) -> None:
    """Send a message about version ``number`` of the weights to workers.

    Args:
        data: payload of the message, uint8; None: it has none.
        bucket: index of the bucket, if the payload is one.
    """
    context = {} if data is None else {PAYLOAD: data}
    record = Record(RecordId(number, bucket), context=context, info=message.to_dict())
    links.send(out, workers, record)


class BroadcastGroups:
    """The process groups in which this worker sends or receives weights.

    Args:
        dtype: dtype in which float32 tensors are sent; None: unchanged.
    """

    def __init__(self, links: WeightLinks, dtype: torch.dtype | None = None) -> None:
        self._links, self._dtype = links, dtype
        self._lock = threading.Lock()
        self._senders: dict[tuple[str, ...], tuple[str, _GroupMember]] = {}
        """Name and membership of each group in which this worker sends, by (backend, *members)."""
        self._failed_groups: dict[tuple[str, ...], None] = {}
        """Groups in which a send failed, by (backend, *members); they are not used again."""
        self._receivers: dict[str, _GroupReceiver] = {}
        """Groups in which this worker receives, by name."""
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
        """Send a version to a group of workers; return False if this or an earlier send failed."""
        group_key = (backend, self._links.name, *workers)
        if group_key in self._failed_groups:
            return False
        try:
            name, member = self._senders.get(group_key) or self._form_group(group_key)
            route = (self._links, out, workers, number)
            send_weight_message(*route, GroupSendStarted(group=name, attempt=attempt))
            digest = member.broadcast.send(number, tensors, dtype=self._dtype)
            send_weight_message(*route, GroupSendDone(group=name, digest=digest))
        except GROUP_ERRORS as error:
            log.warning("no %s with %s: %s", backend, ", ".join(workers), error)
            self._failed_groups[group_key] = None
            evict_oldest(self._failed_groups, MAX_GROUPS)
            self._drop_sender(group_key)
            return False
        return True

    def handle_message(
        self, out: str, number: int, message: GroupMessage, on_weights: WeightsCallback
    ) -> None:
        """Handle a message about a group and return at once. Only the message receiver calls it.

        Args:
            on_weights: called with complete weights, see :data:`WeightsCallback`.

        Raises:
            WeightTransferError: the message is about a group without this worker.
        """
        name = message.group
        if isinstance(message, GroupFormed):
            members = message.members.split(",")
            if not GROUP_NAME.fullmatch(name) or self._links.name not in members:
                raise WeightTransferError(f"no group of this worker: {name!r}")
            rank = members.index(self._links.name)
            with self._lock:
                if not self._closed:
                    group_args = (message.backend, self._rendezvous_file(name), rank, len(members))
                    self._receivers[name] = _GroupReceiver(group_args, on_weights)
            while len(self._receivers) > MAX_GROUPS:
                self._leave_group(next(iter(self._receivers)))
        elif isinstance(message, GroupClosed):
            self._leave_group(name)
        elif (receiver := self._receivers.get(name)) is not None:
            receiver.messages.put((out, number, message))

    def close(self) -> None:
        """Close all groups. Gloo would abort a process that ends with open groups."""
        with self._lock:
            self._closed = True
        for group_key in list(self._senders):
            self._drop_sender(group_key)
        for name in list(self._receivers):
            self._leave_group(name)
        for receiver in self._closing:
            receiver.join()

    def _leave_group(self, name: str) -> None:
        with self._lock:
            if (receiver := self._receivers.pop(name, None)) is not None:
                receiver.leave()
                self._closing = [r for r in [*self._closing, receiver] if r.is_alive]

    def _form_group(self, group_key: tuple[str, ...]) -> tuple[str, _GroupMember]:
        backend, _, *workers = group_key
        backend_device(backend)  # raises if this process lacks the backend
        name = f"group-{secrets.token_hex(8)}"
        members = ",".join(group_key[1:])
        message = GroupFormed(group=name, members=members, backend=backend)
        # The message is about no version, so the group's name replaces the output.
        send_weight_message(self._links, name, workers, 0, message)
        member = _GroupMember(backend, self._rendezvous_file(name), 0, len(workers) + 1)
        self._senders[group_key] = name, member
        while len(self._senders) > MAX_GROUPS:
            self._drop_sender(next(iter(self._senders)))
        return self._senders[group_key]

    def _rendezvous_file(self, name: str) -> Path:
        return self._links.folder / f"{name}.json"

    def _drop_sender(self, group_key: tuple[str, ...]) -> None:
        if group_key in self._senders:
            name, member = self._senders.pop(group_key)
            send_weight_message(self._links, name, group_key[2:], 0, GroupClosed(group=name))
            member.close()


class _GroupMember:
    """This worker as a member of one group; the constructor waits for all members.

    Raises:
        WeightTransferError, StageError, ConfigError, RuntimeError: this process lacks the backend
            or the network, or a member did not join.
    """

    def __init__(self, backend: str, rendezvous_file: Path, rank: int, size: int) -> None:
        device = backend_device(backend)
        self._store, _ = join_rendezvous(rendezvous_file, rank, size, BUCKET_TIMEOUT_S)
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
    """Receives the weights of one group in its own thread.

    Args:
        group_args: backend, rendezvous file, rank and size of the group.
    """

    def __init__(self, group_args: tuple[str, Path, int, int], on_weights: WeightsCallback) -> None:
        self.messages: queue.SimpleQueue[tuple[str, int, GroupMessage] | None] = queue.SimpleQueue()
        """Output, number of the version, and message about the group; None: leave the group."""
        self._on_weights = on_weights
        self._thread = threading.Thread(
            target=self._run, args=group_args, name="group", daemon=True
        )
        self._thread.start()

    def leave(self) -> None:
        """Make the thread leave the group after the version that it is receiving."""
        self.messages.put(None)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread to end, at most for the timeout of one bucket."""
        self._thread.join(BUCKET_TIMEOUT_S + JOIN_GRACE_S)

    def _run(self, backend: str, rendezvous_file: Path, rank: int, size: int) -> None:
        member = None
        try:
            member = _GroupMember(backend, rendezvous_file, rank, size)
            while (message := self.messages.get()) is not None:
                self._receive(*message, member.broadcast)
        except (*GROUP_ERRORS, queue.Empty) as error:
            log.warning("no weights by %s: %r", backend, error)
        finally:
            if member is not None:
                member.close()

    def _receive(
        self, out: str, number: int, message: GroupMessage, broadcast: WeightBroadcast
    ) -> None:
        if not isinstance(message, GroupSendStarted):
            return
        received = broadcast.receive()
        # The sender confirms that all members have the version; otherwise the send has failed.
        match self.messages.get(timeout=BUCKET_TIMEOUT_S):
            case (_, _, GroupSendDone(digest=sent_digest)):
                if (received.version, received.digest) != (number, sent_digest):
                    raise WeightTransferError(f"version {received.version} is not what was sent")
            case _:
                raise WeightTransferError("the group was closed")
        self._on_weights(out, received.version, message.attempt, received.tensors)


def backend_device(backend: str) -> torch.device:
    """Return the device on which a backend needs the buckets.

    Raises:
        WeightTransferError: the backend is not available in this process.
    """
    if backend == GLOO:
        return torch.device("cpu")
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise WeightTransferError(
            "NCCL needs a GPU in every worker and a torch that was built with it"
        )
    return local_device("cuda")


def create_process_group(backend: str, store: Store, rank: int, size: int) -> BroadcastGroup:
    """Create a process group in addition to those of the pools, and wait for all members.

    Raises:
        ConfigError: this machine is not on the network ``cluster.network_interface``.
        RuntimeError: the group cannot be created.
    """
    timeout = timedelta(seconds=BUCKET_TIMEOUT_S)
    if backend == GLOO:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        device = dist.ProcessGroupGloo.create_device
        if names := os.environ.get(GLOO_INTERFACE_VARIABLE):
            options._devices = [device(interface=name) for name in names.split(",")]
        else:
            # By default Gloo uses the address of the host name, which is often that of loopback.
            interface = os.environ.get(INTERFACE_VARIABLE)
            address = interface_address(interface) if interface else local_addresses()[0]
            options._devices = [device(hostname=address)]
        return cast(BroadcastGroup, dist.ProcessGroupGloo(store, rank, size, options))
    # NCCL's watchdog would end this process when another process dies. It is disabled here, because
    # :mod:`rlinf.weights.broadcast` detects dead processes.
    variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    previous = os.environ.get(variable)
    os.environ[variable] = "0"
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return cast(BroadcastGroup, dist.ProcessGroupNCCL(store, rank, size, options))
    finally:
        if previous is None:
            del os.environ[variable]
        else:
            os.environ[variable] = previous


MAX_VERSIONS = 2
"""Number of versions that are kept in memory; older versions are read from disk."""
MAX_ANNOUNCED = 64
"""Maximum number of announced versions that are remembered; some never arrive completely."""
log = logging.getLogger("rlinf")


class _Version(NamedTuple):
    """The weights of one output; see the module docstring."""

    out: str
    attempt: str
    number: int
    tensors: Mapping[str, Tensor]


@dataclass
class _SharedSegment:
    """A shared-memory segment, and the version that was last written to it."""

    name: str
    layout: BucketLayout
    writer: SharedWeightsWriter
    number: int = -1
    """Number of the version that was last written; -1: none."""
    content: tuple[str, str] = ("", "")
    """Output and attempt of that version."""


class WeightPublisher:
    """Sends the weights of this worker to their subscribers, in its own thread.

    Args:
        dtype: dtype in which float32 tensors are sent; None: unchanged.
    """

    def __init__(self, links: WeightLinks, dtype: torch.dtype | None = None) -> None:
        self._links, self._dtype = links, dtype
        self.groups = BroadcastGroups(links, dtype)
        self._lock = threading.Lock()
        self._thread = BackgroundWorker("weights", TRANSFER_ERRORS)
        self._subscribers: dict[str, dict[str, str]] = {}
        """Transport of each subscribed worker, by output."""
        self._versions: dict[str, _Version] = {}
        """The newest versions by output, oldest first."""
        self._segment: _SharedSegment | None = None

    def subscribe(self, out: str, transports: Mapping[str, str]) -> None:
        """Send the weights of an output to workers, now or once they are published.

        Args:
            transports: transport by name of the worker.
        """
        with self._lock:
            self._subscribers[out] = self._subscribers.get(out, {}) | dict(transports)
            if out in self._versions:
                self._thread.submit(f"weights of {out}", self._send, out, dict(transports))

    def publish(self, out: str, attempt: str, number: int, objects: Mapping[str, Any]) -> None:
        """Send the weights of an output and return at once; the weights must not change later."""
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
        """Drop the subscribers of committed outputs; they read from disk from now on."""
        with self._lock:
            for out in outs:
                self._subscribers.pop(out, None)

    def pop_socket_subscribers(self, out: str) -> list[str]:
        """Remove and return the subscribers of an output that use sockets.

        The caller forwards buckets to them. :meth:`publish` sends to other and later subscribers.
        """
        with self._lock:
            subscribers = self._subscribers.get(out, {})
            workers = [worker for worker, transport in subscribers.items() if transport == SOCKET]
            for worker in workers:
                del subscribers[worker]
        return workers

    def forward(self, out: str, workers: Sequence[str], record: Record) -> None:
        """Forward a record about an output's weights and return at once."""
        if workers:
            self._thread.submit(f"weights of {out}", self._forward, out, workers, record)

    def close(self) -> None:
        self._thread.close()
        self.groups.close()
        if self._segment is not None:
            self._segment.writer.close()

    def _forward(self, out: str, workers: Sequence[str], record: Record) -> None:
        self._links.send(out, workers, record)

    def _send(self, out: str, transports: Mapping[str, str]) -> None:
        """Send a version by these transports, or by socket if another transport fails."""
        # A dropped version is not sent, because it is on disk.
        if (version := self._versions.get(out)) is None:
            return
        by_transport = {
            transport: [worker for worker in transports if transports[worker] == transport]
            for transport in set(transports.values())
        }
        socket_workers = by_transport.get(SOCKET, [])
        local_workers = by_transport.get(SHARED_MEMORY, [])
        if local_workers and not self._publish_in_shared_memory(version, local_workers):
            socket_workers += local_workers
        for backend in BACKENDS:
            members = by_transport.get(backend, [])
            if members and not self.groups.send(*version, members, backend):
                socket_workers += members
        if socket_workers:
            self._send_buckets(version, socket_workers)

    def _publish_in_shared_memory(self, version: _Version, workers: list[str]) -> bool:
        """Write a version to shared memory and announce it; return False if that fails."""
        segment = self._segment
        layout = BucketLayout.from_tensors(version.tensors, dtype=self._dtype)
        try:
            if segment is None or segment.content != (version.out, version.attempt):
                if segment is None or segment.layout != layout or segment.number >= version.number:
                    segment = self._create_segment(layout)
                segment.writer.publish(version.number, version.tensors)
                segment.content, segment.number = (version.out, version.attempt), version.number
        except WeightTransferError as error:
            log.warning("%s", error)
            return False
        message = WeightsInSharedMemory(attempt=version.attempt, segment=segment.name)
        send_weight_message(self._links, version.out, workers, version.number, message)
        return True

    def _create_segment(self, layout: BucketLayout) -> _SharedSegment:
        if self._segment is not None:
            self._segment.writer.close()
            self._segment = None
        name = new_segment_name()
        self._segment = _SharedSegment(name, layout, SharedWeightsWriter(name, layout))
        return self._segment

    def _send_buckets(self, version: _Version, workers: list[str]) -> None:
        layout = BucketLayout.from_tensors(version.tensors, dtype=self._dtype)
        layout_json = layout.to_json().encode()
        route = (self._links, version.out, workers, version.number)
        send_weight_message(
            *route, WeightsStart(attempt=version.attempt), np.frombuffer(layout_json, np.uint8)
        )
        checksums: list[int] = []
        for bucket in range(layout.num_buckets):
            bucket_range = layout.bucket_slice(bucket)
            data = torch.zeros(bucket_range.stop - bucket_range.start, dtype=torch.uint8)
            layout.pack_bucket(bucket, version.tensors, data)
            checksums.append(int(bucket_checksum(data)))
            message = WeightsBucket(attempt=version.attempt, checksum=f"{checksums[-1]:x}")
            send_weight_message(*route, message, data.numpy(), bucket)
        digest = version_digest(version.number, layout_json, checksums)
        send_weight_message(*route, WeightsEnd(attempt=version.attempt, digest=digest))


@dataclass
class _PartialVersion:
    """A version whose buckets have not all arrived."""

    attempt: str
    number: int
    layout_json: bytes
    layout: BucketLayout
    buffer: Tensor
    """Memory of all buckets, uint8."""
    checksums: dict[int, int] = field(default_factory=dict)
    """Checksum of each bucket that has arrived."""

    def destination(self, bucket: int) -> Tensor:
        """Return the part of the buffer for a bucket; empty if there is no bucket of this index."""
        exists = 0 <= bucket < self.layout.num_buckets
        return self.buffer[self.layout.bucket_slice(bucket)] if exists else self.buffer[:0]


def _payload(record: Record) -> np.ndarray:
    """Return the payload of a record about weights, uint8.

    Raises:
        WeightTransferError: the record has no payload.
    """
    data = record.context.get(PAYLOAD)
    if data is None or data.dtype != np.uint8:
        raise WeightTransferError("a message with weights has no payload")
    return data


@contextlib.contextmanager
def _translate_out_of_memory() -> Iterator[None]:
    """Raise WeightTransferError for the ``RuntimeError`` that torch raises without free memory."""
    try:
        yield
    except RuntimeError as error:
        raise WeightTransferError(f"not enough memory for weights ({error})") from None


class WeightReceiver:
    """Adds complete received weights to the live store. Only the message receiver calls it.

    Args:
        publisher: forwards received weights to their subscribers.
        extra_versions: number of versions that may arrive while an older version is in use.
        on_arrival: called with output, attempt and number of new weights in the live store.
    """

    def __init__(
        self,
        store: LiveStore,
        publisher: WeightPublisher,
        extra_versions: int = 0,
        on_arrival: Callable[[str, str, int], None] = lambda *_: None,
    ) -> None:
        self._live_store, self._publisher = store, publisher
        self._max_versions = MAX_VERSIONS + extra_versions
        self._on_arrival = on_arrival
        self._forward_receivers: dict[str, list[str]] = {}
        """Workers to which each bucket is forwarded, by output."""
        self._partial: dict[str, _PartialVersion] = {}
        """Incomplete versions by output."""
        self._stored_versions: dict[int, tuple[str, str]] = {}
        """Output and attempt of each version in the live store, by number."""
        self._reader: tuple[str, SharedWeightsReader] | None = None
        """Name and reader of the shared-memory segment that was read last."""
        self._announced: dict[int, tuple[str, str]] = {}
        """Output and attempt that were last announced for each version, by number."""
        self._lock = threading.RLock()
        """Needed because group receivers add weights in their own threads."""

    def handle_record(self, out: str, record: Record) -> None:
        """Handle a record about an output's weights. An error drops the version with a warning."""
        try:
            with self._lock:
                self._handle(out, record)
        except (RlinfError, OSError) as error:
            self._partial.pop(out, None)
            log.warning("weights of %s: %s; waiting for its commit", out, error)

    def _handle(self, out: str, record: Record) -> None:
        message, number = read_weight_message(record.info), record.identity.iteration
        if self._reader is not None and self._reader[1].is_closed:
            # Release it now, because two versions at once would need much memory.
            self._reader = None
        if isinstance(message, WeightsInSharedMemory | WeightsStart | GroupSendStarted):
            self._announced[number] = (out, message.attempt)
            evict_oldest(self._announced, MAX_ANNOUNCED)
        match message:
            case WeightsInSharedMemory():
                tensors = self._read_shared_memory(message.segment, number)
                self._add_version(out, number, message.attempt, tensors)
            case WeightsStart():
                self._start_version(out, number, message.attempt, record)
            case WeightsBucket() | WeightsEnd():
                partial = self._partial.get(out)
                # The message may belong to an abandoned attempt.
                if partial and (partial.attempt, partial.number) == (message.attempt, number):
                    self._add_bucket(out, partial, message, record)
            case _:
                self._publisher.groups.handle_message(out, number, message, self._add_version)

    def _start_version(self, out: str, number: int, attempt: str, record: Record) -> None:
        layout_json = _payload(record).tobytes()
        layout = BucketLayout.from_json(layout_json)
        with _translate_out_of_memory():
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
        self._partial[out] = _PartialVersion(attempt, number, layout_json, layout, buffer)
        self._forward_receivers[out] = [
            *self._forward_receivers.get(out, ()),
            *self._publisher.pop_socket_subscribers(out),
        ]
        evict_oldest(self._forward_receivers, MAX_ANNOUNCED)
        self._publisher.forward(out, self._forward_receivers[out], record)

    def _add_bucket(
        self,
        out: str,
        partial: _PartialVersion,
        message: WeightsBucket | WeightsEnd,
        record: Record,
    ) -> None:
        number, receivers = partial.number, self._forward_receivers.get(out, ())
        if isinstance(message, WeightsBucket):
            bucket = record.identity.sample
            data, destination = (
                torch.from_numpy(_payload(record).copy()),
                partial.destination(bucket),
            )
            partial.checksums[bucket] = checksum = int(bucket_checksum(data))
            if f"{checksum:x}" != message.checksum or data.shape != destination.shape:
                raise WeightTransferError(f"bucket {bucket} of version {number} arrived damaged")
            destination.copy_(data)
            # The forwarded record and the version share memory.
            record = replace(record, context={PAYLOAD: destination.numpy()})
            self._publisher.forward(out, receivers, record)
            return
        checksums = [checksum for _, checksum in sorted(partial.checksums.items())]
        if version_digest(number, partial.layout_json, checksums) != message.digest:
            raise WeightTransferError(f"version {number} is not what was sent")
        del self._partial[out]
        self._publisher.forward(out, receivers, record)
        self._add_version(out, number, partial.attempt, partial.layout.tensor_views(partial.buffer))

    def _read_shared_memory(self, name: str, number: int) -> dict[str, Tensor]:
        if not SEGMENT_NAME.fullmatch(name):
            raise WeightTransferError(f"no name of shared memory: {name!r}")
        if self._reader is None or self._reader[0] != name:
            self._reader = None  # released first, because memory may not suffice for both
            self._reader = (name, SharedWeightsReader(name))
        view = self._reader[1].newest(after=number - 1)
        if view is None:
            raise WeightTransferError(f"version {number} is no longer in shared memory")
        with view:
            if view.version != number:
                raise WeightTransferError(f"version {number} was replaced by {view.version}")
            # Copy, because the sender may reuse the memory before the engine loads the weights.
            with _translate_out_of_memory():
                copies = {id(tensor): tensor.clone() for tensor in view.tensors.values()}
            return {name: copies[id(tensor)] for name, tensor in view.tensors.items()}

    def _add_version(self, out: str, number: int, attempt: str, tensors: dict[str, Tensor]) -> None:
        with self._lock:
            self._store_version(out, number, attempt, tensors)

    def _store_version(
        self, out: str, number: int, attempt: str, tensors: dict[str, Tensor]
    ) -> None:
        for old in [name for name, partial in self._partial.items() if partial.number <= number]:
            del self._partial[old]  # the remaining buckets of an older version will not arrive
        stored = self._stored_versions
        is_superseded = len(stored) >= self._max_versions and number < min(stored)
        # Announcements may arrive out of order.
        is_outdated = self._announced.get(number) != (out, attempt)
        if is_superseded or is_outdated or stored.get(number) == (out, attempt):
            return
        stored[number] = (out, attempt)
        while len(stored) > self._max_versions:
            dropped, _ = stored.pop(min(stored))
            if dropped in self._live_store:
                self._live_store.output(dropped).objects.pop(WEIGHTS, None)
        output = self._live_store.output(out)
        output.put_object(attempt, WEIGHTS, tensors)
        log.info("weights of %s arrived", out)
        self._on_arrival(out, attempt, number)
        self._publisher.publish(out, attempt, number, output.objects)
