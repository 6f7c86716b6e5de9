"""Callbacks of the driver: progress bars and log lines, trackers, and a command at the end of a
run."""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
import time
from collections import deque
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
)

from pipeline.console import create_console, format_duration, format_number, format_rate
from pipeline.graph import StageNode
from pipeline.metrics import headline_metrics, read_metrics, step_unit
from pipeline.run import Run, compute_texts
from pipeline.transcripts import read_samples, select_samples, shorten
from rlinf.artifacts import Manifest
from rlinf.config import RunConfig, json_digest, validate
from rlinf.errors import (
    ConfigError,
    InterruptedByUser,
    RequeueRequested,
    RunLockedError,
    RunStopped,
)
from rlinf.track import LogConfig, open_trackers
from rlinf.track.trackers import LoggedSample
from slurm.jobs import current_job_id
from stages.flow import EVALUATE, flow_of
from stages.layout import METRICS_FILE, TRACKED_FILE

SFT_PROGRAM = "stages.sft"
"""Module of the stage that the section ``sft`` configures."""
PROGRESS_INTERVAL_S = 10.0
"""Seconds between two progress lines of a stage without a terminal."""
MIN_RATE_INTERVAL_S = 1.0
"""Seconds during which a rate must be measured before it is shown."""
TIME_FORMAT = "%H:%M:%S"
RECENT_ITERATIONS = 10
"""Number of recent iterations whose mean duration predicts the remaining time."""
LAUNCHER_DESCRIPTIONS = {
    "inprocess": "stages run in this process",
    "local": "stages run as processes of this machine",
    "slurm": "stages run as Slurm jobs",
}
log = logging.getLogger("rlinf")


class ProgressCallback:
    """Shows progress: bars on a terminal, and log lines everywhere.

    Each finished iteration gets a line with its metrics, throughput, the newest held-out score and
    the time left.
    """

    def __init__(self, run: Run, launcher: str = "inprocess") -> None:
        self._run = run
        self._launcher_description = LAUNCHER_DESCRIPTIONS[launcher]
        self._logged_at = time.monotonic()
        self._terminal = create_console(stderr=True)
        self._bars: Progress | None = None
        self._score_text = ""
        """The newest held-out score and its iteration."""
        self._rates: dict[tuple[str, str], RateEstimate] = {}
        """Progress rate by stage and unit."""
        self._rollout_started_at: dict[int, float] = {}
        """Unix time at which the rollout of an unfinished iteration started, by iteration."""
        self._publish_times = (0.0, 0.0)
        """Unix times at which the previous and the newest weights were published."""
        self._iteration_ends: deque[float] = deque(maxlen=RECENT_ITERATIONS + 1)
        """Monotonic times: the start of this driver's first iteration, then the end of each
        iteration. Only the newest are kept."""

    def __enter__(self) -> ProgressCallback:
        log.setLevel(logging.INFO)
        log.propagate = False
        handler: logging.Handler
        config = self._run.config
        if self._terminal.is_terminal:
            handler = RichHandler(
                console=self._terminal,
                show_path=False,
                show_level=False,
                log_time_format=TIME_FORMAT,
            )
            handler.setFormatter(LevelFormatter())
            self._bars = Progress(
                TextColumn("{task.description}", style="bold", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                TimeElapsedColumn(),
                console=self._terminal,
            )
            self._bars.start()
            self._iterations_task: TaskID = self._bars.add_task(
                "iterations", total=config.iterations, note=""
            )
            self._stage_task: TaskID = self._bars.add_task("", total=None, note="", visible=False)
        else:
            handler = logging.StreamHandler()
            handler.setFormatter(LevelFormatter("%(asctime)s %(message)s", TIME_FORMAT))
        self._handler = handler
        log.handlers = [handler]
        log.info("run %s in %s", self._run.folder.name, self._run.folder)
        log.info("%s; %s", describe_run(config), self._launcher_description)
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

    def on_stage_progress(
        self, stage: str, done: int, total: int, unit: str, note: str = ""
    ) -> None:
        """Show the progress within a stage: amount, rate and time left."""
        estimate = self._rates.get((stage, unit))
        if estimate is None or done < estimate.done:
            estimate = self._rates[stage, unit] = RateEstimate(done)
        estimate.done = done
        details = [note] if note else []
        if rate := estimate.per_second():
            details.append(f"{format_rate(rate)} {unit.rpartition(' ')[2]}/s")
            if done < total:
                details.append(f"{format_duration((total - done) / rate)} left")
        if self._bars is not None:
            self._bars.update(
                self._stage_task,
                description=stage,
                completed=done,
                total=total,
                note=", ".join([unit, *details]),
                visible=True,
            )
        elif time.monotonic() - self._logged_at > PROGRESS_INTERVAL_S:
            self._logged_at = time.monotonic()
            log.info("%s: %s", stage, ", ".join([f"{done}/{total} {unit}", *details]))

    def on_resume(self, rows: Sequence[dict[str, Any]]) -> None:
        if self._bars is not None:
            self._bars.update(self._iterations_task, completed=len(rows))

    def on_node_start(self, node: StageNode) -> None:
        config, flow = self._run.config, flow_of(self._run.config)
        settings = config.sft
        if self._is_sft(node) and settings.max_steps:
            if settings.eval_generation:
                log.info(
                    "sft: supervised fine-tuning until the held-out score reaches %g, at "
                    "most %d steps",
                    settings.target_score,
                    settings.max_steps,
                )
            else:
                log.info("sft: %d steps of supervised fine-tuning", settings.max_steps)
        if node.stage in flow.stages and not self._iteration_ends:
            self._iteration_ends.append(time.monotonic())
        for key in [key for key in self._rates if key[0] == node.stage]:
            del self._rates[key]
        if self._bars is not None:
            # The total of a progress task cannot be unset, so each stage gets a new task.
            self._bars.remove_task(self._stage_task)
            self._stage_task = self._bars.add_task(node.stage, total=None, note="")

    def _is_sft(self, node: StageNode) -> bool:
        return flow_of(self._run.config).module_of(node.stage) == SFT_PROGRAM

    def on_node_end(self, node: StageNode, manifest: Manifest) -> None:
        flow = flow_of(self._run.config)
        if node.stage == flow.rollout_stage:
            self._rollout_started_at[node.iteration] = manifest.timing["start"]
        if node.stage == flow.publish_stage:
            self._publish_times = (self._publish_times[1], manifest.timing["end"])
        if node.stage == EVALUATE:
            score = format_number(manifest.metrics["score"])
            self._score_text = f"held-out score {score} (iteration {node.iteration})"
            when = f" after iteration {node.iteration}" if node.iteration else ""
            if self._run.config.iterations and not node.iteration:
                when = " before iteration 1"
            lengths = [
                f", {name} {format_number(manifest.metrics[name])}"
                for name in ("episode_length", "completion_length")
                if name in manifest.metrics
            ]
            log.info("held-out score%s: %s%s", when, score, *lengths[:1] or [""])
        elif self._is_sft(node):
            for name, label in (("score", "score"), ("eval_loss", "loss")):
                if name in manifest.metrics:
                    log.info(
                        "sft: held-out %s %s after %d steps",
                        label,
                        format_number(manifest.metrics[name]),
                        manifest.metrics["steps"],
                    )

    def on_iteration_end(self, iteration: int, metrics: dict[str, Any]) -> None:
        config = self._run.config
        details = [
            f"{name} {format_number(value)}"
            for name, value in headline_metrics(config, metrics).items()
        ]
        # Pools may start a rollout early: count from the publication of the previous weights.
        start = self._rollout_started_at.pop(iteration, None)
        steps = metrics.get(f"{flow_of(config).rollout_stage}/steps")
        if start is not None and steps is not None:
            seconds = self._publish_times[1] - max(start, self._publish_times[0])
            unit = step_unit(config)
            details.append(f"{format_rate(steps / max(1e-9, seconds))} {unit}/s")
        details += [self._score_text] if self._score_text else []
        self._iteration_ends.append(time.monotonic())
        remaining, time_left = config.iterations - iteration - 1, ""
        if remaining > 0 and len(self._iteration_ends) > 1:
            oldest, newest = self._iteration_ends[0], self._iteration_ends[-1]
            iteration_s = (newest - oldest) / (len(self._iteration_ends) - 1)
            time_left = f"{format_duration(iteration_s * remaining)} left"
            details.append(time_left)
        if self._bars is not None:
            self._bars.update(self._iterations_task, completed=iteration + 1, note=time_left)
        log.info("iteration %d/%d: %s", iteration + 1, config.iterations, ", ".join(details))


def describe_run(config: RunConfig) -> str:
    """Return one line that says what a run does."""
    if config.evaluate.sets and not config.iterations:
        return f"evaluation on {', '.join(config.evaluate.sets)}"
    count = f"{config.iterations} iteration{'s' * (config.iterations != 1)}"
    task = (config.task.model_extra or {}).get("id", config.task.name)
    return f"algorithm {config.algorithm.name}, task {task}, model {config.model.name}, {count}"


class LevelFormatter(logging.Formatter):
    """A formatter that names the level of warnings and errors."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname.lower()}: {record.message}"
        return super().formatMessage(record)


class RateEstimate:
    """The rate of a stage's progress since its first report."""

    done: int
    """Amount of the newest report."""

    def __init__(self, done: int) -> None:
        self.done = self._first_done = done
        self._started_at = time.monotonic()

    def per_second(self) -> float | None:
        """Return the amount done per second; None if the rate is still unknown."""
        elapsed_s = time.monotonic() - self._started_at
        if elapsed_s < MIN_RATE_INTERVAL_S or self.done == self._first_done:
            return None
        return (self.done - self._first_done) / elapsed_s


class TrackerCallback:
    """Forwards the metrics of each finished iteration to the configured trackers exactly once, and
    some of the samples.

    A digest of the metrics is written to the run before they are forwarded. A restarted driver, or
    one that rebuilds a damaged result, therefore does not forward the same metrics twice.
    """

    def __init__(self, run: Run) -> None:
        self._sinks = open_trackers(run.config.log, run.folder, run.config)
        self._run, self._settings = run.folder, validate(LogConfig, run.config.log, "log")
        self._file = run.folder / TRACKED_FILE
        self._compute = set[tuple[str, str]]()
        """Data types and devices of engine and trainer that the trackers have received."""
        is_unrecorded = not self._file.exists() and (run.folder / METRICS_FILE).exists()
        self._recorded_digests = set[str]() if is_unrecorded else _read_lines(self._file)
        if is_unrecorded:  # an older version of rlinf forwarded metrics without recording digests
            for values in read_metrics(run.folder):
                self._record(values["iteration"] + 1, _to_floats(values))

    def on_resume(self, rows: Sequence[dict[str, Any]]) -> None:
        for values in rows:
            self.on_iteration_end(values["iteration"], values)

    def on_node_start(self, node: StageNode) -> None: ...

    def on_node_end(self, node: StageNode, manifest: Manifest) -> None:
        if new := compute_texts([manifest]).items() - self._compute:
            self._compute |= new
            for sink in self._sinks:
                sink.log_compute(dict(new))
        if node.stage == EVALUATE:
            self._log(node.iteration, {"evaluate/score": manifest.metrics["score"]})

    def on_iteration_end(self, iteration: int, metrics: dict[str, Any]) -> None:
        is_new = self._log(iteration + 1, _to_floats(metrics))
        if is_new and self._settings.samples and iteration % self._settings.samples_every == 0:
            self._log_samples(iteration)

    def close(self) -> None:
        """Flush and close the trackers."""
        for sink in self._sinks:
            sink.close()

    def _log(self, step: int, metrics: dict[str, float]) -> bool:
        """Forward metrics that are new; returns whether they are."""
        is_new = self._record(step, metrics)
        if is_new:
            for sink in self._sinks:
                sink.log(step, metrics)
        return is_new

    def _log_samples(self, iteration: int) -> None:
        """Forward some samples of an iteration; none if the task has no texts, or if their files
        were removed."""
        candidates = [s for s in read_samples(self._run, iteration) if s.text is not None]
        if not candidates:
            return
        samples = [
            LoggedSample(
                iteration=iteration + 1,
                sample=sample.number,
                score=sample.score,
                prompt=shorten(sample.prompt),
                response=shorten(sample.text or ""),
                answer=shorten(sample.answer),
            )
            for sample in select_samples(candidates, self._settings.samples)
        ]
        for sink in self._sinks:
            sink.log_samples(iteration + 1, samples)

    def _record(self, step: int, metrics: dict[str, float]) -> bool:
        """Record the digest of metrics; returns whether it is new."""
        if not self._sinks:
            return False
        digest = json_digest([step, metrics])
        if digest in self._recorded_digests:
            return False
        self._recorded_digests.add(digest)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{digest}\n")
        return True


def _to_floats(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if name != "iteration"}


def _read_lines(path: Path) -> set[str]:
    try:
        return set(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except FileNotFoundError:
        return set()


NOTIFY_TIMEOUT_S = 60.0


def check_notify_command(command: Sequence[str]) -> None:
    """Check that the command exists.

    Raises:
        ConfigError: no such command exists here.
    """
    if command and shutil.which(command[0]) is None:
        raise ConfigError(
            f"cluster.notify_command: no command {command[0]!r} here; set it to a path and "
            "arguments: [/home/me/bin/tell, --quietly]"
        )


@contextlib.contextmanager
def notify_at_end(name: str, command: Sequence[str]) -> Iterator[None]:
    """Call the command when the block ends, unless the user stopped the run.

    Args:
        name: name of the run.
        command: ``cluster.notify_command``; empty if no command is called.
    """
    try:
        yield
    except (InterruptedByUser, RunLockedError, RunStopped):
        raise
    except RequeueRequested:
        if current_job_id() is None:  # in a Slurm job, the run continues when the job is requeued
            _run_notify_command(command, name, "stopped")
        raise
    except Exception:
        _run_notify_command(command, name, "failed")
        raise
    _run_notify_command(command, name, "finished")


def _run_notify_command(command: Sequence[str], name: str, outcome: str) -> None:
    if not command:
        return
    try:
        subprocess.run([*command, name, outcome], check=True, timeout=NOTIFY_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("cluster.notify_command: %s", error)
