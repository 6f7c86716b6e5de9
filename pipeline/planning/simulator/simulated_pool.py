"""A simulated pool: jobs that wait, start, are interrupted or reach their limit, and their work."""

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
"""Cause of the interrupt that the working process receives."""
MAX_RENEWALS = 10_000
"""Maximum renewals of jobs in a row without work between them."""
MAX_SPEED_CHANGES = 100_000
"""Maximum speed changes of a pool during one micro-batch."""
MAX_INTERRUPTIONS = 1000
"""Maximum interruptions in a row of one micro-batch."""


class StragglerSpeed:
    """The speed of a pool over time: 1, or less while some of its GPUs are slow.

    Times of calls must not decrease.
    """

    def __init__(self, model: Stragglers | None, gpus: int, rng: np.random.Generator) -> None:
        self._model, self._gpus, self._rng = model, gpus, rng
        self._ends: list[float] = []
        self._next = self._gap(0.0) if model else math.inf

    def _gap(self, now: float) -> float:
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
            while self._next <= now:
                end = self._next + float(self._rng.exponential(self._model.mean_s))
                heapq.heappush(self._ends, end)
                self._next = self._gap(self._next)
            while self._ends and self._ends[0] <= now:
                heapq.heappop(self._ends)
            slow = len(self._ends)
            if balanced:
                pace = 1 - min(1.0, slow / self._gpus) * (1 - 1 / self._model.factor)
            else:
                pace = 1 / self._model.factor if slow else 1.0
            until = min(self._next, self._ends[0] if self._ends else math.inf)
            if seconds <= pace * (until - now):
                return now + seconds / pace
            seconds -= pace * (until - now)
            now = until
        raise PlanError(
            f"stragglers.per_gpu_hour: {self._model.per_gpu_hour:g} makes {self._gpus} GPUs slow "
            f"more than {MAX_SPEED_CHANGES:,} times during one micro-batch; lower it"
        )


class SimulatedJob:
    """A sequence of Slurm jobs that allocate a pool's GPUs of one kind."""

    def __init__(self, pool: int, kind: GpuKind, gpus: int, scenario: Scenario, seed: int, k: int):
        self.pool, self.kind, self.gpus = pool, kind, gpus
        self._scenario = scenario
        self._waits = random_generator(seed, "waits", pool, k)
        self.losses = random_generator(seed, "losses", pool, k)
        self.allocated_since = self.wait()
        self.up_at = self.allocated_since + scenario.startup_s
        """Time at which it can work (again)."""
        self.allocations: list[GpuAllocation] = []

    def wait(self) -> float:
        """Return the seconds in the queue."""
        queue = self._scenario.queue
        expected = float(self.kind.queue_wait_s(np.array(self.gpus)))
        if queue is None or not expected:
            return 0.0
        if queue.spread == "none":
            return expected
        return float(self._waits.exponential(expected))

    @property
    def lease_end(self) -> float:
        """The end of the job by its time limit."""
        walltime = self._scenario.walltime
        return math.inf if walltime is None else self.allocated_since + walltime.limit_s

    def close(self, now: float) -> None:
        """End the job, or record its end at the time limit."""
        end = min(now, self.lease_end)
        if end > self.allocated_since:
            self.allocations.append(
                GpuAllocation(self.pool, self.kind.name, self.gpus, self.allocated_since, end)
            )

    def lose(self, now: float) -> None:
        """Interrupt the job, which then waits in the queue again."""
        self.close(now)
        self.allocated_since = now + self.wait()
        self.up_at = self.allocated_since + self._scenario.startup_s

    def renew(self, now: float) -> None:
        """Replace the job by the next one, which may have been submitted before."""
        walltime = self._scenario.walltime
        assert walltime is not None
        submitted = max(self.allocated_since, min(now, self.lease_end - walltime.lead_s))
        started = submitted + self.wait()
        ready = started + self._scenario.startup_s
        if walltime.lead_s:
            # The old job stays until the new one can work, but not beyond its limit.
            self.close(max(now, ready))
        else:
            self.close(now)
        self.allocated_since, self.up_at = started, ready


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
        lost: Callable[[], None],
    ) -> None:
        self._env, self.number, self._scenario, self._trace = env, number, scenario, trace
        self._lost = lost
        self.jobs = [
            SimulatedJob(number, kind, n, scenario, seed, k)
            for k, (kind, n) in enumerate(zip(kinds, gpus, strict=True))
            if n
        ]
        self.turn = simpy.Resource(env)
        """Held by the working process, if several compete (the halves of a cycle)."""
        total = sum(job.gpus for job in self.jobs)
        self._pace = StragglerSpeed(
            scenario.stragglers, total, random_generator(seed, "stragglers", number)
        )
        self._balanced = scenario.stragglers.balanced if scenario.stragglers else frozenset()
        self._at_work: simpy.Process | None = None
        if scenario.losses is not None:
            for job in self.jobs:
                rate = scenario.losses.per_hour.get(job.kind.name, job.kind.interruptions_per_hour)
                if rate:
                    env.process(self._losses(job, 3600 / rate))

    def start(self) -> Process:
        """Wait for the jobs to start."""
        up = max(job.up_at for job in self.jobs)
        if up > self._env.now:
            self.add_span("", 0, 0, "queue", self._env.now, up)
            yield self._env.timeout(up - self._env.now)

    def close(self) -> list[GpuAllocation]:
        """End all jobs, and return their allocations."""
        for job in self.jobs:
            job.close(self._env.now)
        return [hold for job in self.jobs for hold in job.allocations]

    def work(
        self,
        seconds: float,
        stage: str,
        iteration: int,
        micro_batch: int = 0,
        kind: SpanKind | None = "work",
        beside: Sequence[SimulatedPool] = (),
    ) -> Process:
        """Do work that takes ``seconds`` at full speed, again if it is interrupted, and return its
        seconds.

        If ``kind`` is None, the caller records the span. Pools in ``beside`` work on it too.

        Raises:
            PlanError: the work takes longer than a lease, or is interrupted too often.
        """
        every, losses = (self, *beside), 0
        while seconds > 0:
            for pool in every:
                yield from pool._available(seconds, stage, iteration)
            start, balanced = self._env.now, stage in self._balanced
            end = max(pool._pace.finish(start, seconds, balanced=balanced) for pool in every)
            for pool in every:
                pool._at_work = self._env.active_process
            try:
                yield self._env.timeout(end - start)
            except simpy.Interrupt as interrupt:
                self.add_span(stage, iteration, micro_batch, "redone", start, self._env.now)
                if interrupt.cause != INTERRUPTED:
                    raise
                self._lost()
                losses += 1
                if losses == MAX_INTERRUPTIONS:
                    raise PlanError(
                        f"losses: a micro-batch of stage {stage!r}, {seconds:.3g} s, was lost "
                        f"{losses} times in a row and would never end; lower losses.per_hour, or "
                        "use more micro-batches"
                    ) from None
                continue
            finally:
                for pool in every:
                    pool._at_work = None
            if kind is not None:
                for pool in every:
                    pool.add_span(stage, iteration, micro_batch, kind, start, end)
            return end - start
        return 0.0

    def _available(self, seconds: float, stage: str, iteration: int) -> Process:
        """Wait until all jobs run and their leases last for ``seconds``."""
        walltime = self._scenario.walltime
        if walltime and seconds > walltime.limit_s - self._scenario.startup_s:
            raise PlanError(
                f"stage {stage!r}: a micro-batch takes {seconds:.0f} s on pool {self.number}, more "
                f"than a job of {walltime.limit_s:.0f} s; use more micro-batches or longer jobs"
            )
        since, renewals = self._env.now, 0
        while True:
            now = self._env.now
            up = max(job.up_at for job in self.jobs)
            if up > now:
                yield self._env.timeout(up - now)
                continue
            short = [job for job in self.jobs if now + seconds > job.lease_end]
            if not short:
                break
            for job in short:
                job.renew(now)
                self._trace.renewals += 1
            renewals += 1
            if renewals == MAX_RENEWALS:
                raise PlanError(
                    f"stage {stage!r}: the jobs of pool {self.number} wait so long and last so "
                    "short that they hardly ever run together; use longer jobs or GPUs of one kind"
                )
        self.add_span(stage, iteration, 0, "down", since, self._env.now)

    def _losses(self, job: SimulatedJob, mean_s: float) -> Process:
        while True:
            yield self._env.timeout(float(job.losses.exponential(mean_s)))
            now, process = self._env.now, self._at_work
            if not job.allocated_since <= now < job.lease_end:
                continue
            self._trace.interruptions.append(
                JobInterruption(self.number, job.kind.name, now, process is not None)
            )
            job.lose(now)
            if process is not None:
                self._at_work = None
                process.interrupt(INTERRUPTED)

    def add_span(
        self, stage: str, i: int, micro_batch: int, kind: SpanKind, start: float, end: float
    ) -> None:
        """Record a span, unless it is empty."""
        if end > start:
            self._trace.spans.append(
                TraceSpan(self.number, stage, i, micro_batch, kind, start, end)
            )
