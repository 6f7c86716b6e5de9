"""``python -m stages.worker.main``: one resident worker of a pool.

It takes orders from the run's driver, runs stages in turns, and commits one stage's output while
the next computes. Stages of one worker hand each other records and weights in memory; records for
stages elsewhere go to their workers' inboxes. Whatever is not in memory is read from disk, so a
worker can begin, end or be replaced at any time.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlinf import machine, segments
from rlinf.artifacts import DATA, MANIFEST
from rlinf.channels.base import ChannelClosed, ChannelFailed
from rlinf.channels.control import Link
from rlinf.channels.world import ParallelLayout, World
from rlinf.config import RunConfig
from rlinf.errors import EXIT_REQUEUE, RlinfError, last_line, told_of_exhaustion
from rlinf.user_code import exit_of, reporting_user_errors
from slurm.deadline import stop_in
from slurm.signals import StopFlag
from stages.activity import Activity
from stages.board import Board, Output
from stages.context import Input, Live, Writer
from stages.deltas import Deltas
from stages.layout import CHANNELS, CONFIG
from stages.names import worker_name
from stages.parts import WEIGHTS, sent_type
from stages.ranks import Ranks
from stages.resident import Resident
from stages.runner import Attempt, StageCall, load_config, withdrawing
from stages.turns import Aside, Turn, Turns
from stages.worker.answers import Desk
from stages.worker.asks import Askers
from stages.worker.generate import Generator
from stages.worker.inbox import Inbox, Outbox
from stages.worker.messages import (
    Answer,
    Claim,
    ClaimEnded,
    Cut,
    Drop,
    Gathered,
    HandOver,
    HasWeights,
    Leave,
    Over,
    Run,
    Said,
    Send,
    StageEnded,
    StageOrder,
    read_order,
)
from stages.worker.relays import Relays
from stages.worker.weights import Arrivals, Publisher

STATUS_S = 1.0
STOP_S, LEAVE_S = 30.0, 5.0
"""How long what is under way may take to end when Slurm wants the nodes, and when told to leave."""
GIVE_WAY_S = 0.1
"""A commit begins so much later. It is Python for the most part, as is what the next stages do
before the next kernel: one after the other, both end sooner than side by side."""
log = logging.getLogger("rlinf")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to leave (0), or asked to stop by Slurm (75)."""
    machine.apply()
    segments.sweep()
    parser = argparse.ArgumentParser(prog="python -m stages.worker.main", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("--name", required=True, help="name of the pool")
    parser.add_argument(
        "--uncast", action="store_true", help="send weights as the trainer has them"
    )
    parser.add_argument(
        "--deltas", action="store_true", help="write and read what changed of the weights"
    )
    parser.add_argument(
        "--orphan-s", type=float, default=600.0, help="leave when no driver came for so long"
    )
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    # Where does it hang? The log tells, after kill -QUIT.
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    try:
        config = load_config(arguments.run / CONFIG)
        with told_of_exhaustion(), StopFlag() as stop, reporting_user_errors():
            worker = Worker(
                arguments.run,
                config,
                arguments.name,
                stop,
                uncast=arguments.uncast,
                deltas=arguments.deltas,
            )
            return worker.serve(arguments.orphan_s)
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


class Worker:
    """See the module."""

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        pool: str,
        stop: StopFlag,
        *,
        uncast: bool,
        deltas: bool,
    ) -> None:
        self._run, self._config, self._stop = run, config, stop
        self._world = World.from_environment(run / CHANNELS)
        self._name = worker_name(pool, self._world.rank)
        dtype = None if uncast else sent_type(config)
        held = Deltas(dtype) if deltas else None
        self._resident = Resident(progress=self._progress, deltas=held)
        self._board, self._turns, self._activity = Board(), Turns(), Activity()
        self._busy: dict[str, threading.Thread] = {}
        self._commits: set[str] = set()
        """Stages that are computed and not on disk yet."""
        self._leaving = threading.Event()
        self._moved = time.monotonic()
        self._lock = threading.Lock()
        self._outbox = Outbox(run / CHANNELS, self._cut, self._name)
        behind = config.rollout.staleness
        self._relays = Relays(self._outbox)
        self._publisher = Publisher(self._outbox, dtype)
        arrivals = Arrivals(self._board, self._publisher, behind, self._tell_of_weights)
        takers = {WEIGHTS: arrivals.take}
        self._inbox = Inbox(
            run / CHANNELS,
            self._name,
            self._board,
            takers,
            passing=self._relays.arrived if self._world.size > 1 else lambda *_: None,
        )
        self._generator = Generator(
            run,
            config,
            self._board,
            self._outbox,
            self._turns,
            self._resident,
            self._activity,
            self._tell_of_claim,
            self._stopping,
        )
        shared = (self._board, self._turns, self._resident, self._activity)
        self._desk = Desk(run, config, self._name, *shared, self._stopping)
        self._askers = Askers(run / CHANNELS, self._name)
        left = stop_in()
        about = {
            "pool": pool,
            "rank": self._world.rank,
            "ranks": self._world.size,
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID", ""),
            "host": os.uname().nodename,
            "ends": None if left is None else time.time() + left,
        }
        self._link = Link(run / CHANNELS, self._name, about)

    def serve(self, orphan_s: float) -> int:
        """Carry out orders; returns the exit code."""
        code, told, commits_s = 0, 0.0, 0.0
        try:
            while not self._stop.is_set():
                if time.monotonic() - told > STATUS_S:
                    told = time.monotonic()
                    self._tell()
                if self._link.silent_s > orphan_s and self._idle(orphan_s):
                    log.warning("no driver for %.0f s: leaving", orphan_s)
                    break
                orders = [read_order(content) for content in self._link.orders(0.2)]
                leave = next((order for order in orders if isinstance(order, Leave)), None)
                if leave is not None:
                    commits_s = leave.commits_s
                    break
                for order in orders:
                    match order:
                        case Send():
                            self._wanted(order)
                        case Answer():
                            self._desk.answer(order)
                        case Over():
                            self._desk.over(order)
                            self._askers.over(order)
                # All places are taken before any stage begins: all ranks see the same order.
                begun = [stage for o in orders if isinstance(o, Run) for stage in o.stages]
                for stage, thread in [(stage, self._enter(stage)) for stage in begun]:
                    if thread is not None:
                        (self._generator.submit(thread.run) if stage.queued else thread.start())
                for order in orders:
                    match order:
                        case Claim():
                            self._generator.claim(order)
                        case HandOver():
                            self._generator.hand_over(order.claim, order.to)
                        case Drop():
                            self._generator.drop()
            else:
                code = EXIT_REQUEUE
        except ChannelFailed as error:
            log.warning("this worker cannot go on: %s", error)
            code = 1
        self._end(code, commits_s)
        return code

    def _idle(self, seconds: float) -> bool:
        """Nothing is under way, or all that is waits for what does not come."""
        under_way = self._busy or self._desk.busy
        return not under_way or time.monotonic() - self._moved > seconds

    def _stopping(self) -> bool:
        return self._stop.is_set() or self._leaving.is_set()

    def _end(self, code: int, commits_s: float) -> None:
        """Let what runs come to an end: soon, what is being written in ``commits_s``.

        A stage that is computed but waits for the commit of an input does not get that time: the
        worker that makes the input may be the one that was lost.
        """
        self._leaving.set()
        with self._lock:
            # Those of a generator run in its thread and were never started.
            running = {node: thread for node, thread in self._busy.items() if thread.is_alive()}
        began, patience_s = time.monotonic(), STOP_S if code == EXIT_REQUEUE else LEAVE_S
        for node, thread in running.items():
            while thread.is_alive():
                longest = max(patience_s, commits_s) if node in self._commits else patience_s
                if time.monotonic() - began > longest:
                    break
                thread.join(0.05)
        self._turns.close()
        self._generator.close()
        self._desk.close()
        self._publisher.close()
        self._relays.close()
        self._outbox.close()
        self._link.close()
        self._inbox.close()
        self._resident.close()

    def _cut(self, worker: str) -> None:
        """Another worker does not take records any more: the driver knows what that means."""
        with contextlib.suppress(ChannelClosed, ChannelFailed):
            self._tell_driver(Cut(worker=worker))

    def _tell_driver(self, said: Said) -> None:
        self._link.report(said.packed())

    def _wanted(self, order: Send) -> None:
        """Other workers wait for something that is made here, or is to be passed on."""
        out, channel, maker, ways = order.out, order.channel, order.maker, order.to
        self._board.output(out)  # what is kept for it goes with it
        if channel == WEIGHTS:
            self._publisher.want(out, ways)
        elif maker == self._name:
            self._outbox.want(f"{out}:{channel}", ways)
        else:
            self._relays.want(f"{out}:{channel}", maker, ways)

    def _enter(self, order: StageOrder) -> threading.Thread | None:
        """A thread for a stage that has its place in the order; None if it is under way already."""
        node = order.node
        self._askers.ordered(order)
        if order.gathers:
            self._tell_what_arrived(order)
        with self._lock:
            if node in self._busy:
                return None
            aside = order.gathers or order.queued
            turn = Aside() if aside else self._turns.enter(order.position)
            thread = threading.Thread(target=self._work, args=(order, turn), name=node, daemon=True)
            self._busy[node] = thread
            self._moved = time.monotonic()
        live = [folder for folder, live in order.inputs.values() if live]
        self._board.hold(node, [order.out, *live])
        self._activity.ordered(node, order.stage)
        output = self._board.output(order.out)
        output.retried()
        self._tell()
        return thread

    def _work(self, order: StageOrder, turn: Turn | Aside) -> None:
        output = self._board.output(order.out)
        # Others may wait for this one while it waits for its turn.
        ranks = Ranks(self._run / order.out / f"{DATA}{order.attempt}", self._among(order))
        try:
            with withdrawing(), ranks.attempting():
                with turn:
                    attempt = self._attempt(order, output, turn)
                    self._activity.begins(order.node, lambda: attempt.ctx.doing)
                    with self._askers.asking(order.node):
                        attempt.compute()
                    self._activity.computed(order.node)
                    name = attempt.ctx.data.name
                    output.done(name)
                    made = (order.out, name, order.iteration)
                    self._publisher.publish(*made, output.objects)
                    if WEIGHTS in output.objects:
                        self._tell_of_weights(*made)
                    self._board.trim(2 + self._config.rollout.staleness)
                    self._commits.add(order.node)
                time.sleep(GIVE_WAY_S)
                # It may wait for an input whose stage has to run here once more.
                manifest = attempt.commit()
            if manifest.data != attempt.ctx.data.name:
                log.warning("%s: another attempt was first", order.node)
            self._report(order, 0, "")
        except BaseException as error:
            self._failed(order, output, error)

    def _attempt(self, order: StageOrder, output: Output, turn: Turn | Aside) -> Attempt:
        world, out = self._among(order), order.out
        inputs = {}
        for name, (folder, live) in order.inputs.items():
            source = self._board.output(folder) if live else None
            inputs[name] = Input(self._run / folder, None, source, self._stopping)

        def sinks(channel: str) -> Writer:
            made = partial(output.arrived, channel)
            return self._outbox.stream(f"{out}:{channel}", world.data_rank, world.data_size, made)

        now = time.time()
        return Attempt(
            StageCall(
                order.stage,
                self._run / CONFIG,
                self._run / out,
                order.iteration,
                {name: entry.folder for name, entry in inputs.items()},
            ),
            self._config,
            world,
            inputs,
            self._resident,
            self._stopping,
            began=now,
            start=now,
            name=order.attempt,
            live=Live(output, turn, sinks, order.parts),
            worker=self._name,
            gathers=order.gathers,
            asks=self._askers.begin(order, world.rank),
        )

    def _among(self, order: StageOrder) -> World:
        """Which process this is of those that compute a stage."""
        ranks, own = order.ranks, self._world
        if len(ranks) == 1:
            return World()
        if len(ranks) == own.size:
            return replace(own, layout=ParallelLayout.parse(order.layout))
        # They form no process group: the others of the pool compute something else.
        shares = own.shares and tuple(own.shares[rank] for rank in ranks)
        return World(ranks.index(own.rank), len(ranks), own.local_rank, shares)

    def _failed(self, order: StageOrder, output: Output, error: BaseException) -> None:
        node = order.node
        code, reason = exit_of(error)
        output.fail(f"{node} failed: {last_line(reason)}")
        log.warning("%s: %s", node, reason)
        self._report(order, code, reason)

    def _report(self, order: StageOrder, code: int, reason: str) -> None:
        node = order.node
        with self._lock:
            self._busy.pop(node, None)
            self._commits.discard(node)
            self._board.release(node)
        self._moved = time.monotonic()
        self._activity.ended(node)
        self._tell_driver(StageEnded(node=node, code=code, reason=reason[-8000:]))
        self._tell()
        self._let_go()

    def _let_go(self) -> None:
        """Free what is on disk and no stage here is to read: there is no other use for it."""
        gone = self._board.let_go(self._committed)
        self._outbox.forget(gone)
        self._relays.forget(gone)
        self._publisher.forget(gone)

    def _committed(self, folder: str) -> bool:
        try:
            return (self._run / folder / MANIFEST).exists()
        except OSError:
            # A filesystem that fails now is asked again when the next stage ends.
            return False

    def _tell_what_arrived(self, order: StageOrder) -> None:
        """The starts of a rollout that need not be generated again."""
        size = self._config.rollout.group_size
        records = self._board.output(order.out).arrived("trajectories")
        count = Counter(record.identity.sample // size for record in records)
        there = sorted(start for start, samples in count.items() if samples == size)
        self._tell_driver(Gathered(node=order.node, starts=tuple(there)))

    def _tell_of_weights(self, out: str, attempt: str, iteration: int) -> None:
        """These are on the board: claims need not wait for their commit."""
        self._tell_driver(HasWeights(out=out, attempt=attempt, iteration=iteration))

    def _tell_of_claim(self, said: ClaimEnded) -> None:
        self._tell_driver(said)
        self._let_go()

    def _progress(self, stage: str, done: int, total: int, what: str) -> None:
        self._moved = time.monotonic()
        self._activity.progress(stage, done, total, what)
        self._tell()

    def _tell(self) -> None:
        engine = self._resident.engine
        self._link.status(
            {
                "doing": self._activity.rows(),
                "version": None if engine is None else engine.version,
                "queue": self._board.waiting,
                "malformed": self._inbox.malformed,
            }
        )


if __name__ == "__main__":
    sys.exit(main())
