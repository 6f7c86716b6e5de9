"""The policy's end of a rollout whose simulators are in other workers (:mod:`stages.worker.asks`).

A worker that has the policy hosts one mailbox. For every attempt at a stage that asks it has a
*service*, which has its turns at the place of that stage and answers whoever asks then: first the
simulators of its iteration, then whatever stages of later places are to run on the same device.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from rlinf.channels.base import ChannelClosed
from rlinf.channels.mailbox import Mailbox
from rlinf.channels.numbered import Block
from rlinf.channels.session import LEFT, REPLACED, Event, Joined, Lost, Report
from rlinf.channels.socket import pointer_of
from rlinf.channels.wire import decode
from rlinf.channels.world import World
from rlinf.config import RunConfig
from rlinf.data.record import Record
from rlinf.errors import EXIT_REQUEUE, DataError
from rlinf.threads import Malformed, serve
from rlinf.user_code import exit_of
from stages.activity import Activity
from stages.board import Board, Output, keep_newest
from stages.context import Context, Input, Live, Writer
from stages.flow import GENERATE
from stages.layout import CHANNELS
from stages.resident import Resident
from stages.runner import import_program, withdrawing
from stages.turns import Turn, Turns
from stages.worker.asks import channel_of, word
from stages.worker.messages import (
    Answer,
    Failed,
    Over,
)
from stages.worker.services import Ended, Service, Session

TIMEOUT_S = 10.0
"""How long this worker may be silent before a worker that asks gives it up, as for the driver."""
MAX_BYTES = 1 << 30
"""Of a request, and of a reply."""
KNOWN = 64
log = logging.getLogger("rlinf")


class Desk:
    """Answers those that ask this worker; a thread of its own hears them.

    Args:
        name: of this worker.
    """

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        name: str,
        board: Board,
        turns: Turns,
        resident: Resident,
        activity: Activity,
        stopping: Callable[[], bool],
    ) -> None:
        self._run, self._config, self._name = run, config, name
        self._board, self._turns, self._resident = board, turns, resident
        self._activity, self._stopping = activity, stopping
        self._lock = threading.Lock()
        self._host: Mailbox | None = None
        self._malformed = Malformed(f"desk of {name}")
        self._services: dict[str, Service] = {}
        """By attempt."""
        self._over: dict[str, None] = {}
        """Attempts that were answered."""
        self._sessions: dict[str, Session] = {}
        """By peer."""
        self._early: dict[str, list[Record]] = {}
        """By peer: what came before the driver's order."""
        self._threads: list[threading.Thread] = []

    @property
    def busy(self) -> bool:
        """Whether somebody is answered, or to be."""
        return bool(self._services)

    def answer(self, order: Answer) -> None:
        """Answer an attempt at a stage, in turn. Returns at once."""
        if self._host is None:
            self._host = Mailbox(
                pointer_of(self._run / CHANNELS, channel_of(self._name)),
                decode,
                interface=None,
                timeout_s=TIMEOUT_S,
                max_bytes=MAX_BYTES,
                keeps=False,
            )
            serve("desk", self._hear_all)
        turn = self._turns.enter(order.position)
        key = self._key(order)
        self._activity.ordered(key, key.partition("/")[0])
        if order.weights[1]:
            self._board.hold(key, [order.weights[0]])
        service = Service(order, self._say, self._stopping, MAX_BYTES)
        with self._lock:
            for old in self._services.values():
                # Of a driver that is gone. Askers that are still at it are to be answered first.
                if old.order.node == order.node and {*old.order.askers} != {*order.askers}:
                    old.end("another attempt takes its place")
            self._services[order.attempt] = service
            for session in [s for s in self._sessions.values() if s.attempt == order.attempt]:
                for record in self._early.pop(session.peer, ()):
                    self._given(service, session, record)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        work = threading.Thread(target=self._work, args=(service, turn), name=key, daemon=True)
        self._threads.append(work)
        work.start()

    def over(self, order: Over) -> None:
        """An attempt has ended: nobody asks for it any more."""
        with self._lock:
            for service in self._services.values():
                if service.order.node == order.node:
                    service.end(order.reason)

    def close(self) -> None:
        """Leave; workers that ask give up. After the worker began to stop."""
        for thread in self._threads:
            thread.join(1.0)
        if self._host is not None:
            self._host.close()

    @staticmethod
    def _key(order: Answer) -> str:
        return f"{order.stage}{GENERATE}/{order.iteration}"

    def _work(self, service: Service, turn: Turn) -> None:
        order, key = service.order, self._key(service.order)
        ctx = service.about = self._context(order, turn)
        try:
            with withdrawing(), turn:
                self._activity.begins(key, lambda: ctx.doing)
                program = import_program(self._config, order.stage)
                service.work(ctx, program.acting)
        except Ended as error:
            service.fail(EXIT_REQUEUE, str(error))
        except BaseException as error:
            code, reason = exit_of(error)
            log.warning("%s: %s", key, reason)
            service.fail(code, reason[-8000:])
        finally:
            ctx.let_go()
            self._board.release(key)
            self._activity.ended(key)
            with self._lock:
                self._services.pop(order.attempt, None)
                self._over[order.attempt] = None
                keep_newest(self._over, KNOWN)

    def _context(self, order: Answer, turn: Turn) -> Context:
        folder, live = order.weights
        source = self._board.output(folder) if live else None
        out = self._run / order.out
        return Context(
            config=self._config,
            stage=order.stage,
            iteration=order.iteration,
            run=self._run,
            out=out,
            data=out,
            world=World(),
            inputs={"weights": Input(self._run / folder, None, source, self._stopping)},
            resident=self._resident,
            stopping=self._stopping,
            live=Live(Output(), turn, _no_sink, 1),
            worker=self._name,
        )

    def _say(self, session: Session, item: Block) -> None:
        assert self._host is not None
        with contextlib.suppress(ChannelClosed):  # this worker leaves, which they notice
            self._host.deliver(session.peer, item)

    def _hear_all(self) -> None:
        assert self._host is not None
        while True:
            try:
                events = self._host.events(1.0)
            except ChannelClosed:
                return
            with self._lock:
                for event in events:
                    self._heard(event)

    def _heard(self, event: Event) -> None:
        if isinstance(event, Joined):
            known = self._sessions.get(event.worker)
            if known is None:
                said = (str(event.about.get(name)) for name in ("asker", "node", "attempt"))
                self._sessions[event.worker] = Session(event.worker, *said)
            return
        session = self._sessions.get(event.worker)
        if session is None:
            return
        service = self._services.get(session.attempt)
        if isinstance(event, Report):
            if service is not None:
                self._given(service, session, event.content)
            elif session.attempt in self._over:
                reason = "it has ended what it did for this attempt"
                self._say(session, word(Failed(code=EXIT_REQUEUE, reason=reason)))
            else:
                self._early.setdefault(session.peer, []).append(event.content)
        elif isinstance(event, Lost) and event.reason in (LEFT, REPLACED):
            # One that is silent may be heard again; if not, the driver says so.
            self._sessions.pop(session.peer)
            self._early.pop(session.peer, None)
            if service is not None:
                service.gone(session)
            assert self._host is not None
            self._host.forget(session.peer)

    def _given(self, service: Service, session: Session, record: Record) -> None:
        try:
            service.hear(session, record)
        except (DataError, KeyError) as error:
            self._malformed.drop(error)


def _no_sink(channel: str) -> Writer:
    raise AssertionError(f"what answers writes no {channel}")
