"""The trace of a simulation, and its statistics as text and tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from pipeline.console import format_duration
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import Placement, PlacementProblem

Array = np.ndarray
Activity = Literal["work", "switch", "sync", "transfer", "redone", "queue", "down"]
MAX_WAITS_SHOWN = 2
"""Maximum number of causes of waits in the table, for each pool."""


@dataclass(frozen=True)
class TraceSpan:
    """An activity or wait of a pool; times are in seconds since the submission of the first job."""

    pool: int
    stage: str
    iteration: int
    chunk: int
    activity: Activity
    """``work``; ``switch``: loading a stage; ``sync``: sending weights; ``transfer``: sending a
    chunk to ``pool``; ``redone``: work that was lost in an interruption and is repeated later;
    ``queue``: waiting for the first start of a job; ``down``: waiting for a job to start again."""
    start: float
    end: float


@dataclass(frozen=True)
class GpuAllocation:
    """The GPUs of one job, from its start to its end."""

    pool: int
    kind: str
    gpus: int
    start: float
    end: float


@dataclass(frozen=True)
class JobInterruption:
    """A preemption or failure of a job."""

    pool: int
    kind: str
    time: float
    while_working: bool
    """True if the pool was working, so that work must be repeated."""


@dataclass
class SimulationTrace:
    """The record of one simulation."""

    problem: PlacementProblem
    placement: Placement
    iteration_starts: list[float] = field(default_factory=list)
    """Start of each iteration, then the end of the last iteration; times as in ``TraceSpan``."""
    gpu_busy: list[Array] = field(default_factory=list)
    """Seconds of useful work per GPU: an array ``[gpus]`` per pool, in the order of
    ``problem.kinds``. Repeated work counts once."""
    waits: list[dict[str, float]] = field(default_factory=list)
    """Seconds that each pool waited, by cause: the name of a stage that it waits for, ``room in
    STAGE``, or ``weights``."""
    spans: list[TraceSpan] = field(default_factory=list)
    allocations: list[GpuAllocation] = field(default_factory=list)
    interruptions: list[JobInterruption] = field(default_factory=list)
    renewals: int = 0
    """Number of jobs that replaced a job at its time limit."""
    repeated_iterations: int = 0
    """Number of repeats of an iteration after an interruption."""

    def __post_init__(self) -> None:
        self.gpu_busy = [np.zeros(sum(gpus)) for gpus in self.placement.gpus]
        self.waits = [{} for _ in self.placement.pools]

    def add_wait(self, pool: int, cause: str, seconds: float) -> None:
        """Add ``seconds`` to the waits of a pool with this cause."""
        if seconds > 0:
            self.waits[pool][cause] = self.waits[pool].get(cause, 0.0) + seconds

    def mark_repeated(self, first: int) -> None:
        """Mark all work in the spans from index ``first`` on as ``redone``."""
        for n in range(first, len(self.spans)):
            if self.spans[n].activity in ("work", "switch", "sync", "transfer"):
                self.spans[n] = replace(self.spans[n], activity="redone")

    @property
    def iteration_s(self) -> Array:
        """Seconds of each iteration, ``[iterations]``."""
        return np.diff(self.iteration_starts)

    @property
    def mean_s(self) -> float:
        """Mean seconds per iteration."""
        return float(self.iteration_s.mean())

    @property
    def total_s(self) -> float:
        """Seconds from submission to the end, queue waits included."""
        return self.iteration_starts[-1]

    def gpu_idle_shares(self, pool: int) -> Array:
        """Return the share of time in which each GPU of a pool did no useful work, ``[gpus]``."""
        duration_s = self.iteration_starts[-1] - self.iteration_starts[0]
        return 1 - self.gpu_busy[pool] / duration_s

    def idle_share(self, pool: int) -> float:
        """Return the mean of ``gpu_idle_shares`` over the GPUs of a pool."""
        return float(self.gpu_idle_shares(pool).mean())

    def longest_waits(self, pool: int) -> list[tuple[str, float]]:
        """Return the causes of a pool's waits and their shares of the time, longest first."""
        duration_s = self.iteration_starts[-1] - self.iteration_starts[0]
        shares = [(cause, seconds / duration_s) for cause, seconds in self.waits[pool].items()]
        return sorted(shares, key=lambda entry: -entry[1])

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all allocations, including idle time."""
        return sum(a.gpus * (a.end - a.start) for a in self.allocations) / 3600

    @property
    def cost(self) -> float:
        """Cost of all GPU-hours at the prices of their kinds."""
        prices = {kind.name: kind.price for kind in self.problem.kinds}
        return sum(a.gpus * (a.end - a.start) / 3600 * prices[a.kind] for a in self.allocations)

    def label(self, pool: int) -> tuple[str, str]:
        """Return the stages and GPUs of a pool: ``rollout, reward`` and ``16 h100 + 8 a100``."""
        stages = ", ".join(self.problem.stages[s].name for s in self.placement.pools[pool])
        gpus = " + ".join(
            f"{n} {kind.name}"
            for n, kind in zip(self.placement.gpus[pool], self.problem.kinds, strict=True)
            if n
        )
        return stages, gpus


def summary(trace: SimulationTrace) -> str:
    """Return the statistics of a simulation as text."""
    seconds = trace.iteration_s
    low, high = np.quantile(seconds, [0.1, 0.9])
    lines = [
        f"{trace.placement.mode}, {trace.placement.num_chunks} chunks",
        f"iteration: {seconds.mean():.1f} s (q10 {low:.1f}, q90 {high:.1f}); "
        f"predicted {_predicted_s(trace):.1f}",
        f"{len(seconds)} iterations: {format_duration(trace.total_s)} from submission to end, "
        f"{trace.gpu_hours:,.1f} GPU-hours, cost {trace.cost:,.1f}",
    ]
    if trace.interruptions or trace.renewals:
        lines.append(
            f"{len(trace.interruptions)} jobs interrupted, {trace.repeated_iterations} iterations "
            f"repeated, {trace.renewals} jobs renewed"
        )
    return "\n".join(lines)


def summary_tiles(trace: SimulationTrace, seed: int) -> list[tuple[str, str]]:
    """Return the statistics and settings of a simulation as labels and values."""
    seconds = trace.iteration_s
    low, high = np.quantile(seconds, [0.1, 0.9])
    mean, predicted = float(seconds.mean()), _predicted_s(trace)
    tiles = [
        ("iteration, simulated", f"{mean:.1f} s"),
        ("80 % of iterations", f"{low:.1f} - {high:.1f} s"),
        ("iteration, predicted", f"{predicted:.1f} s ({predicted / mean - 1:+.1%})"),
        (f"cost of {len(seconds)} iterations", f"{trace.cost:,.1f}"),
        ("GPU-hours", f"{trace.gpu_hours:,.1f}"),
        ("from submission to end", format_duration(trace.total_s)),
        ("placement", f"{trace.placement.mode}, {trace.placement.num_chunks} chunks"),
        ("seed", str(seed)),
    ]
    if trace.interruptions or trace.renewals:
        tiles.append(("jobs interrupted", str(len(trace.interruptions))))
        tiles.append(("iterations repeated", str(trace.repeated_iterations)))
        tiles.append(("jobs renewed", str(trace.renewals)))
    return tiles


def _predicted_s(trace: SimulationTrace) -> float:
    return float(Predictor(trace.problem).predict(trace.placement).total_s)


def pool_table(trace: SimulationTrace) -> list[tuple[str, ...]]:
    """Return the table of pools; the first row is the header."""
    rows: list[tuple[str, ...]] = [("pool", "GPUs", "idle", "waits for")]
    for pool in range(len(trace.placement.pools)):
        stages, gpus = trace.label(pool)
        longest = trace.longest_waits(pool)[:MAX_WAITS_SHOWN]
        waits = ", ".join(f"{cause} {share:.0%}" for cause, share in longest if share >= 0.005)
        rows.append((stages, gpus, f"{trace.idle_share(pool):.0%}", waits))
    return rows
