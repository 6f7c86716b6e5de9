"""The server of a policy that simulators in other pool workers use.

A worker with the engine serves the method ``act`` (:mod:`rlinf.channels.requests`): a request has
observations of some samples, and the reply has their actions. Each attempt at a stage whose policy
is in this worker has a :class:`PolicySession`, at that stage's position in the device schedule.

The session has the device only while it computes. While it waits for requests, stages with an
earlier position may compute here, and so may those of the simulators' worker while its stage waits
for actions. So neither worker waits for the other with its device in hand.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf.channels.channel import ChannelClosed, RecordSource
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.channels.reply_buffers import join
from rlinf.channels.requests import Request
from rlinf.channels.wire_format import decode_record, encode_record
from rlinf.config import RunConfig
from rlinf.data.record import Record
from rlinf.errors import EXIT_REQUEUE, DataError, RequeueRequested
from rlinf.user_code import exit_code_and_message
from stages.context import IDLE_SPANS, LiveContext, StageContext, StageInput
from stages.device_schedule import DeviceSchedule, DeviceSlot
from stages.flow import POLICY_SUFFIX, WEIGHTS
from stages.live_store import LiveOutput, LiveStore, evict_oldest
from stages.rollout import PolicyRunner
from stages.runner import import_stage_module, withdraw_on_damage
from stages.worker.messages import AttemptEnded, ServePolicy, StageOrder
from stages.worker.policy_client import ACT, FINISH, POLL_S, check_size
from stages.worker_state import ActivityTracker, WorkerState

HOLD_S = 0.05
"""How long a session keeps the device for the next request before it waits without the device."""
SIMULATORS_WAIT, GENERATE_SPAN = "simulators", "generate"
"""Names of the wait for simulators, in the status, and of the span of the generation."""
MAX_REMEMBERED = 64
"""Number of ended attempts to remember."""
log = logging.getLogger("rlinf")


class ServingEnded(Exception):
    """The attempt that a session serves has ended."""


@dataclass(eq=False)
class PolicySession(RecordSource):
    """The service for one attempt; the engine reads the clients' requests from this object."""

    order: StageOrder
    clients: frozenset[str]
    context: StageContext
    should_stop: Callable[[], bool]
    condition: threading.Condition = field(default_factory=threading.Condition)
    """Guards all fields below; notified when one of them has changed."""
    observations: deque[Record] = field(default_factory=deque)
    """Observations that the engine has not read."""
    open_requests: dict[int, Request] = field(default_factory=dict)
    """Requests without a reply, by their first sample."""
    finished_clients: set[str] = field(default_factory=set)
    weights: dict[str, Any] = field(default_factory=dict)
    """The attempt that produced the engine's weights (empty: they are newer, committed weights),
    and whether they were read from disk although they were expected in memory."""
    serving_since: float = 0.0
    """Time of the first request (Unix time, s)."""
    end_reason: str | None = None
    """Why the session must end; None: it continues."""
    failure: dict[str, Any] | None = None
    """The reply to all requests after the session has failed; None: it has not failed."""

    def handle(self, request: Request) -> None:
        """Handle a request of a client.

        Raises:
            DataError: the request is malformed.
        """
        with self.condition:
            if self.failure is not None:
                request.reply(self.failure)
            elif request.method == FINISH:
                self.finished_clients.add(str(request.arguments["client"]))
                request.reply({"spans": self._finished_spans(), "host": os.uname().nodename})
            elif request.method == ACT:
                observations = decode_record(join(request.blocks[0]))
                self.open_requests[_first_sample(observations)] = request
                self.observations.append(observations)
                self.serving_since = self.serving_since or time.time()
            else:
                raise DataError(f"no method {request.method!r}")
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
            self.failure = {"exit_code": exit_code, "reason": reason}
            while self.open_requests:
                self.open_requests.popitem()[1].reply(self.failure)

    def serve(self, get_policy: Callable[[StageContext], PolicyRunner]) -> None:
        """Serve until all clients have finished; the caller has acquired the device.

        Raises:
            ServingEnded: the attempt has ended.
            RequeueRequested: the allocation is about to end.
            DataError: a reply is too large.
        """
        ctx = self.context
        while True:
            with ctx.waiting(SIMULATORS_WAIT), self.condition:
                while not self.observations and self._has_unfinished_clients():
                    self._wait(POLL_S)
            if not self.observations:
                return
            # This call may wait for the weights; other stages use the device meanwhile.
            policy = get_policy(ctx)
            folder, _, attempt = (ctx.worker_state.engine_weights or "").rpartition("/")
            weights = ctx.inputs["weights"]
            self.weights = {
                "attempt": attempt if folder == str(weights.folder) else "",
                "used_disk_fallback": weights.used_disk_fallback,
            }
            with ctx.span(GENERATE_SPAN):
                for actions in policy.engine.generate(
                    self, seed=policy.seed, stage=policy.stage, hooks=policy.hooks
                ):
                    self._reply(actions)

    def get(self) -> Record:
        """Return the next observations; raises ChannelClosed if none arrive for ``HOLD_S``."""
        with self.condition:
            deadline = time.monotonic() + HOLD_S
            while not self.observations:
                if (remaining_s := deadline - time.monotonic()) <= 0:
                    raise ChannelClosed("no client needs actions now")
                self._wait(remaining_s)
            return self.observations.popleft()

    def __len__(self) -> int:
        return len(self.observations)

    def _has_unfinished_clients(self) -> bool:
        return not self.finished_clients.issuperset(self.clients)

    def _reply(self, actions: Record) -> None:
        encoded = encode_record(actions)
        check_size(encoded.size, f"what the policy answers in one step of {self.order.node}")
        with self.condition:
            request = self.open_requests.pop(_first_sample(actions), None)
        if request is not None:
            request.reply(self.weights, [encoded.to_bytes()])

    def _wait(self, timeout_s: float) -> None:
        """Wait for a change; raise if the session must end."""
        if self.end_reason is not None:
            raise ServingEnded(self.end_reason)
        if self.should_stop():
            raise RequeueRequested("the worker with the policy is stopping")
        self.condition.wait(timeout_s)

    def _finished_spans(self) -> list[tuple[str, float, float]]:
        """Return the spans of the policy (name, start, end), for the last client only."""
        if self._has_unfinished_clients():
            return []
        excluded = (*IDLE_SPANS, GENERATE_SPAN)
        spans = [s for s in self.context.spans if s["name"] not in excluded]
        return [
            *((s["name"], s["start"], s["end"]) for s in spans),
            (GENERATE_SPAN, self.serving_since, time.time()),
        ]


def _first_sample(record: Record) -> int:
    """Return the first sample of observations or actions.

    Raises:
        DataError: there is none.
    """
    samples = record.steps.get("sample")
    if samples is None or not len(samples):
        raise DataError("a request or reply without samples")
    return int(samples[0])


class PolicyServer:
    """The policy server of a worker.

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
        self._sessions: dict[str, PolicySession] = {}
        """Sessions by attempt."""
        self._ended_attempts: dict[str, None] = {}
        """Attempts that are no longer served, oldest first."""
        self._threads: list[threading.Thread] = []

    @property
    def is_busy(self) -> bool:
        """Whether an attempt is being served."""
        return bool(self._sessions)

    def serve(self, message: ServePolicy) -> None:
        """Serve an attempt at a stage in a new thread; return at once."""
        order = message.stage
        slot = self._schedule.add(order.position)
        key = self._activity_key(order)
        self._activity.add(key, key.partition("/")[0])
        folder, _ = order.inputs[WEIGHTS]
        if message.has_live_weights:
            self._live_store.pin(key, [folder])
        context = self._context(order, slot, live=message.has_live_weights)
        session = PolicySession(order, frozenset(message.clients), context, self._should_stop)
        with self._lock:
            for running in self._sessions.values():
                # The running session was ordered by a dead driver; other clients wait now.
                if running.order.node == order.node and running.clients != session.clients:
                    running.end("another attempt takes its place")
            self._sessions[order.attempt] = session
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
        """Wait a short time for the sessions to end; the worker is stopping."""
        for thread in self._threads:
            thread.join(1.0)

    def handle(self, request: Request) -> None:
        """Handle a request of a client.

        Raises:
            KeyError, DataError: the request is malformed.
        """
        attempt = str(request.arguments["attempt"])
        with self._lock:
            session = self._sessions.get(attempt)
            has_ended = attempt in self._ended_attempts
        if session is not None:
            session.handle(request)
        elif has_ended:
            reason = "it no longer serves this attempt"
            request.reply({"exit_code": EXIT_REQUEUE, "reason": reason})
        else:
            # The driver's order has not arrived yet.
            request.reply({"retry": True})

    @staticmethod
    def _activity_key(order: StageOrder) -> str:
        """Return the name of the attempt in the status, such as ``rollout.generate/3``."""
        return f"{order.stage}{POLICY_SUFFIX}/{order.iteration}"

    def _serve_attempt(self, session: PolicySession, slot: DeviceSlot) -> None:
        order, ctx, key = session.order, session.context, self._activity_key(session.order)
        try:
            with withdraw_on_damage(), slot:
                self._activity.start(key, lambda: ctx.activity)
                stage_module = import_stage_module(self._config, order.stage)
                session.serve(stage_module.policy_runner)
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

    def _context(self, order: StageOrder, slot: DeviceSlot, *, live: bool) -> StageContext:
        folder, _ = order.inputs[WEIGHTS]
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
            live=LiveContext(LiveOutput(), slot, 1),
            worker=self._name,
        )
