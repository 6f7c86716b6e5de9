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

from launchers.base import Job
from launchers.sbatch import marked, new_mark, sbatch, sbatch_together
from rlinf.artifacts import MANIFEST, write_atomic
from rlinf.errors import PlanError, RlinfError, SlurmError, SlurmSilent
from slurm.client import Queued, SlurmClient
from slurm.ids import own_id, whole_of
from slurm.jobs import Resources, Status
from slurm.quotas import Quotas, is_full, read_quotas

NOTE = "job.json"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
log = logging.getLogger("rlinf")


@dataclass(eq=False)
class Entry:
    """A job, and what became of it."""

    job: Job
    id: str | None = None
    """Slurm's; None: not submitted yet."""
    found: bool = False
    """Whether an earlier process had submitted it."""
    refusal: RlinfError | None = None
    """Why it will not be submitted."""
    end: Status | None = None
    """How it ended, where that was decided here and not by Slurm."""
    stuck_since: float | None = None
    said: str = ""
    """The last thing logged of it."""

    def say(self, text: str) -> None:
        """Log what has not just been logged."""
        if text != self.said:
            self.said = text
            log.warning("%s", text)


@dataclass
class Backlog:
    """See the module."""

    client: SlurmClient
    quotas: Quotas | None = None
    """Limits on the number of jobs; asked of Slurm before the first submission when not given."""
    shows_s: float = 30.0
    """How long after a submission that was not answered its jobs may come into the queue."""
    _waiting: list[list[Entry]] = field(default_factory=list)
    """Jobs to be submitted on their own or in arrays, and several that start together."""
    _unknown: list[list[Entry]] = field(default_factory=list)
    """Those of them that an earlier process may have submitted."""
    _queue: Mapping[str, Queued] | None = None
    """At the last look. With what was submitted since, it tells how much room there is."""
    _since: list[Resources] = field(default_factory=list)
    _unanswered: str | None = None
    """Mark of jobs that may have been submitted."""
    _withdrawn: set[str] = field(default_factory=set)
    """Marks of submissions that a process before did not see to their end."""
    _pause_s: float = FIRST_PAUSE_S
    _resume: float = 0.0

    def add(self, units: Collection[list[Entry]]) -> None:
        """Let jobs wait behind the others, and submit what there is room for.

        Jobs that an earlier process submitted, and that wait or run, are found again by the notes
        beside their outputs; those that start together where all of them are there.

        Args:
            units: jobs, each by itself or with those that start together with it.

        Raises:
            SlurmSilent: no answer; they wait.
        """
        self._waiting += units
        self._unknown += units
        self.admit()

    def discard(self, entries: Collection[Entry]) -> None:
        """Forget jobs that wait here, and those that would start together with them."""
        for units in (self._waiting, self._unknown):
            units[:] = [unit for unit in units if not any(e in entries for e in unit)]

    def admit(self, queue: Mapping[str, Queued] | None = None) -> None:
        """Submit of those waiting, in order, as many as limits allow; see :meth:`add`.

        Args:
            queue: what Slurm's queue was found to be just now, where it was asked.
        """
        looked_for = any(noted(entry.job.out) for unit in self._unknown for entry in unit)
        if queue is None and (self._queue is None or looked_for):
            queue = self.client.queue()
        if queue is not None:
            self._queue, self._since = queue, []
        while self._unknown:
            self._find(self._unknown[0])
            del self._unknown[0]
        if time.monotonic() >= self._resume and self._unanswered is not None:
            # They could not run: submitit names their files by the answer.
            self.client.cancel(self.client.with_comment(self._unanswered))
            self._unanswered = None
        while self._waiting and time.monotonic() >= self._resume:
            first = self._waiting[0]
            if all((entry.job.out / MANIFEST).exists() for entry in first):
                del self._waiting[0]
                continue
            try:
                room = self._room(first)
            except SlurmSilent:
                raise
            except RlinfError as error:
                for entry in first:
                    entry.refusal = error
                del self._waiting[0]
                continue
            alike = list(takewhile(partial(_alike, first), self._waiting)) or [first]
            if not room or not (self._start(alike[:room]) or self._start(alike[:1])):
                return

    def _find(self, unit: list[Entry]) -> None:
        """Take up jobs that are there already; cancel those that are not what is wanted."""
        notes = [(entry, note) for entry in unit if (note := noted(entry.job.out)) is not None]
        for mark in {note.mark for _, note in notes if note.mark} - self._withdrawn:
            # Its submitter died before it had the ids.
            self.client.cancel(self.client.with_comment(mark))
            self._withdrawn.add(mark)
        there = [(entry, note) for entry, note in notes if active(self._queue, note.id)]
        alike = {whole_of(note.id) for _, note in there if len(unit) > 1}
        if len(there) == len(unit) and len(alike) < 2 and all(n.key == e.job.key for e, n in there):
            for entry, note in there:
                entry.id, entry.found = note.id, True
            self._waiting.remove(unit)
        elif there:
            self.client.cancel([note.id for _, note in there])

    def _room(self, unit: Sequence[Entry]) -> int:
        """How many units like this one may be submitted now, as one array at most.

        Raises:
            PlanError: not even one, however long it waits.
            SlurmSilent: Slurm does not answer.
        """
        if self.quotas is None:
            self.quotas = read_quotas(self.client)
        parts = [part for entry in unit for part in entry.job.components]
        needs = [quota for part in parts for quota in self.quotas.of(part)]
        room, first = self.quotas.array_size, unit[0]
        for quota in dict.fromkeys(needs):
            queue = self._queue or {}
            counted = {identity for identity, job in queue.items() if quota.counts(job)}
            if quota.most < needs.count(quota) + len(counted & {own_id()}):
                raise PlanError(
                    f"{first.job.name}: {quota.what} is {quota.most}, which leaves no place for "
                    "the jobs of a run; start the driver outside of a job, or use another account "
                    "or QOS"
                )
            taken = len(counted) + sum(quota in self.quotas.of(other) for other in self._since)
            places = max(quota.most - taken, 0) // needs.count(quota)
            if not places:
                first.say(f"{first.job.name} waits to be submitted: {quota.what} is {quota.most}")
            room = min(room, places)
        return room

    def _start(self, units: Sequence[list[Entry]]) -> bool:
        """Submit the first of those waiting; False when there are too many jobs for now.

        Raises:
            SlurmSilent: no answer.
        """
        entries = [entry for unit in units for entry in unit]
        submit = sbatch_together if _heterogeneous(units[0]) else sbatch
        mark = new_mark()
        for entry in entries:
            note(entry.job, mark=mark)
        try:
            ids = submit([marked(entry.job, mark) for entry in entries])
        except SlurmSilent:
            self._unanswered, self._resume = mark, time.monotonic() + self.shows_s
            raise
        except SlurmError as error:
            if is_full(str(error)):
                if len(units) == 1:
                    entries[0].say(f"{entries[0].job.name} waits to be submitted: {error}")
                    self._resume = time.monotonic() + self._pause_s
                    self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
                return False
            for entry in entries:
                entry.refusal = error
                (entry.job.out / NOTE).unlink(missing_ok=True)
        else:
            self._pause_s = FIRST_PAUSE_S
            for entry, identity in zip(entries, ids, strict=True):
                entry.id = identity
                note(entry.job, identity)
                self._since += entry.job.components
        del self._waiting[: len(units)]
        return True


def _heterogeneous(unit: Sequence[Entry]) -> bool:
    return sum(len(entry.job.components) for entry in unit) > 1


def _alike(unit: Sequence[Entry], other: Sequence[Entry]) -> bool:
    """Whether both may be elements of one array."""
    if _heterogeneous(unit) or _heterogeneous(other):
        return False
    mine, theirs = unit[0].job, other[0].job
    return mine.resources == theirs.resources and mine.logs == theirs.logs


@dataclass(frozen=True)
class Note:
    """The job that was submitted last for an output."""

    id: str = ""
    """Empty until sbatch has told it."""
    name: str = ""
    key: str = ""
    mark: str = ""
    """Word in the comment of a job whose id is not known yet (:func:`launchers.sbatch.marked`)."""

    def ids(self, client: SlurmClient) -> list[str]:
        """Return the job's id; of one without, those that the queue has for its mark.

        Raises:
            SlurmError: Slurm was asked and does not answer.
        """
        if self.id or not self.mark:
            return [self.id] if self.id else []
        return client.with_comment(self.mark)


def noted(out: Path) -> Note | None:
    """What stands beside an output of the job submitted last for it, if there was one."""
    try:
        known = json.loads((out / NOTE).read_text())
        names = ("id", "name", "key", "mark")
        return Note(**{key: str(known[key]) for key in names if key in known})
    except (OSError, ValueError, TypeError):
        return None


def active(queue: Mapping[str, Queued] | None, identity: str) -> bool:
    """Whether a job was in the queue, and not at its end."""
    status = (queue or {}).get(identity)
    return status is not None and status.state.active


def note(job: Job, identity: str = "", *, mark: str = "") -> None:
    """Write beside a job's output what :func:`noted` reads: before it is submitted its mark, by
    which it is found should this process die, and then its id."""
    job.out.mkdir(parents=True, exist_ok=True)
    content = {"id": identity, "name": job.name, "key": job.key, "submitted": time.time()}
    write_atomic(job.out / NOTE, json.dumps(content | ({"mark": mark} if mark else {})))
