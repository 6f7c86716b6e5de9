"""The work queue of a rollout: prompts are assigned in work items to workers that may join or
leave.

A work item is a list of prompts for one worker. Prompts of a lost worker are requeued and assigned
again in the order of the batch, so that its first prompts complete early. This module has no clock
and starts no processes.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

MAX_IN_FLIGHT = 2
"""Maximum work items of one worker: one in progress, and the next one to begin right after it."""
MAX_OVERHEAD_SHARE = 0.25
"""Maximum share of a work item's time that may be fixed, that is, independent of its size."""
HISTORY_SIZE = 64


class WorkItem(NamedTuple):
    """Prompts for one worker."""

    number: int
    starts: tuple[int, ...]
    """Indices of the prompts in the batch."""


class WorkQueue:
    """The prompts of one batch: each is pending, assigned to a worker, or done."""

    def __init__(self, num_prompts: int, done: Iterable[int] = ()) -> None:
        self.done = set(done)
        self._pending = [prompt for prompt in range(num_prompts) if prompt not in self.done]
        self._assigned: dict[str, dict[int, WorkItem]] = defaultdict(dict)
        self._num_prompts, self._next_number = num_prompts, 0

    @property
    def num_pending(self) -> int:
        """Number of prompts that are not assigned."""
        return len(self._pending)

    @property
    def is_complete(self) -> bool:
        return len(self.done) == self._num_prompts

    def items_of(self, worker: str) -> tuple[WorkItem, ...]:
        return tuple(self._assigned.get(worker, {}).values())

    def assign(self, worker: str, size: int) -> WorkItem:
        """Assign the first pending prompts to a worker; at least one must be pending."""
        prompts = tuple(heapq.heappop(self._pending) for _ in range(min(size, len(self._pending))))
        return self._assign(worker, prompts)

    def mark_done(self, worker: str, number: int) -> WorkItem | None:
        """Mark a work item as done. Returns None if it is not (or no longer) the worker's."""
        item = self._assigned[worker].pop(number, None)
        if item is not None:
            self.done.update(item.starts)
        return item

    def reassign(self, item: WorkItem, unfinished: Iterable[int], successor: str) -> WorkItem:
        """Assign to ``successor`` the prompts that a worker left by ending a work item early."""
        prompts = tuple(prompt for prompt in item.starts if prompt in set(unfinished))
        self.done.difference_update(prompts)
        return self._assign(successor, prompts)

    def _assign(self, worker: str, prompts: tuple[int, ...]) -> WorkItem:
        item = WorkItem(self._next_number, prompts)
        self._next_number += 1
        self._assigned[worker][item.number] = item
        return item

    def requeue(self, worker: str, number: int) -> None:
        """Requeue a work item that a worker could not finish."""
        item = self._assigned[worker].pop(number, None)
        for prompt in item.starts if item else ():
            heapq.heappush(self._pending, prompt)

    def requeue_worker(self, worker: str) -> None:
        """Requeue all work items of a lost worker."""
        for item in self.items_of(worker):
            self.requeue(worker, item.number)
        self._assigned.pop(worker, None)


class WorkerSpeeds:
    """A linear model of the time of work items, and the speeds of workers.

    A work item of n prompts takes about ``fixed_s + n * per_prompt_s`` seconds, because an engine
    decodes a batch of few samples in nearly the same time as a batch of many.
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
        """Return prompts per second by worker; unmeasured workers get the average."""
        known = [self._speeds[worker] for worker in workers if worker in self._speeds]
        average = sum(known) / len(known) if known else 1.0
        return {worker: self._speeds.get(worker, average) for worker in workers}

    def fit_line(self) -> tuple[float, float]:
        """Return the fixed seconds of a work item, and the seconds per prompt."""
        sizes, times = [size for size, _ in self._times], [seconds for _, seconds in self._times]
        if not sizes:
            return 0.0, 0.0
        mean_size, mean_time = sum(sizes) / len(sizes), sum(times) / len(times)
        spread = sum((size - mean_size) ** 2 for size in sizes)
        if not spread:
            return 0.0, mean_time / mean_size
        per_prompt_s = sum((n - mean_size) * (t - mean_time) for n, t in self._times) / spread
        per_prompt_s = min(max(per_prompt_s, 0.0), mean_time / mean_size)
        return mean_time - per_prompt_s * mean_size, per_prompt_s

    def min_item_size(self) -> float:
        """Return the minimum size that amortises the fixed seconds; infinite if more prompts take
        no more time."""
        fixed_s, per_prompt_s = self.fit_line()
        if not fixed_s:
            return 1.0
        if not per_prompt_s:
            return math.inf
        return max(1.0, fixed_s / per_prompt_s * (1 / MAX_OVERHEAD_SHARE - 1))


def assign_work(
    queues: Sequence[WorkQueue],
    speeds: Mapping[str, float],
    min_item_size: float,
    max_queues: Mapping[str, int] = MappingProxyType({}),
) -> list[tuple[WorkQueue, str, WorkItem]]:
    """Assign work items to all workers with fewer than :data:`MAX_IN_FLIGHT`, first queue first.

    This is guided self-scheduling: a worker gets half of its speed-weighted share of the pending
    prompts, so that work items shrink and all workers finish at about the same time. A work item
    has at least ``min_item_size`` prompts, and at most the whole share.

    Args:
        queues: one per batch, in the order of iterations.
        speeds: prompts per second by worker.
        min_item_size: see :meth:`WorkerSpeeds.min_item_size`.
        max_queues: how many of the first queues a worker may work on; default all.
    """
    assigned = []
    total = sum(speeds.values())
    for in_flight in range(MAX_IN_FLIGHT):
        for index, queue in enumerate(queues):
            pending = queue.num_pending
            for worker, speed in speeds.items():
                num_items = sum(len(q.items_of(worker)) for q in queues)
                if not queue.num_pending or num_items > in_flight:
                    continue
                if index >= max_queues.get(worker, len(queues)):
                    continue
                share = math.ceil(pending * speed / total)
                size = max(1, min(share, max(math.ceil(share / 2), min_item_size)))
                assigned.append((queue, worker, queue.assign(worker, math.ceil(size))))
    return assigned
