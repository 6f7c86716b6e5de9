"""A simulated pool: its jobs wait, start, work, are interrupted or reach their time limit."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import simpy

from pipeline.planning.planner.problem import GpuKind
from pipeline.planning.simulator.scenario import Scenario, Stragglers, random_generator
from pipeline.planning.simulator.trace import (
    GpuAllocation,
    JobInterruption,
    SimulationTrace,
    SpanKind,
    TraceSpan,
)
from rlinf.errors import PlanError

Process = Generator[Any, Any, Any]
INTERRUPTED = "lost"
"""Cause of the interrupt that the simulated process receives."""
MAX_RENEWALS = 10_000
"""Maximum number of consecutive renewals of jobs without work between them."""
MAX_SPEED_CHANGES = 100_000
"""Maximum number of speed changes of a pool during one chunk."""
MAX_INTERRUPTIONS = 1000
"""Maximum number of consecutive interruptions of one chunk."""


class StragglerSpeed:
    """The relative speed of a pool over time: 1, or less while some of its GPUs are slow.

    Calls must come in the order of time.
    """

    def __init__(self, model: Stragglers | None, gpus: int, rng: np.random.Generator) -> None:
        self._model, self._gpus, self._rng = model, gpus, rng
        self._slow_until: list[float] = []
        self._next_slowdown = self._draw_slowdown(0.0) if model else math.inf

    def _draw_slowdown(self, now: float) -> float:
        assert self._model is not None
        rate = self._model.per_gpu_hour * self._gpus / 3600
        return now + float(self._rng.exponential(1 / rate))

    def finish(self, start: float, seconds: float, *, balanced: bool) -> float:
        """Return the end of work that takes ``seconds`` at full speed.

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
    """A sequence of Slurm jobs that allocate a pool's GPUs of one kind."""

    def __init__(self, pool: int, kind: GpuKind, gpus: int, scenario: Scenario, seed: int, k: int):
        self.pool, self.kind, self.gpus = pool, kind, gpus
        self._scenario = scenario
        self._wait_rng = random_generator(seed, "waits", pool, k)
        self.interruption_rng = random_generator(seed, "losses", pool, k)
        self.allocated_since = self.wait()
        self.ready_at = self.allocated_since + scenario.startup_s
        """Time from which the job can work (again)."""
        self.allocations: list[GpuAllocation] = []

    def wait(self) -> float:
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
        self.allocated_since = now + self.wait()
        self.ready_at = self.allocated_since + self._scenario.startup_s

    def renew(self, now: float) -> None:
        """Replace the job by the next one, which may have been submitted before ``now``."""
        walltime = self._scenario.walltime
        assert walltime is not None
        submitted = max(self.allocated_since, min(now, self.lease_end - walltime.lead_s))
        started = submitted + self.wait()
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
        """Lock of the working process, if several compete (the halves of a cycle)."""
        num_gpus = sum(job.gpus for job in self.jobs)
        self._straggler_speed = StragglerSpeed(
            scenario.stragglers, num_gpus, random_generator(seed, "stragglers", number)
        )
        self._balanced_stages = scenario.stragglers.balanced if scenario.stragglers else frozenset()
        self._worker: simpy.Process | None = None
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
        kind: SpanKind | None = "work",
        other_pools: Sequence[SimulatedPool] = (),
    ) -> Process:
        """Do work that takes ``seconds`` at full speed, and return its duration.

        Interrupted work is repeated. If ``kind`` is None, the caller records the span. The
        ``other_pools`` work on it too.

        Raises:
            PlanError: the work takes longer than a lease, or is interrupted too often.
        """
        pools, num_interruptions = (self, *other_pools), 0
        while seconds > 0:
            for pool in pools:
                yield from pool._available(seconds, stage, iteration)
            start, balanced = self._env.now, stage in self._balanced_stages
            end = max(
                pool._straggler_speed.finish(start, seconds, balanced=balanced) for pool in pools
            )
            for pool in pools:
                pool._worker = self._env.active_process
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
                    pool._worker = None
            if kind is not None:
                for pool in pools:
                    pool.add_span(stage, iteration, chunk, kind, start, end)
            return end - start
        return 0.0

    def _available(self, seconds: float, stage: str, iteration: int) -> Process:
        """Wait until all jobs run and have at least ``seconds`` left."""
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
            now, process = self._env.now, self._worker
            if not job.allocated_since <= now < job.lease_end:
                continue
            self._trace.interruptions.append(
                JobInterruption(self.number, job.kind.name, now, process is not None)
            )
            job.interrupt(now)
            if process is not None:
                self._worker = None
                process.interrupt(INTERRUPTED)

    def add_span(
        self, stage: str, i: int, chunk: int, kind: SpanKind, start: float, end: float
    ) -> None:
        """Record a span, unless it is empty."""
        if end > start:
            self._trace.spans.append(TraceSpan(self.number, stage, i, chunk, kind, start, end))
