"""The project's own driver: walks the graph, starts stages, notices ends, goes on after a crash.

All state is in the run directory. What is finished is decided by manifests alone: their key must be
the digest of the configuration and of the inputs they were made from.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pipeline.committed import Committed
from pipeline.flow import Graph, Node
from pipeline.lock import Lock
from pipeline.metrics import append, write
from pipeline.run import Run
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
)
from stages.layout import CONFIG
from stages.runner import StageCall, run_stage

DAMAGE_LOOK_S = 2.0
"""How often inputs of what runs are looked after."""
log = logging.getLogger("rlinf")


@dataclass(frozen=True)
class Outcome:
    """How one attempt at a stage ended."""

    exit_code: int
    reason: str = ""
    error: BaseException | None = None


class Executor(Protocol):
    """Starts stage calls and says how they ended."""

    live: bool
    """Whether a stage may be started before its inputs are committed."""

    def start(self, node: Node, call: StageCall) -> None:
        """Begin an attempt at a node."""

    def ended(self) -> dict[Node, Outcome]:
        """Attempts that ended since the last call; may wait a little for one."""

    def stop(self, *, replaced: bool = False) -> None:
        """Cancel what runs; called when the driver ends for whatever reason.

        Args:
            replaced: by another driver, whose it all is now: leave it.
        """


@dataclass
class InProcess:
    """Runs stages in the driver's own process; engines and trainers stay loaded between them."""

    run: Run
    resident: dict[str, Any] = field(default_factory=dict)
    stopping: Callable[[], bool] = lambda: False
    live: bool = False
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

    def stop(self, *, replaced: bool = False) -> None:
        environment = self.resident.pop("environment", None)
        if environment is not None:
            environment[1].close()


class Listener(Protocol):
    """Is told what happens: progress bars, trackers."""

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
        self._told = -1
        """The newest iteration whose metrics are in the run's files."""

    def drive(self) -> None:
        """Run every node that is not done.

        Raises:
            RunLockedError: another driver owns the run.
            InputError: a stage was given something it cannot use.
            StageError: a stage failed more often than ``retries`` allows.
            RequeueRequested: the allocation of this process is about to end.
        """
        with self.run.driven() as lock:
            replaced = False
            try:
                self._recover()
                self._loop(lock)
            except RunLockedError:
                replaced = True
                raise
            finally:
                self.executor.stop(replaced=replaced)

    def _recover(self) -> None:
        self._committed.recover()
        if self._done:
            log.info("resuming: %d stages are done", len(self._done))
        self._told = max((n.iteration for n in self._done if n.stage == "sync"), default=-1)
        write(self.run.folder)

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
            for node, outcome in self.executor.ended().items():
                self._running.discard(node)
                window += self._settle(node, outcome)
            window += self._found_damaged()
            window.sort(key=lambda node: (node.iteration, node.stage == "evaluate"))

    def _next(self, nodes: Iterator[Node], count: int) -> list[Node]:
        """So many further nodes; whole iterations for an executor that knows what comes next."""
        found: list[Node] = []
        last = list(self.graph.flow.stages)[-1]
        while len(found) < count or (
            self.executor.live and found and found[-1].stage not in (last, "evaluate")
        ):
            node = next(nodes, None)
            if node is None:
                break
            if node not in self._done:
                found.append(node)
        return found

    def _ready(self, node: Node) -> bool:
        return all(
            source in self._done or (self.executor.live and source in self._running)
            for source in self.graph.inputs(node).values()
        )

    def _start(self, node: Node) -> None:
        inputs = {
            name: self.graph.folder(self.run.folder, source)
            for name, source in self.graph.inputs(node).items()
        }
        out = self.graph.folder(self.run.folder, node)
        # What stands there belongs to other work (a shorter schedule, say); a launcher
        # that watches for a manifest must not take it for the end of this job.
        self._committed.withdraw(node)
        call = StageCall(
            node.stage,
            self.run.folder / CONFIG,
            out,
            node.iteration,
            inputs,
        )
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
            log.info("%s: asked to be started again", node.name)
            return []
        if outcome.exit_code == EXIT_BAD_INPUT:
            raise outcome.error or InputError(f"{node.name}: {outcome.reason}")
        self._failures[node] = self._failures.get(node, 0) + 1
        if self._failures[node] > self.retries:
            raise outcome.error or StageError(
                f"{node.name} failed {self._failures[node]} times: {outcome.reason}"
            )
        if outcome.exit_code == EXIT_BAD_ARTIFACT:
            return self._withdrawn(node, outcome.reason)
        log.warning("%s failed (%s); trying again", node.name, outcome.reason)
        return []

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
        if node.stage == "sync" and node.iteration <= self._told:
            write(self.run.folder)  # it was damaged and made again
        elif node.stage == "sync":
            self._told = node.iteration
            metrics = append(self.run.folder, node.iteration)
            for listener in self.listeners:
                listener.iteration_done(node.iteration, metrics)
