"""Which worker generates what: starts of a batch are given out in claims, to workers that come and
go.

A claim is a list of starts that one worker does. What a worker leaves behind goes back and is given
out again, lowest start first, so that the front of the batch is complete early. Pure bookkeeping:
no clock, no process.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

MAX_IN_FLIGHT = 2
"""Claims a worker holds, so that it has the next one when it is through with one."""
MAX_OVERHEAD_SHARE = 0.25
"""The share of its time that a claim may spend on what does not depend on its size."""
HISTORY_SIZE = 64


class WorkItem(NamedTuple):
    """Starts that one worker does."""

    number: int
    starts: tuple[int, ...]


class WorkQueue:
    """The starts of one batch: left, held by a worker, or done; each is one of these."""

    def __init__(self, batch: int, done: Iterable[int] = ()) -> None:
        self.done = set(done)
        self._left = [start for start in range(batch) if start not in self.done]
        self._held: dict[str, dict[int, WorkItem]] = defaultdict(dict)
        self._batch, self._next = batch, 0

    @property
    def num_pending(self) -> int:
        """Starts that no worker does yet."""
        return len(self._left)

    @property
    def is_complete(self) -> bool:
        return len(self.done) == self._batch

    def items_of(self, worker: str) -> tuple[WorkItem, ...]:
        return tuple(self._held.get(worker, {}).values())

    def assign(self, worker: str, size: int) -> WorkItem:
        """Give the lowest starts that are left to a worker; there must be one."""
        starts = tuple(heapq.heappop(self._left) for _ in range(min(size, len(self._left))))
        return self._hold(worker, starts)

    def mark_done(self, worker: str, number: int) -> WorkItem | None:
        """A worker has done a claim; None if that is not (or no longer) its claim."""
        claim = self._held[worker].pop(number, None)
        if claim is not None:
            self.done.update(claim.starts)
        return claim

    def reassign(self, claim: WorkItem, rest: Iterable[int], successor: str) -> WorkItem:
        """Some starts of a finished claim are not done after all: ``successor`` holds them now."""
        starts = tuple(start for start in claim.starts if start in set(rest))
        self.done.difference_update(starts)
        return self._hold(successor, starts)

    def _hold(self, worker: str, starts: tuple[int, ...]) -> WorkItem:
        claim = WorkItem(self._next, starts)
        self._next += 1
        self._held[worker][claim.number] = claim
        return claim

    def requeue(self, worker: str, number: int) -> None:
        """A worker could not do a claim."""
        claim = self._held[worker].pop(number, None)
        for start in claim.starts if claim else ():
            heapq.heappush(self._left, start)

    def requeue_worker(self, worker: str) -> None:
        """A worker is gone: others do what it held."""
        for claim in self.items_of(worker):
            self.requeue(worker, claim.number)
        self._held.pop(worker, None)


class WorkerSpeeds:
    """How long claims took, and how large the next ones should be.

    A claim of n starts takes about ``fixed + n * each`` seconds: an engine that decodes a batch to
    its end takes nearly as long for a few samples as for many.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=HISTORY_SIZE)
        self._speeds: dict[str, float] = {}

    def record(self, worker: str, size: int, seconds: float) -> None:
        """A worker took so long for a claim."""
        self._seen.append((size, seconds))
        speed = size / max(seconds, 1e-6)
        self._speeds[worker] = (self._speeds.get(worker, speed) + speed) / 2

    def speeds(self, workers: Sequence[str]) -> dict[str, float]:
        """Starts per second; a worker not seen yet is taken for average."""
        known = [self._speeds[worker] for worker in workers if worker in self._speeds]
        average = sum(known) / len(known) if known else 1.0
        return {worker: self._speeds.get(worker, average) for worker in workers}

    def fit_line(self) -> tuple[float, float]:
        """Seconds that a claim takes whatever its size, and those that each start adds."""
        sizes, times = [size for size, _ in self._seen], [seconds for _, seconds in self._seen]
        if not sizes:
            return 0.0, 0.0
        middle, usual = sum(sizes) / len(sizes), sum(times) / len(times)
        spread = sum((size - middle) ** 2 for size in sizes)
        if not spread:
            return 0.0, usual / middle
        each = sum((n - middle) * (t - usual) for n, t in self._seen) / spread
        each = min(max(each, 0.0), usual / middle)
        return usual - each * middle, each

    def min_items(self) -> float:
        """The smallest claim worth its fixed time; infinite where size hardly matters."""
        fixed, each = self.fit_line()
        if not fixed:
            return 1.0
        return max(1.0, fixed / each * (1 / MAX_OVERHEAD_SHARE - 1)) if each else math.inf


def assign_work(
    batches: Sequence[WorkQueue],
    speeds: Mapping[str, float],
    min_items: float,
    max_batches: Mapping[str, int] = MappingProxyType({}),
) -> list[tuple[WorkQueue, str, WorkItem]]:
    """Claims for all workers that have fewer than :data:`MAX_IN_FLIGHT`, from the first batch on.

    A worker is given half of its fair share of what is left, so that claims get smaller towards the
    end and all come to it at about the same time; no less than is worth it, and no more than its
    share.

    Args:
        only: of workers that may not do every batch: how many of the first ones.
    """
    given = []
    total = sum(speeds.values())
    for held in range(MAX_IN_FLIGHT):
        for number, batch in enumerate(batches):
            left = batch.num_pending
            for worker, speed in speeds.items():
                if not batch.num_pending or sum(len(b.items_of(worker)) for b in batches) > held:
                    continue
                if number >= max_batches.get(worker, len(batches)):
                    continue
                share = math.ceil(left * speed / total)
                size = max(1, min(share, max(math.ceil(share / 2), min_items)))
                given.append((batch, worker, batch.assign(worker, math.ceil(size))))
    return given
