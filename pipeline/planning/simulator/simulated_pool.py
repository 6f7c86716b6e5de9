"""A simulated pool: its jobs wait, start, work, and are interrupted or reach their time limit.

Decoding stages use continuous batching, and their samples have unequal lengths.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from pipeline.planning.planner.problem import GpuKind
from pipeline.planning.simulator.scenario import (
    LengthDistribution,
    Scenario,
    StragglerModel,
    random_generator,
)
from pipeline.planning.simulator.trace import (
    Activity,
    GpuAllocation,
    JobInterruption,
    SimulationTrace,
    TraceSpan,
)
from rlinf.errors import PlanError

Process = Generator[Any, Any, Any]
INTERRUPTED = "lost"
"""Cause of the ``simpy.Interrupt`` that the working process receives if its job is interrupted."""
MAX_RENEWALS = 10_000
"""Maximum number of consecutive renewals of jobs without work between them."""
MAX_SPEED_CHANGES = 100_000
"""Maximum number of speed changes of a pool during one chunk."""
MAX_INTERRUPTIONS = 1000
"""Maximum number of consecutive interruptions of one chunk."""


class StragglerSpeed:
    """The relative speed of a pool over time: 1, or less while some of its GPUs are slow. Calls of
    ``finish`` must have ascending ``start``."""

    def __init__(self, model: StragglerModel | None, gpus: int, rng: np.random.Generator) -> None:
        self._model, self._gpus, self._rng = model, gpus, rng
        self._slow_until: list[float] = []
        """Heap: the end of the slow phase of each GPU that is slow now."""
        self._next_slowdown = self._draw_slowdown(0.0) if model else math.inf

    def _draw_slowdown(self, now: float) -> float:
        assert self._model is not None
        rate = self._model.per_gpu_hour * self._gpus / 3600
        return now + float(self._rng.exponential(1 / rate))

    def finish(self, start: float, seconds: float, *, balanced: bool) -> float:
        """Return the end of work that begins at ``start`` and takes ``seconds`` at full speed.

        If ``balanced``, free workers fetch more work; else the slowest GPU determines the speed.

        Raises:
            PlanError: GPUs become slow too often to be simulated.
        """
        if self._model is None:
            return start + seconds
        now = start
        for _ in range(MAX_SPEED_CHANGES):
            while self._next_slowdown <= now:
                end = self._next_slowdown + float(self._rng.exponential(self._model.mean_s))
                heapq.heappush(self._slow_until, end)
                self._next_slowdown = self._draw_slowdown(self._next_slowdown)
            while self._slow_until and self._slow_until[0] <= now:
                heapq.heappop(self._slow_until)
            num_slow = len(self._slow_until)
            if balanced:
                speed = 1 - min(1.0, num_slow / self._gpus) * (1 - 1 / self._model.factor)
            else:
                speed = 1 / self._model.factor if num_slow else 1.0
            next_end = self._slow_until[0] if self._slow_until else math.inf
            next_change = min(self._next_slowdown, next_end)
            if seconds <= speed * (next_change - now):
                return now + seconds / speed
            seconds -= speed * (next_change - now)
            now = next_change
        raise PlanError(
            f"stragglers.per_gpu_hour: {self._model.per_gpu_hour:g} makes {self._gpus} GPUs slow "
            f"more than {MAX_SPEED_CHANGES:,} times during one chunk; lower it"
        )


class SimulatedJob:
    """The job that has a pool's GPUs of one kind, and the later jobs that replace it."""

    def __init__(self, pool: int, kind: GpuKind, gpus: int, scenario: Scenario, seed: int, k: int):
        self.pool, self.kind, self.gpus = pool, kind, gpus
        self._scenario = scenario
        self._wait_rng = random_generator(seed, "waits", pool, k)
        self.interruption_rng = random_generator(seed, "losses", pool, k)
        self.allocated_since = self.draw_wait_s()
        """Start of the present allocation; in the future while the job waits in the queue."""
        self.ready_at = self.allocated_since + scenario.startup_s
        """Time from which the job can work, after its start or restart."""
        self.allocations: list[GpuAllocation] = []

    def draw_wait_s(self) -> float:
        """Draw the seconds that the job waits in the queue."""
        queue = self._scenario.queue
        expected = float(self.kind.queue_wait_s(np.array(self.gpus)))
        if queue is None or not expected:
            return 0.0
        if queue.spread == "none":
            return expected
        return float(self._wait_rng.exponential(expected))

    @property
    def lease_end(self) -> float:
        """The time at which the job reaches its time limit."""
        walltime = self._scenario.walltime
        return math.inf if walltime is None else self.allocated_since + walltime.limit_s

    def close(self, now: float) -> None:
        """End the job at ``now``, or at its time limit if that is earlier."""
        end = min(now, self.lease_end)
        if end > self.allocated_since:
            self.allocations.append(
                GpuAllocation(self.pool, self.kind.name, self.gpus, self.allocated_since, end)
            )

    def interrupt(self, now: float) -> None:
        """Interrupt the job, which then waits in the queue again."""
        self.close(now)
        self.allocated_since = now + self.draw_wait_s()
        self.ready_at = self.allocated_since + self._scenario.startup_s

    def renew(self, now: float) -> None:
        """Replace the job by the next job, which may have been submitted before ``now``."""
        walltime = self._scenario.walltime
        assert walltime is not None
        submitted = max(self.allocated_since, min(now, self.lease_end - walltime.lead_s))
        started = submitted + self.draw_wait_s()
        ready = started + self._scenario.startup_s
        if walltime.lead_s:
            # The old job runs until the new one can work, but not beyond its time limit.
            self.close(max(now, ready))
        else:
            self.close(now)
        self.allocated_since, self.ready_at = started, ready


class SimulatedPool:
    """GPUs that work together, with their jobs."""

    def __init__(
        self,
        env: simpy.Environment,
        number: int,
        kinds: Sequence[GpuKind],
        gpus: Sequence[int],
        scenario: Scenario,
        seed: int,
        trace: SimulationTrace,
        on_interruption: Callable[[], None],
    ) -> None:
        self._env, self.number, self._scenario, self._trace = env, number, scenario, trace
        self._on_interruption = on_interruption
        self.jobs = [
            SimulatedJob(number, kind, n, scenario, seed, k)
            for k, (kind, n) in enumerate(zip(kinds, gpus, strict=True))
            if n
        ]
        self.lock = simpy.Resource(env)
        """Lock for processes that compete for the pool: the two halves of a cycle's chunk."""
        num_gpus = sum(job.gpus for job in self.jobs)
        self._straggler_speed = StragglerSpeed(
            scenario.stragglers, num_gpus, random_generator(seed, "stragglers", number)
        )
        self._balanced_stages = scenario.stragglers.balanced if scenario.stragglers else frozenset()
        self._working_process: simpy.Process | None = None
        if scenario.losses is not None:
            for job in self.jobs:
                rate = scenario.losses.per_hour.get(job.kind.name, job.kind.interruptions_per_hour)
                if rate:
                    env.process(self._interrupt_randomly(job, 3600 / rate))

    def start(self) -> Process:
        """Wait for the jobs to start."""
        ready_at = max(job.ready_at for job in self.jobs)
        if ready_at > self._env.now:
            self.add_span("", 0, 0, "queue", self._env.now, ready_at)
            yield self._env.timeout(ready_at - self._env.now)

    def close(self) -> list[GpuAllocation]:
        """End all jobs, and return their allocations."""
        for job in self.jobs:
            job.close(self._env.now)
        return [allocation for job in self.jobs for allocation in job.allocations]

    def work(
        self,
        seconds: float,
        stage: str,
        iteration: int,
        chunk: int = 0,
        activity: Activity | None = "work",
        other_pools: Sequence[SimulatedPool] = (),
    ) -> Process:
        """Do work that takes ``seconds`` at full speed, and return its real duration.

        Interrupted work is repeated. If ``activity`` is None, the caller records the span. The GPUs
        of ``other_pools`` take part in the work.

        Raises:
            PlanError: the work takes longer than a lease, or is interrupted too often.
        """
        pools, num_interruptions = (self, *other_pools), 0
        while seconds > 0:
            for pool in pools:
                yield from pool._wait_for_jobs(seconds, stage, iteration)
            start, balanced = self._env.now, stage in self._balanced_stages
            end = max(
                pool._straggler_speed.finish(start, seconds, balanced=balanced) for pool in pools
            )
            for pool in pools:
                pool._working_process = self._env.active_process
            try:
                yield self._env.timeout(end - start)
            except simpy.Interrupt as interrupt:
                self.add_span(stage, iteration, chunk, "redone", start, self._env.now)
                if interrupt.cause != INTERRUPTED:
                    raise
                self._on_interruption()
                num_interruptions += 1
                if num_interruptions == MAX_INTERRUPTIONS:
                    raise PlanError(
                        f"losses: a chunk of stage {stage!r}, {seconds:.3g} s, was lost "
                        f"{MAX_INTERRUPTIONS} times in a row and would never end; lower "
                        "losses.per_hour, or use more chunks"
                    ) from None
                continue
            finally:
                for pool in pools:
                    pool._working_process = None
            if activity is not None:
                for pool in pools:
                    pool.add_span(stage, iteration, chunk, activity, start, end)
            return end - start
        return 0.0

    def _wait_for_jobs(self, seconds: float, stage: str, iteration: int) -> Process:
        """Wait until all jobs run, and reach their time limits in ``seconds`` or later."""
        walltime = self._scenario.walltime
        if walltime and seconds > walltime.limit_s - self._scenario.startup_s:
            raise PlanError(
                f"stage {stage!r}: a chunk takes {seconds:.0f} s on pool {self.number}, more "
                f"than a job of {walltime.limit_s:.0f} s; use more chunks or longer jobs"
            )
        wait_start, renewals = self._env.now, 0
        while True:
            now = self._env.now
            ready_at = max(job.ready_at for job in self.jobs)
            if ready_at > now:
                yield self._env.timeout(ready_at - now)
                continue
            expiring = [job for job in self.jobs if now + seconds > job.lease_end]
            if not expiring:
                break
            for job in expiring:
                job.renew(now)
                self._trace.renewals += 1
            renewals += 1
            if renewals == MAX_RENEWALS:
                raise PlanError(
                    f"stage {stage!r}: the jobs of pool {self.number} wait so long and run so "
                    "briefly that they hardly ever overlap; use longer jobs or GPUs of one kind"
                )
        self.add_span(stage, iteration, 0, "down", wait_start, self._env.now)

    def _interrupt_randomly(self, job: SimulatedJob, mean_s: float) -> Process:
        while True:
            yield self._env.timeout(float(job.interruption_rng.exponential(mean_s)))
            now, process = self._env.now, self._working_process
            if not job.allocated_since <= now < job.lease_end:
                continue
            self._trace.interruptions.append(
                JobInterruption(self.number, job.kind.name, now, process is not None)
            )
            job.interrupt(now)
            if process is not None:
                self._working_process = None
                process.interrupt(INTERRUPTED)

    def add_span(
        self, stage: str, i: int, chunk: int, activity: Activity, start: float, end: float
    ) -> None:
        """Record a span, unless it is empty."""
        if end > start:
            self._trace.spans.append(TraceSpan(self.number, stage, i, chunk, activity, start, end))


Array = np.ndarray
CALIBRATION_DRAWS = 8
"""Number of simulated iterations whose mean duration is compared with the measured one."""


def relative_lengths(lengths: LengthDistribution, count: int, rng: np.random.Generator) -> Array:
    """Return random lengths ``[count]``, float64, with an expected value of 1."""
    if lengths.empirical:
        measured = np.asarray(lengths.empirical, dtype=np.float64)
        return rng.choice(measured, count) / measured.mean()
    if not lengths.sigma:
        return np.ones(count)
    mu = _lognormal_mu(lengths.sigma, lengths.longest)
    return np.minimum(np.exp(mu + lengths.sigma * rng.standard_normal(count)), lengths.longest)


def _lognormal_mu(sigma: float, longest: float) -> float:
    """Return ``mu`` for which ``min(lognormal(mu, sigma), longest)`` has mean 1, by bisection.

    The mean is ``exp(mu + sigma^2/2) P(z < a - sigma) + longest P(z > a)`` with ``a = (log(longest)
    - mu) / sigma``.
    """

    def normal_cdf(z: float) -> float:
        return 0.5 * math.erfc(-z / math.sqrt(2))

    low, high = -0.5 * sigma**2 - 1, math.log(longest)
    for _ in range(60):
        mu = (low + high) / 2
        a = (math.log(longest) - mu) / sigma
        mean = math.exp(mu + sigma**2 / 2) * normal_cdf(a - sigma) + longest * (1 - normal_cdf(a))
        low, high = (mu, high) if mean < 1 else (low, mu)
    return (low + high) / 2


def completion_times(lengths: Array, slots: int, fixed: float, per_sample: float) -> Array:
    """Return the times ``[workers, n]`` at which each worker has finished 1, 2, ... n samples.

    Args:
        lengths: steps of each sample ``[workers, n]`` in the order of their start; zeros (padding)
            take no time.
        slots: maximum number of samples that a worker runs at the same time.
        fixed: part of a step's time that is independent of the number of running samples.
        per_sample: further time of a step for each running sample.
    """
    workers, count = lengths.shape
    ends = lengths.astype(np.float64)
    if count > slots:
        rows = np.arange(workers)
        slot_ends = ends[:, :slots].copy()
        for j in range(slots, count):
            slot = slot_ends.argmin(1)
            slot_ends[rows, slot] += ends[:, j]
            ends[:, j] = slot_ends[rows, slot]
    ends.sort(axis=1)
    running = np.minimum(slots, count - np.arange(count))
    steps = np.diff(ends, axis=1, prepend=0.0)
    return np.cumsum(steps * (fixed + running * per_sample), axis=1)


@dataclass(frozen=True)
class DecodingWorkers:
    """The workers of one kind in a pool; undocumented fields are as in ``DecodingReplica``."""

    workers: int
    gpus: int
    """GPUs per worker."""
    slots: int
    fixed_share: float
    samples: int
    """Samples per iteration, of all these workers together."""


class DecodingStage:
    """Draws durations of a decoding stage. If ``lengths.profiled``, their mean is ``seconds``; else
    ``seconds`` is the duration for samples of equal length."""

    def __init__(
        self, lengths: LengthDistribution, workers: list[DecodingWorkers], seconds: float, seed: int
    ) -> None:
        self._lengths, self._workers = lengths, workers
        self._samples = sum(entry.samples for entry in workers)
        self._scale = seconds
        """Duration for samples of equal length, seconds."""
        if lengths.profiled:
            end_times = [
                self._draw_times(random_generator(seed, "calibration", i))[0][-1]
                for i in range(CALIBRATION_DRAWS)
            ]
            self._scale = seconds * seconds / float(np.mean(end_times))

    def draw_iteration(self, rng: np.random.Generator, num_chunks: int) -> tuple[Array, Array]:
        """Draw the durations of one iteration.

        Returns:
            seconds ``[num_chunks]`` from one chunk of finished samples to the next, and seconds of
                work of each GPU ``[gpus]``, ordered by kind.
        """
        end_times, gpu_seconds = self._draw_times(rng)
        last_samples = np.arange(1, num_chunks + 1) * len(end_times) / num_chunks
        chunk_ends = end_times[np.ceil(last_samples).astype(np.int64) - 1]
        return np.diff(chunk_ends, prepend=0.0), gpu_seconds

    def _draw_times(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Return sorted end times ``[samples]`` and work of each GPU ``[gpus]``, in seconds."""
        lengths = relative_lengths(self._lengths, self._samples, rng)
        end_times, gpu_seconds, assigned = [], [], 0
        for entry in self._workers:
            if not entry.samples:
                gpu_seconds.append(np.zeros(entry.workers * entry.gpus))
                continue
            worker_lengths = lengths[assigned : assigned + entry.samples]
            assigned += entry.samples
            per_worker = -(-entry.samples // entry.workers)
            padded = np.zeros(entry.workers * per_worker)
            # Round-robin assignment; a worker with one sample less has a leading zero.
            padded[padded.size - entry.samples :] = worker_lengths
            padded_lengths = padded.reshape(per_worker, entry.workers).T
            # Times are relative to the duration for equal lengths.
            step_args = (entry.slots, entry.fixed_share, (1 - entry.fixed_share) / entry.slots)
            equal_lengths_s = completion_times(np.ones((1, per_worker)), *step_args)[0, -1]
            times = completion_times(padded_lengths, *step_args) / equal_lengths_s
            end_times.append(_without_padding(times, padded_lengths))
            gpu_seconds.append(np.repeat(times[:, -1], entry.gpus))
        sorted_times = np.sort(np.concatenate(end_times))
        return sorted_times * self._scale, np.concatenate(gpu_seconds) * self._scale


def _without_padding(times: Array, lengths: Array) -> Array:
    """Return the times of real samples; padding comes first on a worker."""
    padding = (lengths == 0).sum(1, keepdims=True)
    return times[np.arange(times.shape[1])[None] >= padding]
