"""The task of a profiling job, and its trial: the file of the measurements so far.

A job updates the trial after every iteration, so that the next job with this task can continue.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field
from scipy.stats import t as student

from pipeline.planning.profile.schema import (
    SCHEMA,
    MemoryLocation,
    Seconds,
    read_json,
    validate_section,
)
from rlinf.artifacts import write_atomic
from rlinf.config import Section

MIN_REPEATS = 3
"""Minimum number of repeats, without the first iteration of each process."""
RUN_SIZE_TURNS = 3
"""Number of repeats of the run's own batch size, per repeat of another batch size."""
CONFIDENCE = 0.95
"""Confidence level of the interval of an iteration's time."""
CONVERGED_SHARE = 0.05
"""A time has converged if half the width of the confidence interval is below this share of the
median."""
CONVERGED_S = 0.005
"""A time has also converged if half the width is below these seconds."""


class ProfileTask(Section):
    """The task of a profiling job."""

    config: Path
    """Frozen configuration of the run."""
    initial: Path
    """Committed output of the run's SFT stage."""
    key: str
    """Digest of the measured work, under which the trial is cached."""
    kind: str
    """The kind of device of the job."""
    folder: Path
    """Folder of the task file, the trial, and the output of the measured stages."""
    nodes: int = Field(gt=0)
    processes: int = Field(gt=0)
    """Number of ranks that measure; the job may have more."""
    batch_sizes: tuple[int, ...] = ()
    """Numbers of prompts or environments to measure, the run's own first."""
    seconds: float = Field(gt=0)
    """Seconds of measuring after the imports."""
    submitted: float
    """Time of submission, seconds since the epoch."""
    first: bool = True
    """True for the first job of an array, which does not wait for another job."""

    @property
    def trial_path(self) -> Path:
        """The file of the trial."""
        return self.folder / "trial.json"


class StageTiming(Section):
    """One repeat of a stage, or its failure; undocumented fields are as in ``ProfilePoint``."""

    stage: str
    samples: int = Field(gt=0)
    cold: bool = False
    """True for the first run of the stage in its process."""
    seconds: Seconds = 0.0
    peak_memory_bytes: int = Field(default=0, ge=0)
    failure: str = ""
    """Why the stage failed; "" if it succeeded."""


class RunningStage(Section):
    """The stage that runs now, which counts as failed if the job runs out of memory."""

    stage: str
    batch_size: int
    samples: int = Field(gt=0)


class IterationRepeats(Section):
    """Times of iterations with a batch size, without the first iteration of each process."""

    batch_size: int
    seconds: tuple[Seconds, ...] = ()
    failed: bool = False

    @property
    def has_converged(self) -> bool:
        """True if an iteration failed, or the confidence interval is narrow enough."""
        if self.failed or len(self.seconds) < MIN_REPEATS:
            return self.failed
        # Student's interval of the mean (NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.5.2).
        n, median_s = len(self.seconds), statistics.median(self.seconds)
        quantile = float(student.ppf((1 + CONFIDENCE) / 2, n - 1))
        half_width = quantile * statistics.stdev(self.seconds) / math.sqrt(n)
        return half_width <= max(CONVERGED_SHARE * median_s, CONVERGED_S)


class Trial(Section):
    """The measurements so far of all jobs with the same work, nodes, processes and kind."""

    schema_version: Literal[4] = SCHEMA
    key: str
    """Digest of the measured work; see :func:`pipeline.planning.profile.schema.kind_key`."""
    nodes: int = Field(gt=0)
    processes: int = Field(gt=0)
    iterations: int = Field(default=0, ge=0)
    """Number of iterations so far, over all jobs."""
    running: RunningStage | None = None
    repeats: tuple[IterationRepeats, ...] = ()
    samples: tuple[StageTiming, ...] = ()
    """Timings of single stages: all repeats of all batch sizes (not samples of the batch)."""
    overheads_s: dict[str, tuple[Seconds, ...]] = {}
    """Repeats of each overhead, by ``OverheadName``."""
    lengths: tuple[tuple[int, ...], ...] = ()
    """Response lengths of each of a few rollouts of the full batch, in steps."""
    weights_bytes: int = Field(default=0, ge=0)
    """Bytes that ``sync`` published; 0: not measured yet."""
    memory: MemoryLocation | None = None
    """Where memory peaks were measured; None: unknown."""

    @property
    def start_s(self) -> float | None:
        """Seconds from the last job's start to its first iteration; None: not measured."""
        names = ("startup", "imports", "engine_load", "trainer_load")
        times = [self.overheads_s[name][-1] for name in names if name in self.overheads_s]
        return sum(times) if "imports" in self.overheads_s else None

    def repeats_of(self, batch_size: int) -> IterationRepeats:
        """Return the repeats of a batch size."""
        repeats = {entry.batch_size: entry for entry in self.repeats}
        return repeats.get(batch_size, IterationRepeats(batch_size=batch_size))

    def with_repeat(self, batch_size: int, seconds: float | None) -> Trial:
        """Return the trial with one more repeat of a batch size; ``seconds`` None: it failed."""
        previous = self.repeats_of(batch_size)
        change = {"failed": True} if seconds is None else {"seconds": (*previous.seconds, seconds)}
        others = tuple(r for r in self.repeats if r.batch_size != batch_size)
        return self.model_copy(update={"repeats": (*others, previous.model_copy(update=change))})

    def next_batch_size(self, batch_sizes: Sequence[int]) -> int | None:
        """Return the unconverged batch size with the fewest repeats; None: all have converged.

        The first is the run's own, on which every prediction is based, so it is measured first and
        more often. Batches at least as large as a failed one are skipped.
        """
        failed = min((r.batch_size for r in self.repeats if r.failed), default=math.inf)
        runnable = [size for size in batch_sizes if size < failed]
        unfinished = [size for size in runnable if not self.repeats_of(size).has_converged]

        def priority(size: int) -> float:
            turns = RUN_SIZE_TURNS if size == batch_sizes[0] else 1
            return (len(self.repeats_of(size).seconds) + 1) / turns

        return min(unfinished, key=priority, default=None)

    def with_overhead(self, name: str, seconds: float) -> Trial:
        """Return the trial with one more repeat of an overhead."""
        overheads = self.overheads_s
        # Clocks of two machines may differ, so a short duration may be negative.
        updated = {**overheads, name: (*overheads.get(name, ()), max(0.0, seconds))}
        return self.model_copy(update={"overheads_s": updated})

    def with_crash(self, reason: str) -> Trial:
        """Return the trial with the running stage marked as failed, after its job died."""
        if self.running is None:
            return self
        failure = StageTiming(
            stage=self.running.stage,
            samples=self.running.samples,
            failure=reason,
        )
        update = {"samples": (*self.samples, failure), "running": None}
        return self.model_copy(update=update).with_repeat(self.running.batch_size, None)

    def save(self, path: Path) -> None:
        """Write the trial atomically."""
        write_atomic(path, self.model_dump_json(exclude_defaults=True) + "\n")


def load_trial(path: Path) -> Trial | None:
    """Read a trial; None if it does not exist yet.

    Raises:
        PlanError: the file is damaged; the message names the file and the key.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return None
    return validate_section(Trial, read_json(path, f"no file {path}"), path)
