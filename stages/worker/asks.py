"""The simulators' end of a rollout whose policy is in other workers.

What is observed goes to one of these as requests to an engine do, and its replies come back, over a
mailbox that the other worker hosts (:mod:`stages.worker.answers`): encrypted and authenticated as
all channels of a run, with both ends' signs of life.

A stage that asks needs two turns, its own here and that of its policy there, and whoever holds one
while it waits for the other may hold up what that one waits for. So it takes both or none: it
*opens* and waits without its turn; what answers has its turn and *grants* for a moment; if the
simulators have theirs by then they are *ready*, and both keep theirs until they are through. If
not, the grant is *void*, and they begin anew.
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

from rlinf.channels.base import Channel, ChannelClosed, ChannelFailed
from rlinf.channels.curve import reachable, routing_id
from rlinf.channels.numbered import Block
from rlinf.channels.peer import Peer
from rlinf.channels.socket import host_of
from rlinf.channels.wire import decode, encode
from rlinf.data.record import Identity, Record
from rlinf.envs.base import Environment, Episodes
from rlinf.errors import (
    EXIT_REQUEUE,
    DataError,
    InputError,
    InputFailed,
    RequeueRequested,
    RlinfError,
)
from stages.board import Output, keep_newest
from stages.context import Context
from stages.worker.messages import (
    Answers,
    Closed,
    Closes,
    Failed,
    Granted,
    Message,
    OfAsking,
    Opens,
    Over,
    Ready,
    StageOrder,
    Void,
    read_of_asking,
)

LOOK_S = 0.2
"""How often whoever waits sees whether it is to stop."""
OPEN_S = 60.0
"""How long the other worker may take to be there: it was when the stage was ordered."""
CLOSE_S = 5.0
KNOWN = 1024
WORD = -1
"""Sample number of what is no request or reply."""
POLICY = "the policy"


def channel_of(worker: str) -> str:
    """The name of the mailbox by which a worker is asked."""
    return f"{worker}-policy"


def word(message: Message) -> Block:
    """Something else than a request or reply, as it travels."""
    return encode(Record(Identity(0, WORD), info=message.packed())).to_bytes()


class PolicyFailed(RlinfError):
    """The policy's part of a stage failed, with this exit code."""

    def __init__(self, worker: str, failed: Failed) -> None:
        super().__init__(f"{worker}, which has the policy: {failed.reason}")
        self.exit_code = failed.code


class _OrderedAnew(Exception):
    """By another order than the one by which the other worker was asked."""


def packed(record: Record, most: int, what: str, sent_as: str) -> Block:
    """A request or reply as it is sent.

    Args:
        most: bytes that the other worker takes.
        what: it is, and ``sent_as``: a request or reply, in the words of an error.

    Raises:
        DataError: it is larger.
    """
    encoded = encode(record)
    if encoded.size > most:
        raise DataError(
            f"{what} takes {encoded.size} bytes, and {sent_as} may have {most}: let fewer be "
            "simulated together (task.at_once), or give their stage more processes"
        )
    return encoded.to_bytes()


class Asks(Channel):
    """Asks one worker, on behalf of one attempt at a stage; observations in, actions out.

    Args:
        folder: the run's folder for channels.
        name: of this worker.
        order: names those that have the policy.
        rank: of this process among those that compute the stage.
    """

    def __init__(self, folder: Path, name: str, order: StageOrder, rank: int) -> None:
        self._folder, self._name, self._rank = folder, name, rank
        self._order = self._newest = order
        self._policy, self._answered = "", False
        self._most = 0
        """The largest request that the other worker takes, in bytes."""
        self._peer: Peer | None = None
        self._ctx: Context | None = None
        self._replies: deque[Record] = deque()
        self._words: deque[OfAsking] = deque()
        self._ended: str | None = None

    def collect(
        self, ctx: Context, environment: Environment, episodes: Episodes
    ) -> Generator[Record]:
        """Trajectories of ``episodes``; the policy's turn is kept until :meth:`close`.

        Raises:
            RequeueRequested: the allocation is about to end.
            InputFailed: the other worker is gone, or silent.
            PolicyFailed: its part failed.
        """
        self._ctx = ctx
        if self._peer is None:
            self._begin(ctx)
        yield from environment.simulate(episodes, self, self)

    def over(self, reason: str) -> None:
        """The other worker is known to be gone."""
        self._ended = reason

    def ordered(self, order: StageOrder) -> None:
        """The stage was ordered once more, by another driver.

        The first one may have died before the other worker took its order: unless that answers by
        now, it is asked by the new one.
        """
        self._newest = order

    def put(self, record: Record) -> None:
        """As the interface says.

        Raises:
            DataError: the other worker takes no request as large as this.
        """
        what = f"what the simulators of {self._order.node} observe in one step"
        self._give(packed(record, self._most, what, f"a request to {self._policy}"))

    def get(self) -> Record:
        while not self._replies:
            self._take()
        return self._replies.popleft()

    def close(self) -> None:
        """These observations are all; others may follow, in another call of :meth:`collect`."""

    def leave(self, *, through: bool) -> None:
        """The stage needs no more answers.

        Args:
            through: whether it has all it wanted; it is told what they took then.
        """
        peer, ctx = self._peer, self._ctx
        if peer is None or ctx is None:
            return
        try:
            if through:
                deadline = time.monotonic() + CLOSE_S
                # What is missing in the report then is no reason to collect once more.
                with contextlib.suppress(RlinfError):
                    self._give(word(Closes()))
                    while time.monotonic() < deadline and not self._closed(ctx):
                        self._take()
        finally:
            self._peer = None
            peer.close()

    def _closed(self, ctx: Context) -> bool:
        if not self._words:
            return False
        said = self._words.popleft()
        if isinstance(said, Closed):
            about = {"worker": self._policy, "rank": ctx.world.rank, "host": said.host}
            for name, start, end in json.loads(said.spans):
                ctx.spans.append({"name": name, **about, "start": start, "end": end})
        return True

    def _begin(self, ctx: Context) -> None:
        while not self._answered:
            self._order = order = self._newest
            self._policy = order.asks[self._rank % len(order.asks)]
            try:
                self._open(ctx)
            except _OrderedAnew:
                self._words.clear()
                if self._peer is not None:
                    self._peer.close()
                    self._peer = None

    def _open(self, ctx: Context) -> None:
        while True:
            with ctx.waiting(POLICY):
                if self._peer is None:
                    self._peer = self._connected()
                self._give(word(Opens()))
                granted = self._next()
            if not isinstance(granted, Granted):
                raise InputFailed(f"{self._policy} does not grant its turn: {granted!r}")
            self._give(word(Ready(number=granted.number)))
            while isinstance(said := self._next(), Granted):
                pass  # a later one; what became of this one comes after it
            if isinstance(said, Answers):
                self._answered = True
                entry = ctx.inputs["weights"]
                entry.fell |= said.fell
                if said.weights:
                    # Compared with what was committed before this stage commits.
                    entry.output, entry.taken = Output(), True
                    entry.output.done(said.weights)
                return
            if not isinstance(said, Void):
                raise InputFailed(f"{self._policy} neither answers nor refuses: {said!r}")

    def _connected(self) -> Peer:
        order = self._order
        about = {"asker": self._name, "node": order.node, "attempt": order.attempt}
        deadline = time.monotonic() + OPEN_S
        while True:
            self._check()
            # It listens from the first time on that it is to answer.
            with contextlib.suppress(InputError):
                _, host = host_of(self._folder, channel_of(self._policy))
                self._most = host.max_bytes
                if (address := reachable(host.addresses)) is not None:
                    return Peer(
                        self._folder / f"{channel_of(self._policy)}.socket.json",
                        routing_id().hex(),
                        decode,
                        about=msgpack.packb(about),
                        host=host,
                        address=address,
                    )
            if time.monotonic() > deadline:
                raise InputFailed(
                    f"{self._policy}, which has the policy, has not been there for {OPEN_S:g} s"
                )
            time.sleep(LOOK_S / 4)

    def _next(self) -> OfAsking:
        while not self._words:
            self._take()
        return self._words.popleft()

    def _check(self) -> None:
        if self._ended is not None:
            raise InputFailed(f"{self._policy}, which has the policy: {self._ended}")
        if self._ctx is not None and self._ctx.stopping():
            raise RequeueRequested(f"{self._ctx.stage}: stopping while the policy is asked")
        if self._newest is not self._order and not self._answered:
            raise _OrderedAnew

    def _give(self, item: Block) -> None:
        self._check()
        with self._failing():
            assert self._peer is not None
            self._peer.give(item, wait=True)

    def _take(self) -> None:
        self._check()
        with self._failing():
            assert self._peer is not None
            items = self._peer.take(LOOK_S)
        for item in items:
            if item.identity.sample != WORD:
                self._replies.append(item)
                continue
            try:
                said = read_of_asking(item.info)
            except DataError as error:
                raise InputFailed(f"{self._policy}, which has the policy: {error}") from None
            if isinstance(said, Failed) and said.code == EXIT_REQUEUE:
                raise InputFailed(f"{self._policy}, which has the policy: {said.reason}")
            if isinstance(said, Failed):
                raise PolicyFailed(self._policy, said)
            self._words.append(said)

    @contextlib.contextmanager
    def _failing(self) -> Generator[None]:
        try:
            yield
        except (ChannelClosed, ChannelFailed) as error:
            raise InputFailed(f"{self._policy}, which has the policy, is gone: {error}") from None


class Askers:
    """The stages under way in a worker whose policy others have.

    Args:
        folder: the run's folder for channels.
        name: of this worker.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._lock = threading.Lock()
        self._asks: dict[str, Asks] = {}
        """By stage instance."""
        self._newest: dict[str, StageOrder] = {}
        """The same; of those that have not begun."""
        self._over: dict[str, str] = {}
        """By attempt: why it was over before it began."""

    def ordered(self, order: StageOrder) -> None:
        """A stage was ordered, be it under way already."""
        with self._lock:
            if (asks := self._asks.get(order.node)) is not None:
                asks.ordered(order)
            elif order.asks:
                self._newest[order.node] = order
                keep_newest(self._newest, KNOWN)

    def begin(self, order: StageOrder, rank: int) -> Asks | None:
        """The way to the policy of an attempt; None where this worker has it."""
        if not order.asks:
            return None
        with self._lock:
            newest = self._newest.pop(order.node, order)
            asks = self._asks[order.node] = Asks(self._folder, self._name, newest, rank)
            if (reason := self._over.get(newest.attempt)) is not None:
                asks.over(reason)
        return asks

    @contextlib.contextmanager
    def asking(self, node: str) -> Iterator[None]:
        """While a stage computes, which may ask."""
        through = False
        try:
            yield
            through = True
        finally:
            if (asks := self._asks.pop(node, None)) is not None:
                asks.leave(through=through)

    def over(self, order: Over) -> None:
        """Whoever was asked is known to be gone."""
        with self._lock:
            if (asks := self._asks.get(order.node)) is not None:
                asks.over(order.reason)
            else:
                self._over[order.attempt] = order.reason
                keep_newest(self._over, KNOWN)
