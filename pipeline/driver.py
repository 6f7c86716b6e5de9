"""The project's own driver: walks the graph, starts stages, notices ends, goes on after a crash.

All state is in the run directory. What is finished is decided by manifests alone: their key must be
the digest of the configuration and of the inputs they were made from.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pipeline.clean import sweep
from pipeline.committed import Committed, left_out
from pipeline.flow import Graph, Node
from pipeline.lock import Lock
from pipeline.metrics import Written
from pipeline.outcome import Outcome
from pipeline.record import differences
from pipeline.run import Run
from pipeline.settle import Choice, settle_frozen
from rlinf.artifacts import MANIFEST, Manifest
from rlinf.errors import (
    EXIT_BAD_ARTIFACT,
    EXIT_BAD_INPUT,
    EXIT_REQUEUE,
    InputError,
    RequeueRequested,
    RlinfError,
    RunLockedError,
    StageError,
    without_traceback,
)
from stages.flow import EVALUATE
from stages.layout import CONFIG
from stages.resident import Resident
from stages.runner import StageCall, load_config, run_stage

DAMAGE_LOOK_S = 2.0
"""How often inputs of what runs are looked after."""
log = logging.getLogger("rlinf")


class Executor(Protocol):
    """Starts stage calls and says how they ended."""

    live: bool
    """Whether a stage may be started before its inputs are committed."""

    @property
    def remains(self) -> str:
        """What an interrupted driver leaves behind, for the person that interrupted it."""

    def start(self, node: Node, call: StageCall) -> None:
        """Begin an attempt at a node."""

    def ended(self) -> dict[Node, Outcome]:
        """Attempts that ended since the last call; may wait a little for one."""

    def stop(self, *, leave: bool = False) -> None:
        """Cancel what runs; called when the driver ends for whatever reason.

        Args:
            leave: it to another driver, which is there or will be.
        """


@dataclass
class InProcess:
    """Runs stages in the driver's own process; engines and trainers stay loaded between them."""

    run: Run
    resident: Resident = field(default_factory=Resident)
    stopping: Callable[[], bool] = lambda: False
    live: bool = False
    remains: str = "the stage under way begins anew"
    _ended: dict[Node, Outcome] = field(default_factory=dict)

    def start(self, node: Node, call: StageCall) -> None:
        try:
            run_stage(call, config=self.run.config, resident=self.resident, stopping=self.stopping)
            outcome = Outcome(0)
        except RlinfError as error:
            outcome = Outcome(error.exit_code, str(error), error)
        except Exception as error:  # retried by policy, then raised as it is
            log.warning("%s", traceback.format_exc())
            outcome = Outcome(1, str(error), error)
        self._ended[node] = outcome

    def ended(self) -> dict[Node, Outcome]:
        ended, self._ended = self._ended, {}
        return ended

    def stop(self, *, leave: bool = False) -> None:
        self.resident.close()


def call_of(run: Run, graph: Graph, node: Node) -> StageCall:
    """The call that makes the output of a node."""
    inputs = {name: graph.folder(run.folder, source) for name, source in graph.inputs(node).items()}
    out = graph.folder(run.folder, node)
    return StageCall(node.stage, run.folder / CONFIG, out, node.iteration, inputs)


class Listener(Protocol):
    """Is told what happens: progress bars, trackers."""

    def resumed(self, rows: Sequence[dict[str, Any]]) -> None:
        """Metrics of the iterations that are finished when the driver begins."""

    def node_started(self, node: Node) -> None: ...

    def node_done(self, node: Node, manifest: Manifest) -> None: ...

    def iteration_done(self, iteration: int, metrics: dict[str, Any]) -> None: ...


@dataclass
class Driver:
    """Takes a run from where it is to its end."""

    run: Run
    executor: Executor
    listeners: list[Listener] = field(default_factory=list)
    retries: int = 2
    """Further attempts at a stage that failed for no stated reason."""
    offline: bool = False
    """Whether to run the stages before the first iteration only."""
    choice: Choice = Choice.ASK
    """What to do about results of another configuration or other code."""
    ahead: int = 16
    """Nodes beyond the first unfinished one that may start once their inputs are there."""

    def __post_init__(self) -> None:
        self.graph = Graph(self.run.config)
        self.ahead += len(self.graph.flow.stages) * self.run.config.rollout.staleness
        self._committed = Committed(self.run, self.graph)
        self._done = self._committed.done
        self._failures: dict[Node, int] = {}
        self._running: set[Node] = set()
        self._looked = 0.0
        self._left_out = False
        self._written = Written(self.run.folder)

    def drive(self) -> None:
        """Run every node that is not done.

        Raises:
            RunLockedError: another driver owns the run.
            InputError: a stage was given something it cannot use.
            StageError: a stage failed more often than ``retries`` allows.
            RequeueRequested: the allocation of this process is about to end.
        """
        with self.run.driven() as lock:
            leave = True
            try:
                self._recover()
                self._loop(lock)
                leave = False
            except RunLockedError:
                raise  # another driver has the run
            except (InputError, StageError, KeyboardInterrupt):
                leave = False  # nobody goes on with it before something has changed
                raise
            finally:
                self.executor.stop(leave=leave)

    def _recover(self) -> None:
        self._refuse_changed()
        sweep(self.run.folder)
        settle_frozen(self._committed, self.choice)
        if self._done:
            count = len({n.iteration for n in self._done if n.stage == self.graph.flow.publishes})
            log.info("resuming after iteration %d of %d", count, self.graph.iterations)
        rows = self._written.renew()
        for listener in self.listeners:
            listener.resumed(rows)

    def _refuse_changed(self) -> None:
        """See that the run is what it was when it was opened, before this driver owned it.

        Raises:
            RunLockedError: another start changed its configuration since.
        """
        frozen = load_config(self.run.folder / CONFIG).semantic()
        own = self.run.config.semantic()
        # A start may end after fewer iterations than the run has.
        found = differences(own, {**frozen, "iterations": own["iterations"]})
        if found:
            raise RunLockedError(
                f"{self.run.folder}: another start changed its configuration meanwhile "
                f"({found[0]}); start again with the configuration that you want"
            )

    def _loop(self, lock: Lock) -> None:
        nodes = self.graph.before() if self.offline else self.graph.nodes()
        window: list[Node] = []
        while True:
            window = [node for node in window if node not in self._done]
            window += self._next(nodes, self.ahead - len(window))
            if not window:
                return
            for node in window:
                if node in self._running or node in self._done or not self._ready(node):
                    continue
                manifest = self._committed.look(node)
                if manifest is not None:
                    # A job of an earlier driver committed it since.
                    self._finish(node, manifest)
                else:
                    self._start(node)
                    if not isinstance(self.executor, InProcess):
                        continue
                    break
            if not self._running and not any(node in self._done for node in window):
                raise StageError(f"{window[0].name}: its inputs can never be there")
            lock.check()
            ended = self.executor.ended()
            self._tell_of_requeued([n for n, o in ended.items() if o.exit_code == EXIT_REQUEUE])
            for node, outcome in ended.items():
                self._running.discard(node)
                window += self._settle(node, outcome)
            window += self._found_damaged()
            window.sort(key=lambda node: (node.iteration, node.stage == EVALUATE))

    def _next(self, nodes: Iterator[Node], count: int) -> list[Node]:
        """So many further nodes; whole iterations for an executor that knows what comes next."""
        found: list[Node] = []
        last = self.graph.flow.publishes
        while len(found) < count or (
            self.executor.live and found and found[-1].stage not in (last, EVALUATE)
        ):
            node = next(nodes, None)
            if node is None:
                break
            if node in self._done:
                continue
            if left_out(self.graph, self.run.folder, node):
                if not self._left_out:
                    log.warning(
                        "%s is left out, as are all evaluations of weights that the retention "
                        "policy has removed (retention.every keeps some)",
                        node.name,
                    )
                self._left_out = True
                continue
            found.append(node)
        return found

    def _ready(self, node: Node) -> bool:
        # What is on disk already may be right: that is seen once its inputs are there.
        live = self.executor.live and node not in self._committed.waiting
        return all(
            source in self._done or (live and source in self._running)
            for source in self.graph.inputs(node).values()
        )

    def _start(self, node: Node) -> None:
        # A launcher that watches for a manifest must not take that of another attempt, made of
        # other inputs, for the end of this job.
        self._committed.make_way(node)
        call = call_of(self.run, self.graph, node)
        for listener in self.listeners:
            listener.node_started(node)
        self._running.add(node)
        self.executor.start(node, call)

    def _settle(self, node: Node, outcome: Outcome) -> list[Node]:
        """Account for an ended attempt; returns nodes that must run again."""
        if outcome.exit_code == 0:
            manifest = self._committed.look(node)
            if manifest is not None:
                self._finish(node, manifest)
                return []
            outcome = Outcome(1, outcome.reason or "ended without a valid manifest")
        if outcome.exit_code == EXIT_REQUEUE:
            if isinstance(outcome.error, RequeueRequested):
                raise outcome.error
            return []
        if outcome.exit_code == EXIT_BAD_INPUT:
            gone = self._gone(node)
            sources = self.graph.inputs(node).values()
            if not all(source in self._done or source in self._running for source in sources):
                # Another stage found it damaged first: it is made again, and this one waits.
                return gone
            raise outcome.error or InputError(f"{node.name}: {outcome.reason}")
        self._failures[node] = self._failures.get(node, 0) + 1
        if self._failures[node] > self.retries:
            raise outcome.error or StageError(
                f"{node.name} failed {self._failures[node]} times: {outcome.reason}"
            )
        if outcome.exit_code == EXIT_BAD_ARTIFACT:
            return self._withdrawn(node, outcome.reason)
        log.warning("%s failed (%s); trying again", node.name, without_traceback(outcome.reason))
        return []

    @staticmethod
    def _tell_of_requeued(nodes: list[Node]) -> None:
        """One line, however many a pool had been given."""
        if nodes:
            more = f" and {len(nodes) - 1} more" if nodes[1:] else ""
            log.info("%s%s: asked to be started again", nodes[0].name, more)

    def _withdrawn(self, node: Node, reason: str) -> list[Node]:
        """The nodes whose damaged output was withdrawn and must be made again."""
        log.warning("%s: %s; rebuilding it", node.name, reason)
        return self._gone(node)

    def _found_damaged(self) -> list[Node]:
        """The same of inputs that stages under way still wait for.

        Not whoever finds damage ends with it: a generator hands its claim back, and everybody waits
        for the weights.
        """
        if time.monotonic() - self._looked < DAMAGE_LOOK_S:
            return []
        self._looked = time.monotonic()
        again = []
        for node in self._running:
            sources = self._done.keys() & self.graph.inputs(node).values()
            if not all((self._folder(source) / MANIFEST).exists() for source in sources):
                again += self._gone(node)
        for source in again:
            log.warning("%s was found damaged; rebuilding it", source.name)
        return again

    def _gone(self, node: Node) -> list[Node]:
        """Inputs of a node that are there no more, or not whole."""
        gone = []
        for source in self.graph.inputs(node).values():
            if source in self._done and self._committed.look(source) is None:
                del self._done[source]
                gone.append(source)
                (self._folder(source) / "pruned").unlink(missing_ok=True)
        return gone

    def _folder(self, node: Node) -> Path:
        return self.graph.folder(self.run.folder, node)

    def _finish(self, node: Node, manifest: Manifest) -> None:
        self._done[node] = manifest.content
        for listener in self.listeners:
            listener.node_done(node, manifest)
        metrics = (
            self._written.add(node.iteration) if node.stage == self.graph.flow.publishes else None
        )
        if metrics is not None:
            for listener in self.listeners:
                listener.iteration_done(node.iteration, metrics)
