"""The server of a policy that simulators in other pool workers use.

A worker with the engine hosts one mailbox (:class:`PolicyServer`). Each attempt at a stage that
uses the worker's policy has a :class:`PolicySession`. The session acquires the device at the
position of that stage and answers the clients of that attempt. See
:mod:`stages.worker.policy_client` for the protocol.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlinf.channels.channel import ChannelClosed
from rlinf.channels.mailbox import MailboxHost
from rlinf.channels.mailbox_protocol import (
    REASON_DEPARTED,
    REASON_REPLACED,
    Block,
    PeerEvent,
    PeerJoined,
    PeerLost,
    PeerReport,
)
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.channels.record_streams import channel_pointer
from rlinf.channels.wire_format import decode_record
from rlinf.config import RunConfig
from rlinf.data.record import Record
from rlinf.errors import EXIT_REQUEUE, DataError, RequeueRequested
from rlinf.threads import MalformedCounter, start_service_thread
from rlinf.user_code import exit_code_and_message
from stages.context import IDLE_SPANS, LiveContext, RecordWriter, StageContext, StageInput
from stages.device_schedule import DeviceSchedule, DeviceSlot
from stages.flow import POLICY_SUFFIX
from stages.layout import CHANNELS_FOLDER
from stages.live_store import LiveOutput, LiveStore, evict_oldest
from stages.rollout import PolicyRunner
from stages.runner import import_stage_module, withdraw_on_damage
from stages.worker.messages import (
    AttemptEnded,
    PolicyFailure,
    ReleaseSlot,
    RequestSlot,
    ServePolicy,
    SlotAccepted,
    SlotConfirmed,
    SlotExpired,
    SlotOffered,
    SlotReleased,
    WorkerMessage,
    read_policy_message,
)
from stages.worker.policy_client import (
    CONTROL_SAMPLE,
    POLL_S,
    encode_message,
    encode_policy_message,
    policy_channel,
)
from stages.worker_state import ActivityTracker, WorkerState

ACCEPT_TIMEOUT_S = 5.0
"""How long a slot offer is valid."""
SIMULATORS_WAIT, GENERATE_SPAN = "simulators", "generate"
"""Names of the wait for simulators, in the status, and of the span of the generation."""


class ServingEnded(Exception):
    """The attempt that a session serves has ended."""


@dataclass(eq=False)
class PolicyConnection:
    """The connection of one client for one attempt."""

    peer: str
    """Name of the connection in the mailbox; a client that connects again has another one."""
    client: str
    """Name of the worker with the simulators."""
    node: str
    attempt: str


@dataclass(eq=False)
class PolicySession:
    """The service for one attempt; the engine reads the clients' requests from this object.

    Args:
        order: the driver's order to serve the attempt.
        send: sends an encoded message to a client.
        max_reply_bytes: the largest reply that a client accepts.
    """

    order: ServePolicy
    send: Callable[[PolicyConnection, Block], None]
    should_stop: Callable[[], bool]
    max_reply_bytes: int
    context: StageContext | None = None
    """None: the session does not run yet."""
    condition: threading.Condition = field(default_factory=threading.Condition)
    """Guards all fields below; notified when one of them has changed."""
    waiting_clients: dict[str, PolicyConnection] = field(default_factory=dict)
    """Clients that wait for a slot offer, by peer."""
    active_clients: dict[str, PolicyConnection] = field(default_factory=dict)
    """Clients with a confirmed slot, by peer."""
    finished_clients: set[str] = field(default_factory=set)
    """Names of clients that have finished."""
    requests: deque[Record] = field(default_factory=deque)
    """Requests that the engine has not read."""
    reply_clients: dict[int, PolicyConnection] = field(default_factory=dict)
    """The client that waits for a reply, by the first sample of its request."""
    offer_number: int | None = None
    """The number of the current slot offer; None: there is no offer."""
    num_offers: int = 0
    """Number of offers made so far."""
    weights_attempt: str = ""
    """The attempt that produced the engine's weights; empty: they are newer, committed weights."""
    serving_since: float = 0.0
    """Time of the first confirmed slot (Unix time, s)."""
    end_reason: str | None = None
    """Why the session must end; None: it continues."""
    failure: PolicyFailure | None = None
    """The reply to all messages after the session has failed; None: it has not failed."""

    def handle_record(self, connection: PolicyConnection, record: Record) -> None:
        """Handle a request or a control message of a client.

        Raises:
            DataError: the message is invalid, or not allowed in the current state of the client.
        """
        with self.condition:
            if self.failure is not None:
                self._send_message(connection, self.failure)
            elif record.identity.sample != CONTROL_SAMPLE:
                if connection.peer not in self.active_clients or not len(
                    record.steps.get("sample", ())
                ):
                    raise DataError("a request without samples, or of a client without a slot")
                self.reply_clients[_first_sample(record)] = connection
                self.requests.append(record)
            else:
                self._handle_message(connection, record)
            self.condition.notify_all()

    def _handle_message(self, connection: PolicyConnection, record: Record) -> None:
        match read_policy_message(record.info):
            case RequestSlot():
                self.waiting_clients[connection.peer] = connection
                if self.offer_number is not None:
                    self._send_message(connection, SlotOffered(number=self.offer_number))
            case SlotAccepted(number=number):
                if number == self.offer_number and connection.peer in self.waiting_clients:
                    self.active_clients[connection.peer] = self.waiting_clients.pop(connection.peer)
                    self.serving_since = self.serving_since or time.time()
                    self._send_message(
                        connection,
                        SlotConfirmed(
                            weights_attempt=self.weights_attempt,
                            used_disk_fallback=self._used_disk_fallback(),
                        ),
                    )
                else:
                    self.waiting_clients.pop(connection.peer, None)
                    self._send_message(connection, SlotExpired())
            case ReleaseSlot():
                self._send_message(connection, self._slot_released(connection))
                self.remove_client(connection)
            case other:
                raise DataError(f"not a message of a client: {other!r}")

    def remove_client(self, connection: PolicyConnection) -> None:
        """Remove a client that has finished or is lost."""
        with self.condition:
            self.waiting_clients.pop(connection.peer, None)
            self.active_clients.pop(connection.peer, None)
            self.finished_clients.add(connection.client)
            self.reply_clients = {
                n: client for n, client in self.reply_clients.items() if client is not connection
            }
            clients = self.reply_clients
            self.requests = deque(r for r in self.requests if _first_sample(r) in clients)
            self.condition.notify_all()

    def end(self, reason: str) -> None:
        """End the session, because the attempt has ended."""
        with self.condition:
            self.end_reason = reason
            self.condition.notify_all()

    def fail(self, exit_code: int, reason: str) -> None:
        """Fail the session, and report the failure to all clients."""
        with self.condition:
            self.end_reason = reason
            self.failure = PolicyFailure(exit_code=exit_code, reason=reason)
            for connection in (*self.waiting_clients.values(), *self.active_clients.values()):
                self._send_message(connection, self.failure)

    def serve(self, ctx: StageContext, get_policy: Callable[[StageContext], PolicyRunner]) -> None:
        """Serve until all clients have finished; the caller has acquired the device.

        Raises:
            ServingEnded: the attempt has ended.
            RequeueRequested: the allocation is about to end.
            DataError: a reply is larger than a client accepts.
        """
        while True:
            with ctx.waiting(SIMULATORS_WAIT), self.condition:
                while not self.waiting_clients and self._has_unfinished_clients():
                    self._wait()
            if not self._has_unfinished_clients():
                return
            # This call may wait for the weights; other stages use the device meanwhile.
            policy = get_policy(ctx)
            folder, _, attempt = (ctx.worker_state.engine_weights or "").rpartition("/")
            self._offer_slot(attempt if folder == str(ctx.inputs["weights"].folder) else "")
            with ctx.span(GENERATE_SPAN):
                for reply in policy.engine.generate(
                    self, seed=policy.seed, stage=policy.stage, hooks=policy.hooks
                ):
                    self._reply(reply)

    def get(self) -> Record:
        """Return the next request; raises ChannelClosed if no client has a slot."""
        with self.condition:
            while not self.requests:
                if not self.active_clients:
                    self.offer_number = None
                    raise ChannelClosed("no client has a slot")
                self._wait()
            return self.requests.popleft()

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Record]:
        while True:
            try:
                yield self.get()
            except ChannelClosed:
                return

    def _has_unfinished_clients(self) -> bool:
        return not self.finished_clients.issuperset(self.order.clients)

    def _offer_slot(self, weights_attempt: str) -> None:
        """Offer the device slot to the waiting clients for a short time."""
        with self.condition:
            self.num_offers += 1
            self.offer_number, self.weights_attempt = self.num_offers, weights_attempt
            for connection in self.waiting_clients.values():
                self._send_message(connection, SlotOffered(number=self.offer_number))
            deadline = time.monotonic() + ACCEPT_TIMEOUT_S
            while not self.active_clients and self.waiting_clients and time.monotonic() < deadline:
                self._wait()
            if not self.active_clients:
                # Late clients receive SlotExpired and request a slot again.
                self.offer_number = None
                self.waiting_clients.clear()

    def _reply(self, reply: Record) -> None:
        with self.condition:
            connection = self.reply_clients.pop(_first_sample(reply), None)
        if connection is not None:
            client, node, limit = connection.client, self.order.node, self.max_reply_bytes
            content = f"what the policy answers {client} in one step of {node}"
            self.send(connection, encode_policy_message(reply, limit, content, "a reply"))

    def _used_disk_fallback(self) -> bool:
        return self.context is not None and self.context.inputs["weights"].used_disk_fallback

    def _wait(self) -> None:
        """Wait for a change, at most for ``POLL_S``; raise if the session must end."""
        if self.end_reason is not None:
            raise ServingEnded(self.end_reason)
        if self.should_stop():
            raise RequeueRequested("the worker with the policy is stopping")
        self.condition.wait(POLL_S)

    def _send_message(self, connection: PolicyConnection, message: WorkerMessage) -> None:
        self.send(connection, encode_message(message))

    def _slot_released(self, connection: PolicyConnection) -> SlotReleased:
        assert self.context is not None
        spans = []
        if self.finished_clients | {connection.client} >= set(self.order.clients):
            # Only the reply to the last client has spans. The generation's span has not ended.
            excluded = (*IDLE_SPANS, GENERATE_SPAN)
            finished = [s for s in self.context.spans if s["name"] not in excluded]
            spans = [(s["name"], s["start"], s["end"]) for s in finished]
            spans.append((GENERATE_SPAN, self.serving_since, time.time()))
        return SlotReleased(spans=json.dumps(spans), host=os.uname().nodename)


def _first_sample(record: Record) -> int:
    """Return the first sample of a request or reply."""
    return int(record.steps["sample"][0])


PEER_TIMEOUT_S = 10.0
"""Seconds without a message after which a client considers this worker lost."""
MAX_MESSAGE_BYTES = 1 << 30
"""Limit of a request and of a reply."""
MAX_REMEMBERED = 64
"""Number of ended attempts to remember."""
log = logging.getLogger("rlinf")


class PolicyServer:
    """The policy server of a worker, with a thread that receives messages.

    Args:
        run: the run folder.
        name: the name of this worker.
    """

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        name: str,
        store: LiveStore,
        schedule: DeviceSchedule,
        worker_state: WorkerState,
        activity: ActivityTracker,
        should_stop: Callable[[], bool],
    ) -> None:
        self._run, self._config, self._name = run, config, name
        self._live_store, self._schedule, self._worker_state = store, schedule, worker_state
        self._activity, self._should_stop = activity, should_stop
        self._lock = threading.Lock()
        self._host: MailboxHost | None = None
        self._malformed = MalformedCounter(f"policy server of {name}")
        self._sessions: dict[str, PolicySession] = {}
        """Sessions by attempt."""
        self._ended_attempts: dict[str, None] = {}
        """Attempts that are no longer served, oldest first."""
        self._connections: dict[str, PolicyConnection] = {}
        """Connections by peer."""
        self._early_records: dict[str, list[Record]] = {}
        """Messages that arrived before the driver's order, by peer."""
        self._threads: list[threading.Thread] = []

    @property
    def is_busy(self) -> bool:
        """Whether an attempt is being served."""
        return bool(self._sessions)

    def serve(self, order: ServePolicy) -> None:
        """Serve an attempt at a stage in a new thread; return at once."""
        if self._host is None:
            self._host = MailboxHost(
                channel_pointer(self._run / CHANNELS_FOLDER, policy_channel(self._name)),
                decode_record,
                interface=None,
                timeout_s=PEER_TIMEOUT_S,
                max_bytes=MAX_MESSAGE_BYTES,
                ack_on_poll=False,
            )
            start_service_thread("policy-server", self._receive_messages)
        slot = self._schedule.add(order.position)
        key = self._activity_key(order)
        self._activity.add(key, key.partition("/")[0])
        folder, is_live = order.weights
        if is_live:
            self._live_store.pin(key, [folder])
        session = PolicySession(order, self._send_item, self._should_stop, MAX_MESSAGE_BYTES)
        with self._lock:
            for running in self._sessions.values():
                # The running session was ordered by a dead driver; other clients wait now.
                same_clients = {*running.order.clients} == {*order.clients}
                if running.order.node == order.node and not same_clients:
                    running.end("another attempt takes its place")
            self._sessions[order.attempt] = session
            for connection in [c for c in self._connections.values() if c.attempt == order.attempt]:
                for record in self._early_records.pop(connection.peer, ()):
                    self._handle_record(session, connection, record)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(
            target=self._serve_attempt, args=(session, slot), name=key, daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def end_attempt(self, message: AttemptEnded) -> None:
        """Stop serving an attempt that has ended."""
        with self._lock:
            for session in self._sessions.values():
                if session.order.node == message.node:
                    session.end(message.reason)

    def close(self) -> None:
        """Close the mailbox, which clients notice; the worker is stopping."""
        for thread in self._threads:
            thread.join(1.0)
        if self._host is not None:
            self._host.close()

    @staticmethod
    def _activity_key(order: ServePolicy) -> str:
        """Return the name of the attempt in the status, such as ``rollout.generate/3``."""
        return f"{order.stage}{POLICY_SUFFIX}/{order.iteration}"

    def _serve_attempt(self, session: PolicySession, slot: DeviceSlot) -> None:
        order, key = session.order, self._activity_key(session.order)
        ctx = session.context = self._context(order, slot)
        try:
            with withdraw_on_damage(), slot:
                self._activity.start(key, lambda: ctx.activity)
                stage_module = import_stage_module(self._config, order.stage)
                session.serve(ctx, stage_module.policy_runner)
        except ServingEnded as error:
            session.fail(EXIT_REQUEUE, str(error))
        except BaseException as error:
            exit_code, reason = exit_code_and_message(error)
            log.warning("%s: %s", key, reason)
            session.fail(exit_code, reason[-8000:])
        finally:
            ctx.release()
            self._live_store.unpin(key)
            self._activity.remove(key)
            with self._lock:
                self._sessions.pop(order.attempt, None)
                self._ended_attempts[order.attempt] = None
                evict_oldest(self._ended_attempts, MAX_REMEMBERED)

    def _context(self, order: ServePolicy, slot: DeviceSlot) -> StageContext:
        folder, live = order.weights
        source = self._live_store.output(folder) if live else None
        out = self._run / order.output
        return StageContext(
            config=self._config,
            stage=order.stage,
            iteration=order.iteration,
            run_folder=self._run,
            output_folder=out,
            data_folder=out,
            world=ProcessGroupInfo(),
            inputs={"weights": StageInput(self._run / folder, None, source, self._should_stop)},
            worker_state=self._worker_state,
            should_stop=self._should_stop,
            live=LiveContext(LiveOutput(), slot, _no_sink, 1),
            worker=self._name,
        )

    def _send_item(self, connection: PolicyConnection, item: Block) -> None:
        assert self._host is not None
        with contextlib.suppress(ChannelClosed):  # the worker is stopping, which clients notice
            self._host.send_item(connection.peer, item)

    def _receive_messages(self) -> None:
        assert self._host is not None
        while True:
            try:
                events = self._host.poll_events(1.0)
            except ChannelClosed:
                return
            with self._lock:
                for event in events:
                    self._handle_event(event)

    def _handle_event(self, event: PeerEvent) -> None:
        if isinstance(event, PeerJoined):
            connection = self._connections.get(event.worker)
            if connection is None:
                names = ("client", "node", "attempt")
                fields = (str(event.description.get(name)) for name in names)
                self._connections[event.worker] = PolicyConnection(event.worker, *fields)
            return
        connection = self._connections.get(event.worker)
        if connection is None:
            return
        session = self._sessions.get(connection.attempt)
        if isinstance(event, PeerReport):
            if session is not None:
                self._handle_record(session, connection, event.content)
            elif connection.attempt in self._ended_attempts:
                reason = "it no longer serves this attempt"
                self._send_item(
                    connection, encode_message(PolicyFailure(exit_code=EXIT_REQUEUE, reason=reason))
                )
            else:
                self._early_records.setdefault(connection.peer, []).append(event.content)
        elif isinstance(event, PeerLost) and event.reason in (REASON_DEPARTED, REASON_REPLACED):
            # A silent client stays, because it may send again; if it is lost, the driver ends the
            # attempt.
            self._connections.pop(connection.peer)
            self._early_records.pop(connection.peer, None)
            if session is not None:
                session.remove_client(connection)
            assert self._host is not None
            self._host.forget_peer(connection.peer)

    def _handle_record(
        self, session: PolicySession, connection: PolicyConnection, record: Record
    ) -> None:
        try:
            session.handle_record(connection, record)
        except (DataError, KeyError) as error:
            self._malformed.count_dropped(error)


def _no_sink(channel: str) -> RecordWriter:
    raise AssertionError(f"a policy server writes no {channel}")
