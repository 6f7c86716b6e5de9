"""Transfer of weights from the worker that publishes them to the live stores of other workers.

A version of the weights is the output of one publish stage: ``out`` is its output folder, relative
to the run folder, ``attempt`` the attempt that produced it, and ``number`` the iteration, from 0
(elsewhere these weights are version ``number + 1``).

A worker requests a version from the worker that publishes it, by the method ``weights``
(:mod:`rlinf.channels.requests`). The reply is sent once the version is published, and says how the
weights arrive (:class:`WeightSync`): in shared memory of the machine, or by a broadcast in a
process group. A worker that gets them in neither way reads the committed folder.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from rlinf.channels import INTERFACE_VARIABLE
from rlinf.channels.curve_sockets import interface_address, local_addresses
from rlinf.channels.process_group import GLOO_INTERFACE_VARIABLE
from rlinf.channels.rendezvous import join_rendezvous
from rlinf.channels.requests import Message, Request
from rlinf.errors import ConfigError, StageError, WeightTransferError
from rlinf.models.base import local_device
from rlinf.shared_memory import SEGMENT_NAME, new_segment_name, shared_memory_id
from rlinf.threads import BackgroundWorker
from rlinf.weights.broadcast import BUCKET_TIMEOUT_S, BroadcastGroup, WeightBroadcast
from rlinf.weights.buckets import BucketLayout
from rlinf.weights.shared_weights import SharedWeightsReader, SharedWeightsWriter
from stages.factory import WEIGHTS
from stages.live_store import LiveStore, evict_oldest
from stages.worker.messages import FetchWeights
from stages.worker.record_transfer import Fetch

GLOO, NCCL = "gloo", "nccl"
BACKENDS = (GLOO, NCCL)
"""Transports of a plan that use a process group."""
GROUP_NAME = re.compile(r"group-[0-9a-f]{16}")
MAX_GROUPS = 4
"""Maximum number of groups of a worker; a further group replaces the oldest."""
MAX_VERSIONS = 2
"""Number of versions that are kept in memory; older versions are read from disk."""
MAX_WAITING = 64
"""Maximum number of outputs with waiting requests."""
TRANSFER_ERRORS = (WeightTransferError, StageError, ConfigError, RuntimeError, OSError)
"""Errors of a transfer; the workers then read from disk."""
log = logging.getLogger("rlinf")


class WeightVersion(NamedTuple):
    """The weights of one output; see the module docstring."""

    out: str
    attempt: str
    number: int
    tensors: Mapping[str, Tensor]


class WeightSync(ABC):
    """A way in which published weights get into the memory of other workers."""

    @abstractmethod
    def send(self, version: WeightVersion, reply: Callable[[Mapping[str, Any]], None]) -> None:
        """Send a version.

        Args:
            reply: replies to the waiting workers; its argument is that of :meth:`receive`.

        Raises:
            WeightTransferError, StageError, ConfigError, RuntimeError, OSError: it is not sent.
        """

    @abstractmethod
    def receive(self, number: int, details: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of version ``number``.

        Raises: as :meth:`send`.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""


class SharedMemorySync(WeightSync):
    """Weights in shared memory of one machine (:mod:`rlinf.weights.shared_weights`).

    Args:
        dtype: dtype in which float32 tensors are sent; None: unchanged.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._writer: tuple[str, BucketLayout, SharedWeightsWriter] | None = None
        """Name, layout and writer of the segment."""
        self._written = ("", "", -1)
        """Output, attempt and number of the version that was last written."""
        self._reader: tuple[str, SharedWeightsReader] | None = None
        """Name and reader of the segment that was read last."""

    def send(self, version: WeightVersion, reply: Callable[[Mapping[str, Any]], None]) -> None:
        layout = BucketLayout.from_tensors(version.tensors, dtype=self._dtype)
        if self._writer is None or self._written != version[:3]:
            is_older = self._written[2] >= version.number
            if self._writer is None or self._writer[1] != layout or is_older:
                self.close()
                name = new_segment_name()
                self._writer = (name, layout, SharedWeightsWriter(name, layout))
            self._writer[2].publish(version.number, version.tensors)
            self._written = version[:3]
        reply({"segment": self._writer[0]})

    def receive(self, number: int, details: Mapping[str, Any]) -> dict[str, Tensor]:
        name = str(details["segment"])
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
            copies = {id(tensor): tensor.clone() for tensor in view.tensors.values()}
            return {name: copies[id(tensor)] for name, tensor in view.tensors.items()}

    def close(self) -> None:
        if self._writer is not None:
            self._writer[2].close()
            self._writer = None


class BroadcastSync(WeightSync):
    """Weights by a broadcast in a process group (:mod:`rlinf.weights.broadcast`).

    Args:
        folder: the run's folder for channels.
        backend: ``gloo`` or ``nccl``.
        members: the members of the group; the first one sends.
        name: the name of this worker.
        dtype: as for :class:`SharedMemorySync`.
    """

    def __init__(
        self,
        folder: Path,
        backend: str,
        members: Sequence[str],
        name: str,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._folder, self._backend, self._dtype = folder, backend, dtype
        self._rank, self._size = list(members).index(name), len(members)
        self._group: tuple[str, _GroupMember] | None = None
        """Name of the group, and the membership."""
        self._has_failed = False

    def send(self, version: WeightVersion, reply: Callable[[Mapping[str, Any]], None]) -> None:
        if self._has_failed:
            raise WeightTransferError("an earlier broadcast has failed")
        try:
            backend_device(self._backend)  # raises if this process lacks the backend
            name = f"group-{secrets.token_hex(8)}" if self._group is None else self._group[0]
            reply({"group": name})
            self._join(name).send(version.number, version.tensors, dtype=self._dtype)
        except TRANSFER_ERRORS:
            self._has_failed = True
            self.close()
            raise

    def receive(self, number: int, details: Mapping[str, Any]) -> dict[str, Tensor]:
        name = str(details["group"])
        if not GROUP_NAME.fullmatch(name):
            raise WeightTransferError(f"no name of a group: {name!r}")
        try:
            received = self._join(name).receive()
        except TRANSFER_ERRORS:
            self.close()
            raise
        if received.version != number:
            raise WeightTransferError(f"version {received.version} is not what was sent")
        return received.tensors

    def close(self) -> None:
        """Leave the group. Gloo would abort a process that ends with open groups."""
        if self._group is not None:
            self._group[1].close()
            self._group = None

    def _join(self, name: str) -> WeightBroadcast:
        if self._group is None or self._group[0] != name:
            self.close()
            rendezvous_file = self._folder / f"{name}.json"
            member = _GroupMember(self._backend, rendezvous_file, self._rank, self._size)
            self._group = (name, member)
        return self._group[1].broadcast


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


def create_sync(
    folder: Path,
    transport: str,
    members: Sequence[str],
    name: str,
    dtype: torch.dtype | None = None,
) -> WeightSync:
    """Return the way of a transport; the arguments are those of :class:`BroadcastSync`."""
    if transport in BACKENDS:
        return BroadcastSync(folder, transport, members, name, dtype)
    return SharedMemorySync(dtype)


class WeightSyncs:
    """The ways in which a worker sends or receives weights, by transport and members of the group.

    Args:
        folder, name, dtype: as for :class:`BroadcastSync`.
    """

    def __init__(self, folder: Path, name: str, dtype: torch.dtype | None = None) -> None:
        self._folder, self._name, self._dtype = folder, name, dtype
        self._syncs: dict[tuple[str, ...], WeightSync] = {}

    def get(self, transport: str, members: Sequence[str]) -> WeightSync:
        """
        Raises:
            WeightTransferError: this worker is no member of the group.
        """
        key = (transport, *members)
        if transport in BACKENDS and self._name not in members:
            raise WeightTransferError(f"{self._name} is no member of {', '.join(members)}")
        if key not in self._syncs:
            sync = create_sync(self._folder, transport, members, self._name, self._dtype)
            self._syncs[key] = sync
            while len(self._syncs) > MAX_GROUPS:
                self._syncs.pop(next(iter(self._syncs))).close()
        return self._syncs[key]

    def close(self) -> None:
        for sync in self._syncs.values():
            sync.close()


class WeightPublisher:
    """Answers requests for the weights that this worker has published, in its own thread.

    Args:
        folder, name, dtype: as for :class:`BroadcastSync`.
    """

    def __init__(self, folder: Path, name: str, dtype: torch.dtype | None = None) -> None:
        self._syncs = WeightSyncs(folder, name, dtype)
        self._lock = threading.Lock()
        self._thread = BackgroundWorker("weights", TRANSFER_ERRORS)
        self._versions: dict[str, WeightVersion] = {}
        """The newest versions by output, oldest first."""
        self._waiting: dict[str, list[_WeightRequest]] = {}
        """Requests without a reply, by output."""
        self._incomplete: set[tuple[str, ...]] = set()
        """Transport and members of groups in which a member was missing."""

    def publish(self, out: str, attempt: str, number: int, objects: Mapping[str, Any]) -> None:
        """Send the weights of an output and return at once; the weights must not change later."""
        if WEIGHTS not in objects:
            return
        with self._lock:
            self._versions[out] = WeightVersion(out, attempt, number, objects[WEIGHTS])
            evict_oldest(self._versions, MAX_VERSIONS)
        self._thread.submit(f"weights of {out}", self._send, out)

    def handle(self, request: Request) -> None:
        """Answer a request, now or once the weights are published.

        Raises:
            KeyError, TypeError: the request is malformed.
        """
        arguments = request.arguments
        out = str(arguments["output"])
        way = (str(arguments["transport"]), *map(str, arguments["members"]))
        waiting = _WeightRequest(request, str(arguments["worker"]), way)
        with self._lock:
            self._waiting.setdefault(out, []).append(waiting)
            oldest = [] if len(self._waiting) <= MAX_WAITING else [next(iter(self._waiting))]
        self.drop_outputs(oldest)
        self._thread.submit(f"weights of {out}", self._send, out)

    def drop_outputs(self, outs: Collection[str]) -> None:
        """Reject the requests for committed outputs, which are read from disk from now on."""
        with self._lock:
            dropped = [request for out in outs for request in self._waiting.pop(out, [])]
        for waiting in dropped:
            waiting.request.reject("committed")

    def close(self) -> None:
        self._thread.close()
        self._syncs.close()

    def _send(self, out: str, *, is_late: bool = False) -> None:
        """Send a version to the workers that wait for it.

        Args:
            is_late: whether to leave incomplete groups to the disk.
        """
        with self._lock:
            version = self._versions.get(out)
            requests = self._waiting.pop(out, [])
            by_way: dict[tuple[str, ...], list[_WeightRequest]] = {}
            for request in requests:
                if version is None or request.has(version.attempt):
                    self._waiting.setdefault(out, []).append(request)
                else:
                    by_way.setdefault(request.way, []).append(request)
        if version is None:
            return
        for way, group in by_way.items():
            transport, *members = way
            missing = {*members[1:]} - {request.worker for request in group}
            if transport not in BACKENDS:
                local = [request for request in group if request.is_local]
                _reply(version, [request for request in group if not request.is_local], {})
                self._send_by(transport, members, version, local)
            elif not missing:
                self._send_by(transport, members, version, group)
            elif is_late or way in self._incomplete:
                self._incomplete.add(way)
                log.warning("no %s: %s do not answer", transport, ", ".join(sorted(missing)))
                _reply(version, group, {})
            else:
                with self._lock:
                    self._waiting.setdefault(out, []).extend(group)
                timer = threading.Timer(BUCKET_TIMEOUT_S, self._leave_to_disk, (out,))
                timer.daemon = True
                timer.start()

    def _leave_to_disk(self, out: str) -> None:
        self._thread.submit(f"weights of {out}", partial(self._send, is_late=True), out)

    def _send_by(
        self,
        transport: str,
        members: Sequence[str],
        version: WeightVersion,
        requests: Sequence[_WeightRequest],
    ) -> None:
        if not requests:
            return
        is_sent = False

        def reply(details: Mapping[str, Any]) -> None:
            nonlocal is_sent
            is_sent = True
            _reply(version, requests, details)

        try:
            self._syncs.get(transport, members).send(version, reply)
        except TRANSFER_ERRORS as error:
            log.warning("no %s: %s", transport, error)
            if not is_sent:
                _reply(version, requests, {})


class _WeightRequest(NamedTuple):
    """A request for weights."""

    request: Request
    worker: str
    way: tuple[str, ...]
    """Transport, and the members of the group."""

    def has(self, attempt: str) -> bool:
        """Return whether the worker has the weights of this attempt already."""
        return bool(self.request.arguments.get("attempt") == attempt)

    @property
    def is_local(self) -> bool:
        return bool(self.request.arguments.get("memory") == shared_memory_id())


def _reply(
    version: WeightVersion, requests: Sequence[_WeightRequest], details: Mapping[str, Any]
) -> None:
    """Reply to requests; without ``details`` the workers read from disk."""
    for waiting in requests:
        waiting.request.reply(
            {"attempt": version.attempt, "number": version.number, "details": dict(details)}
        )


class WeightFetch(Fetch):
    """Fetches each version of an output's weights that a worker publishes."""

    method = WEIGHTS
    has_ended = False

    def __init__(self, order: FetchWeights, name: str, receiver: WeightReceiver) -> None:
        # Two stages may order the same weights for different groups, and each group needs all of
        # its members.
        super().__init__(order.output, WEIGHTS, (order.transport, *order.members))
        self.order, self._name, self._receiver = order, name, receiver
        self._attempt: str | None = None
        """The attempt of the last version."""
        self._is_open = False
        """Whether a request has no reply."""

    def restart(self) -> None:
        self._is_open = False

    def next_request(self) -> dict[str, Any] | None:
        if self._is_open:
            return None
        self._is_open = True
        return {
            "output": self.output,
            "worker": self._name,
            "attempt": self._attempt,
            "transport": self.order.transport,
            "members": self.order.members,
            "memory": shared_memory_id(),
        }

    def advance(self, reply: Message) -> bool:
        self._attempt, self._is_open = str(reply.arguments["attempt"]), False
        return True

    def handle(self, reply: Message) -> None:
        self._receiver.receive(self.order, str(reply.arguments["attempt"]), reply)


class WeightReceiver:
    """Adds the weights of other workers to the live store, in its own thread.

    Args:
        folder, name: as for :class:`BroadcastSync`.
        extra_versions: number of versions that may arrive while an older version is in use.
        on_arrival: called with output, attempt and number of new weights in the live store.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        store: LiveStore,
        extra_versions: int = 0,
        on_arrival: Callable[[str, str, int], None] = lambda *_: None,
    ) -> None:
        self._live_store, self._name = store, name
        self._syncs = WeightSyncs(folder, name)
        self._max_versions = MAX_VERSIONS + extra_versions
        self._on_arrival = on_arrival
        self._stored: dict[int, str] = {}
        """Output of each version in the live store, by number."""
        self._thread = BackgroundWorker("new weights", TRANSFER_ERRORS)

    def create_fetch(self, order: FetchWeights) -> WeightFetch:
        return WeightFetch(order, self._name, self)

    def receive(self, order: FetchWeights, attempt: str, reply: Message) -> None:
        """Receive a version and return at once."""
        number, details = int(reply.arguments["number"]), dict(reply.arguments["details"])
        arguments = (order, attempt, number, details)
        self._thread.submit(f"weights of {order.output}", self._receive, *arguments)

    def close(self) -> None:
        self._thread.close()
        self._syncs.close()

    def _receive(
        self, order: FetchWeights, attempt: str, number: int, details: Mapping[str, Any]
    ) -> None:
        stored = self._stored
        if not details or (len(stored) >= self._max_versions and number < min(stored)):
            log.info("weights of %s are read from disk", order.output)
            return
        try:
            sync = self._syncs.get(order.transport, order.members)
            tensors = sync.receive(number, details)
        except TRANSFER_ERRORS as error:
            log.warning("weights of %s: %s; waiting for its commit", order.output, error)
            return
        stored[number] = order.output
        while len(stored) > self._max_versions:
            dropped = stored.pop(min(stored))
            if dropped in self._live_store:
                self._live_store.output(dropped).objects.pop(WEIGHTS, None)
        self._live_store.output(order.output).put_object(attempt, WEIGHTS, tensors)
        log.info("weights of %s arrived", order.output)
        self._on_arrival(order.output, attempt, number)
