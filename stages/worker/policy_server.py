"""The server for stages whose simulators are in other pool workers.

A worker with the engine hosts one mailbox (:class:`PolicyServer`). Every attempt at a stage that
uses its policy has a :class:`PolicySession`. The session takes its device slots at the position of
that stage and answers the clients of that attempt. See :mod:`stages.worker.policy_client` for the
protocol.
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


class ServingEnded(Exception):
    """The attempt being served has ended."""


@dataclass(eq=False)
class PolicyConnection:
    """The connection of one client for one attempt."""

    peer: str
    client: str
    node: str
    attempt: str


@dataclass(eq=False)
class PolicySession:
    """The policy's work for one attempt: a source of its clients' requests for the engine.

    Args:
        send: sends a message to a client.
        max_reply_bytes: the largest reply that a client accepts.
    """

    order: ServePolicy
    send: Callable[[PolicyConnection, Block], None]
    should_stop: Callable[[], bool]
    max_reply_bytes: int
    context: StageContext | None = None
    condition: threading.Condition = field(default_factory=threading.Condition)
    waiting_clients: dict[str, PolicyConnection] = field(default_factory=dict)
    """By peer: clients that wait for a slot offer."""
    active_clients: dict[str, PolicyConnection] = field(default_factory=dict)
    """By peer: clients with a confirmed slot."""
    finished_clients: set[str] = field(default_factory=set)
    """Names of clients that have finished."""
    requests: deque[Record] = field(default_factory=deque)
    reply_clients: dict[int, PolicyConnection] = field(default_factory=dict)
    """By first sample of a request: the client that waits for the reply."""
    offer_number: int | None = None
    """The number of the current slot offer; None: the device is not held."""
    num_offers: int = 0
    weights_attempt: str = ""
    """The attempt that produced the engine's weights."""
    serving_since: float = 0.0
    """When the first client had its slot confirmed."""
    end_reason: str | None = None
    failure: PolicyFailure | None = None

    def handle_record(self, session: PolicyConnection, record: Record) -> None:
        """Handle a request or a control message of a client.

        Raises:
            DataError: the message is invalid at this point.
        """
        with self.condition:
            if self.failure is not None:
                self._send_message(session, self.failure)
            elif record.identity.sample != CONTROL_SAMPLE:
                if session.peer not in self.active_clients or not len(
                    record.steps.get("sample", ())
                ):
                    raise DataError("a request of a client without a slot, or without a sample")
                self.reply_clients[_first(record)] = session
                self.requests.append(record)
            else:
                self._handle_message(session, record)
            self.condition.notify_all()

    def _handle_message(self, session: PolicyConnection, record: Record) -> None:
        match read_policy_message(record.info):
            case RequestSlot():
                self.waiting_clients[session.peer] = session
                if self.offer_number is not None:
                    self._send_message(session, SlotOffered(number=self.offer_number))
            case SlotAccepted(number=number):
                if number == self.offer_number and session.peer in self.waiting_clients:
                    self.active_clients[session.peer] = self.waiting_clients.pop(session.peer)
                    self.serving_since = self.serving_since or time.time()
                    self._send_message(
                        session,
                        SlotConfirmed(
                            weights_attempt=self.weights_attempt,
                            used_disk_fallback=self._used_disk_fallback(),
                        ),
                    )
                else:
                    self.waiting_clients.pop(session.peer, None)
                    self._send_message(session, SlotExpired())
            case ReleaseSlot():
                self._send_message(session, self._closed(session))
                self.remove_client(session)
            case other:
                raise DataError(f"no message of a client: {other!r}")

    def remove_client(self, session: PolicyConnection) -> None:
        """Remove a client that has finished or is lost."""
        with self.condition:
            self.waiting_clients.pop(session.peer, None)
            self.active_clients.pop(session.peer, None)
            self.finished_clients.add(session.client)
            self.reply_clients = {
                n: client for n, client in self.reply_clients.items() if client is not session
            }
            self.requests = deque(r for r in self.requests if _first(r) in self.reply_clients)
            self.condition.notify_all()

    def end(self, reason: str) -> None:
        """End the session, because the attempt has ended."""
        with self.condition:
            self.end_reason = reason
            self.condition.notify_all()

    def fail(self, code: int, reason: str) -> None:
        """Fail the session; all clients give up."""
        with self.condition:
            self.end_reason, self.failure = reason, PolicyFailure(exit_code=code, reason=reason)
            for session in (*self.waiting_clients.values(), *self.active_clients.values()):
                self._send_message(session, self.failure)

    def serve(self, ctx: StageContext, get_policy: Callable[[StageContext], PolicyRunner]) -> None:
        """Serve until all clients have finished; needs the session's device slot.

        Raises:
            ServingEnded: the attempt has ended.
            RequeueRequested: the allocation is about to end.
            DataError: a reply is larger than a client accepts.
        """
        while True:
            with ctx.waiting(SIMULATORS_WAIT), self.condition:
                while not self.waiting_clients and self._is_needed():
                    self._pause()
            if not self._is_needed():
                return
            # It may wait for the weights, while other stages use the device.
            policy = get_policy(ctx)
            folder, _, attempt = (ctx.worker_state.engine_weights or "").rpartition("/")
            self._offer(attempt if folder == str(ctx.inputs["weights"].folder) else "")
            with ctx.span(GENERATE_SPAN):
                for reply in policy.engine.generate(
                    self, seed=policy.seed, stage=policy.stage, hooks=policy.hooks
                ):
                    self._reply(reply)

    def get(self) -> Record:
        with self.condition:
            while not self.requests:
                if not self.active_clients:
                    self.offer_number = None
                    raise ChannelClosed("no client has a slot")
                self._pause()
            return self.requests.popleft()

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Record]:
        while True:
            try:
                yield self.get()
            except ChannelClosed:
                return

    def _is_needed(self) -> bool:
        return not self.finished_clients.issuperset(self.order.clients)

    def _offer(self, weights: str) -> None:
        """Offer the device slot to the waiting clients for a short time."""
        with self.condition:
            self.num_offers += 1
            self.offer_number, self.weights_attempt = self.num_offers, weights
            for session in self.waiting_clients.values():
                self._send_message(session, SlotOffered(number=self.offer_number))
            deadline = time.monotonic() + ACCEPT_TIMEOUT_S
            while not self.active_clients and self.waiting_clients and time.monotonic() < deadline:
                self._pause()
            if not self.active_clients:
                # Late clients receive SlotExpired and request a slot again.
                self.offer_number = None
                self.waiting_clients.clear()

    def _reply(self, reply: Record) -> None:
        with self.condition:
            session = self.reply_clients.pop(_first(reply), None)
        if session is not None:
            what = f"what the policy answers {session.client} in one step of {self.order.node}"
            self.send(session, encode_policy_message(reply, self.max_reply_bytes, what, "a reply"))

    def _used_disk_fallback(self) -> bool:
        return self.context is not None and self.context.inputs["weights"].used_disk_fallback

    def _pause(self) -> None:
        if self.end_reason is not None:
            raise ServingEnded(self.end_reason)
        if self.should_stop():
            raise RequeueRequested("the worker with the policy is stopping")
        self.condition.wait(POLL_S)

    def _send_message(self, session: PolicyConnection, message: WorkerMessage) -> None:
        self.send(session, encode_message(message))

    def _closed(self, session: PolicyConnection) -> SlotReleased:
        assert self.context is not None
        spans = []
        if self.finished_clients | {session.client} >= set(self.order.clients):
            # Report each span once; the running span has not ended.
            done = [s for s in self.context.spans if s["name"] not in (*IDLE_SPANS, GENERATE_SPAN)]
            spans = [(s["name"], s["start"], s["end"]) for s in done]
            spans.append((GENERATE_SPAN, self.serving_since, time.time()))
        return SlotReleased(spans=json.dumps(spans), host=os.uname().nodename)


def _first(record: Record) -> int:
    """Return the first sample of a request or reply."""
    return int(record.steps["sample"][0])


PEER_TIMEOUT_S = 10.0
"""How long this worker may be silent before a client considers it lost."""
MAX_MESSAGE_BYTES = 1 << 30
"""The largest request, and the largest reply."""
MAX_REMEMBERED = 64
log = logging.getLogger("rlinf")


class PolicyServer:
    """The policy server of a worker, with a thread that receives messages.

    Args:
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
        self._activity, self._stopping = activity, should_stop
        self._lock = threading.Lock()
        self._host: MailboxHost | None = None
        self._malformed = MalformedCounter(f"policy server of {name}")
        self._services: dict[str, PolicySession] = {}
        """Sessions by attempt."""
        self._ended_attempts: dict[str, None] = {}
        """Attempts that have been served."""
        self._sessions: dict[str, PolicyConnection] = {}
        """Connections by peer."""
        self._early: dict[str, list[Record]] = {}
        """By peer: messages that arrived before the driver's order."""
        self._threads: list[threading.Thread] = []

    @property
    def is_busy(self) -> bool:
        """Whether an attempt is being served."""
        return bool(self._services)

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
        turn = self._schedule.add(order.position)
        key = self._key(order)
        self._activity.add(key, key.partition("/")[0])
        if order.weights[1]:
            self._live_store.pin(key, [order.weights[0]])
        service = PolicySession(order, self._send_to, self._stopping, MAX_MESSAGE_BYTES)
        with self._lock:
            for old in self._services.values():
                # An order of a dead driver: clients of the running attempt are served first.
                if old.order.node == order.node and {*old.order.clients} != {*order.clients}:
                    old.end("another attempt takes its place")
            self._services[order.attempt] = service
            for session in [s for s in self._sessions.values() if s.attempt == order.attempt]:
                for record in self._early.pop(session.peer, ()):
                    self._handle_record(service, session, record)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        work = threading.Thread(target=self._work, args=(service, turn), name=key, daemon=True)
        self._threads.append(work)
        work.start()

    def end_attempt(self, order: AttemptEnded) -> None:
        """Stop serving an attempt that has ended."""
        with self._lock:
            for service in self._services.values():
                if service.order.node == order.node:
                    service.end(order.reason)

    def close(self) -> None:
        """Close the mailbox, after the worker has begun to stop; clients give up."""
        for thread in self._threads:
            thread.join(1.0)
        if self._host is not None:
            self._host.close()

    @staticmethod
    def _key(order: ServePolicy) -> str:
        return f"{order.stage}{POLICY_SUFFIX}/{order.iteration}"

    def _work(self, service: PolicySession, turn: DeviceSlot) -> None:
        order, key = service.order, self._key(service.order)
        ctx = service.context = self._context(order, turn)
        try:
            with withdraw_on_damage(), turn:
                self._activity.start(key, lambda: ctx.activity)
                program = import_stage_module(self._config, order.stage)
                service.serve(ctx, program.policy_runner)
        except ServingEnded as error:
            service.fail(EXIT_REQUEUE, str(error))
        except BaseException as error:
            code, reason = exit_code_and_message(error)
            log.warning("%s: %s", key, reason)
            service.fail(code, reason[-8000:])
        finally:
            ctx.release()
            self._live_store.unpin(key)
            self._activity.remove(key)
            with self._lock:
                self._services.pop(order.attempt, None)
                self._ended_attempts[order.attempt] = None
                evict_oldest(self._ended_attempts, MAX_REMEMBERED)

    def _context(self, order: ServePolicy, turn: DeviceSlot) -> StageContext:
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
            inputs={"weights": StageInput(self._run / folder, None, source, self._stopping)},
            worker_state=self._worker_state,
            should_stop=self._stopping,
            live=LiveContext(LiveOutput(), turn, _no_sink, 1),
            worker=self._name,
        )

    def _send_to(self, session: PolicyConnection, item: Block) -> None:
        assert self._host is not None
        with contextlib.suppress(ChannelClosed):  # this worker is closing, which clients notice
            self._host.send_item(session.peer, item)

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
            known = self._sessions.get(event.worker)
            if known is None:
                values = (str(event.about.get(name)) for name in ("asker", "node", "attempt"))
                self._sessions[event.worker] = PolicyConnection(event.worker, *values)
            return
        session = self._sessions.get(event.worker)
        if session is None:
            return
        service = self._services.get(session.attempt)
        if isinstance(event, PeerReport):
            if service is not None:
                self._handle_record(service, session, event.content)
            elif session.attempt in self._ended_attempts:
                reason = "it has ended what it did for this attempt"
                self._send_to(
                    session, encode_message(PolicyFailure(exit_code=EXIT_REQUEUE, reason=reason))
                )
            else:
                self._early.setdefault(session.peer, []).append(event.content)
        elif isinstance(event, PeerLost) and event.reason in (REASON_DEPARTED, REASON_REPLACED):
            # A silent client may return; otherwise the driver reports its loss.
            self._sessions.pop(session.peer)
            self._early.pop(session.peer, None)
            if service is not None:
                service.remove_client(session)
            assert self._host is not None
            self._host.forget_peer(session.peer)

    def _handle_record(
        self, service: PolicySession, session: PolicyConnection, record: Record
    ) -> None:
        try:
            service.handle_record(session, record)
        except (DataError, KeyError) as error:
            self._malformed.count_dropped(error)


def _no_sink(channel: str) -> RecordWriter:
    raise AssertionError(f"a policy server writes no {channel}")
