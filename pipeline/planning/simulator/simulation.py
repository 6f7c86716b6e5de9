"""The simulation of a placement under a scenario: iterations, jobs, and what they cost.

The simulator shares :class:`pipeline.planning.planner.predictor.Predictor` with the planner.
Unequal lengths and slow GPUs become factors of the stages' times, one per iteration. Interrupted
and expired jobs delay the stage that their pool runs at that moment. The predictor then decides
which of these delays lengthen the iteration, and which are hidden by waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from pipeline.planning.planner.predictor import PlacementPrediction, Predictor
from pipeline.planning.planner.problem import GpuKind, Placement, PlacementProblem
from pipeline.planning.simulator.scenario import LengthDistribution, Scenario, StragglerModel
from rlinf.errors import PlanError, did_you_mean

Array = np.ndarray
MAX_OUTAGES = 1000
"""Maximum number of interruptions and renewals of a job in one iteration."""
SLOTS = 256
"""Number of samples that a worker runs at the same time; others wait for a slot."""
FIXED_SHARE = 0.5
"""Share of the time of a decoding step with full slots that does not depend on the number of
samples: reading the weights, launching kernels (assumed)."""
PURPOSES = ("lengths", "stragglers", "losses")
"""Purposes of random numbers; each purpose has random generators of its own."""


@dataclass
class SimulationTrace:
    """The record of one simulation."""

    problem: PlacementProblem
    placement: Placement
    predicted_s: float
    """Seconds of an iteration without disturbances."""
    iteration_starts: list[float] = field(default_factory=list)
    """Start of each iteration, then the end of the last iteration, in seconds since the submission
    of the first job."""
    busy_s: Array = field(default_factory=lambda: np.zeros(0))
    """Seconds of work of each pool, ``[pools]``."""
    down_s: Array = field(default_factory=lambda: np.zeros(0))
    """Seconds after its first start in which each pool had no job, ``[pools]``."""
    started_at: Array = field(default_factory=lambda: np.zeros(0))
    """First start of each pool's jobs, ``[pools]``."""
    interruptions: int = 0
    """Number of preemptions and failures of jobs."""
    renewals: int = 0
    """Number of jobs that replaced a job at its time limit."""

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

    @property
    def idle_shares(self) -> Array:
        """Share of the time of all iterations in which each pool did no work, ``[pools]``."""
        return 1 - self.busy_s / (self.iteration_starts[-1] - self.iteration_starts[0])

    @property
    def down_shares(self) -> Array:
        """Share of the time of all iterations in which each pool had no job, ``[pools]``."""
        return self.down_s / (self.iteration_starts[-1] - self.iteration_starts[0])

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all jobs, including idle time."""
        return float(self._allocated_hours() @ np.array(self.placement.gpus).sum(1))

    @property
    def cost(self) -> float:
        """Cost of all GPU-hours at the prices of their kinds."""
        prices = np.array([kind.price for kind in self.problem.kinds])
        return float(self._allocated_hours() @ (np.array(self.placement.gpus) @ prices))

    def _allocated_hours(self) -> Array:
        return (self.total_s - self.started_at - self.down_s) / 3600

    def label(self, pool: int) -> tuple[str, str]:
        """Return the stages and GPUs of a pool: ``rollout, reward`` and ``16 h100 + 8 a100``."""
        stages = ", ".join(self.problem.stages[s].name for s in self.placement.pools[pool])
        counts = zip(self.placement.gpus[pool], self.problem.kinds, strict=True)
        return stages, " + ".join(f"{n} {kind.name}" for n, kind in counts if n)


def simulate(
    problem: PlacementProblem,
    placement: Placement,
    scenario: Scenario | None = None,
    iterations: int = 20,
    seed: int = 0,
) -> SimulationTrace:
    """Simulate some iterations.

    Args:
        seed: seed of all random numbers; the same seed gives the same result.

    Raises:
        PlanError: the placement cannot run, the scenario does not fit the problem, or interruptions
            are so frequent that hardly any work is done.
    """
    scenario = scenario or Scenario()
    names = [stage.name for stage in problem.stages]
    _check_placement(problem, placement)
    predictor = Predictor(problem)
    nominal = predictor.predict(placement)
    if not np.isfinite(nominal.total_s):
        raise PlanError("placement: a stage cannot run on its pool, or the GPUs cannot be a job")
    factors = np.ones((len(names), len(problem.kinds), iterations))
    if scenario.lengths is not None:
        name = scenario.lengths.stage
        if name not in names:
            raise PlanError(f"lengths.stage: no stage {name!r}{did_you_mean(name, names)}")
        s = names.index(name)
        num_gpus = sum(placement.gpus_of(s))
        factors[s] *= _length_factors(scenario.lengths, num_gpus, iterations, seed)
    if scenario.stragglers is not None:
        for s, stage in enumerate(problem.stages):
            factors[s] *= _straggler_factors(
                scenario.stragglers, placement, nominal, s, not stage.after, iterations, seed
            )
    jobs = [
        _Job(p, kind, n, scenario, random_generator(seed, "losses", p, k))
        for p, gpus in enumerate(placement.gpus)
        for k, (kind, n) in enumerate(zip(problem.kinds, gpus, strict=True))
        if n
    ]
    simulation = _Simulation(predictor, placement, scenario, jobs, factors)
    return simulation.run(float(nominal.total_s))


class _Job:
    """The job that has a pool's GPUs of one kind, and the later jobs that replace it."""

    def __init__(
        self, pool: int, kind: GpuKind, gpus: int, scenario: Scenario, rng: np.random.Generator
    ) -> None:
        self.pool, self._scenario, self._rng = pool, scenario, rng
        self._expected_wait_s = float(kind.queue_wait_s(np.array(gpus)))
        per_hour = kind.interruptions_per_hour if scenario.losses else 0.0
        self._mean_uptime_s = 3600 / per_hour if per_hour else math.inf
        self._lease_s = (scenario.walltime_s or math.inf) - scenario.startup_s
        if self._lease_s <= 0:
            raise PlanError("walltime_s: jobs end before startup_s; use longer jobs")
        self._lease_left_s = self._lease_s
        self.ready_at = self._draw_start_s()
        """Time from which the first job works."""

    def _draw_start_s(self) -> float:
        """Draw the seconds from the submission of a job to its first work."""
        has_wait = self._scenario.queue and self._expected_wait_s > 0
        wait_s = float(self._rng.exponential(self._expected_wait_s)) if has_wait else 0.0
        return wait_s + self._scenario.startup_s

    def next_outage(self, progress_s: float, end_s: float) -> tuple[float, float, bool] | None:
        """Draw the next outage while the job works from ``progress_s`` to ``end_s``.

        Returns:
            When it happens, the seconds without a job, and whether work is lost; None: no outage.
        """
        has_losses = math.isfinite(self._mean_uptime_s)
        uptime_s = float(self._rng.exponential(self._mean_uptime_s)) if has_losses else math.inf
        loss_s = progress_s + uptime_s
        expiry_s = progress_s + self._lease_left_s
        if min(loss_s, expiry_s) >= end_s:
            self._lease_left_s -= end_s - progress_s
            return None
        self._lease_left_s = self._lease_s
        return min(loss_s, expiry_s), self._draw_start_s(), loss_s < expiry_s


class _Simulation:
    """The state of a simulation: one iteration after the other."""

    def __init__(
        self,
        predictor: Predictor,
        placement: Placement,
        scenario: Scenario,
        jobs: list[_Job],
        factors: Array,
    ) -> None:
        self.predictor, self.placement, self.scenario = predictor, placement, scenario
        self.jobs, self.factors = jobs, factors
        self.names = [stage.name for stage in predictor.problem.stages]

    def run(self, predicted_s: float) -> SimulationTrace:
        pools = range(len(self.placement.pools))
        trace = SimulationTrace(self.predictor.problem, self.placement, predicted_s)
        ready = [max(job.ready_at for job in self.jobs if job.pool == p) for p in pools]
        trace.started_at = np.array(ready) - self.scenario.startup_s
        trace.busy_s, trace.down_s = np.zeros(len(ready)), np.zeros(len(ready))
        now = max(ready)
        calm = self._predict(self.factors, None)
        for i in range(self.factors.shape[-1]):
            trace.iteration_starts.append(now)
            prediction = PlacementPrediction(*(value[..., i] for value in vars(calm).values()))
            delays_s = self._delays(prediction, trace)
            if delays_s.any():
                delayed = self._predict(self.factors[..., i : i + 1], delays_s[:, None])
                prediction = PlacementPrediction(
                    *(value[..., 0] for value in vars(delayed).values())
                )
            for p, stages in enumerate(self.placement.pools):
                trace.busy_s[p] += float(prediction.busy_s[list(stages)].sum())
            now += float(prediction.total_s)
        trace.iteration_starts.append(now)
        return trace

    def _predict(self, factors: Array, delays_s: Array | None) -> PlacementPrediction:
        count = factors.shape[-1]
        gpus = [np.tile(np.array(pool)[:, None], count) for pool in self.placement.gpus]
        return self.predictor.predict_batch(
            self.placement.pools,
            gpus,
            self.placement.num_chunks,
            factors=factors,
            delays_s=delays_s,
        )

    def _delays(self, calm: PlacementPrediction, trace: SimulationTrace) -> Array:
        """Draw the outages of an iteration, and return the seconds by which they delay each stage,
        ``[stages]``."""
        delays_s, duration_s = np.zeros(len(self.names)), float(calm.total_s)
        for job in self.jobs:
            progress_s = 0.0
            for _ in range(MAX_OUTAGES):
                outage = job.next_outage(progress_s, duration_s)
                if outage is None:
                    break
                at, down_s, is_loss = outage
                stage, delay_s, redone_s = self._delay(calm, job.pool, at, down_s)
                progress_s = at - redone_s if is_loss else at
                delays_s[stage] += delay_s + (redone_s if is_loss else 0.0)
                trace.interruptions += is_loss
                trace.renewals += not is_loss
                trace.down_s[job.pool] += down_s
            else:
                raise PlanError(
                    f"jobs of pool {job.pool + 1} end {MAX_OUTAGES} times during an iteration of "
                    f"{duration_s:.3g} s; lower interruptions_per_hour, or use longer jobs"
                )
        return delays_s

    def _delay(
        self, calm: PlacementPrediction, pool: int, at: float, down_s: float
    ) -> tuple[int, float, float]:
        """Return the stage that is delayed if a pool is down from ``at``, the seconds of delay, and
        the seconds of work since its last chunk."""
        for s in self.placement.pools[pool]:
            start, finish = float(calm.start_s[s]), float(calm.finish_s[s])
            if at < start:  # the pool is idle, and only a long outage delays its next stage
                return s, max(0.0, at + down_s - start), 0.0
            if at < finish:
                chunk_s = float(calm.busy_s[s]) / self.placement.num_chunks
                return s, down_s, (at - start) % chunk_s
        # After its last stage: only a long outage delays the next iteration.
        return s, max(0.0, at + down_s - float(calm.total_s)), 0.0


def random_generator(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """Return an independent random generator for a purpose and for the object with the indices
    ``ids``, such as a pool."""
    return np.random.default_rng(np.random.SeedSequence([seed, PURPOSES.index(purpose), *ids]))


def relative_lengths(lengths: LengthDistribution, count: int, rng: np.random.Generator) -> Array:
    """Return random lengths ``[count]``, float64, with an expected value of 1."""
    if not lengths.sigma:
        return np.ones(count)
    # The mean of min(exp(mu + sigma z), longest) grows with mu, so bisection finds mean 1.
    quantiles = np.random.default_rng(0).standard_normal(4096)
    low, high = -0.5 * lengths.sigma**2 - 1, math.log(lengths.longest)
    for _ in range(40):
        mu = (low + high) / 2
        mean = np.minimum(np.exp(mu + lengths.sigma * quantiles), lengths.longest).mean()
        low, high = (mu, high) if mean < 1 else (low, mu)
    return np.minimum(np.exp(mu + lengths.sigma * rng.standard_normal(count)), lengths.longest)


def completion_s(lengths: Array, slots: int, fixed: float, per_sample: float) -> Array:
    """Return the times ``[workers]`` at which workers with continuous batching have finished.

    Args:
        lengths: steps of each sample ``[workers, n]`` in the order of their start.
        slots: maximum number of samples that a worker runs at the same time.
        fixed: part of a step's time that is independent of the number of running samples.
        per_sample: further time of a step for each running sample.
    """
    workers, count = lengths.shape
    ends = lengths.astype(np.float64)
    if count > slots:
        rows, slot_ends = np.arange(workers), ends[:, :slots].copy()
        for j in range(slots, count):
            slot = slot_ends.argmin(1)
            slot_ends[rows, slot] += ends[:, j]
            ends[:, j] = slot_ends[rows, slot]
    ends.sort(axis=1)
    running = np.minimum(slots, count - np.arange(count))
    steps = np.diff(ends, axis=1, prepend=0.0)
    return np.asarray((steps * (fixed + running * per_sample)).sum(1))


def _length_factors(lengths: LengthDistribution, gpus: int, iterations: int, seed: int) -> Array:
    """Return the factors of the stage's time ``[iterations]`` that unequal lengths cause."""
    workers = min(gpus, lengths.samples)
    step = SLOTS, FIXED_SHARE, (1 - FIXED_SHARE) / SLOTS
    per_worker = -(-lengths.samples // workers)
    durations = []
    for i in range(iterations):
        rng = random_generator(seed, "lengths", i)
        drawn = relative_lengths(lengths, workers * per_worker, rng)
        durations.append(completion_s(drawn.reshape(workers, per_worker), *step).max())
    return np.array(durations) / np.mean(durations)


def _straggler_factors(
    model: StragglerModel,
    placement: Placement,
    nominal: PlacementPrediction,
    stage: int,
    is_balanced: bool,
    iterations: int,
    seed: int,
) -> Array:
    """Return the factors of a stage's time ``[iterations]`` that slow GPUs of its pool cause."""
    pool = next(p for p, stages in enumerate(placement.pools) if stage in stages)
    gpus, total_s = sum(placement.gpus[pool]), float(nominal.total_s)
    rng = random_generator(seed, "stragglers", pool)
    # Phases that began before the first iteration count too.
    begin_s, end_s = -5 * model.mean_s, iterations * total_s
    count = rng.poisson(model.per_gpu_hour * gpus * (end_s - begin_s) / 3600)
    slow_from = rng.uniform(begin_s, end_s, count)
    slow_to = slow_from + rng.exponential(model.mean_s, count)
    start = np.arange(iterations) * total_s + float(nominal.start_s[stage])
    seconds = max(float(nominal.finish_s[stage] - nominal.start_s[stage]), 1e-9)
    slow_s = np.array(
        [
            np.clip(np.minimum(slow_to, a + seconds) - np.maximum(slow_from, a), 0, None).sum()
            for a in start
        ]
    )
    if is_balanced:
        return np.asarray(1 / (1 - np.minimum(1, slow_s / seconds / gpus) * (1 - 1 / model.factor)))
    return np.asarray(1 + np.minimum(1, slow_s / seconds) * (model.factor - 1))


def _check_placement(problem: PlacementProblem, placement: Placement) -> None:
    if sorted(s for pool in placement.pools for s in pool) != list(range(len(problem.stages))):
        raise PlanError("placement: every stage must be in one pool")
    if placement.num_chunks < 1:
        raise PlanError(f"placement: chunks must be at least 1 (got {placement.num_chunks})")
    for k, kind in enumerate(problem.kinds):
        used = sum(pool[k] for pool in placement.gpus)
        if used > kind.gpus:
            raise PlanError(f"placement: {used} {kind.name} are requested, of {kind.gpus}")
