"""Generating in claims: a worker collects the starts it is given and sends what comes of them.

It keeps nothing but the engine and the environment, so it can begin and end at any time. What it
has sent when it dies counts; the rest of its starts others do. One that has something else to do
hands the last samples of a claim, the long ones, over to another and goes back to that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import Any

from rlinf.artifacts import read_manifest
from rlinf.channels.world import World
from rlinf.config import RunConfig
from rlinf.data.record import Record
from rlinf.envs.base import UNFINISHED
from rlinf.errors import EXIT_REQUEUE, InputFailed, RequeueRequested
from rlinf.user_code import exit_of
from stages.activity import Activity
from stages.board import Board, Output
from stages.context import Context, Input
from stages.names import CLAIM, unfinished
from stages.parts import WEIGHTS
from stages.resident import Resident
from stages.rollout import collected
from stages.runner import withdrawing
from stages.turns import Turns
from stages.worker.inbox import MADE_OF, Outbox
from stages.worker.messages import Claim, ClaimEnded

TAIL = 0.25
"""A claim is handed over once this share of its samples, or less, is unfinished."""
log = logging.getLogger("rlinf")


class Generator:
    """Does claims one after the other, and other work between them, in a thread of its own.

    Claims fill the time in which the worker's stages wait, the earliest iteration first.
    """

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        board: Board,
        outbox: Outbox,
        turns: Turns,
        resident: Resident,
        activity: Activity,
        report: Callable[[ClaimEnded], None],
        stopping: Callable[[], bool],
    ) -> None:
        self._run, self._config, self._resident = run, config, resident
        self._board, self._outbox, self._turns = board, outbox, turns
        self._activity, self._report, self._stopping = activity, report, stopping
        self._thread = ThreadPoolExecutor(1, "generate")
        self._waiting: set[str] = set()
        """Claims that are to be done; one that is dropped is not."""
        self._queue: list[Claim] = []
        self._lock = threading.Lock()
        self._successors: dict[str, str] = {}
        """Workers that are to go on with the tails of claims."""

    def claim(self, order: Claim) -> None:
        """Do a claim after those of earlier iterations, and those that came before it."""
        with self._lock:
            self._waiting.add(order.claim)
            self._queue.append(order)
        self._thread.submit(self._next)

    def hand_over(self, claim: str, successor: str) -> None:
        """Let another worker go on with a claim once little is left of it; at once if it waits."""
        with self._lock:
            waits = [order for order in self._queue if order.claim == claim]
            self._queue = [order for order in self._queue if order.claim != claim]
            if not waits and claim in self._waiting:
                self._successors[claim] = successor
        for order in waits:
            self._ended(claim, rest=order.starts)

    def drop(self) -> None:
        """The claims of until now are no longer wanted."""
        self._waiting.clear()

    def submit(self, work: Callable[[], None]) -> None:
        """Do something else with the engine."""
        self._thread.submit(work)

    def close(self) -> None:
        self.drop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        with self._turns.spare():
            with self._lock:
                if not self._queue:
                    return
                order = min(self._queue, key=lambda order: order.iteration)
                self._queue.remove(order)
            if order.claim in self._waiting:
                self._do(order)

    def _do(self, order: Claim) -> None:
        claim, code, reason = order.claim, 0, ""
        spans: tuple[tuple[str, float, float], ...] = ()
        rest, successor = list[Record](), ""
        ctx = self._context(order, lambda: self._stopping() or claim not in self._waiting)
        name = order.name
        self._activity.ordered(name, ctx.stage)
        try:
            with withdrawing():
                self._activity.begins(name, lambda: ctx.doing)
                rest, successor = self._send(ctx, order)
            spans = tuple((s["name"], s["start"], s["end"]) for s in ctx.spans)
        except (RequeueRequested, InputFailed) as error:
            code, reason = EXIT_REQUEUE, str(error)
        except BaseException as error:
            code, reason = exit_of(error)
        ctx.let_go()
        self._activity.ended(name)
        self._successors.pop(claim, None)
        if code:
            log.warning("%s: %s", name, reason)
        size = self._config.rollout.group_size
        self._ended(
            claim,
            code=code,
            reason=reason[-8000:],
            spans=spans,
            rest=tuple(sorted({record.identity.sample // size for record in rest})),
            to=successor,
            samples=len(rest) if successor else 0,
            fell=ctx.inputs["weights"].fell,
        )

    def _ended(self, claim: str, **said: Any) -> None:
        """Say what became of a claim that is still wanted, or that was done all the same.

        Its last sample may end the rollout, and all claims of it, before this is said.
        """
        done = not said.get("code") and bool(said.get("spans"))
        if claim in self._waiting or done:
            self._waiting.discard(claim)
            self._report(ClaimEnded(claim=claim, host=gethostname(), **said))

    def _send(self, ctx: Context, order: Claim) -> tuple[list[Record], str]:
        """Send trajectories to the worker that gathers them.

        Returns:
            The unfinished ones, and the successor that has them, if one has.

        Raises:
            InputFailed: that worker no longer takes them, or the weights are not there.
        """
        self._take_weights(ctx, order)
        # The gathering worker sees whether the weights were committed in the end.
        mark = {} if order.attempt is None else {MADE_OF: order.attempt}
        to, claim, out = order.to, order.claim, order.out
        sender = self._outbox.writer(f"{out}:trajectories", [to], 0, 1)
        total, begun = len(order.starts) * self._config.rollout.group_size, None
        if order.begun:
            channel, total = order.begun.channel, order.begun.samples
            output = self._board.output(out)
            there = output.arriving(channel, total, ctx.stopping)
            begun = {record.identity.sample: record for record in there}
            output.forget(channel)

        def gives_up(left: int, of: int) -> bool:
            return claim in self._successors and left <= TAIL * of

        rest = []
        for done, trajectory in enumerate(collected(ctx, order.starts, begun, gives_up), 1):
            if trajectory.info["stop_reason"] == UNFINISHED:
                rest.append(trajectory)
            else:
                marked = replace(trajectory, info={**trajectory.info, **mark})
                sender.put(marked)
                ctx.progress(done, total, "samples")
        if not sender.flush():
            raise InputFailed(f"{to} did not take all trajectories")
        if not rest:
            return [], ""
        successor = self._successors[claim]
        sender = self._outbox.writer(f"{out}:{unfinished(claim)}", [successor], 0, 1)
        for trajectory in rest:
            sender.put(trajectory)
        return rest, successor if sender.flush() else ""

    def _take_weights(self, ctx: Context, order: Claim) -> None:
        """Take the claim's weights from the board where they are there, else from the disk.

        It must not wait for weights that are still to be committed: those that fail are made again
        by this worker, or of what others do with its help.

        Raises:
            InputFailed: those it was to take are in neither place.
        """
        entry, folder = ctx.inputs["weights"], order.weights
        manifest = read_manifest(entry.folder)
        committed = None if manifest is None else manifest.data
        attempt = order.attempt or committed
        if attempt is not None and ctx.resident.engine_weights is not None:
            output = self._board.output(folder)
            if (tensors := output.held(WEIGHTS, attempt)) is not None:
                entry.output = Output()
                entry.output.bring(attempt, WEIGHTS, tensors)
                return
            entry.fell = order.attempt is not None
        if manifest is None or order.attempt not in (None, committed):
            made = f"by {attempt} " if attempt else ""
            raise InputFailed(f"weights of {folder} {made}are neither here nor committed")
        # What is withdrawn from now on is not there to be read; it is not waited for either.
        entry.committed = manifest

    def _context(self, order: Claim, stopping: Callable[[], bool]) -> Context:
        out = self._run / order.out
        weights = Input(self._run / order.weights, None, None, stopping)
        return Context(
            config=self._config,
            stage=CLAIM,
            iteration=order.iteration,
            run=self._run,
            out=out,
            data=out,
            world=World(),
            inputs={"weights": weights},
            resident=self._resident,
            stopping=stopping,
        )
