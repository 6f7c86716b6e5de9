"""Executors: how the driver starts stages and learns how they ended."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.graph import Graph, StageNode
from pipeline.run import Run
from rlinf.errors import RlinfError
from stages.layout import CONFIG_FILE
from stages.runner import StageCall, run_stage
from stages.worker_state import WorkerState

log = logging.getLogger("rlinf")


@dataclass(frozen=True)
class Outcome:
    """The result of one attempt at a stage."""

    exit_code: int
    """0 for success; :mod:`rlinf.errors` explains the other codes."""
    reason: str = ""
    """Cause of a failure."""
    error: BaseException | None = None
    """The exception of a stage that ran in this process; None for other failures and successes."""


class StageExecutor(Protocol):
    """The interface of executors: start stage calls and report how they ended."""

    supports_streaming: bool
    """Whether stages may start before their inputs are committed."""

    @property
    def interrupt_note(self) -> str:
        """The outcome for running jobs, for the message after an interrupt."""

    def start(self, node: StageNode, call: StageCall) -> None:
        """Start an attempt at a node."""

    def poll(self) -> dict[StageNode, Outcome]:
        """Return attempts that ended since the last call; may block briefly."""

    def stop(self, *, keep_jobs: bool = False) -> None:
        """Cancel all running attempts. The driver always calls this when it ends.

        Args:
            keep_jobs: let jobs continue for the next driver.
        """


@dataclass
class InProcessExecutor:
    """An executor that runs stages in the driver's process. Engines and trainers stay loaded."""

    run: Run
    worker_state: WorkerState = field(default_factory=WorkerState)
    should_stop: Callable[[], bool] = lambda: False
    progress_timeout_s: float | None = None
    """Seconds without progress after which a stage is ended; 0: no limit; None: as in the
    environment."""
    supports_streaming: bool = False
    interrupt_note: str = "the running stage will start again"
    _ended: dict[StageNode, Outcome] = field(default_factory=dict)

    def start(self, node: StageNode, call: StageCall) -> None:
        try:
            run_stage(
                call,
                config=self.run.config,
                worker_state=self.worker_state,
                should_stop=self.should_stop,
                progress_timeout_s=self.progress_timeout_s,
            )
            outcome = Outcome(0)
        except RlinfError as error:
            outcome = Outcome(error.exit_code, str(error), error)
        except Exception as error:  # the driver retries it, then raises it unchanged
            log.warning("%s", traceback.format_exc())
            outcome = Outcome(1, str(error), error)
        self._ended[node] = outcome

    def poll(self) -> dict[StageNode, Outcome]:
        ended, self._ended = self._ended, {}
        return ended

    def stop(self, *, keep_jobs: bool = False) -> None:
        self.worker_state.close()


def stage_call(run: Run, graph: Graph, node: StageNode) -> StageCall:
    """Return the call that computes the output of a node."""
    inputs = {
        name: graph.output_folder(run.folder, source) for name, source in graph.inputs(node).items()
    }
    out = graph.output_folder(run.folder, node)
    return StageCall(node.stage, run.folder / CONFIG_FILE, out, node.iteration, inputs)
