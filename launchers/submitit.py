"""The Slurm launcher: submits jobs through submitit and polls them itself.

submitit writes the batch script and starts the callable. Its watcher, result files and requeueing
are not used, because they poll rarely, guess time-outs from run times, and restart pickles.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from launchers.launcher import JobSpec, failure_reason
from launchers.submission_queue import (
    SubmissionQueue,
    TrackedJob,
    is_active_in,
    read_submitted_job,
)
from rlinf.artifacts import MANIFEST
from rlinf.errors import EXIT_BAD_INPUT, SlurmError, SlurmUnresponsiveError
from slurm.client import QueuedJob, SlurmClient
from slurm.job_limits import ClusterLimits
from slurm.jobs import JobState, JobStatus, diagnose_pending

log = logging.getLogger("rlinf")


@dataclass
class SubmititLauncher:
    """Launches Slurm jobs through submitit.

    Jobs over Slurm's limits wait in this process and are submitted in order when limits allow
    (:mod:`launchers.submission_queue`).
    """

    client: SlurmClient
    cluster_limits: ClusterLimits | None = None
    """Limits on the number of jobs; queried from Slurm before the first submission if None."""
    unknown_job_timeout_s: float = 20.0
    """Seconds after which a job in neither queue nor accounting counts as vanished."""
    stuck_timeout_s: float = 60.0
    """Seconds after which a job is cancelled if its pending reason never ends by itself. Jobs may
    show such a reason briefly while the controller starts or is reconfigured."""
    hold_timeout_s: float = 900.0
    """Seconds after which a job on hold counts as failed. The job stays in the queue, so that the
    user can release it and resume the run."""
    no_answer_timeout_s: float = 600.0
    """Seconds without an answer from Slurm after which an error is raised."""
    _watched: dict[str, TrackedJob] = field(default_factory=dict)
    """Jobs by the id that :meth:`submit_array` returned, which is called ``name`` here."""
    _last_statuses: dict[str, JobStatus] = field(default_factory=dict)
    """The last known status, by name."""
    _silent_since: float | None = None
    """Time (monotonic) since which Slurm has not answered; None: it answers."""
    _to_cancel: set[str] = field(default_factory=set)
    """Slurm's ids of jobs whose cancellation has not succeeded yet."""
    _missing_since: dict[str, float] = field(default_factory=dict)
    """Time (monotonic) when a job was first not active in the queue, by Slurm's id."""
    _waiting_numbers: count[int] = field(default_factory=count)
    """Numbers for the names of jobs without an id."""

    def __post_init__(self) -> None:
        self._queue = SubmissionQueue(self.client, self.cluster_limits)

    @property
    def poll_interval_s(self) -> float:
        return self.client.poll_interval_s

    def submit(self, job: JobSpec) -> str:
        return self.submit_array([job])[0]

    def submit_array(self, jobs: Sequence[JobSpec]) -> list[str]:
        """See :class:`launchers.launcher.Launcher`; adopts jobs that are still queued or running.

        Returns:
            An id for each job: Slurm's (``12``, ``12_3``), or an id of this launcher if the job
            waits in this process.
        """
        return self._add([[TrackedJob(job)] for job in jobs])

    def submit_hetjob(self, jobs: Sequence[JobSpec]) -> list[str]:
        """See :class:`launchers.launcher.Launcher`; adopts the jobs if all of them still exist.

        Returns:
            An id for each job: Slurm's (``12+0``, ``12+1``), or an id of this launcher if the jobs
            wait in this process.
        """
        return self._add([[TrackedJob(job) for job in jobs]])

    def _add(self, units: list[list[TrackedJob]]) -> list[str]:
        """Watch jobs and return their names; new jobs are submitted when Slurm answers."""
        entries = [entry for unit in units for entry in unit]
        try:
            self._queue.add(units)
        except SlurmUnresponsiveError as error:
            self._tolerate_silence(error)
        for entry in entries:
            if entry.refusal is not None:
                self._drop([entry for entry in entries if not entry.was_submitted_before])
                raise entry.refusal
        names = [entry.id or f"waiting-{next(self._waiting_numbers)}" for entry in entries]
        self._watched.update(zip(names, entries, strict=True))
        return names

    def poll(self, ids: Collection[str]) -> dict[str, JobStatus]:
        """Return the status of jobs, from manifests, then one ``squeue``, then one ``sacct``.

        A job that can never start is cancelled and fails with bad input. A job on hold fails in the
        same way but stays in the queue. While Slurm does not answer, the last known status is
        returned.
        """
        statuses: dict[str, JobStatus] = {}
        for name in ids:
            entry = self._watched[name]
            if (entry.job.output_dir / MANIFEST).exists():
                statuses[name] = JobStatus(JobState.DONE, 0)
            elif entry.final_status is not None:
                statuses[name] = entry.final_status
        if len(statuses) == len(ids):
            return statuses
        remaining = [name for name in ids if name not in statuses]
        try:
            self._cancel([])
            queue = self.client.queue()
            statuses |= self._statuses_from_queue(queue, remaining)
            self._last_statuses.update(statuses)
            self._queue.submit_ready(queue)
            self._silent_since = None
        except SlurmError as error:
            self._tolerate_silence(error)
            pending = JobStatus(JobState.PENDING, None, "Slurm does not answer")
            unanswered = [name for name in remaining if name not in statuses]
            statuses |= {n: self._last_statuses.get(n, pending) for n in unanswered}
        return statuses

    def _tolerate_silence(self, error: SlurmError) -> None:
        """Tolerate that Slurm does not answer, because its controller may be restarting.

        Raises:
            SlurmError: Slurm has not answered for :attr:`no_answer_timeout_s`.
        """
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            log.warning("Slurm does not answer, and is queried again: %s", error)
        if now - self._silent_since > self.no_answer_timeout_s:
            raise error

    def _statuses_from_queue(
        self, queue: Mapping[str, QueuedJob], names: Collection[str]
    ) -> dict[str, JobStatus]:
        """Return statuses from the queue and, for jobs not in it, from accounting."""
        statuses: dict[str, JobStatus] = {}
        ended: dict[str, str] = {}
        for name in names:
            entry = self._watched[name]
            if entry.refusal is not None:
                statuses[name] = JobStatus(
                    JobState.FAILED, entry.refusal.exit_code, str(entry.refusal)
                )
            elif entry.id is None:
                statuses[name] = JobStatus(
                    JobState.PENDING, None, entry.last_warning or "waits behind other jobs"
                )
            elif is_active_in(queue, entry.id):
                statuses[name] = self._check_pending(entry, queue[entry.id])
                self._missing_since.pop(entry.id, None)
            else:
                ended[name] = entry.id
        accounting = self.client.accounting(ended.values()) if ended else {}
        for name, job_id in ended.items():
            entry = self._watched[name]
            statuses[name] = self._final_status(entry, queue.get(job_id), accounting.get(job_id))
        return statuses

    def cancel(self, ids: Collection[str]) -> None:
        self._drop([self._watched[name] for name in ids])

    def cancel_for_outputs(self, output_dirs: Collection[Path]) -> None:
        jobs = [job for out in output_dirs if (job := read_submitted_job(out)) is not None]
        if not jobs:
            return
        try:
            ids = [job_id for job in jobs for job_id in job.find_ids(self.client)]
            queue = self.client.queue()
            self._cancel([job_id for job_id in ids if is_active_in(queue, job_id)])
        except SlurmUnresponsiveError as error:
            self._tolerate_silence(error)

    def close(self) -> None:
        """Retry failed cancellations. Jobs continue; the next driver finds them by job files."""
        try:
            self._cancel([])
        except SlurmError as error:
            ids = " ".join(sorted(self._to_cancel))
            log.warning("jobs could not be cancelled (%s); do it with: scancel %s", error, ids)

    def _cancel(self, ids: Collection[str]) -> None:
        """Cancel jobs, and those whose cancellation failed before."""
        self._to_cancel.update(ids)
        if self._to_cancel:
            self.client.cancel(self._to_cancel)
            self._to_cancel.clear()

    def _drop(self, entries: Sequence[TrackedJob]) -> None:
        """Cancel jobs, including those that wait in this process."""
        self._queue.discard(entries)
        for entry in entries:
            if entry.id is None:
                entry.final_status = JobStatus(
                    JobState.CANCELLED, None, "cancelled before it was submitted"
                )
        try:
            self._cancel([entry.id for entry in entries if entry.id is not None])
        except SlurmUnresponsiveError as error:
            self._tolerate_silence(error)

    def _check_pending(self, entry: TrackedJob, status: JobStatus) -> JobStatus:
        """Return the status of a queued job; fail it if it can never start by itself."""
        problem = (
            diagnose_pending(status.reason, str(entry.id))
            if status.state is JobState.PENDING
            else None
        )
        if problem is None:
            entry.stuck_since = None
            return status
        if entry.stuck_since is None:
            entry.stuck_since = time.monotonic()
        entry.warn_once(
            f"{entry.job.name}: job {entry.id} does not start: {problem.reason}: {problem.advice}"
        )
        patience_s = self.hold_timeout_s if problem.is_on_hold else self.stuck_timeout_s
        if time.monotonic() - entry.stuck_since < patience_s:
            return replace(status, reason=f"{problem.reason}: {problem.advice}")
        outcome = "counts as failed and was left in the queue, where a resumed run finds it"
        if not problem.is_on_hold:
            self._cancel([str(entry.id)])
            outcome = "could never start and was cancelled"
        reason = (
            f"job {entry.id} in partition {status.partition} {outcome}: "
            f"{problem.reason}: {problem.advice}"
        )
        entry.final_status = JobStatus(JobState.FAILED, EXIT_BAD_INPUT, reason, status.partition)
        return entry.final_status

    def _final_status(
        self, entry: TrackedJob, queued: JobStatus | None, accounted: JobStatus | None
    ) -> JobStatus:
        """Return the status of a job that is no longer active in the queue."""
        job_id = str(entry.id)
        if (entry.job.output_dir / MANIFEST).exists():
            return JobStatus(JobState.DONE, 0)
        code, rank = _read_exit_code(entry.job, job_id)
        status = accounted if accounted is not None and not accounted.state.is_active else queued
        if status is None and code is None:
            if self._is_recently_missing(job_id):
                return JobStatus(JobState.RUNNING, None, "no longer in the queue")
            return JobStatus(JobState.VANISHED, None, "neither queue nor accounting knows this job")
        if status is None:
            status = JobStatus(JobState.FAILED if code else JobState.DONE)
        if (
            status.state is JobState.DONE
            and code in (None, 0)
            and self._is_recently_missing(job_id)
        ):
            # The manifest of a successful job may appear late on a network filesystem.
            return JobStatus(JobState.RUNNING, None, "ended; waiting for its manifest")
        if status.state is JobState.CANCELLED or (code is None and "+" not in job_id):
            # Use Slurm's code. A cancelled job may have written another one. For a component of a
            # heterogeneous job, Slurm reports the code of whichever component failed.
            code = status.exit_code
        reason = f"job {job_id} {status.reason or status.state.value}".strip()
        return JobStatus(
            JobState.FAILED if status.state is JobState.DONE else status.state,
            code or None,
            f"{reason}\n{failure_reason(_log(entry.job, job_id, rank), code)}".strip(),
            status.partition,
            status.node,
        )

    def _is_recently_missing(self, job_id: str) -> bool:
        """Return True if a job has been missing for less than :attr:`unknown_job_timeout_s`."""
        since = self._missing_since.setdefault(job_id, time.monotonic())
        return time.monotonic() - since < self.unknown_job_timeout_s


def _read_exit_code(job: JobSpec, job_id: str) -> tuple[int | None, int]:
    """Return the exit code that a job's ranks wrote, and the rank that wrote it."""
    try:
        content = json.loads((job.log_dir / f"{job_id}.exit").read_text())
        return int(content["code"]), int(content["rank"])
    except (OSError, ValueError, KeyError):
        return None, 0


def _log(job: JobSpec, job_id: str, rank: int) -> Path:
    return job.log_dir / f"{job_id}_{rank}_log.err"
