"""The client of a stage whose simulators use the policy of another pool worker.

The worker with the engine hosts a mailbox (:mod:`stages.worker.policy_server`). The client sends
observations to the mailbox and receives actions. The mailbox is encrypted, authenticated and
monitored by heartbeats, like every channel of a run.

A rollout needs two device slots, which are rights to use a device (:mod:`stages.device_schedule`):
one in the worker with the simulators and one in the worker with the policy. To avoid a deadlock,
neither side keeps its slot while it waits for the other:

1. The client sends :class:`RequestSlot` and waits without a slot.
2. The server acquires its slot and sends :class:`SlotOffered`. The offer expires soon.
3. The client acquires its own slot and sends :class:`SlotAccepted`.
4. The server replies :class:`SlotConfirmed`, and both keep their slots until the client sends
   :class:`ReleaseSlot`. If the offer has expired, the server replies :class:`SlotExpired`, and the
   client begins again with step 1.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path

import msgpack

from rlinf.channels.channel import Channel, ChannelClosed, ChannelFailed
from rlinf.channels.curve_sockets import first_reachable, routing_id
from rlinf.channels.mailbox import MailboxPeer
from rlinf.channels.mailbox_protocol import Block
from rlinf.channels.record_streams import find_channel_host
from rlinf.channels.wire_format import decode_record, encode_record
from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.envs.base import Environment, RolloutRequest
from rlinf.errors import (
    EXIT_REQUEUE,
    DataError,
    InputError,
    RequeueRequested,
    RlinfError,
    UpstreamFailed,
)
from stages.context import StageContext
from stages.live_store import LiveOutput, evict_oldest
from stages.worker.messages import (
    AttemptEnded,
    PolicyFailure,
    PolicyMessage,
    ReleaseSlot,
    RequestSlot,
    SlotAccepted,
    SlotConfirmed,
    SlotExpired,
    SlotOffered,
    SlotReleased,
    StageOrder,
    WorkerMessage,
    read_policy_message,
)

POLL_S = 0.2
"""Seconds between checks whether a waiting thread should stop."""
CONNECT_TIMEOUT_S = 60.0
"""How long the policy worker may take to accept a connection."""
RELEASE_TIMEOUT_S = 5.0
"""How long a finished client waits for the spans of the server."""
MAX_REMEMBERED_ORDERS = 1024
"""Number of orders and of ended attempts to remember."""
CONTROL_SAMPLE = -1
"""The sample number of control messages; requests and replies have other numbers."""
POLICY_WAIT = "the policy"
"""Name of the wait for a slot of the policy, in the status."""


def policy_channel(worker: str) -> str:
    """Return the name of the mailbox of a policy server."""
    return f"{worker}-policy"


def encode_message(message: WorkerMessage) -> Block:
    """Encode a control message for the wire."""
    return encode_record(Record(RecordId(0, CONTROL_SAMPLE), info=message.to_dict())).to_bytes()


class PolicyFailed(RlinfError):
    """An error of the policy in another worker, with the exit code of that error."""

    def __init__(self, worker: str, failed: PolicyFailure) -> None:
        super().__init__(f"{worker}, which has the policy: {failed.reason}")
        self.exit_code = failed.exit_code


class _Reordered(Exception):
    """Another driver ordered the stage again before the server had confirmed a slot."""


def encode_policy_message(record: Record, max_bytes: int, description: str, kind: str) -> Block:
    """Encode a request or reply for the wire.

    Args:
        max_bytes: the largest message that the other worker accepts.
        description: a description of the record's content, for the error.
        kind: "a request to ..." or "a reply", for the error.

    Raises:
        DataError: the encoded record is larger than ``max_bytes``.
    """
    encoded = encode_record(record)
    if encoded.size > max_bytes:
        raise DataError(
            f"{description} takes {encoded.size} bytes, and {kind} may have {max_bytes}: let fewer "
            "be simulated together (task.max_parallel_envs), or give their stage more processes"
        )
    return encoded.to_bytes()


class PolicyClient(Channel):
    """A client of one policy server, for one attempt at a stage.

    Args:
        folder: the run's folder for channels.
        name: the name of this worker.
        order: the order to compute the stage, with the names of the policy workers.
        rank: rank of this process in the stage.
    """

    def __init__(self, folder: Path, name: str, order: StageOrder, rank: int) -> None:
        self._folder, self._name, self._rank = folder, name, rank
        self._order = self._newest_order = order
        self._server = ""
        """Name of the worker with the policy."""
        self._is_confirmed = False
        """Whether the server has confirmed a slot."""
        self._max_request_bytes = 0
        """The largest request that the server accepts, in bytes."""
        self._peer: MailboxPeer | None = None
        """This end of the connection; None: not connected."""
        self._ctx: StageContext | None = None
        self._replies: deque[Record] = deque()
        self._messages: deque[PolicyMessage] = deque()
        """Control messages that have arrived and are not handled yet."""
        self._lost_reason: str | None = None
        """Why the policy worker is lost; None: it is not."""

    def rollout_iter(
        self, ctx: StageContext, environment: Environment, request: RolloutRequest
    ) -> Generator[Trajectory]:
        """Yield the trajectories of ``request``; both device slots are kept until :meth:`finish`.

        Raises:
            RequeueRequested: the allocation is about to end.
            UpstreamFailed: the policy worker is lost or silent.
            PolicyFailed: the policy failed in its worker.
        """
        self._ctx = ctx
        if self._peer is None:
            self._acquire_slot(ctx)
        yield from environment.simulate(request, self, self)

    def mark_lost(self, reason: str) -> None:
        """Record that the policy worker is lost."""
        self._lost_reason = reason

    def update_order(self, order: StageOrder) -> None:
        """Replace the order, because another driver has ordered the stage again.

        The first driver may have died before it sent an order to the policy worker. Until a slot is
        confirmed, the client therefore connects again, to the policy worker of the new order.
        """
        self._newest_order = order

    def put(self, record: Record) -> None:
        """Send an observation to the policy.

        Raises:
            DataError: the request is larger than the server accepts.
        """
        description = f"what the simulators of {self._order.node} observe in one step"
        self._send(
            encode_policy_message(
                record, self._max_request_bytes, description, f"a request to {self._server}"
            )
        )

    def get(self) -> Record:
        while not self._replies:
            self._receive()
        return self._replies.popleft()

    def close(self) -> None:
        """Do nothing: the observations of one rollout end, but another may follow."""

    def finish(self, *, completed: bool) -> None:
        """Release the policy's slot and disconnect.

        Args:
            completed: whether the rollout was completed. If so, wait for the server's spans.
        """
        peer, ctx = self._peer, self._ctx
        if peer is None or ctx is None:
            return
        try:
            if completed:
                deadline = time.monotonic() + RELEASE_TIMEOUT_S
                # Errors are ignored, because missing spans are no reason to repeat the rollout.
                with contextlib.suppress(RlinfError):
                    self._send(encode_message(ReleaseSlot()))
                    while time.monotonic() < deadline and not self._read_slot_released(ctx):
                        self._receive()
        finally:
            self._peer = None
            peer.close()

    def _read_slot_released(self, ctx: StageContext) -> bool:
        """Return whether the server has replied; if so, record the spans of its reply."""
        if not self._messages:
            return False
        message = self._messages.popleft()
        if isinstance(message, SlotReleased):
            labels = {"worker": self._server, "rank": ctx.world.rank, "host": message.host}
            for name, start, end in json.loads(message.spans):
                ctx.spans.append({"name": name, **labels, "start": start, "end": end})
        return True

    def _acquire_slot(self, ctx: StageContext) -> None:
        while not self._is_confirmed:
            self._order = order = self._newest_order
            self._server = order.policy_workers[self._rank % len(order.policy_workers)]
            try:
                self._request_slot(ctx)
            except _Reordered:
                self._messages.clear()
                if self._peer is not None:
                    self._peer.close()
                    self._peer = None

    def _request_slot(self, ctx: StageContext) -> None:
        while True:
            with ctx.waiting(POLICY_WAIT):
                if self._peer is None:
                    self._peer = self._connect()
                self._send(encode_message(RequestSlot()))
                offer = self._receive_message()
            if not isinstance(offer, SlotOffered):
                raise UpstreamFailed(f"{self._server} sent no slot offer: {offer!r}")
            self._send(encode_message(SlotAccepted(number=offer.number)))
            while isinstance(message := self._receive_message(), SlotOffered):
                pass  # A newer offer. The reply to the accepted offer follows.
            if isinstance(message, SlotConfirmed):
                self._is_confirmed = True
                weights = ctx.inputs["weights"]
                weights.used_disk_fallback |= message.used_disk_fallback
                if message.weights_attempt:
                    # This attempt is compared with the committed one before this stage commits.
                    weights.live_output, weights.used_live = LiveOutput(), True
                    weights.live_output.mark_complete(message.weights_attempt)
                return
            if not isinstance(message, SlotExpired):
                raise UpstreamFailed(f"{self._server} sent an unexpected message: {message!r}")

    def _connect(self) -> MailboxPeer:
        order = self._order
        description = {"client": self._name, "node": order.node, "attempt": order.attempt}
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            self._raise_if_ended()
            # The server listens once it has received its first order.
            with contextlib.suppress(InputError):
                _, host = find_channel_host(self._folder, policy_channel(self._server))
                self._max_request_bytes = host.max_bytes
                if (address := first_reachable(host.addresses)) is not None:
                    return MailboxPeer(
                        self._folder / f"{policy_channel(self._server)}.socket.json",
                        routing_id().hex(),
                        decode_record,
                        description=msgpack.packb(description),
                        host=host,
                        address=address,
                    )
            if time.monotonic() > deadline:
                raise UpstreamFailed(
                    f"{self._server}, which has the policy, has accepted no connection for "
                    f"{CONNECT_TIMEOUT_S:g} s"
                )
            time.sleep(POLL_S / 4)

    def _receive_message(self) -> PolicyMessage:
        while not self._messages:
            self._receive()
        return self._messages.popleft()

    def _raise_if_ended(self) -> None:
        """Raise if the policy worker is lost, the process must stop, or the order was replaced."""
        if self._lost_reason is not None:
            raise UpstreamFailed(f"{self._server}, which has the policy: {self._lost_reason}")
        if self._ctx is not None and self._ctx.should_stop():
            raise RequeueRequested(f"{self._ctx.stage}: stopping while waiting for the policy")
        if self._newest_order is not self._order and not self._is_confirmed:
            raise _Reordered

    def _send(self, item: Block) -> None:
        self._raise_if_ended()
        with self._translate_channel_errors():
            assert self._peer is not None
            self._peer.send_item(item, wait=True)

    def _receive(self) -> None:
        self._raise_if_ended()
        with self._translate_channel_errors():
            assert self._peer is not None
            items = self._peer.receive_items(POLL_S)
        for item in items:
            if item.identity.sample != CONTROL_SAMPLE:
                self._replies.append(item)
                continue
            try:
                message = read_policy_message(item.info)
            except DataError as error:
                raise UpstreamFailed(f"{self._server}, which has the policy: {error}") from None
            if isinstance(message, PolicyFailure) and message.exit_code == EXIT_REQUEUE:
                raise UpstreamFailed(f"{self._server}, which has the policy: {message.reason}")
            if isinstance(message, PolicyFailure):
                raise PolicyFailed(self._server, message)
            self._messages.append(message)

    @contextlib.contextmanager
    def _translate_channel_errors(self) -> Generator[None]:
        try:
            yield
        except (ChannelClosed, ChannelFailed) as error:
            raise UpstreamFailed(
                f"{self._server}, which has the policy, is lost: {error}"
            ) from None


class PolicyClients:
    """The policy clients of the stages of a worker.

    Args:
        folder: the run's folder for channels.
        name: the name of this worker.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._lock = threading.Lock()
        self._clients: dict[str, PolicyClient] = {}
        """Client of each running stage, by node."""
        self._newest_orders: dict[str, StageOrder] = {}
        """Newest order of each stage that has no client yet, by node."""
        self._ended_attempts: dict[str, str] = {}
        """Why an attempt ended before it had a client, by attempt."""

    def update_order(self, order: StageOrder) -> None:
        """Record an order for a stage, which may be running already."""
        with self._lock:
            if (client := self._clients.get(order.node)) is not None:
                client.update_order(order)
            elif order.policy_workers:
                self._newest_orders[order.node] = order
                evict_oldest(self._newest_orders, MAX_REMEMBERED_ORDERS)

    def create_client(self, order: StageOrder, rank: int) -> PolicyClient | None:
        """Create the client of an attempt; None if the policy is in this worker."""
        if not order.policy_workers:
            return None
        with self._lock:
            newest = self._newest_orders.pop(order.node, order)
            client = self._clients[order.node] = PolicyClient(
                self._folder, self._name, newest, rank
            )
            if (reason := self._ended_attempts.get(newest.attempt)) is not None:
                client.mark_lost(reason)
        return client

    @contextlib.contextmanager
    def client_scope(self, node: str) -> Iterator[None]:
        """Finish the client of a stage at the end of this context."""
        is_completed = False
        try:
            yield
            is_completed = True
        finally:
            if (client := self._clients.pop(node, None)) is not None:
                client.finish(completed=is_completed)

    def end_attempt(self, message: AttemptEnded) -> None:
        """Record that the policy of an attempt is lost."""
        with self._lock:
            if (client := self._clients.get(message.node)) is not None:
                client.mark_lost(message.reason)
            else:
                self._ended_attempts[message.attempt] = message.reason
                evict_oldest(self._ended_attempts, MAX_REMEMBERED_ORDERS)
