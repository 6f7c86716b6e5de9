"""What a worker that has the policy does for one attempt at a stage that asks it.

See :mod:`stages.worker.asks` for what the two ends say, and :mod:`stages.worker.answers` for
where it arrives.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rlinf.channels.base import ChannelClosed
from rlinf.channels.numbered import Block
from rlinf.data.record import Record
from rlinf.errors import DataError, RequeueRequested
from stages.collect import Acting
from stages.context import PAUSES, Context
from stages.worker.asks import LOOK_S, WORD, packed, word
from stages.worker.messages import (
    Answer,
    Answers,
    Closed,
    Closes,
    Failed,
    Granted,
    Message,
    Opens,
    Ready,
    Void,
    read_of_asking,
)

GRANT_S = 5.0
"""How long simulators may take to be ready; they are at once, or have lost their turn."""
SIMULATORS, GENERATE = "simulators", "generate"


class Ended(Exception):
    """The attempt that asked is over."""


@dataclass(eq=False)
class Session:
    """One asker at one attempt."""

    peer: str
    asker: str
    node: str
    attempt: str


@dataclass(eq=False)
class Service:
    """What is under way of one attempt; the requests of all its simulators, to an engine.

    Args:
        say: sends an asker something.
        most: bytes of a reply that an asker takes.
    """

    order: Answer
    say: Callable[[Session, Block], None]
    stopping: Callable[[], bool]
    most: int
    about: Context | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)
    asking: dict[str, Session] = field(default_factory=dict)
    """By peer: those that wait to be granted the turn."""
    inside: dict[str, Session] = field(default_factory=dict)
    """Those that are answered."""
    through: set[str] = field(default_factory=set)
    """Askers that need no more."""
    requests: deque[Record] = field(default_factory=deque)
    askers: dict[int, Session] = field(default_factory=dict)
    """By first sample: the worker that waits for the reply."""
    grant: int | None = None
    """Number of the turn, while it is held."""
    grants: int = 0
    weights: str = ""
    """By which attempt those that the engine serves were made."""
    began: float = 0.0
    """When the first asker was answered."""
    ended: str | None = None
    failed: Failed | None = None

    def hear(self, session: Session, record: Record) -> None:
        """Something came from an asker.

        Raises:
            DataError: it makes no sense.
        """
        with self.changed:
            if self.failed is not None:
                self._tell(session, self.failed)
            elif record.identity.sample != WORD:
                if session.peer not in self.inside or not len(record.steps.get("sample", ())):
                    raise DataError("a request of a worker that is not answered, or of no sample")
                self.askers[_first(record)] = session
                self.requests.append(record)
            else:
                self._hear_word(session, record)
            self.changed.notify_all()

    def _hear_word(self, session: Session, record: Record) -> None:
        match read_of_asking(record.info):
            case Opens():
                self.asking[session.peer] = session
                if self.grant is not None:
                    self._tell(session, Granted(number=self.grant))
            case Ready(number=number):
                if number == self.grant and session.peer in self.asking:
                    self.inside[session.peer] = self.asking.pop(session.peer)
                    self.began = self.began or time.time()
                    self._tell(session, Answers(weights=self.weights, fell=self._fell()))
                else:
                    self.asking.pop(session.peer, None)
                    self._tell(session, Void())
            case Closes():
                self._tell(session, self._closed(session))
                self.gone(session)
            case other:
                raise DataError(f"no word of an asker: {other!r}")

    def gone(self, session: Session) -> None:
        """An asker needs no more answers, or is no longer there."""
        with self.changed:
            self.asking.pop(session.peer, None)
            self.inside.pop(session.peer, None)
            self.through.add(session.asker)
            self.askers = {n: asker for n, asker in self.askers.items() if asker is not session}
            self.requests = deque(r for r in self.requests if _first(r) in self.askers)
            self.changed.notify_all()

    def end(self, reason: str) -> None:
        """The attempt that asks is over."""
        with self.changed:
            self.ended = reason
            self.changed.notify_all()

    def fail(self, code: int, reason: str) -> None:
        """No more answers come: whoever asks gives up."""
        with self.changed:
            self.ended, self.failed = reason, Failed(code=code, reason=reason)
            for session in (*self.asking.values(), *self.inside.values()):
                self._tell(session, self.failed)

    def work(self, ctx: Context, acting: Callable[[Context], Acting]) -> None:
        """Answer until all askers are through; in the service's turn.

        Raises:
            Ended: the attempt that asks is over.
            RequeueRequested: the allocation is about to end.
            DataError: an asker takes no reply as large as one of the engine's.
        """
        while True:
            with ctx.waiting(SIMULATORS), self.changed:
                while not self.asking and self._wanted():
                    self._pause()
            if not self._wanted():
                return
            # It may wait for the weights, and others take the device meanwhile.
            policy = acting(ctx)
            folder, _, attempt = (ctx.resident.engine_weights or "").rpartition("/")
            self._offer(attempt if folder == str(ctx.inputs["weights"].folder) else "")
            with ctx.span(GENERATE):
                for reply in policy.engine.generate(
                    self, seed=policy.seed, stage=policy.stage, hooks=policy.hooks
                ):
                    self._reply(reply)

    def get(self) -> Record:
        with self.changed:
            while not self.requests:
                if not self.inside:
                    self.grant = None
                    raise ChannelClosed("nobody asks")
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

    def _wanted(self) -> bool:
        return not self.through.issuperset(self.order.askers)

    def _offer(self, weights: str) -> None:
        """Hold the turn for a moment for the workers that ask."""
        with self.changed:
            self.grants += 1
            self.grant, self.weights = self.grants, weights
            for session in self.asking.values():
                self._tell(session, Granted(number=self.grant))
            deadline = time.monotonic() + GRANT_S
            while not self.inside and self.asking and time.monotonic() < deadline:
                self._pause()
            if not self.inside:
                # Those that are late hear that it is void, and ask anew.
                self.grant = None
                self.asking.clear()

    def _reply(self, reply: Record) -> None:
        with self.changed:
            session = self.askers.pop(_first(reply), None)
        if session is not None:
            what = f"what the policy answers {session.asker} in one step of {self.order.node}"
            self.say(session, packed(reply, self.most, what, "a reply"))

    def _fell(self) -> bool:
        return self.about is not None and self.about.inputs["weights"].fell

    def _pause(self) -> None:
        if self.ended is not None:
            raise Ended(self.ended)
        if self.stopping():
            raise RequeueRequested("the worker with the policy is asked to stop")
        self.changed.wait(LOOK_S)

    def _tell(self, session: Session, message: Message) -> None:
        self.say(session, word(message))

    def _closed(self, session: Session) -> Closed:
        assert self.about is not None
        spans = []
        if self.through | {session.asker} >= set(self.order.askers):
            # Told once. What these were answered in has not ended.
            done = [s for s in self.about.spans if s["name"] not in (*PAUSES, GENERATE)]
            spans = [(s["name"], s["start"], s["end"]) for s in done]
            spans.append((GENERATE, self.began, time.time()))
        return Closed(spans=json.dumps(spans), host=os.uname().nodename)


def _first(record: Record) -> int:
    """The first sample of a request or reply."""
    return int(record.steps["sample"][0])
