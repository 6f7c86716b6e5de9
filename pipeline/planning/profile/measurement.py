"""What a profiling job is asked to do, and what it has measured so far: two small files.

The job adds to its trial after every iteration, so that the next job goes on where it ended.
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
"""Least repeats of a point that was not the first of its process."""
RUN_SIZE_TURNS = 3
"""Of the run's own size for each of another one."""
CONVERGED_SHARE = 0.05
"""Measuring ends where intervals are narrower to either side than this share of the mean,"""
CONVERGED_S = 0.005
"""or than this."""


class ProfileCase(Section):
    """A size of the work: what one repeat runs the stages of an iteration on."""

    starts: int = Field(gt=0)
    """Prompts or environments."""
    token_budget: int | None = None

    def covers(self, other: ProfileCase) -> bool:
        """Whether this is at least as much in every respect."""
        budgets = self.token_budget or 0, other.token_budget or 0
        return self.starts >= other.starts and budgets[0] >= budgets[1]


class ProfileTask(Section):
    """What a job is asked to measure."""

    config: Path
    """Frozen configuration of the run."""
    initial: Path
    """Committed output of its warm start."""
    key: str
    kinds: tuple[str, ...]
    """The kind of device it runs on; both, for a link between two jobs."""
    folder: Path
    """Holds this file, the trial and what the stages write while they are measured."""
    nodes: int = Field(gt=0)
    processes: int = Field(gt=0)
    """Ranks that take part; the job may have more."""
    cases: tuple[ProfileCase, ...] = ()
    """The first is the run's own; none: only the link to another job is measured."""
    seconds: float = Field(gt=0)
    """Time to measure for, once all is imported."""
    submitted: float
    """Seconds since the epoch."""
    first: bool = True
    """Whether no other job had to end before this one could start."""
    rank: int | None = None
    """Of this job in a group of two jobs of one process each."""

    @property
    def trial(self) -> Path:
        """File of what was measured."""
        return self.folder / "trial.json"


class StageTiming(Section):
    """One repeat of one stage, or its failure."""

    stage: str
    samples: int = Field(gt=0)
    token_budget: int | None = None
    cold: bool = False
    """Whether it was the first of its stage in its process."""
    seconds: Seconds = 0.0
    tokens: int = Field(default=0, ge=0)
    parts_s: dict[str, Seconds] = {}
    peak_memory_bytes: int = Field(default=0, ge=0)
    failure: str = ""


class RunningCase(Section):
    """What is being run; a job that is gone died of it."""

    stage: str
    case: ProfileCase
    samples: int = Field(gt=0)
    token_budget: int | None


class CaseRepeats(Section):
    """Times of whole iterations of a case, each process's first left out."""

    case: ProfileCase
    seconds: tuple[Seconds, ...] = ()
    failed: bool = False

    @property
    def has_converged(self) -> bool:
        """Whether more repeats would say little more."""
        if self.failed or len(self.seconds) < MIN_REPEATS:
            return self.failed
        measured = Measurement.of(self.seconds)
        assert measured.low_s is not None
        assert measured.high_s is not None
        width = (measured.high_s - measured.low_s) / 2
        return width <= max(CONVERGED_SHARE * measured.median_s, CONVERGED_S)


class Trial(Section):
    """What one job (a number of nodes and processes of a kind) has measured so far."""

    schema_version: Literal[1] = SCHEMA
    key: str
    """What it was measured for; see :func:`pipeline.planning.profile.profile_identity.kind_key`."""
    nodes: int = Field(gt=0)
    processes: int = Field(gt=0)
    hosts: tuple[str, ...] = ()
    iterations: int = Field(default=0, ge=0)
    """Run so far, by all jobs."""
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
    """What the peaks of its samples are of; None: none was taken."""

    @property
    def start_s(self) -> float | None:
        """What the last job took until its first iteration was under way, the queue apart."""
        names = ("startup", "imports", "engine_load", "trainer_load")
        known = [self.overheads_s[name][-1] for name in names if name in self.overheads_s]
        return sum(known) if "imports" in self.overheads_s else None

    def repeats_of(self, case: ProfileCase) -> CaseRepeats:
        """The repeats of a case."""
        return next((r for r in self.repeats if r.case == case), CaseRepeats(case=case))

    def with_repeat(self, case: ProfileCase, seconds: float | None) -> Trial:
        """With one more repeat of a case, or with its failure."""
        old = self.repeats_of(case)
        change = {"failed": True} if seconds is None else {"seconds": (*old.seconds, seconds)}
        rest = tuple(r for r in self.repeats if r.case != case)
        return self.model_copy(update={"repeats": (*rest, old.model_copy(update=change))})

    def next_case(self, cases: Sequence[ProfileCase]) -> ProfileCase | None:
        """What to run next: each case a few times in turn, then the one that is least settled.

        The first case is the run's own, which every prediction begins with: it has more turns,
        and the first ones. A case at least as large as one that failed is left out. None: all are
        settled.
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
        """With one more measurement of an overhead."""
        known = self.overheads_s
        # Clocks of two machines may differ by more than something quick takes.
        more = {**known, name: (*known.get(name, ()), max(0.0, seconds))}
        return self.model_copy(update={"overheads_s": more})

    def with_crash(self, reason: str) -> Trial:
        """With what was being run as a failure; for a job that died of it."""
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
        """Write it, whole or not at all."""
        write_atomic(path, self.model_dump_json(exclude_defaults=True) + "\n")


def load_trial(path: Path) -> Trial | None:
    """Read a trial; None when there is none yet.

    Raises:
        PlanError: it is damaged; names the file and the key.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return None
    return validate_section(Trial, read_json(path, f"no file {path}"), path)
