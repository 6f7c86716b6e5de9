"""Pools as the driver keeps them: each a job that is renewed before its lease ends."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pipeline.flow import Node
from pipeline.plan import StagePlan
from rlinf.errors import PlanError
from stages.flow import GENERATE
from stages.lives import MOST
from stages.names import worker_name
from stages.runner import StageCall

RENEW_S, RENEW_SHARE = 300.0, 0.25
"""How long before the end of its lease a pool's successor is submitted: at most, and which share of
a short one."""


@dataclass(eq=False)
class Member:
    """One lease of a pool: a job and its workers."""

    name: str
    job: str
    size: int
    joined: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What the workers that are there said of themselves, by rank."""
    began: float = field(default_factory=time.time)
    """When it was submitted, or found by this driver."""
    ends: float | None = None
    """When its time is up, if that is known."""
    given: set[Node] = field(default_factory=set)
    answers: set[Node] = field(default_factory=set)
    """Stages of other leases that it was to answer, be they over or not."""
    finished: int = 0
    leaving: bool = False
    fellows: tuple[Member, ...] = ()
    """Those that started with it and end with it."""

    @property
    def ready(self) -> bool:
        return len(self.joined) == self.size

    def join(self, about: dict[str, Any]) -> None:
        """A worker is there, and said this of itself."""
        self.joined[int(about["rank"])] = about
        if (ends := about.get("ends")) is not None:
            self.ends = ends if self.ends is None else min(ends, self.ends)

    @property
    def due(self) -> bool:
        """Whether to submit a successor: the lease is nearly over, however long it was."""
        if self.ends is None:
            return False
        length = self.ends - self.began
        return self.ends - time.time() < min(RENEW_S, RENEW_SHARE * length)

    def workers(self, ranks: Iterable[int] | None = None) -> list[str]:
        """Their names; of all ranks by default."""
        return [
            worker_name(self.name, rank) for rank in (range(self.size) if ranks is None else ranks)
        ]

    @property
    def first(self) -> str:
        """The worker of rank 0."""
        return worker_name(self.name, 0)

    def hosts(self, ranks: Iterable[int]) -> dict[str, str | None]:
        """Where workers are, as far as that is known."""
        return {
            worker_name(self.name, rank): self.joined.get(rank, {}).get("host") for rank in ranks
        }


@dataclass(eq=False)
class PoolState:
    """A pool of the plan and its leases, the one in use first."""

    number: int
    stages: tuple[str, ...]
    needs: tuple[StagePlan, ...]
    slot: int | None = None
    """Of one generator of an elastic pool: which."""
    members: list[Member] = field(default_factory=list)
    writing: list[Member] = field(default_factory=list)
    """Leases that were given up, and have time to end what they write."""
    waiting: dict[Node, StageCall] = field(default_factory=dict)
    """Started by the driver, not yet ordered."""
    since: float = 0.0
    lease: int = 0
    failures: int = 0
    reason: str = ""
    resume: float = 0.0
    in_vain: int = 0
    """Leases in a row that came to their end with work, of which nothing was finished."""
    retired: bool = False
    """Not wanted any more: it leaves once it has nothing to do."""
    helps: bool = False
    """It generates in claims beside its stages."""

    @property
    def name(self) -> str:
        return str(self.number) if self.slot is None else f"{self.number}w{self.slot}"

    @property
    def size(self) -> int:
        return sum(part.nodes * part.processes for part in self.needs)

    def see_use(self, member: Member) -> None:
        """A lease ended by itself: had it work that is longer than a lease?

        Raises:
            PlanError: so had as many before it that there is no use in another.
        """
        if member.finished:
            self.in_vain = 0
        elif (member.given or member.answers) and member.due:
            self.in_vain += 1
            if self.in_vain == MOST:
                answered = {node.stage + GENERATE for node in member.answers}
                stages = ", ".join(sorted({node.stage for node in member.given} | answered))
                raise PlanError(
                    f"plan: pools[{self.number}]: {MOST} of its jobs came to the end of their time "
                    f"and had not finished {stages}, which begins anew each time: give it more "
                    "(time_min of its stages), a partition with a longer limit, or less work"
                )

    @property
    def active(self) -> Member | None:
        """The newest lease whose workers are all there.

        None while one that was given up may still commit what it computed: the next attempt would
        do it twice, and removes the files of those before.
        """
        if self.retired or self.writing:
            return None
        return next((m for m in reversed(self.members) if m.ready and not m.leaving), None)


def rank_of(worker: str) -> int:
    """The rank in a worker's name."""
    return int(worker.rpartition("-r")[2])
