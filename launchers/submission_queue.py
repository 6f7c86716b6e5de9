"""Jobs that wait in this process until Slurm's limits leave a place for them.

A job over MaxSubmitJobs or MaxJobCount would be refused; here it is submitted, in order, when one
that was before it has ended.
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
from slurm.jobs import JobResources, JobStatus, current_job_id, parent_job_id

JOB_NOTE = "job.json"
MIN_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S = 5.0, 300.0
log = logging.getLogger("rlinf")


@dataclass(eq=False)
class PendingSubmission:
    """A job, and what became of it."""

    job: JobSpec
    id: str | None = None
    """Slurm's; None: not submitted yet."""
    was_submitted_before: bool = False
    """Whether an earlier process had submitted it."""
    refusal: RlinfError | None = None
    """Why it will not be submitted."""
    final_status: JobStatus | None = None
    """How it ended, where that was decided here and not by Slurm."""
    stuck_since: float | None = None
    last_warning: str = ""
    """The last thing logged of it."""

    def warn_once(self, text: str) -> None:
        """Log what has not just been logged."""
        if text != self.last_warning:
            self.last_warning = text
            log.warning("%s", text)


@dataclass
class SubmissionQueue:
    """See the module."""

    client: SlurmClient
    quotas: Quotas | None = None
    """Limits on the number of jobs; asked of Slurm before the first submission when not given."""
    visibility_timeout_s: float = 30.0
    """How long after a submission that was not answered its jobs may come into the queue."""
    _waiting: list[list[PendingSubmission]] = field(default_factory=list)
    """Jobs to be submitted on their own or in arrays, and several that start together."""
    _unknown: list[list[PendingSubmission]] = field(default_factory=list)
    """Those of them that an earlier process may have submitted."""
    _queue: Mapping[str, QueuedJob] | None = None
    """At the last look. With what was submitted since, it tells how much room there is."""
    _since: list[JobResources] = field(default_factory=list)
    _unanswered: str | None = None
    """Mark of jobs that may have been submitted."""
    _withdrawn: set[str] = field(default_factory=set)
    """Marks of submissions that a process before did not see to their end."""
    _pause_s: float = MIN_RETRY_PAUSE_S
    _resume: float = 0.0

    def add(self, units: Collection[list[PendingSubmission]]) -> None:
        """Let jobs wait behind the others, and submit what there is room for.

        Jobs that an earlier process submitted, and that wait or run, are found again by the notes
        beside their outputs; those that start together where all of them are there.

        Args:
            units: jobs, each by itself or with those that start together with it.

        Raises:
            SlurmUnresponsiveError: no answer; they wait.
        """
        self._waiting += units
        self._unknown += units
        self.submit_ready()

    def discard(self, entries: Collection[PendingSubmission]) -> None:
        """Forget jobs that wait here, and those that would start together with them."""
        for units in (self._waiting, self._unknown):
            units[:] = [unit for unit in units if not any(e in entries for e in unit)]

    def submit_ready(self, queue: Mapping[str, QueuedJob] | None = None) -> None:
        """Submit of those waiting, in order, as many as limits allow; see :meth:`add`.

        Args:
            queue: what Slurm's queue was found to be just now, where it was asked.
        """
        looked_for = any(
            read_job_note(entry.job.output_dir) for unit in self._unknown for entry in unit
        )
        if queue is None and (self._queue is None or looked_for):
            queue = self.client.queue()
        if queue is not None:
            self._queue, self._since = queue, []
        while self._unknown:
            self._find(self._unknown[0])
            del self._unknown[0]
        if time.monotonic() >= self._resume and self._unanswered is not None:
            # They could not run: submitit names their files by the answer.
            self.client.cancel(self.client.find_by_comment(self._unanswered))
            self._unanswered = None
        while self._waiting and time.monotonic() >= self._resume:
            first = self._waiting[0]
            if all((entry.job.output_dir / MANIFEST).exists() for entry in first):
                del self._waiting[0]
                continue
            try:
                room = self._room(first)
            except SlurmUnresponsiveError:
                raise
            except RlinfError as error:
                for entry in first:
                    entry.refusal = error
                del self._waiting[0]
                continue
            alike = list(takewhile(partial(_alike, first), self._waiting)) or [first]
            if not room or not (self._start(alike[:room]) or self._start(alike[:1])):
                return

    def _find(self, unit: list[PendingSubmission]) -> None:
        """Take up jobs that are there already; cancel those that are not what is wanted."""
        notes = [
            (entry, note)
            for entry in unit
            if (note := read_job_note(entry.job.output_dir)) is not None
        ]
        for mark in {note.mark for _, note in notes if note.mark} - self._withdrawn:
            # Its submitter died before it had the ids.
            self.client.cancel(self.client.find_by_comment(mark))
            self._withdrawn.add(mark)
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

    def _room(self, unit: Sequence[PendingSubmission]) -> int:
        """How many units like this one may be submitted now, as one array at most.

        Raises:
            PlanError: not even one, however long it waits.
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
                quota in self.quotas.quotas_for(other) for other in self._since
            )
            places = max(quota.max_jobs - occupied, 0) // needs.count(quota)
            if not places:
                first.warn_once(
                    f"{first.job.name} waits to be submitted: {quota.description} is "
                    f"{quota.max_jobs}"
                )
            room = min(room, places)
        return room

    def _start(self, units: Sequence[list[PendingSubmission]]) -> bool:
        """Submit the first of those waiting; False when there are too many jobs for now.

        Raises:
            SlurmUnresponsiveError: no answer.
        """
        entries = [entry for unit in units for entry in unit]
        submit = submit_hetjob if _heterogeneous(units[0]) else submit_jobs
        mark = new_tag()
        for entry in entries:
            write_job_note(entry.job, mark=mark)
        try:
            ids = submit([with_tag(entry.job, mark) for entry in entries])
        except SlurmUnresponsiveError:
            self._unanswered, self._resume = mark, time.monotonic() + self.visibility_timeout_s
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
                self._since += entry.job.components
        del self._waiting[: len(units)]
        return True


def _heterogeneous(unit: Sequence[PendingSubmission]) -> bool:
    return sum(len(entry.job.components) for entry in unit) > 1


def _alike(unit: Sequence[PendingSubmission], other: Sequence[PendingSubmission]) -> bool:
    """Whether both may be elements of one array."""
    if _heterogeneous(unit) or _heterogeneous(other):
        return False
    mine, theirs = unit[0].job, other[0].job
    return mine.resources == theirs.resources and mine.log_dir == theirs.log_dir


@dataclass(frozen=True)
class JobNote:
    """The job that was submitted last for an output."""

    id: str = ""
    """Empty until sbatch has told it."""
    name: str = ""
    key: str = ""
    mark: str = ""
    """Tag in the comment of a job without a known id; see :func:`launchers.sbatch.with_tag`."""

    def find_ids(self, client: SlurmClient) -> list[str]:
        """Return the job's id; of one without, those that the queue has for its mark.

        Raises:
            SlurmError: Slurm was asked and does not answer.
        """
        if self.id or not self.mark:
            return [self.id] if self.id else []
        return client.find_by_comment(self.mark)


def read_job_note(out: Path) -> JobNote | None:
    """What stands beside an output of the job submitted last for it, if there was one."""
    try:
        known = json.loads((out / JOB_NOTE).read_text())
        names = ("id", "name", "key", "mark")
        return JobNote(**{key: str(known[key]) for key in names if key in known})
    except (OSError, ValueError, TypeError):
        return None


def is_active_in(queue: Mapping[str, QueuedJob] | None, identity: str) -> bool:
    """Whether a job was in the queue, and not at its end."""
    status = (queue or {}).get(identity)
    return status is not None and status.state.is_active


def write_job_note(job: JobSpec, identity: str = "", *, mark: str = "") -> None:
    """Write beside a job's output what :func:`noted` reads: before it is submitted its mark, by
    which it is found should this process die, and then its id."""
    job.output_dir.mkdir(parents=True, exist_ok=True)
    content = {"id": identity, "name": job.name, "key": job.content_key, "submitted": time.time()}
    write_atomic(job.output_dir / JOB_NOTE, json.dumps(content | ({"mark": mark} if mark else {})))
