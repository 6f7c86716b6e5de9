"""GPU-hours: for how long the jobs of a run have held GPUs, by partition.

The driver notes at each poll which jobs run. The GPUs of a job count from the first poll that finds
it running to the first that does not, whether its work was kept or not. Slurm's accounting, if the
cluster has one, corrects this after the job has ended. Stages that run in the driver's own
allocation count with the GPUs of that allocation, or of this machine.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from rlinf.artifacts import write_atomic
from rlinf.config import Section, validate
from rlinf.errors import ConfigError, PlanError
from slurm.jobs import (
    JobResources,
    JobState,
    JobStatus,
    current_job_resources,
    is_job_id,
    visible_gpus,
)
from stages.layout import GPU_HOURS_FILE

if TYPE_CHECKING:  # a run in one process needs no launcher
    from launchers.launcher import JobSpec, Launcher

WRITE_INTERVAL_S = 10.0
"""Minimum seconds between two writes of the file while jobs only continue."""
ACCOUNTING_INTERVAL_S = 60.0
"""Minimum seconds between two queries of accounting."""
MAX_LOOKUPS = 3
"""Queries of accounting for an ended job; if it is still unknown then, the polls decide."""
THIS_MACHINE = "this machine"
"""Name of the partition of a driver that runs outside of Slurm jobs."""


class JobUsage(Section, frozen=False):
    """The GPUs that one job has held."""

    gpus: dict[str, int]
    """Number of GPUs by partition."""
    seconds: float = Field(default=0.0, ge=0)
    """Time in closed intervals."""
    running_since: float | None = None
    """Unix time at which the current interval began; None: the job does not run."""
    last_seen: float = 0.0
    """Unix time of the last poll that found the job running."""
    lookups: int = 0
    """Number of queries of Slurm's accounting that did not know the ended job."""

    def close(self, end: float) -> None:
        """End the current interval, if there is one."""
        if self.running_since is not None:
            self.seconds += max(0.0, end - self.running_since)
            self.running_since = None


class _Content(Section):
    ended_gpu_s: dict[str, float] = {}
    """GPU-seconds of the jobs that have ended and are no longer in ``jobs``, by partition."""
    jobs: dict[str, JobUsage] = {}


@dataclass
class GpuHours:
    """The GPU-hours of a run. The driver writes them to a file of the run, and others read it."""

    run: Path
    clock: Callable[[], float] = time.time
    _seen: set[str] = field(default_factory=set)
    """Jobs that this process has seen running."""
    _written_at: float = 0.0

    def __post_init__(self) -> None:
        content = _read_content(self.run)
        self._jobs, self._ended_gpu_s = content.jobs, content.ended_gpu_s

    def observe(self, job_id: str, gpus: Mapping[str, int], *, is_running: bool) -> None:
        """Note whether a job runs. A job that waits again after a preemption does not run.

        Args:
            gpus: number of its GPUs by partition; a job without GPUs is ignored.
        """
        if not sum(gpus.values()):
            return
        now = self.clock()
        usage = self._jobs.setdefault(job_id, JobUsage(gpus=dict(gpus)))
        was_running = usage.running_since is not None
        if is_running:
            usage.last_seen, usage.lookups = now, 0
            if not was_running:
                usage.running_since = now
            self._seen.add(job_id)
        else:
            # A job that an earlier driver started may have ended long ago.
            usage.close(now if job_id in self._seen else usage.last_seen)
        if is_running != was_running or now - self._written_at > WRITE_INTERVAL_S:
            self.write()

    def has(self, job_id: str) -> bool:
        """Return whether a job has held GPUs and is not finally counted."""
        return job_id in self._jobs

    @property
    def unaccounted(self) -> list[str]:
        """Jobs that this process does not see running and that are not finally counted."""
        return [
            job_id
            for job_id, usage in self._jobs.items()
            if usage.running_since is None or job_id not in self._seen
        ]

    def correct(self, seconds: Mapping[str, float]) -> None:
        """Take over how long ended jobs ran, in seconds, as accounting recorded it.

        All :attr:`unaccounted` jobs were looked up. Jobs that stay unknown to accounting count as
        the polls found them.
        """
        job_ids = self.unaccounted
        for job_id in job_ids:
            usage = self._jobs[job_id]
            usage.lookups += 1
            if job_id in seconds or usage.lookups >= MAX_LOOKUPS:
                usage.close(usage.last_seen)
                usage.seconds = max(usage.seconds, seconds.get(job_id, 0.0))
                self._end(job_id)
        if job_ids:
            self.write()

    def _end(self, job_id: str) -> None:
        """Add an ended job to the sums, so that the file does not grow with the run."""
        usage = self._jobs.pop(job_id)
        self._seen.discard(job_id)
        for partition, count in usage.gpus.items():
            gpu_s = self._ended_gpu_s.get(partition, 0.0) + count * usage.seconds
            self._ended_gpu_s[partition] = gpu_s

    def write(self) -> None:
        """Write the file of the run."""
        self._written_at = self.clock()
        content = _Content(ended_gpu_s=self._ended_gpu_s, jobs=self._jobs)
        write_atomic(self.run / GPU_HOURS_FILE, json.dumps(content.model_dump(mode="json")))

    @property
    def total(self) -> float:
        """GPU-hours until now."""
        content = _Content(ended_gpu_s=self._ended_gpu_s, jobs=self._jobs)
        return sum(_sum_by_partition(content, self._seen, self.clock()).values())


def read_gpu_hours(run: Path) -> dict[str, float]:
    """Return the GPU-hours of a run by partition, from its file; empty if it held no GPUs.

    Raises:
        ConfigError: the file is damaged.
    """
    return _sum_by_partition(_read_content(run))


def format_gpu_hours(by_partition: Mapping[str, float], limit: float | None = None) -> str:
    """Return GPU-hours as text: the sum, the budget if there is one, and each partition."""
    text = f"{sum(by_partition.values()):.3g}" + (f" of {limit:.3g}" if limit else "")
    parts = [f"{name or 'default partition'} {hours:.3g}" for name, hours in by_partition.items()]
    return f"{text} ({', '.join(sorted(parts))})" if parts else text


def _read_content(run: Path) -> _Content:
    path = run / GPU_HOURS_FILE
    try:
        return validate(_Content, json.loads(path.read_text()))
    except FileNotFoundError:
        return _Content()
    except (ValueError, ConfigError) as error:
        raise ConfigError(
            f"{path}: {error}; move the file away: the GPU-hours then count from zero"
        ) from None


def _sum_by_partition(
    content: _Content, running: Collection[str] = (), now: float = 0.0
) -> dict[str, float]:
    """Return GPU-hours by partition.

    Args:
        running: jobs whose current interval counts until ``now``, not until they were last seen.
    """
    hours = defaultdict[str, float](float)
    for partition, gpu_s in content.ended_gpu_s.items():
        hours[partition] = gpu_s / 3600
    for job_id, usage in content.jobs.items():
        seconds = usage.seconds
        if usage.running_since is not None:
            seconds += (now if job_id in running else usage.last_seen) - usage.running_since
        for partition, count in usage.gpus.items():
            hours[partition] += count * seconds / 3600
    return {partition: amount for partition, amount in hours.items() if amount}


def driver_gpus(launcher: str) -> dict[str, int]:
    """Return the GPUs that a driver holds itself, by partition.

    They are those of the driver's Slurm job. Outside of jobs they are this machine's, if the stages
    run here (a launcher other than ``slurm``).
    """
    job = current_job_resources()
    if job is not None:
        return {job.partition or "": job.nodes * job.gpus_per_node}
    if launcher == "slurm":
        return {}
    return {THIS_MACHINE: len(visible_gpus())}


def _gpus_of_job(components: Sequence[JobResources], partition: str) -> dict[str, int]:
    """Return a job's GPUs by partition.

    Args:
        partition: where the job runs, if it has a single component; it may have named several.
    """
    gpus = Counter[str]()
    for component in components:
        name = partition if partition and len(components) == 1 else component.partition or ""
        gpus[name] += component.nodes * component.gpus_per_node
    return dict(gpus)


@dataclass
class MeteredLauncher:
    """A launcher that notes the GPU-hours of the jobs of another launcher."""

    launcher: Launcher
    gpu_hours: GpuHours
    elapsed_s: Callable[[Collection[str]], Mapping[str, float]]
    """Returns how long jobs ran that have ended, seconds, as far as accounting knows them."""
    _components: dict[str, tuple[JobResources, ...]] = field(default_factory=dict)
    _started_at: float = field(default_factory=time.time)
    _accounted_at: float = field(default_factory=time.monotonic)

    @property
    def poll_interval_s(self) -> float:
        return self.launcher.poll_interval_s

    def submit(self, job: JobSpec) -> str:
        return self._note([job], [self.launcher.submit(job)])[0]

    def submit_array(self, jobs: Sequence[JobSpec]) -> list[str]:
        return self._note(jobs, self.launcher.submit_array(jobs))

    def submit_hetjob(self, jobs: Sequence[JobSpec]) -> list[str]:
        return self._note(jobs, self.launcher.submit_hetjob(jobs))

    def poll(self, ids: Collection[str]) -> dict[str, JobStatus]:
        statuses = self.launcher.poll(ids)
        for job_id, status in statuses.items():
            key, is_running = self._key(job_id), status.state is JobState.RUNNING
            if status.state is not JobState.PENDING or self.gpu_hours.has(key):
                gpus = _gpus_of_job(self._components[job_id], status.partition)
                self.gpu_hours.observe(key, gpus, is_running=is_running)
        if time.monotonic() - self._accounted_at > ACCOUNTING_INTERVAL_S:
            self._query_accounting()
        return statuses

    def cancel(self, ids: Collection[str]) -> None:
        self.launcher.cancel(ids)
        for job_id in ids:
            gpus = _gpus_of_job(self._components.get(job_id, ()), "")
            self.gpu_hours.observe(self._key(job_id), gpus, is_running=False)

    def cancel_for_outputs(self, output_dirs: Collection[Path]) -> None:
        self.launcher.cancel_for_outputs(output_dirs)

    def close(self) -> None:
        self.launcher.close()
        self._query_accounting()

    def _key(self, job_id: str) -> str:
        """Return an id that no other driver of the run gives to another job."""
        return job_id if is_job_id(job_id) else f"{job_id} of {self._started_at:.3f}"

    def _note(self, jobs: Sequence[JobSpec], ids: list[str]) -> list[str]:
        self._components.update(
            {job_id: job.components for job_id, job in zip(ids, jobs, strict=True)}
        )
        return ids

    def _query_accounting(self) -> None:
        self._accounted_at = time.monotonic()
        if job_ids := self.gpu_hours.unaccounted:
            self.gpu_hours.correct(self.elapsed_s(job_ids))


@dataclass
class GpuBudget:
    """Decides which iterations may begin and which stages may start within ``budget.gpu_hours``.

    Stages that run are not cancelled, so that nothing is lost; the run may exceed its budget by
    them.
    """

    gpu_hours: GpuHours
    limit: float | None = None
    """GPU-hours; None: no limit."""
    driver_gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs that this process holds as long as it drives the run, by partition."""

    def __post_init__(self) -> None:
        self._driver_key = f"driver of {self.gpu_hours.clock():.3f}"

    def is_used_up(self) -> bool:
        """Return whether no further stage may start."""
        self.gpu_hours.observe(self._driver_key, self.driver_gpus, is_running=True)
        return self.limit is not None and self.gpu_hours.total >= self.limit

    def allows(self, num_iterations: int, num_finished: int) -> bool:
        """Return whether further iterations fit, at the mean GPU-hours of the finished ones.

        Args:
            num_iterations: number of iterations to finish from now on.
            num_finished: number of finished iterations, on which all GPU-hours were spent.
        """
        if self.limit is None:
            return True
        used = self.gpu_hours.total
        mean = used / num_finished if num_finished else 0.0
        return used < self.limit and used + num_iterations * mean <= self.limit

    def close(self) -> None:
        """Note that this process no longer drives the run."""
        self.gpu_hours.observe(self._driver_key, self.driver_gpus, is_running=False)

    def describe(self) -> str:
        """Return how much of the budget is used, as text."""
        limit = "" if self.limit is None else f" of {self.limit:.3g}"
        return f"{self.gpu_hours.total:.3g}{limit} GPU-hours are used"


def check_budget(limit: float | None, launcher: str, jobs: Collection[JobResources]) -> None:
    """Check that a budget can have an effect.

    Args:
        limit: ``budget.gpu_hours``; None: there is none.
        launcher: ``cluster.launcher``.
        jobs: resources of the jobs of the plan, for Slurm.

    Raises:
        PlanError: the run holds no GPU, so that the budget would never end it.
    """
    has_gpus = any(job.gpus_per_node for job in jobs)
    if limit is None or has_gpus or any(driver_gpus(launcher).values()):
        return
    why = (
        "no job of its plan has a GPU: set gpus in the plan"
        if launcher == "slurm"
        else f"cluster={launcher} runs all stages here, where there is no GPU: add cluster=slurm"
    )
    raise PlanError(
        f"budget.gpu_hours={limit:g} would never end this run, because {why}, or leave the budget "
        "out"
    )
