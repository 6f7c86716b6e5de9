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

from launchers.base import Job
from launchers.sbatch import sbatch, sbatch_together
from rlinf.artifacts import write_atomic
from rlinf.errors import PlanError, RlinfError, SlurmError
from slurm.client import Queued, SlurmClient
from slurm.ids import own_id
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
    _waiting: list[list[Entry]] = field(default_factory=list)
    """Jobs to be submitted on their own or in arrays, and several that start together."""
    _queue: Mapping[str, Queued] = field(default_factory=dict)
    """At the last look. With what was submitted since, it tells how much room there is."""
    _since: list[Resources] = field(default_factory=list)
    _pause_s: float = FIRST_PAUSE_S
    _resume: float = 0.0

    def add(
        self, units: Collection[list[Entry]], queue: Mapping[str, Queued] | None = None
    ) -> None:
        """Let jobs wait behind the others, and submit what there is room for.

        Args:
            units: jobs, each by itself or with those that start together with it.
            queue: what Slurm's queue was found to be just now, where it was asked.
        """
        self._waiting += units
        self.admit(queue)

    def discard(self, entries: Collection[Entry]) -> None:
        """Forget jobs that wait here, and those that would start together with them."""
        self._waiting = [unit for unit in self._waiting if not any(e in entries for e in unit)]

    def admit(self, queue: Mapping[str, Queued] | None = None) -> None:
        """Submit of those waiting, in order, as many as limits allow; see :meth:`add`."""
        if queue is not None:
            self._queue, self._since = queue, []
        while self._waiting and time.monotonic() >= self._resume:
            first = self._waiting[0]
            try:
                room = self._room(first)
            except RlinfError as error:
                for entry in first:
                    entry.refusal = error
                del self._waiting[0]
                continue
            alike = list(takewhile(partial(_alike, first), self._waiting)) or [first]
            if not room or not (self._start(alike[:room]) or self._start(alike[:1])):
                return

    def _room(self, unit: Sequence[Entry]) -> int:
        """How many units like this one may be submitted now, as one array at most.

        Raises:
            PlanError: not even one, however long it waits.
            SlurmError: Slurm does not answer.
        """
        if self.quotas is None:
            self.quotas = read_quotas(self.client)
        parts = [part for entry in unit for part in entry.job.components]
        needs = [quota for part in parts for quota in self.quotas.of(part)]
        room, first = self.quotas.array_size, unit[0]
        for quota in dict.fromkeys(needs):
            counted = {identity for identity, job in self._queue.items() if quota.counts(job)}
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
        """Submit the first of those waiting; False when there are too many jobs for now."""
        entries = [entry for unit in units for entry in unit]
        submit = sbatch_together if _heterogeneous(units[0]) else sbatch
        try:
            ids = submit([entry.job for entry in entries])
        except SlurmError as error:
            if is_full(str(error)):
                if len(units) == 1:
                    entries[0].say(f"{entries[0].job.name} waits to be submitted: {error}")
                    self._resume = time.monotonic() + self._pause_s
                    self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
                return False
            for entry in entries:
                entry.refusal = error
        else:
            self._pause_s = FIRST_PAUSE_S
            for entry, identity in zip(entries, ids, strict=True):
                entry.id = identity
                _note(entry.job, identity)
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


def noted(job: Job) -> str | None:
    """The id of the job submitted last for this output, if there was one."""
    try:
        return str(json.loads((job.out / NOTE).read_text())["id"])
    except (OSError, ValueError, KeyError):
        return None


def _note(job: Job, identity: str) -> None:
    note = {"id": identity, "name": job.name, "submitted": time.time()}
    write_atomic(job.out / NOTE, json.dumps(note))
