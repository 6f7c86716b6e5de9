"""The client of a stage whose simulators use the policy of another pool worker.

The client sends observations to the policy server of that worker and gets actions
(:mod:`stages.worker.policy_server`). While it waits, the stage releases its device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from pathlib import Path

from rlinf.channels import requests
from rlinf.channels.channel import Channel, ChannelFailed
from rlinf.channels.reply_buffers import join
from rlinf.channels.requests import Message, RequestClient
from rlinf.channels.wire_format import decode_record, encode_record
from rlinf.data.record import Record
from rlinf.data.trajectory import Trajectory
from rlinf.envs.base import Environment, RolloutRequest
from rlinf.errors import EXIT_REQUEUE, DataError, RequeueRequested, RlinfError, UpstreamFailed
from stages.context import StageContext
from stages.layout import worker_pointer
from stages.live_store import LiveOutput
from stages.worker.messages import AttemptEnded, StageOrder

ACT, FINISH = "act", "finish"
"""Methods of a policy server."""
POLL_S = 0.2
"""Seconds between checks whether a waiting thread should stop."""
CONNECT_TIMEOUT_S = 60.0
"""How long the policy worker may take to answer for the first time."""
POLICY_WAIT = "the policy"
"""Name of the wait for the policy, in the status."""


def check_size(size: int, description: str) -> None:
    """Check the size of a request or reply, in bytes.

    Args:
        description: what is sent, for the error.

    Raises:
        DataError: it is too large.
    """
    if size > requests.MAX_MESSAGE_BYTES:
        raise DataError(
            f"{description} takes {size} bytes, and a message may have "
            f"{requests.MAX_MESSAGE_BYTES}: let fewer be simulated together "
            "(task.max_parallel_envs), or give their stage more processes"
        )


class PolicyFailed(RlinfError):
    """An error of the policy in another worker, with its exit code."""

    def __init__(self, worker: str, exit_code: int, reason: str) -> None:
        super().__init__(f"{worker}, which has the policy: {reason}")
        self.exit_code = exit_code


class PolicyClient(Channel):
    """A client of one policy server, for one attempt at a stage and one thread.

    Args:
        folder: the run's folder for channels.
        name: the name of this worker.
        order: the stage order; it names the policy workers.
        rank: rank of this process in the stage.
    """

    def __init__(self, folder: Path, name: str, order: StageOrder, rank: int) -> None:
        self._folder, self._name, self._rank = folder, name, rank
        self._order = self._newest_order = order
        self._worker = ""
        self._client: RequestClient | None = None
        self._ctx: StageContext | None = None
        self._blocks: dict[int, bytes] = {}
        """Encoded observations without actions, by number of the request."""
        self._was_served = False
        self._lost_reason: str | None = None
        self._deadline = 0.0

    def rollout_iter(
        self, ctx: StageContext, environment: Environment, episodes: RolloutRequest
    ) -> Generator[Trajectory]:
        """Yield the trajectories of ``episodes``.

        Raises:
            RequeueRequested: the allocation is about to end.
            UpstreamFailed: the policy worker is lost or silent.
            PolicyFailed: the policy failed in its worker.
        """
        self._ctx = ctx
        self._deadline = time.monotonic() + CONNECT_TIMEOUT_S
        yield from environment.simulate(episodes, self, self)

    def mark_lost(self, reason: str) -> None:
        """Record that the policy worker is lost."""
        self._lost_reason = reason

    def update_order(self, order: StageOrder) -> None:
        """Replace the order, because another driver has ordered the stage again.

        The first driver may have died before it sent an order to the policy worker. Until the
        client has got actions, it turns to the worker of the newest order.
        """
        self._newest_order = order
        if not self._was_served:
            self._lost_reason = None

    def put(self, record: Record) -> None:
        """Send observations to the policy.

        Raises:
            DataError: they are too large for one message.
        """
        encoded = encode_record(record)
        check_size(encoded.size, f"what the simulators of {self._order.node} observe in one step")
        self._act(encoded.to_bytes())

    def get(self) -> Record:
        assert self._ctx is not None
        with self._ctx.waiting(POLICY_WAIT):
            while True:
                number, reply = self._receive()
                block = self._blocks.pop(number)
                if not reply.arguments.get("retry"):
                    break
                self._raise_if_silent("has no order to serve this attempt")
                time.sleep(POLL_S / 4)
                self._act(block)
        if "reason" in reply.arguments:
            reason, exit_code = reply.arguments["reason"], reply.arguments["exit_code"]
            if exit_code == EXIT_REQUEUE:
                raise UpstreamFailed(f"{self._worker}, which has the policy: {reason}")
            raise PolicyFailed(self._worker, exit_code, reason)
        if not self._was_served:
            self._note_weights(reply)
        self._was_served = True
        return decode_record(join(reply.blocks[0]))

    def close(self) -> None:
        """End the observations of this rollout; another :meth:`rollout_iter` may send more."""

    def finish(self, *, completed: bool) -> None:
        """Tell the policy that this client needs no more actions, and disconnect.

        Args:
            completed: whether the rollout is complete. If so, the server's spans are recorded.
        """
        client, ctx = self._client, self._ctx
        if client is None or ctx is None:
            return
        try:
            if completed:
                arguments = {"attempt": self._order.attempt, "client": self._name}
                # Missing spans are no reason to repeat the rollout.
                with contextlib.suppress(ChannelFailed):
                    reply = client.request(FINISH, arguments).arguments
                    labels = {"worker": self._worker, "rank": ctx.world.rank}
                    for name, start, end in reply.get("spans", ()):
                        span = {"name": name, **labels, "host": reply["host"]}
                        ctx.spans.append({**span, "start": start, "end": end})
        finally:
            self._client = None
            client.close()

    def _note_weights(self, reply: Message) -> None:
        """Let the stage compare the policy's weights with the committed ones before it commits."""
        assert self._ctx is not None
        weights = self._ctx.inputs["weights"]
        weights.used_disk_fallback |= bool(reply.arguments["used_disk_fallback"])
        if attempt := reply.arguments["attempt"]:
            weights.live_output, weights.used_live = LiveOutput(), True
            weights.live_output.mark_complete(attempt)

    def _act(self, block: bytes) -> None:
        """Send encoded observations; connect first if necessary."""
        while True:
            self._raise_if_ended()
            if self._client is None:
                self._connect()
            assert self._client is not None
            try:
                number = self._client.send(ACT, {"attempt": self._order.attempt}, [block])
            except ChannelFailed as error:
                # The policy worker may still be starting.
                self._raise_if_silent(str(error))
                time.sleep(POLL_S / 4)
                continue
            self._blocks[number] = block
            return

    def _receive(self) -> tuple[int, Message]:
        while True:
            self._raise_if_ended()
            assert self._client is not None
            try:
                return self._client.receive()
            except ChannelFailed as error:
                self._raise_if_ended()
                if not self._is_reordered:
                    raise UpstreamFailed(
                        f"{self._worker}, which has the policy, is lost: {error}"
                    ) from None
            blocks, self._blocks = list(self._blocks.values()), {}
            self._client.close()
            self._client = None
            for block in blocks:
                self._act(block)

    def _connect(self) -> None:
        self._order = self._newest_order
        workers = self._order.policy_workers
        self._worker = workers[self._rank % len(workers)]
        self._client = RequestClient(
            worker_pointer(self._folder, self._worker), self._should_stop_waiting
        )

    @property
    def _is_reordered(self) -> bool:
        """Whether another driver ordered the stage again before this client got actions."""
        return self._newest_order is not self._order and not self._was_served

    def _should_stop_waiting(self) -> bool:
        return (
            self._lost_reason is not None
            or (self._ctx is not None and self._ctx.should_stop())
            or self._is_reordered
        )

    def _raise_if_ended(self) -> None:
        if self._lost_reason is not None:
            raise UpstreamFailed(f"{self._worker}, which has the policy: {self._lost_reason}")
        if self._ctx is not None and self._ctx.should_stop():
            raise RequeueRequested(f"{self._ctx.stage}: stopping while waiting for the policy")

    def _raise_if_silent(self, reason: str) -> None:
        if self._was_served or time.monotonic() > self._deadline:
            raise UpstreamFailed(f"{self._worker}, which has the policy: {reason}")


class PolicyClients:
    """The policy clients of the stages of a worker.

    Args:
        folder: the run's folder for channels.
        name: the name of this worker.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._clients: dict[str, PolicyClient] = {}
        """Client of each ordered stage, by node."""

    def add(self, order: StageOrder, rank: int) -> None:
        """Create the client of an ordered stage; nothing if the policy is in this worker."""
        if order.policy_workers:
            self._clients[order.node] = PolicyClient(self._folder, self._name, order, rank)

    def get(self, node: str) -> PolicyClient | None:
        return self._clients.get(node)

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

    def update_order(self, order: StageOrder) -> None:
        """Record that another driver has ordered a stage again."""
        if (client := self._clients.get(order.node)) is not None:
            client.update_order(order)

    def end_attempt(self, message: AttemptEnded) -> None:
        """Record that the policy of an attempt is lost."""
        if (client := self._clients.get(message.node)) is not None:
            client.mark_lost(message.reason)
