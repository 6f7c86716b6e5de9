"""The trace of a simulation, and its figures as text and tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from pipeline.console import format_duration
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import Placement, PlacementProblem

Array = np.ndarray
SpanKind = Literal["work", "switch", "sync", "transfer", "redone", "queue", "down"]
MAX_WAITS_SHOWN = 2


@dataclass(frozen=True)
class TraceSpan:
    """An activity or wait of a pool, in seconds since the submission of the first job."""

    pool: int
    stage: str
    iteration: int
    micro_batch: int
    kind: SpanKind
    """``work``; ``switch``: loading a stage; ``sync``: sending weights; ``transfer``: a micro-batch
    on its way to ``pool``; ``redone``: interrupted work; ``queue``: a job waits to start the first
    time; ``down``: it waits to start again."""
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


@dataclass
class SimulationTrace:
    """The record of one simulation."""

    problem: PlacementProblem
    placement: Placement
    iteration_starts: list[float] = field(default_factory=list)
    """Start of each iteration in seconds, and the end of the last one."""
    gpu_busy: list[Array] = field(default_factory=list)
    """Seconds of counted work of each GPU, ``[gpus]`` by pool, in the order of kinds."""
    waits: list[dict[str, float]] = field(default_factory=list)
    """Seconds of waiting by pool and by cause: a stage, ``room in`` one, ``weights``."""
    spans: list[TraceSpan] = field(default_factory=list)
    allocations: list[GpuAllocation] = field(default_factory=list)
    interruptions: list[JobInterruption] = field(default_factory=list)
    renewals: int = 0
    """Jobs that replaced one at its time limit."""
    repeated_iterations: int = 0
    """Iterations that were repeated."""

    def __post_init__(self) -> None:
        self.gpu_busy = [np.zeros(sum(gpus)) for gpus in self.placement.gpus]
        self.waits = [{} for _ in self.placement.pools]

    def add_wait(self, pool: int, what: str, seconds: float) -> None:
        """Add a wait."""
        if seconds > 0:
            self.waits[pool][what] = self.waits[pool].get(what, 0.0) + seconds

    def mark_repeated(self, first: int) -> None:
        """Mark all work since a span as repeated."""
        for n in range(first, len(self.spans)):
            if self.spans[n].kind in ("work", "switch", "sync", "transfer"):
                self.spans[n] = replace(self.spans[n], kind="redone")

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

    def gpu_idle(self, pool: int) -> Array:
        """Return the share of time in which each GPU of a pool did no useful work, ``[gpus]``.

        Interrupted work that is repeated is not useful.
        """
        length = self.iteration_starts[-1] - self.iteration_starts[0]
        return 1 - self.gpu_busy[pool] / length

    def idle(self, pool: int) -> float:
        """Return the mean of ``gpu_idle`` over the GPUs of a pool."""
        return float(self.gpu_idle(pool).mean())

    def longest_waits(self, pool: int) -> list[tuple[str, float]]:
        """Return the causes for which a pool waits, with their shares of the time, longest
        first."""
        length = self.iteration_starts[-1] - self.iteration_starts[0]
        shares = [(what, seconds / length) for what, seconds in self.waits[pool].items()]
        return sorted(shares, key=lambda entry: -entry[1])

    @property
    def gpu_hours(self) -> float:
        """Hours of all allocated GPUs, working or not."""
        return sum(hold.gpus * (hold.end - hold.start) for hold in self.allocations) / 3600

    @property
    def cost(self) -> float:
        """``gpu_hours`` times the prices of the kinds."""
        prices = {kind.name: kind.price for kind in self.problem.kinds}
        return sum(h.gpus * (h.end - h.start) / 3600 * prices[h.kind] for h in self.allocations)

    def label(self, pool: int) -> tuple[str, str]:
        """Return a pool's label: ``rollout, reward`` and ``16 h100 + 8 a100``."""
        stages = ", ".join(self.problem.stages[s].name for s in self.placement.pools[pool])
        gpus = " + ".join(
            f"{n} {kind.name}"
            for n, kind in zip(self.placement.gpus[pool], self.problem.kinds, strict=True)
            if n
        )
        return stages, gpus


def summary(trace: SimulationTrace) -> str:
    """Return the figures of a simulation as text."""
    seconds = trace.iteration_s
    low, high = np.quantile(seconds, [0.1, 0.9])
    lines = [
        f"{trace.placement.mode}, {trace.placement.num_chunks} micro-batches",
        f"iteration: {seconds.mean():.1f} s (q10 {low:.1f}, q90 {high:.1f}); "
        f"predicted {_predicted_s(trace):.1f}",
        f"{len(seconds)} iterations: {format_duration(trace.total_s)} from submission to end, "
        f"{trace.gpu_hours:,.1f} GPU-hours, price {trace.cost:,.1f}",
    ]
    if trace.interruptions or trace.renewals:
        lines.append(
            f"{len(trace.interruptions)} losses, {trace.repeated_iterations} iterations done "
            f"again, {trace.renewals} jobs renewed"
        )
    return "\n".join(lines)


def summary_tiles(trace: SimulationTrace, seed: int) -> list[tuple[str, str]]:
    """Return the figures and settings of a simulation as labels and values."""
    seconds = trace.iteration_s
    low, high = np.quantile(seconds, [0.1, 0.9])
    mean, predicted = float(seconds.mean()), _predicted_s(trace)
    found = [
        ("iteration, simulated", f"{mean:.1f} s"),
        ("80 % of iterations", f"{low:.1f} - {high:.1f} s"),
        ("iteration, predicted", f"{predicted:.1f} s ({predicted / mean - 1:+.1%})"),
        (f"price of {len(seconds)} iterations", f"{trace.cost:,.1f}"),
        ("GPU-hours", f"{trace.gpu_hours:,.1f}"),
        ("from submission to end", format_duration(trace.total_s)),
        ("placement", f"{trace.placement.mode}, {trace.placement.num_chunks} micro-batches"),
        ("seed", str(seed)),
    ]
    if trace.interruptions or trace.renewals:
        found.append(
            (
                "losses, iterations done again",
                f"{len(trace.interruptions)}, {trace.repeated_iterations}",
            )
        )
        found.append(("jobs renewed", str(trace.renewals)))
    return found


def _predicted_s(trace: SimulationTrace) -> float:
    """Return the planner's prediction of an iteration, without disturbances."""
    return float(Predictor(trace.problem).predict(trace.placement).total_s)


def pool_table(trace: SimulationTrace) -> list[tuple[str, ...]]:
    """Return the table of pools, with its header first."""
    out: list[tuple[str, ...]] = [("pool", "GPUs", "idle", "waits for")]
    for pool in range(len(trace.placement.pools)):
        stages, gpus = trace.label(pool)
        waits = [
            f"{what} {share:.0%}" for what, share in trace.longest_waits(pool) if share >= 0.005
        ]
        out.append((stages, gpus, f"{trace.idle(pool):.0%}", ", ".join(waits[:MAX_WAITS_SHOWN])))
    return out
