"""Callbacks of the driver: progress bars and log lines, trackers, and a command at the end of a
run."""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pipeline.console import create_console
from pipeline.graph import StageNode
from pipeline.metrics import read_metrics
from pipeline.run import Run
from rlinf.artifacts import Manifest
from rlinf.config import json_digest
from rlinf.errors import (
    ConfigError,
    InterruptedByUser,
    RequeueRequested,
    RunLockedError,
    RunStopped,
)
from rlinf.track import open_trackers
from slurm.jobs import current_job_id
from stages.flow import EVALUATE, flow_of
from stages.layout import METRICS_FILE, TRACKED_FILE

SFT_PROGRAM = "stages.sft"
"""Program of the stage that the section ``sft`` configures."""
PROGRESS_INTERVAL_S = 10.0
"""Seconds between two progress lines of a stage without a terminal."""
LAUNCHER_DESCRIPTIONS = {
    "inprocess": "stages run in this process",
    "local": "stages run as processes of this machine",
    "slurm": "stages run as Slurm jobs",
}
log = logging.getLogger("rlinf")


class ProgressCallback:
    """Shows progress bars on a terminal, and plain log lines elsewhere."""

    def __init__(self, run: Run, launcher: str = "inprocess") -> None:
        self._run = run
        self._where = LAUNCHER_DESCRIPTIONS[launcher]
        self._logged_at = time.monotonic()
        self._terminal = create_console(stderr=True)
        self._bars: Progress | None = None
        self._score: float | None = None

    def __enter__(self) -> ProgressCallback:
        log.setLevel(logging.INFO)
        log.propagate = False
        handler: logging.Handler
        if self._terminal.is_terminal:
            handler = RichHandler(console=self._terminal, show_path=False, show_level=False)
            self._bars = Progress(
                TextColumn("{task.description}", style="bold", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=self._terminal,
            )
            self._bars.start()
            total = self._run.config.iterations
            self._iterations_task: TaskID = self._bars.add_task("iterations", total=total, note="")
            self._stage_task: TaskID = self._bars.add_task("", total=None, note="", visible=False)
        else:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        self._handler = handler
        log.handlers = [handler]
        config = self._run.config
        log.info("run %s in %s", self._run.folder.name, self._run.folder)
        log.info(
            "%s on task %s, %d iterations; %s",
            config.algorithm.name,
            config.task.name,
            config.iterations,
            self._where,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
        log.handlers = []
        log.propagate = True

    def on_stage_progress(self, stage: str, done: int, total: int, what: str) -> None:
        """Show the progress within a stage."""
        if self._bars is not None:
            self._bars.update(
                self._stage_task,
                description=stage,
                completed=done,
                total=total,
                note=what,
                visible=True,
            )
        elif time.monotonic() - self._logged_at > PROGRESS_INTERVAL_S:
            self._logged_at = time.monotonic()
            log.info("%s: %d of %d %s", stage, done, total, what)

    def on_resume(self, rows: Sequence[dict[str, Any]]) -> None:
        if self._bars is not None:
            self._bars.update(self._iterations_task, completed=len(rows))

    def on_node_start(self, node: StageNode) -> None:
        settings = self._run.config.sft
        if self._is_sft(node) and settings.max_steps:
            if settings.eval_generation:
                log.info(
                    "sft: fine-tuning until the held-out score is %g, %d steps at most",
                    settings.target_score,
                    settings.max_steps,
                )
            else:
                log.info("sft: %d steps of fine-tuning", settings.max_steps)
        if self._bars is not None:
            self._bars.update(
                self._stage_task,
                description=node.stage,
                completed=0,
                total=None,
                note="",
                visible=True,
            )

    def _is_sft(self, node: StageNode) -> bool:
        return flow_of(self._run.config).module_of(node.stage) == SFT_PROGRAM

    def on_node_end(self, node: StageNode, manifest: Manifest) -> None:
        if node.stage == EVALUATE:
            self._score = manifest.metrics["score"]
            log.info("version %d: held-out score %.3f", node.iteration, self._score)
        elif self._is_sft(node):
            for name, what in (("score", "score"), ("eval_loss", "loss")):
                if name in manifest.metrics:
                    log.info(
                        "sft: held-out %s %.3f after %d steps",
                        what,
                        manifest.metrics[name],
                        manifest.metrics["steps"],
                    )

    def on_iteration_end(self, iteration: int, metrics: dict[str, Any]) -> None:
        # Flows that learn from a data set have no rewards.
        score = metrics.get("reward/score")
        summary = "" if score is None else f"score {score:.3f}"
        if self._bars is not None:
            held_out = "" if self._score is None else f", held-out {self._score:.3f}"
            self._bars.update(
                self._iterations_task, completed=iteration + 1, note=f"{summary}{held_out}"
            )
        else:
            total = self._run.config.iterations
            log.info("iteration %d of %d: %s", iteration + 1, total, summary or "done")


class TrackerCallback:
    """Forwards the metrics of each finished iteration to the configured trackers, once.

    A digest of the metrics is written to the run first. A restarted driver, or one that rebuilds a
    damaged result, therefore does not log the same metrics twice.
    """

    def __init__(self, run: Run) -> None:
        self._sinks = open_trackers(run.config.log, run.folder, run.config)
        self._file = run.folder / TRACKED_FILE
        old = not self._file.exists() and (run.folder / METRICS_FILE).exists()
        self._logged = set[str]() if old else _lines(self._file)
        if old:  # an earlier version logged its metrics without recording them
            for values in read_metrics(run.folder):
                self._record(values["iteration"] + 1, _numbers(values))

    def on_resume(self, rows: Sequence[dict[str, Any]]) -> None:
        for values in rows:
            self.on_iteration_end(values["iteration"], values)

    def on_node_start(self, node: StageNode) -> None: ...

    def on_node_end(self, node: StageNode, manifest: Manifest) -> None:
        if node.stage == EVALUATE:
            self._log(node.iteration, {"evaluate/score": manifest.metrics["score"]})

    def on_iteration_end(self, iteration: int, metrics: dict[str, Any]) -> None:
        self._log(iteration + 1, _numbers(metrics))

    def close(self) -> None:
        """Flush and close the trackers."""
        for sink in self._sinks:
            sink.close()

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        if self._record(step, metrics):
            for sink in self._sinks:
                sink.log(step, metrics)

    def _record(self, step: int, metrics: dict[str, float]) -> bool:
        """Record metrics; returns whether they are new."""
        if not self._sinks:
            return False
        mark = json_digest([step, metrics])
        if mark in self._logged:
            return False
        self._logged.add(mark)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{mark}\n")
        return True


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if name != "iteration"}


def _lines(path: Path) -> set[str]:
    try:
        return set(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except FileNotFoundError:
        return set()


NOTIFY_TIMEOUT_S = 60.0


def check_notify_command(command: Sequence[str]) -> None:
    """Check that the command exists.

    Raises:
        ConfigError: it does not.
    """
    if command and shutil.which(command[0]) is None:
        raise ConfigError(
            f"cluster.notify_command: no command {command[0]!r} here; give its path, then its "
            "words: [/home/me/bin/tell, --quietly]"
        )


@contextlib.contextmanager
def notify_at_end(name: str, command: Sequence[str]) -> Iterator[None]:
    """Call the command when the block ends, unless the user stopped the run.

    Args:
        name: name of the run.
        command: ``cluster.notify_command``; empty: none.
    """
    try:
        yield
    except (InterruptedByUser, RunLockedError, RunStopped):
        raise
    except RequeueRequested:
        if current_job_id() is None:  # a job is started again
            _call(command, name, "stopped")
        raise
    except Exception:
        _call(command, name, "failed")
        raise
    _call(command, name, "finished")


def _call(command: Sequence[str], name: str, outcome: str) -> None:
    if not command:
        return
    try:
        subprocess.run([*command, name, outcome], check=True, timeout=NOTIFY_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("cluster.notify_command: %s", error)
