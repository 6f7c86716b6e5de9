"""The task of a profiling job and its measurements so far, in two small files.

The job updates its trial after every iteration, so that the next job continues there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.planning.profile.schema import (
    SCHEMA,
    MeasuredLink,
    Measurement,
    MemoryLocation,
    Seconds,
    read_json,
    validate_section,
)
from rlinf.artifacts import write_atomic
from rlinf.config import Section

MIN_REPEATS = 3
"""Minimum repeats of a measurement that was not the first of its process."""
RUN_SIZE_TURNS = 3
"""Turns of the run's own size for each turn of another size."""
CONVERGED_SHARE = 0.05
"""Measuring ends if the interval is narrower on either side than this share of the mean."""
CONVERGED_S = 0.005
"""Measuring also ends if the interval is narrower than these seconds."""


class ProfileCase(Section):
    """A size of the work of one repeat, which runs all stages of an iteration."""

    starts: int = Field(gt=0)
    """Number of prompts or environments."""
    token_budget: int | None = None

    def covers(self, other: ProfileCase) -> bool:
        """Return True if this case is at least as large in every respect."""
        budgets = self.token_budget or 0, other.token_budget or 0
        return self.starts >= other.starts and budgets[0] >= budgets[1]


class ProfileTask(Section):
    """The task of a profiling job."""

    config: Path
    """Frozen configuration of the run."""
    initial: Path
    """Committed output of the run's SFT stage."""
    key: str
    kinds: tuple[str, ...]
    """The kind of device of the job; both kinds for a link between two jobs."""
    folder: Path
    """Folder of this file, of the trial and of the measured stages' output."""
    nodes: int = Field(gt=0)
    processes: int = Field(gt=0)
    """Number of ranks that measure; the job may have more."""
    cases: tuple[ProfileCase, ...] = ()
    """Sizes to measure, the run's own first; if empty, only the link to another job is measured."""
    seconds: float = Field(gt=0)
    """Seconds of measuring after the imports."""
    submitted: float
    """Seconds since the epoch."""
    first: bool = True
    """True if the job did not have to wait for another job."""
    rank: int | None = None
    """Rank of this job in a group of two jobs with one process each."""

    @property
    def trial(self) -> Path:
        """The file of the measurements."""
        return self.folder / "trial.json"


class StageTiming(Section):
    """One repeat of a stage, or its failure."""

    stage: str
    samples: int = Field(gt=0)
    token_budget: int | None = None
    cold: bool = False
    """True for the first run of the stage in its process."""
    seconds: Seconds = 0.0
    tokens: int = Field(default=0, ge=0)
    parts_s: dict[str, Seconds] = {}
    peak_memory_bytes: int = Field(default=0, ge=0)
    failure: str = ""


class RunningCase(Section):
    """The stage and case that are running; if the job dies, they caused it."""

    stage: str
    case: ProfileCase
    samples: int = Field(gt=0)
    token_budget: int | None


class CaseRepeats(Section):
    """Times of whole iterations of a case, without each process's first one."""

    case: ProfileCase
    seconds: tuple[Seconds, ...] = ()
    failed: bool = False

    @property
    def has_converged(self) -> bool:
        """True if more repeats would hardly change the result."""
        if self.failed or len(self.seconds) < MIN_REPEATS:
            return self.failed
        measured = Measurement.of(self.seconds)
        assert measured.low_s is not None
        assert measured.high_s is not None
        width = (measured.high_s - measured.low_s) / 2
        return width <= max(CONVERGED_SHARE * measured.median_s, CONVERGED_S)


class Trial(Section):
    """The measurements of one job (a number of nodes and processes of a kind) so far."""

    schema_version: Literal[1] = SCHEMA
    key: str
    """Key of the measured work; see :func:`pipeline.planning.profile.profile_identity.kind_key`."""
    nodes: int = Field(gt=0)
    processes: int = Field(gt=0)
    hosts: tuple[str, ...] = ()
    iterations: int = Field(default=0, ge=0)
    """Iterations so far, of all jobs."""
    running: RunningCase | None = None
    repeats: tuple[CaseRepeats, ...] = ()
    samples: tuple[StageTiming, ...] = ()
    overheads_s: dict[str, tuple[Seconds, ...]] = {}
    links: tuple[MeasuredLink, ...] = ()
    lengths: tuple[tuple[int, ...], ...] = ()
    """Response lengths of a few rollouts of the full batch."""
    truncated: int = Field(default=0, ge=0)
    weights_bytes: int = Field(default=0, ge=0)
    memory: MemoryLocation | None = None
    """Where the samples' memory peaks were measured; None: unknown."""

    @property
    def start_s(self) -> float | None:
        """Seconds from the start of the last job to its first iteration, without the queue."""
        names = ("startup", "imports", "engine_load", "trainer_load")
        known = [self.overheads_s[name][-1] for name in names if name in self.overheads_s]
        return sum(known) if "imports" in self.overheads_s else None

    def repeats_of(self, case: ProfileCase) -> CaseRepeats:
        """Return the repeats of a case."""
        return next((r for r in self.repeats if r.case == case), CaseRepeats(case=case))

    def with_repeat(self, case: ProfileCase, seconds: float | None) -> Trial:
        """Return the trial with another repeat of a case, or with its failure."""
        old = self.repeats_of(case)
        change = {"failed": True} if seconds is None else {"seconds": (*old.seconds, seconds)}
        rest = tuple(r for r in self.repeats if r.case != case)
        return self.model_copy(update={"repeats": (*rest, old.model_copy(update=change))})

    def next_case(self, cases: Sequence[ProfileCase]) -> ProfileCase | None:
        """Return the next case: each a few times in turn, then the one with the fewest repeats.

        The first case is the run's own, the basis of every prediction; it has more turns and the
        first ones. Cases at least as large as a failed one are skipped. None: all cases have
        converged.
        """
        failed = [r.case for r in self.repeats if r.failed]
        able = [c for c in cases if not any(c.covers(bad) for bad in failed)]
        open_ = [c for c in able if not self.repeats_of(c).has_converged]

        def turn(case: ProfileCase) -> float:
            return (len(self.repeats_of(case).seconds) + 1) / (
                RUN_SIZE_TURNS if case == cases[0] else 1
            )

        return min(open_, key=turn, default=None)

    def with_overhead(self, name: str, seconds: float) -> Trial:
        """Return the trial with another measurement of an overhead."""
        known = self.overheads_s
        # Clocks of two machines may differ by more than a short duration.
        more = {**known, name: (*known.get(name, ()), max(0.0, seconds))}
        return self.model_copy(update={"overheads_s": more})

    def with_crash(self, reason: str) -> Trial:
        """Return the trial with the running case as a failure, for a job that died of it."""
        if self.running is None:
            return self
        failed = StageTiming(
            stage=self.running.stage,
            samples=self.running.samples,
            token_budget=self.running.token_budget,
            failure=reason,
        )
        update = {"samples": (*self.samples, failed), "running": None}
        return self.model_copy(update=update).with_repeat(self.running.case, None)

    def save(self, path: Path) -> None:
        """Write the trial atomically."""
        write_atomic(path, self.model_dump_json(exclude_defaults=True) + "\n")


def load_trial(path: Path) -> Trial | None:
    """Read a trial; None if it does not exist yet.

    Raises:
        PlanError: the file is damaged; names the file and the key.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return None
    return validate_section(Trial, read_json(path, f"no file {path}"), path)
