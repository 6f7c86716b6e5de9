"""The queue of jobs that wait in this process until Slurm's limits allow their submission.

A job over MaxSubmitJobs or MaxJobCount would be refused. Here it waits and is submitted, in order,
when an earlier job has ended. A note beside each output (``job.json``) names the submitted job, so
that another process finds it.
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
from launchers.sbatch import new_tag, submit_hetjob, submit_jobs, with_tag
from rlinf.artifacts import MANIFEST, write_atomic
from rlinf.errors import PlanError, RlinfError, SlurmError, SlurmUnresponsiveError
from slurm.client import QueuedJob, SlurmClient
from slurm.job_limits import Quotas, is_queue_full, read_quotas
from slurm.jobs import JOB_NOTE, JobResources, JobStatus, current_job_id, parent_job_id

MIN_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S = 5.0, 300.0
log = logging.getLogger("rlinf")


@dataclass(eq=False)
class PendingSubmission:
    """A job with its Slurm id and the state of its submission."""

    job: JobSpec
    id: str | None = None
    """Slurm's id; None: not submitted yet."""
    was_submitted_before: bool = False
    """True if an earlier process submitted the job."""
    refusal: RlinfError | None = None
    """The error because of which the job will not be submitted."""
    final_status: JobStatus | None = None
    """The final status, if it was decided here and not by Slurm."""
    stuck_since: float | None = None
    last_warning: str = ""
    """The last warning that was logged for the job."""

    def warn_once(self, text: str) -> None:
        """Log a warning unless it equals the last one."""
        if text != self.last_warning:
            self.last_warning = text
            log.warning("%s", text)


@dataclass
class SubmissionQueue:
    """Submits jobs in order, as many as Slurm's limits allow; see the module."""

    client: SlurmClient
    quotas: Quotas | None = None
    """Limits on the number of jobs; queried from Slurm before the first submission if None."""
    visibility_timeout_s: float = 30.0
    """Seconds after an unanswered submission in which its jobs may still appear in the queue."""
    _waiting: list[list[PendingSubmission]] = field(default_factory=list)
    """Units to submit: single jobs, which may form arrays, or jobs that start together."""
    _unknown: list[list[PendingSubmission]] = field(default_factory=list)
    """Units that an earlier process may have submitted."""
    _queue: Mapping[str, QueuedJob] | None = None
    """Slurm's queue at the last query; with the later submissions it gives the free places."""
    _submitted_since: list[JobResources] = field(default_factory=list)
    _unanswered_tag: str | None = None
    """Tag of jobs that may have been submitted."""
    _cancelled_tags: set[str] = field(default_factory=set)
    """Tags of unfinished submissions of an earlier process, which were cancelled."""
    _pause_s: float = MIN_RETRY_PAUSE_S
    _resume: float = 0.0

    def add(self, units: Collection[list[PendingSubmission]]) -> None:
        """Append jobs to the queue, and submit as many as limits allow.

        Pending or running jobs of an earlier process are found by the notes beside their outputs;
        jobs that start together are found only if all of them exist.

        Args:
            units: single jobs, or lists of jobs that start together.

        Raises:
            SlurmUnresponsiveError: Slurm does not answer; the jobs stay in this queue.
        """
        self._waiting += units
        self._unknown += units
        self.submit_ready()

    def discard(self, entries: Collection[PendingSubmission]) -> None:
        """Remove waiting jobs, and those that would start together with them."""
        for units in (self._waiting, self._unknown):
            units[:] = [unit for unit in units if not any(e in entries for e in unit)]

    def submit_ready(self, queue: Mapping[str, QueuedJob] | None = None) -> None:
        """Submit waiting jobs in order, as many as limits allow; see :meth:`add`.

        Args:
            queue: Slurm's queue, if the caller has just queried it.
        """
        looked_for = any(
            read_job_note(entry.job.output_dir) for unit in self._unknown for entry in unit
        )
        if queue is None and (self._queue is None or looked_for):
            queue = self.client.queue()
        if queue is not None:
            self._queue, self._submitted_since = queue, []
        while self._unknown:
            self._adopt_or_cancel(self._unknown[0])
            del self._unknown[0]
        if time.monotonic() >= self._resume and self._unanswered_tag is not None:
            # These jobs could not run, because submitit names their files by the answer.
            self.client.cancel(self.client.find_by_comment(self._unanswered_tag))
            self._unanswered_tag = None
        while self._waiting and time.monotonic() >= self._resume:
            first = self._waiting[0]
            if all((entry.job.output_dir / MANIFEST).exists() for entry in first):
                del self._waiting[0]
                continue
            try:
                room = self._free_places(first)
            except SlurmUnresponsiveError:
                raise
            except RlinfError as error:
                for entry in first:
                    entry.refusal = error
                del self._waiting[0]
                continue
            alike = list(takewhile(partial(_same_array, first), self._waiting)) or [first]
            if not room or not (self._submit(alike[:room]) or self._submit(alike[:1])):
                return

    def _adopt_or_cancel(self, unit: list[PendingSubmission]) -> None:
        """Adopt the existing jobs of a unit, or cancel them if they are not equal to it."""
        notes = [
            (entry, note)
            for entry in unit
            if (note := read_job_note(entry.job.output_dir)) is not None
        ]
        for tag in {note.tag for _, note in notes if note.tag} - self._cancelled_tags:
            # The submitting process died before it got the ids.
            self.client.cancel(self.client.find_by_comment(tag))
            self._cancelled_tags.add(tag)
        there = [(entry, note) for entry, note in notes if is_active_in(self._queue, note.id)]
        alike = {parent_job_id(note.id) for _, note in there if len(unit) > 1}
        if (
            len(there) == len(unit)
            and len(alike) < 2
            and all(n.key == e.job.content_key for e, n in there)
        ):
            for entry, note in there:
                entry.id, entry.was_submitted_before = note.id, True
            self._waiting.remove(unit)
        elif there:
            self.client.cancel([note.id for _, note in there])

    def _free_places(self, unit: Sequence[PendingSubmission]) -> int:
        """Return how many units like this one may be submitted now, at most one array.

        Raises:
            PlanError: the limits never allow a single one.
            SlurmUnresponsiveError: Slurm does not answer.
        """
        if self.quotas is None:
            self.quotas = read_quotas(self.client)
        parts = [part for entry in unit for part in entry.job.components]
        needs = [quota for part in parts for quota in self.quotas.quotas_for(part)]
        room, first = self.quotas.max_array_size, unit[0]
        for quota in dict.fromkeys(needs):
            queue = self._queue or {}
            counted = {identity for identity, job in queue.items() if quota.counts(job)}
            if quota.max_jobs < needs.count(quota) + len(counted & {current_job_id()}):
                raise PlanError(
                    f"{first.job.name}: {quota.description} is {quota.max_jobs}, which "
                    "leaves no place for the jobs of a run; start the driver outside of a job, or "
                    "use another account or QOS"
                )
            occupied = len(counted) + sum(
                quota in self.quotas.quotas_for(other) for other in self._submitted_since
            )
            places = max(quota.max_jobs - occupied, 0) // needs.count(quota)
            if not places:
                first.warn_once(
                    f"{first.job.name} waits to be submitted: {quota.description} is "
                    f"{quota.max_jobs}"
                )
            room = min(room, places)
        return room

    def _submit(self, units: Sequence[list[PendingSubmission]]) -> bool:
        """Submit the first waiting units. Returns False if there are too many jobs now.

        Raises:
            SlurmUnresponsiveError: Slurm does not answer.
        """
        entries = [entry for unit in units for entry in unit]
        submit = submit_hetjob if _heterogeneous(units[0]) else submit_jobs
        tag = new_tag()
        for entry in entries:
            write_job_note(entry.job, tag=tag)
        try:
            ids = submit([with_tag(entry.job, tag) for entry in entries])
        except SlurmUnresponsiveError:
            self._unanswered_tag, self._resume = tag, time.monotonic() + self.visibility_timeout_s
            raise
        except SlurmError as error:
            if is_queue_full(str(error)):
                if len(units) == 1:
                    entries[0].warn_once(f"{entries[0].job.name} waits to be submitted: {error}")
                    self._resume = time.monotonic() + self._pause_s
                    self._pause_s = min(2 * self._pause_s, MAX_RETRY_PAUSE_S)
                return False
            for entry in entries:
                entry.refusal = error
                (entry.job.output_dir / JOB_NOTE).unlink(missing_ok=True)
        else:
            self._pause_s = MIN_RETRY_PAUSE_S
            for entry, identity in zip(entries, ids, strict=True):
                entry.id = identity
                write_job_note(entry.job, identity)
                self._submitted_since += entry.job.components
        del self._waiting[: len(units)]
        return True


def _heterogeneous(unit: Sequence[PendingSubmission]) -> bool:
    return sum(len(entry.job.components) for entry in unit) > 1


def _same_array(unit: Sequence[PendingSubmission], other: Sequence[PendingSubmission]) -> bool:
    """Return True if both units may be elements of one array."""
    if _heterogeneous(unit) or _heterogeneous(other):
        return False
    mine, theirs = unit[0].job, other[0].job
    return mine.resources == theirs.resources and mine.log_dir == theirs.log_dir


@dataclass(frozen=True)
class JobNote:
    """The job that was submitted last for an output."""

    id: str = ""
    """Slurm's id; empty until sbatch has printed it."""
    name: str = ""
    key: str = ""
    tag: str = ""
    """Tag in the comment of a job without a known id; see :func:`launchers.sbatch.with_tag`."""

    def find_ids(self, client: SlurmClient) -> list[str]:
        """Return the job's id, or the ids of queued jobs with its tag if the id is unknown.

        Raises:
            SlurmError: the queue was queried and Slurm does not answer.
        """
        if self.id or not self.tag:
            return [self.id] if self.id else []
        return client.find_by_comment(self.tag)


def read_job_note(out: Path) -> JobNote | None:
    """Read the note beside an output about its last submitted job; None without a valid note."""
    try:
        known = json.loads((out / JOB_NOTE).read_text())
        names = ("id", "name", "key", "tag")
        return JobNote(**{key: str(known[key]) for key in names if key in known})
    except (OSError, ValueError, TypeError):
        return None


def is_active_in(queue: Mapping[str, QueuedJob] | None, identity: str) -> bool:
    """Return True if a job is in a queue and pending or running."""
    status = (queue or {}).get(identity)
    return status is not None and status.state.is_active


def write_job_note(job: JobSpec, identity: str = "", *, tag: str = "") -> None:
    """Write a note beside a job's output for :func:`read_job_note`.

    Before the submission it contains the tag, which finds the job if this process dies, and then
    the id.
    """
    job.output_dir.mkdir(parents=True, exist_ok=True)
    content = {"id": identity, "name": job.name, "key": job.content_key, "submitted": time.time()}
    write_atomic(job.output_dir / JOB_NOTE, json.dumps(content | ({"tag": tag} if tag else {})))
