"""The queue of jobs that wait in this process until Slurm's limits allow their submission.

Slurm would refuse a job over MaxSubmitJobs or MaxJobCount. Such a job waits in this queue, in
order, until an earlier job has ended. A unit is what must be submitted together: a single job, or
the jobs of one heterogeneous job. A file beside each output (``job.json``) names the submitted job,
so that another process finds the job.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path

from launchers.launcher import JobSpec
from launchers.sbatch import new_tag, submit_hetjob, submit_jobs
from rlinf.artifacts import MANIFEST, write_atomic
from rlinf.errors import PlanError, RlinfError, SlurmError, SlurmUnresponsiveError
from slurm.client import SlurmClient
from slurm.job_limits import ClusterLimits, is_queue_full, read_cluster_limits
from slurm.jobs import JOB_FILE, JobResources, JobStatus, current_job_id, parent_job_id
from slurm.records import QueuedJob

MIN_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S = 5.0, 300.0
"""First and longest pause after Slurm refused a unit for too many jobs; it doubles each time."""
log = logging.getLogger("rlinf")


@dataclass(eq=False)
class TrackedJob:
    """A job from before its submission to its end, with its Slurm id."""

    job: JobSpec
    id: str | None = None
    """Slurm's id; None: not submitted yet."""
    was_submitted_before: bool = False
    """True if an earlier process submitted the job."""
    refusal: RlinfError | None = None
    """The error that prevents the submission of the job."""
    final_status: JobStatus | None = None
    """The final status, if this program and not Slurm set it."""
    stuck_since: float | None = None
    """Time (monotonic) when the job first had a pending reason that never ends by itself; None: it
    has none."""
    last_warning: str = ""
    """The last warning that was logged for the job."""

    def warn_once(self, text: str) -> None:
        """Log a warning unless it equals the last one."""
        if text != self.last_warning:
            self.last_warning = text
            log.warning("%s", text)


@dataclass
class SubmissionQueue:
    """Submits jobs in order, as many as Slurm's limits allow; see the module's docstring."""

    client: SlurmClient
    cluster_limits: ClusterLimits | None = None
    """Limits on the number of jobs; queried from Slurm before the first submission if None."""
    visibility_timeout_s: float = 30.0
    """Seconds after a submission that sbatch did not answer, during which its jobs may yet appear
    in Slurm's queue."""
    _waiting: list[list[TrackedJob]] = field(default_factory=list)
    """Units to submit, in order. Several units of a single job may become one array."""
    _unchecked: list[list[TrackedJob]] = field(default_factory=list)
    """Units that an earlier process may have submitted."""
    _slurm_queue: Mapping[str, QueuedJob] | None = None
    """Slurm's queue at the last query."""
    _submitted_since: list[JobResources] = field(default_factory=list)
    """The components of the jobs that were submitted since that query."""
    _unanswered_tag: str | None = None
    """Tag of the submission that sbatch did not answer: its jobs may exist."""
    _cancelled_tags: set[str] = field(default_factory=set)
    """Tags of unfinished submissions of an earlier process, which were cancelled."""
    _pause_s: float = MIN_RETRY_PAUSE_S
    """Seconds of the next pause after a refusal for too many jobs."""
    _retry_at: float = 0.0
    """Time (monotonic) before which nothing is submitted."""

    def add(self, units: Collection[list[TrackedJob]]) -> None:
        """Append units to the queue, and submit as many as limits allow.

        Pending or running jobs of an earlier process are found by the files beside their outputs,
        and adopted. The jobs of a unit are adopted only if all of them exist.

        Raises:
            SlurmUnresponsiveError: Slurm does not answer; the jobs stay in this queue.
        """
        self._waiting += units
        self._unchecked += units
        self.submit_ready()

    def discard(self, entries: Collection[TrackedJob]) -> None:
        """Remove waiting jobs with their whole units."""
        for units in (self._waiting, self._unchecked):
            units[:] = [unit for unit in units if not any(e in entries for e in unit)]

    def submit_ready(self, queue: Mapping[str, QueuedJob] | None = None) -> None:
        """Submit waiting units in order, as many as limits allow; see :meth:`add`.

        Args:
            queue: Slurm's queue, if the caller has just queried it.
        """
        may_exist = any(
            read_submitted_job(entry.job.output_dir) for unit in self._unchecked for entry in unit
        )
        if queue is None and (self._slurm_queue is None or may_exist):
            queue = self.client.queue()
        if queue is not None:
            self._slurm_queue, self._submitted_since = queue, []
        while self._unchecked:
            self._adopt_or_cancel(self._unchecked[0])
            del self._unchecked[0]
        if time.monotonic() >= self._retry_at and self._unanswered_tag is not None:
            # Its jobs are submitted again, so that their ids are known.
            self.client.cancel(self.client.find_by_comment(self._unanswered_tag))
            self._unanswered_tag = None
        while self._waiting and time.monotonic() >= self._retry_at:
            first = self._waiting[0]
            if all((entry.job.output_dir / MANIFEST).exists() for entry in first):
                del self._waiting[0]
                continue
            try:
                places = self._free_places(first)
            except SlurmUnresponsiveError:
                raise
            except RlinfError as error:
                for entry in first:
                    entry.refusal = error
                del self._waiting[0]
                continue
            array = list(takewhile(partial(_same_array, first), self._waiting)) or [first]
            if not places or not (self._submit(array[:places]) or self._submit(array[:1])):
                return

    def _adopt_or_cancel(self, unit: list[TrackedJob]) -> None:
        """Adopt the existing jobs of a unit, or cancel them if they differ from it."""
        earlier_jobs = [
            (entry, job)
            for entry in unit
            if (job := read_submitted_job(entry.job.output_dir)) is not None
        ]
        for tag in {job.tag for _, job in earlier_jobs if job.tag} - self._cancelled_tags:
            # The submitting process died before it got the ids.
            self.client.cancel(self.client.find_by_comment(tag))
            self._cancelled_tags.add(tag)
        active = [
            (entry, job) for entry, job in earlier_jobs if is_active_in(self._slurm_queue, job.id)
        ]
        parent_ids = {parent_job_id(job.id) for _, job in active if len(unit) > 1}
        if (
            len(active) == len(unit)
            and len(parent_ids) < 2
            and all(job.key == e.job.content_key for e, job in active)
        ):
            for entry, job in active:
                entry.id, entry.was_submitted_before = job.id, True
            self._waiting.remove(unit)
        elif active:
            self.client.cancel([job.id for _, job in active])

    def _free_places(self, unit: Sequence[TrackedJob]) -> int:
        """Return how many such units may be submitted now, at most as many as fit an array.

        Raises:
            PlanError: the limits never allow even one unit.
            SlurmUnresponsiveError: Slurm does not answer.
        """
        if self.cluster_limits is None:
            self.cluster_limits = read_cluster_limits(self.client)
        components = [component for entry in unit for component in entry.job.components]
        # A limit occurs once for each component that counts against it.
        limits = [
            limit
            for component in components
            for limit in self.cluster_limits.job_count_limits(component)
        ]
        free_places, first = self.cluster_limits.max_array_size, unit[0]
        for limit in dict.fromkeys(limits):
            queue = self._slurm_queue or {}
            counted_ids = {job_id for job_id, job in queue.items() if limit.counts(job)}
            if limit.max_jobs < limits.count(limit) + len(counted_ids & {current_job_id()}):
                raise PlanError(
                    f"{first.job.name}: {limit.description} is {limit.max_jobs}, which "
                    "leaves no place for the jobs of a run; start the driver outside of a job, or "
                    "use another account or QOS"
                )
            occupied = len(counted_ids) + sum(
                limit in self.cluster_limits.job_count_limits(other)
                for other in self._submitted_since
            )
            places = max(limit.max_jobs - occupied, 0) // limits.count(limit)
            if not places:
                first.warn_once(
                    f"{first.job.name} waits to be submitted: {limit.description} is "
                    f"{limit.max_jobs}"
                )
            free_places = min(free_places, places)
        return free_places

    def _submit(self, units: Sequence[list[TrackedJob]]) -> bool:
        """Submit the first waiting units. Returns False if there are too many jobs now.

        Raises:
            SlurmUnresponsiveError: Slurm does not answer.
        """
        entries = [entry for unit in units for entry in unit]
        submit = submit_hetjob if _is_heterogeneous(units[0]) else submit_jobs
        tag = new_tag()
        for entry in entries:
            write_submitted_job(entry.job, tag=tag)
        try:
            ids = submit([entry.job for entry in entries], tag)
        except SlurmUnresponsiveError:
            self._unanswered_tag, self._retry_at = tag, time.monotonic() + self.visibility_timeout_s
            raise
        except SlurmError as error:
            if is_queue_full(str(error)):
                if len(units) == 1:
                    entries[0].warn_once(f"{entries[0].job.name} waits to be submitted: {error}")
                    self._retry_at = time.monotonic() + self._pause_s
                    self._pause_s = min(2 * self._pause_s, MAX_RETRY_PAUSE_S)
                return False
            for entry in entries:
                entry.refusal = error
                (entry.job.output_dir / JOB_FILE).unlink(missing_ok=True)
        else:
            self._pause_s = MIN_RETRY_PAUSE_S
            for entry, job_id in zip(entries, ids, strict=True):
                entry.id = job_id
                write_submitted_job(entry.job, job_id)
                self._submitted_since += entry.job.components
        del self._waiting[: len(units)]
        return True


def _is_heterogeneous(unit: Sequence[TrackedJob]) -> bool:
    return sum(len(entry.job.components) for entry in unit) > 1


def _same_array(unit: Sequence[TrackedJob], other: Sequence[TrackedJob]) -> bool:
    """Return True if both units may be elements of one array."""
    if _is_heterogeneous(unit) or _is_heterogeneous(other):
        return False
    job, other_job = unit[0].job, other[0].job
    return job.resources == other_job.resources and job.log_dir == other_job.log_dir


@dataclass(frozen=True)
class SubmittedJob:
    """The job that was last submitted for an output, as its job file describes it."""

    id: str = ""
    """Slurm's id; empty until sbatch has printed it."""
    name: str = ""
    key: str = ""
    """See :attr:`launchers.launcher.JobSpec.content_key`."""
    tag: str = ""
    """Tag in the comment of a job without a known id; see :func:`launchers.sbatch.submit_jobs`."""

    def find_ids(self, client: SlurmClient) -> list[str]:
        """Return the job's id, or the ids of queued jobs with its tag if the id is unknown.

        Raises:
            SlurmError: the queue was queried and Slurm does not answer.
        """
        if self.id or not self.tag:
            return [self.id] if self.id else []
        return client.find_by_comment(self.tag)


def read_submitted_job(out: Path) -> SubmittedJob | None:
    """Read the job file beside an output; None without a valid file."""
    try:
        content = json.loads((out / JOB_FILE).read_text())
        keys = ("id", "name", "key", "tag")
        return SubmittedJob(**{key: str(content[key]) for key in keys if key in content})
    except (OSError, ValueError, TypeError):
        return None


def is_active_in(queue: Mapping[str, QueuedJob] | None, job_id: str) -> bool:
    """Return True if a job is in a queue and pending or running."""
    status = (queue or {}).get(job_id)
    return status is not None and status.state.is_active


def write_submitted_job(job: JobSpec, job_id: str = "", *, tag: str = "") -> None:
    """Write the job file beside a job's output for :func:`read_submitted_job`.

    Before the submission it contains the tag, by which the job is found if this process dies.
    After the submission it contains the id.
    """
    job.output_dir.mkdir(parents=True, exist_ok=True)
    content = {"id": job_id, "name": job.name, "key": job.content_key, "submitted": time.time()}
    write_atomic(job.output_dir / JOB_FILE, json.dumps(content | ({"tag": tag} if tag else {})))
