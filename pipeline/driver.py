"""The driver: walks the stage graph, starts stages, collects their results and resumes after a
crash.

All state is in the run directory. Only manifests decide what is finished: the key of a manifest
must be the digest of the configuration, the code and the inputs of its stage.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pipeline.cleanup import remove_orphans
from pipeline.executors import InProcessExecutor, Outcome, StageExecutor, stage_call
from pipeline.gpu_hours import GpuBudget
from pipeline.graph import Graph, StageNode
from pipeline.lock import RunLock
from pipeline.metrics import MetricsLog
from pipeline.resume import OnMismatch, check_resumable
from pipeline.run import Run, config_differences
from pipeline.run_state import RunState, is_skipped
from rlinf.artifacts import (
    MANIFEST,
    PRUNED_MARKER,
    Manifest,
    is_pruned,
    withdraw_manifest,
)
from rlinf.errors import (
    EXIT_BAD_ARTIFACT,
    EXIT_BAD_INPUT,
    EXIT_REQUEUE,
    InputError,
    RequeueRequested,
    RunLockedError,
    StageError,
    short_reason,
)
from stages.flow import EVALUATE
from stages.layout import CONFIG_FILE
from stages.runner import load_config

DAMAGE_CHECK_INTERVAL_S = 2.0
"""Seconds between two checks that the inputs of running stages are intact."""
log = logging.getLogger("rlinf")


class RunCallback(Protocol):
    """The interface of callbacks, such as progress bars and trackers."""

    def on_resume(self, rows: Sequence[dict[str, Any]]) -> None:
        """Receive the metrics of the iterations that are finished when the driver starts."""

    def on_node_start(self, node: StageNode) -> None: ...

    def on_node_end(self, node: StageNode, manifest: Manifest) -> None: ...

    def on_iteration_end(self, iteration: int, metrics: dict[str, Any]) -> None: ...


@dataclass
class Driver:
    """Runs all unfinished nodes of a run with an executor."""

    run: Run
    executor: StageExecutor
    callbacks: list[RunCallback] = field(default_factory=list)
    max_retries: int = 2
    """Number of retries of a stage that failed for an unknown reason."""
    setup_only: bool = False
    """Whether to run only the setup stages (SFT), which precede the first iteration."""
    on_mismatch: OnMismatch = OnMismatch.ERROR
    """Handling of results of another configuration or other code."""
    budget: GpuBudget | None = None
    """Counts and limits the GPU-hours of the run."""
    is_over_budget: bool = False
    """Whether the run ended early because its GPU-hours are used up."""
    max_lookahead: int = 16
    """Number of unfinished nodes, in the order of the graph, that the driver considers at a time;
    it starts those that are ready. The stages of ``rollout.staleness`` iterations are added."""

    def __post_init__(self) -> None:
        self.graph = Graph(self.run.config)
        self.max_lookahead += len(self.graph.flow.stages) * self.run.config.rollout.staleness
        self._state = RunState(self.run, self.graph)
        self._done = self._state.done
        """Content digest by finished node; ``_state`` has the same dictionary."""
        self._failures: dict[StageNode, int] = {}
        self._running: set[StageNode] = set()
        self._damage_checked_at = 0.0
        self._has_warned_of_skipped = False
        self._metrics = MetricsLog(self.run.folder)
        self._postponed: StageNode | None = None
        """First node of the next iteration, if the budget does not allow it now."""

    def drive(self) -> None:
        """Run every unfinished node.

        Raises:
            RunLockedError: another driver owns the run.
            InputError: a stage cannot use its input.
            StageError: a stage failed more than ``max_retries`` times.
            RequeueRequested: the allocation of this process is about to end.
        """
        with self.run.lock() as lock:
            keep_jobs = True
            try:
                self._recover()
                self._loop(lock)
                keep_jobs = False
            except RunLockedError:
                raise  # another driver owns the run
            except (InputError, StageError, KeyboardInterrupt):
                keep_jobs = False  # a retry is useless before something changes
                raise
            finally:
                self.executor.stop(keep_jobs=keep_jobs)
                if self.budget is not None:
                    self.budget.close()

    def _recover(self) -> None:
        self._check_config_unchanged()
        remove_orphans(self.run.folder)
        check_resumable(self._state, self.on_mismatch)
        if self._done:
            count = len(
                {n.iteration for n in self._done if n.stage == self.graph.flow.publish_stage}
            )
            log.info("resuming after iteration %d of %d", count, self.graph.iterations)
        rows = self._metrics.rewrite()
        for callback in self.callbacks:
            callback.on_resume(rows)

    def _check_config_unchanged(self) -> None:
        """Check that no command changed the configuration of the run before this driver locked it.

        Raises:
            RunLockedError: another command changed the configuration.
        """
        frozen = load_config(self.run.folder / CONFIG_FILE).semantic_values()
        current = self.run.config.semantic_values()
        # This driver may run fewer iterations than the frozen configuration has.
        differences = config_differences(current, {**frozen, "iterations": current["iterations"]})
        if differences:
            raise RunLockedError(
                f"{self.run.folder}: another command changed its configuration meanwhile "
                f"({differences[0]}); start again with the configuration that you want"
            )

    def _loop(self, lock: RunLock) -> None:
        nodes = self.graph.setup_nodes() if self.setup_only else self.graph.nodes()
        window: list[StageNode] = []
        while True:
            window = [node for node in window if node not in self._done]
            window += self._next_nodes(nodes, self.max_lookahead - len(window))
            if not window:
                self.is_over_budget = self._postponed is not None
                return
            may_start = self.budget is None or not self.budget.is_used_up()
            if not may_start and not self._running:
                self.is_over_budget = True
                return
            for node in window:
                if node in self._running or node in self._done or not self._is_ready(node):
                    continue
                manifest = self._state.lookup(node)
                if manifest is not None:
                    # A job of an earlier driver has committed it.
                    self._finish(node, manifest)
                elif may_start:
                    self._start(node)
                    if not isinstance(self.executor, InProcessExecutor):
                        continue
                    break
            if not self._running and not any(node in self._done for node in window):
                raise StageError(f"{window[0].name}: its inputs can never be ready")
            lock.check()
            outcomes = self.executor.poll()
            self._log_requeued([n for n, o in outcomes.items() if o.exit_code == EXIT_REQUEUE])
            for node, outcome in outcomes.items():
                self._running.discard(node)
                window += self._process_outcome(node, outcome)
            window += self._damaged_inputs()
            window.sort(key=lambda node: (node.iteration, node.stage == EVALUATE))

    def _next_nodes(self, nodes: Iterator[StageNode], count: int) -> list[StageNode]:
        """Return the next ``count`` unfinished nodes, or fewer at the end of the graph. A streaming
        executor gets whole iterations, so possibly more."""
        selected: list[StageNode] = []
        last_stages = (self.graph.flow.publish_stage, EVALUATE)
        streams = self.executor.supports_streaming
        while len(selected) < count or (
            streams and selected and selected[-1].stage not in last_stages
        ):
            node, self._postponed = self._postponed or next(nodes, None), None
            if node is None:
                break
            if node in self._done:
                continue
            if not self._allows_iteration(node):
                self._postponed = node
                break
            if is_skipped(self.graph, self.run.folder, node):
                if not self._has_warned_of_skipped:
                    log.warning(
                        "%s is skipped, as are all evaluations of weights that the retention "
                        "policy has removed (checkpoint.keep_every keeps some)",
                        node.name,
                    )
                self._has_warned_of_skipped = True
                continue
            selected.append(node)
        return selected

    def _allows_iteration(self, node: StageNode) -> bool:
        """Return whether the budget allows the iteration that begins with ``node``, after those
        that have begun; True for all other nodes."""
        is_first = node.stage == next(iter(self.graph.flow.stages))
        if self.budget is None or self.budget.limit is None or not is_first:
            return True
        publish = self.graph.flow.publish_stage
        num_finished = len([done for done in self._done if done.stage == publish])
        return self.budget.allows(node.iteration + 1 - num_finished, num_finished)

    def _is_ready(self, node: StageNode) -> bool:
        # An unverified result may be valid: wait for its inputs, which decide this.
        can_stream = self.executor.supports_streaming and node not in self._state.unverified
        return all(
            source in self._done or (can_stream and source in self._running)
            for source in self.graph.inputs(node).values()
        )

    def _start(self, node: StageNode) -> None:
        # A launcher that waits for a manifest must not see an old one with other inputs.
        self._state.clear_for(node)
        call = stage_call(self.run, self.graph, node)
        for callback in self.callbacks:
            callback.on_node_start(node)
        self._running.add(node)
        self.executor.start(node, call)

    def _process_outcome(self, node: StageNode, outcome: Outcome) -> list[StageNode]:
        """Process the outcome of an attempt; returns nodes that must run again."""
        if outcome.exit_code == 0:
            manifest = self._state.lookup(node)
            if manifest is not None:
                self._finish(node, manifest)
                return []
            outcome = Outcome(1, outcome.reason or "ended without a valid manifest")
        if outcome.exit_code == EXIT_REQUEUE:
            if isinstance(outcome.error, RequeueRequested):
                raise outcome.error
            return []
        if outcome.exit_code == EXIT_BAD_INPUT:
            missing = self._missing_inputs(node)
            sources = self.graph.inputs(node).values()
            if not all(source in self._done or source in self._running for source in sources):
                # Another stage reported the damage first; this node waits until it is rebuilt.
                return missing
            raise outcome.error or InputError(f"{node.name}: {outcome.reason}")
        self._failures[node] = self._failures.get(node, 0) + 1
        if self._failures[node] > self.max_retries:
            raise outcome.error or StageError(
                f"{node.name} failed {self._failures[node]} times: {outcome.reason}"
            )
        if outcome.exit_code == EXIT_BAD_ARTIFACT:
            log.warning("%s: %s; rebuilding it", node.name, outcome.reason)
            return self._missing_inputs(node)
        log.warning("%s failed (%s); trying again", node.name, short_reason(outcome.reason))
        return []

    @staticmethod
    def _log_requeued(nodes: list[StageNode]) -> None:
        if nodes:
            more = f" and {len(nodes) - 1} more" if nodes[1:] else ""
            log.info("%s%s: requeued", nodes[0].name, more)

    def _damaged_inputs(self) -> list[StageNode]:
        """Return the nodes with damaged output that running stages read; they must run again.

        Damaged weights do not always end an attempt: a worker of an elastic pool only returns its
        prompts to the queue, and then all workers wait for the weights.
        """
        if time.monotonic() - self._damage_checked_at < DAMAGE_CHECK_INTERVAL_S:
            return []
        self._damage_checked_at = time.monotonic()
        damaged = []
        for node in self._running:
            sources = self._done.keys() & self.graph.inputs(node).values()
            if not all((self._folder(source) / MANIFEST).exists() for source in sources):
                damaged += self._missing_inputs(node)
        for source in damaged:
            log.warning("%s is damaged; rebuilding it", source.name)
        return damaged

    def _missing_inputs(self, node: StageNode) -> list[StageNode]:
        """Mark the inputs of ``node`` that are missing or damaged as unfinished; returns them."""
        missing = []
        for source in self.graph.inputs(node).values():
            if source in self._done and self._state.lookup(source) is None:
                del self._done[source]
                missing += [source, *self._withdraw_unkept(source)]
                (self._folder(source) / PRUNED_MARKER).unlink(missing_ok=True)
        return missing

    def _withdraw_unkept(self, node: StageNode) -> list[StageNode]:
        """Withdraw the checkpoints before ``node`` that are not on disk; returns their nodes.

        If the update of ``node`` must be repeated, no process has its checkpoint in memory. Without
        this, each of the earlier updates would be noticed by the failure of the next one.
        """
        withdrawn = []
        for source in self.graph.inputs(node).values():
            is_checkpoint = source.stage == node.stage == self.graph.flow.train_stage
            if is_checkpoint and source in self._done and is_pruned(self._folder(source)):
                withdraw_manifest(self._folder(source) / MANIFEST)
                (self._folder(source) / PRUNED_MARKER).unlink(missing_ok=True)
                del self._done[source]
                withdrawn += [source, *self._withdraw_unkept(source)]
        return withdrawn

    def _folder(self, node: StageNode) -> Path:
        return self.graph.output_folder(self.run.folder, node)

    def _finish(self, node: StageNode, manifest: Manifest) -> None:
        self._done[node] = manifest.content
        for callback in self.callbacks:
            callback.on_node_end(node, manifest)
        metrics = (
            self._metrics.append(node.iteration)
            if node.stage == self.graph.flow.publish_stage
            else None
        )
        if metrics is not None:
            for callback in self.callbacks:
                callback.on_iteration_end(node.iteration, metrics)
