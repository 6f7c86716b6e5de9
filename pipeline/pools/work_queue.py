"""The work queue of a rollout: prompts are assigned in work items to workers that may join or
leave.

A work item is a list of prompts for one worker. Work of a lost worker is requeued and assigned
again, lowest prompt first, so that the front of the batch completes early. This module has no clock
and no processes.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

MAX_IN_FLIGHT = 2
"""Work items per worker, so that it has the next one when it finishes one."""
MAX_OVERHEAD_SHARE = 0.25
"""Maximum share of a work item's time for costs that do not depend on its size."""
HISTORY_SIZE = 64


class WorkItem(NamedTuple):
    """Prompts for one worker."""

    number: int
    starts: tuple[int, ...]


class WorkQueue:
    """The prompts of one batch: each is pending, assigned to a worker, or done."""

    def __init__(self, batch: int, done: Iterable[int] = ()) -> None:
        self.done = set(done)
        self._pending = [start for start in range(batch) if start not in self.done]
        self._assigned: dict[str, dict[int, WorkItem]] = defaultdict(dict)
        self._batch, self._next = batch, 0

    @property
    def num_pending(self) -> int:
        """Number of prompts that are not assigned."""
        return len(self._pending)

    @property
    def is_complete(self) -> bool:
        return len(self.done) == self._batch

    def items_of(self, worker: str) -> tuple[WorkItem, ...]:
        return tuple(self._assigned.get(worker, {}).values())

    def assign(self, worker: str, size: int) -> WorkItem:
        """Assign the lowest pending prompts to a worker; at least one must be pending."""
        starts = tuple(heapq.heappop(self._pending) for _ in range(min(size, len(self._pending))))
        return self._assign(worker, starts)

    def mark_done(self, worker: str, number: int) -> WorkItem | None:
        """Mark a work item as done; returns None if it does not belong to the worker (any more)."""
        item = self._assigned[worker].pop(number, None)
        if item is not None:
            self.done.update(item.starts)
        return item

    def reassign(self, item: WorkItem, rest: Iterable[int], successor: str) -> WorkItem:
        """Assign unfinished prompts of a finished work item to ``successor``."""
        starts = tuple(start for start in item.starts if start in set(rest))
        self.done.difference_update(starts)
        return self._assign(successor, starts)

    def _assign(self, worker: str, starts: tuple[int, ...]) -> WorkItem:
        item = WorkItem(self._next, starts)
        self._next += 1
        self._assigned[worker][item.number] = item
        return item

    def requeue(self, worker: str, number: int) -> None:
        """Requeue a work item that a worker could not finish."""
        item = self._assigned[worker].pop(number, None)
        for start in item.starts if item else ():
            heapq.heappush(self._pending, start)

    def requeue_worker(self, worker: str) -> None:
        """Requeue all work items of a lost worker."""
        for item in self.items_of(worker):
            self.requeue(worker, item.number)
        self._assigned.pop(worker, None)


class WorkerSpeeds:
    """A linear model of the time of work items, and the speeds of workers.

    A work item of n prompts takes about ``fixed + n * each`` seconds: an engine that decodes a
    batch takes nearly as long for a few samples as for many.
    """

    def __init__(self) -> None:
        self._times: deque[tuple[int, float]] = deque(maxlen=HISTORY_SIZE)
        self._speeds: dict[str, float] = {}

    def record(self, worker: str, size: int, seconds: float) -> None:
        """Record the seconds of a finished work item."""
        self._times.append((size, seconds))
        speed = size / max(seconds, 1e-6)
        self._speeds[worker] = (self._speeds.get(worker, speed) + speed) / 2

    def speeds(self, workers: Sequence[str]) -> dict[str, float]:
        """Return prompts per second by worker; an unknown worker counts as average."""
        known = [self._speeds[worker] for worker in workers if worker in self._speeds]
        average = sum(known) / len(known) if known else 1.0
        return {worker: self._speeds.get(worker, average) for worker in workers}

    def fit_line(self) -> tuple[float, float]:
        """Return the fixed seconds of a work item, and the seconds per prompt."""
        sizes, times = [size for size, _ in self._times], [seconds for _, seconds in self._times]
        if not sizes:
            return 0.0, 0.0
        middle, usual = sum(sizes) / len(sizes), sum(times) / len(times)
        spread = sum((size - middle) ** 2 for size in sizes)
        if not spread:
            return 0.0, usual / middle
        each = sum((n - middle) * (t - usual) for n, t in self._times) / spread
        each = min(max(each, 0.0), usual / middle)
        return usual - each * middle, each

    def min_items(self) -> float:
        """Return the smallest size that amortises the fixed time; infinite if size hardly
        matters."""
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
    """Assign work items to all workers with fewer than :data:`MAX_IN_FLIGHT`, first batch first.

    This is guided self-scheduling: a worker gets half of its speed-weighted share of the pending
    prompts, so that work items shrink and all workers finish at about the same time. A work item
    has at least ``min_items`` prompts, and at most the whole share.

    Args:
        batches: queues in the order of iterations.
        speeds: prompts per second by worker.
        min_items: see :meth:`WorkerSpeeds.min_items`.
        max_batches: number of batches, from the first on, that a worker may work on; default all.
    """
    assigned = []
    total = sum(speeds.values())
    for count in range(MAX_IN_FLIGHT):
        for number, batch in enumerate(batches):
            pending = batch.num_pending
            for worker, speed in speeds.items():
                if not batch.num_pending or sum(len(b.items_of(worker)) for b in batches) > count:
                    continue
                if number >= max_batches.get(worker, len(batches)):
                    continue
                share = math.ceil(pending * speed / total)
                size = max(1, min(share, max(math.ceil(share / 2), min_items)))
                assigned.append((batch, worker, batch.assign(worker, math.ceil(size))))
    return assigned
