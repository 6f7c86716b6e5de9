"""Scheduling of rollouts on elastic pools: which generator computes which work items.

A rollout has a collector, the worker that consumes its trajectories. A work item is some of the
prompts of a rollout. Generators (the workers of the elastic pool) get work items, and the collector
fetches their trajectories. Helpers, which are workers of pools with other stages, also get work
items until the queue is empty. Generators then finish the long samples of the helpers.

Work items go to workers that have the weights in memory, and to all workers after the weights are
committed. The collector rejects samples from weights that differ from the committed ones.

Prompts of a lost worker are requeued and assigned again in the order of the batch, so that the
first prompts of the batch complete early.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import math
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pipeline.graph import StageNode
from pipeline.pools.autoscaler import IterationLoad
from pipeline.pools.leases import rank_of
from rlinf.artifacts import read_manifest
from rlinf.errors import (
    EXIT_BAD_INPUT,
    EXIT_REQUEUE,
    ArtifactError,
    InputError,
    StageError,
    short_reason,
)
from stages.layout import POOLS_FOLDER, partial_samples_channel
from stages.live_store import evict_oldest
from stages.worker import messages
from stages.worker.messages import WorkerOrder

MAX_IN_FLIGHT = 2
"""Maximum work items of one worker: one in progress, and the next one to begin right after it."""
MAX_OVERHEAD_SHARE = 0.25
"""Maximum share of a work item's time that may be fixed, that is, independent of its size."""
HISTORY_SIZE = 64
"""Maximum number of entries in each history: times, weights, rollouts and ended work items."""


class WorkItem(NamedTuple):
    """Prompts for one worker."""

    number: int
    """Index in its rollout, or :data:`LOAD_ENGINE`."""
    prompts: tuple[int, ...]
    """Indices of the prompts in the batch."""


class WorkQueue:
    """The prompts of one batch: each is pending, assigned to a worker, or done."""

    def __init__(self, num_prompts: int, done: Iterable[int] = ()) -> None:
        self.done = set(done)
        """Indices of finished prompts."""
        self._pending = [prompt for prompt in range(num_prompts) if prompt not in self.done]
        self._assigned: dict[str, dict[int, WorkItem]] = defaultdict(dict)
        self._num_prompts, self._next_number = num_prompts, 0

    @property
    def num_pending(self) -> int:
        """Number of prompts that are neither done nor assigned."""
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
            self.done.update(item.prompts)
        return item

    def reassign(self, item: WorkItem, unfinished: Iterable[int], successor: str) -> WorkItem:
        """Assign to ``successor`` the prompts that a worker left by ending a work item early."""
        prompts = tuple(prompt for prompt in item.prompts if prompt in set(unfinished))
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
        for prompt in item.prompts if item else ():
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
        """Record the seconds of a finished work item of ``size`` prompts."""
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
    """Assign work items until each worker has :data:`MAX_IN_FLIGHT`, the first queue first.

    This is guided self-scheduling: a worker gets half of its speed-weighted share of the pending
    prompts, so that work items shrink and all workers finish at about the same time. A work item
    has at least ``min_item_size`` prompts, and at most the whole share.

    Args:
        queues: one per batch, in the order of iterations.
        speeds: prompts per second by worker.
        min_item_size: see :meth:`WorkerSpeeds.min_item_size`.
        max_queues: by worker, the number of queues, from the first one, from which it may get work
            items; all by default.
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


WORK_LOG = "work_items.jsonl"
"""Log of finished work items, in the folder of the pools."""
LOAD_ENGINE = -1
"""Number of the empty work item that makes a worker load its engine."""
log = logging.getLogger("rlinf")


@dataclass
class _Rollout:
    output: str
    """Output folder, relative to the run."""
    weights: str
    """Folder of its weights, relative to the run."""
    collector: str
    """Name of the worker that receives the trajectories."""
    queue: WorkQueue | None = None
    """None until the collector has reported for which prompts it already has trajectories."""
    has_committed_weights: bool = False
    is_ending: bool = False
    """Whether the queue was empty once; helpers then get no more work items."""


class _Assigned(NamedTuple):
    node: StageNode
    """The node of its rollout."""
    worker: str
    item: WorkItem
    attempt: str | None
    """The attempt that produced its weights; None if these were committed."""
    continued_item: int | None
    """Number of the work item in which another worker began these samples; None if none did."""


class _Partial(NamedTuple):
    """A work item whose samples another worker began, for the worker that continues them."""

    node: StageNode
    successor: str
    item: WorkItem
    samples: messages.PartialSamples


@dataclass
class RolloutScheduler:
    """Assigns the prompts of all running rollouts, the earliest iteration first."""

    run: Path
    num_prompts: int
    """Number of prompts of a rollout."""
    max_failures: int
    """Number of failed work items of a rollout beyond which the run fails."""
    _rollouts: dict[StageNode, _Rollout] = field(default_factory=dict)
    _assigned: dict[str, _Assigned] = field(default_factory=dict)
    """Assigned work items by their names in messages, which are unique in the run."""
    _ended: dict[str, _Assigned] = field(default_factory=dict)
    """Work items of ended rollouts, whose reports may still arrive, by name."""
    _successors: dict[str, str] = field(default_factory=dict)
    """Worker that continues the unfinished samples, by name of the assigned work item."""
    _partial: list[_Partial] = field(default_factory=list)
    """Partial work items that are not sent to their successors yet."""
    _speeds: WorkerSpeeds = field(default_factory=WorkerSpeeds)
    _finished_items: dict[StageNode, Counter[str]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    """Number of finished work items by worker, for recent rollouts."""
    _finished_prompts: dict[StageNode, Counter[str]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    """Number of prompts in these work items."""
    _failures: Counter[str] = field(default_factory=Counter)
    """Number of failed work items by name of the node."""
    _weights: dict[str, dict[str, str]] = field(default_factory=dict)
    """Attempt that produced uncommitted weights, by folder of the weights and by worker that has
    them in memory."""
    _weights_iteration: dict[str, int] = field(default_factory=dict)
    """Iteration of the last received weights, by worker."""
    _ready_workers: set[str] = field(default_factory=set)
    """Workers with a loaded engine; only these get work."""

    def start_rollout(self, node: StageNode, output: str, weights: str, collector: str) -> None:
        """Start a rollout whose trajectories the worker ``collector`` receives."""
        self._rollouts[node] = _Rollout(output, weights, collector)

    def on_collected(self, node: StageNode, starts: Sequence[int]) -> None:
        """Handle the report of a collector: the prompts for which it already has trajectories."""
        if node in self._rollouts:
            self._rollouts[node].queue = WorkQueue(self.num_prompts, starts)

    def on_weights(self, worker: str, weights: str, attempt: str, iteration: int) -> None:
        """Handle the report of a worker that has uncommitted weights of an iteration in memory."""
        self._weights.setdefault(weights, {})[worker] = attempt
        evict_oldest(self._weights, HISTORY_SIZE)
        self._weights_iteration[worker] = iteration

    def invalidate_weights(self, weights: str) -> None:
        """Forget which workers have weights in memory, because the weights are recomputed."""
        self._weights.pop(weights, None)

    def weights_iteration(self, worker: str) -> int:
        """Return the iteration of the newest weights that a worker has reported; -1 without any."""
        return self._weights_iteration.get(worker, -1)

    def end_rollout(self, node: StageNode) -> set[str]:
        """End a rollout; returns the workers that still have work for it."""
        self._rollouts.pop(node, None)
        self._partial = [partial for partial in self._partial if partial.node != node]
        ended = {
            name: assigned for name, assigned in self._assigned.items() if assigned.node == node
        }
        for name in ended:
            self._forget(name)
        self._ended = dict([*self._ended.items(), *ended.items()][-HISTORY_SIZE:])
        return {assigned.worker for assigned in ended.values()}

    def is_busy(self, worker: str) -> bool:
        """Return whether a worker has work, or will continue the work of another worker."""
        busy_workers = {assigned.worker for assigned in self._assigned.values()}
        busy_workers.update(partial.successor for partial in self._partial)
        return worker in busy_workers or worker in self._successors.values()

    def on_worker_lost(self, worker: str) -> None:
        """Requeue the unfinished work of a worker that was lost, or that must drop its work."""
        self._ready_workers.discard(worker)
        for name in [
            name for name, assigned in self._assigned.items() if assigned.worker == worker
        ]:
            self._forget(name)
        self._successors = {
            name: successor for name, successor in self._successors.items() if successor != worker
        }
        for rollout in self._rollouts.values():
            if rollout.queue is not None:
                rollout.queue.requeue_worker(worker)

    def on_report(self, worker: str, report: messages.WorkItemEnded) -> bool:
        """Handle the end of a work item; returns whether it succeeded.

        Raises:
            InputError: bad input, or an error in the user's code.
            StageError: work items failed too often.
        """
        name = report.work_item
        assigned = self._assigned.get(name)
        self._forget(name)
        rollout = self._rollouts.get(assigned.node) if assigned is not None else None
        if assigned is None or rollout is None or rollout.queue is None:
            ended = self._ended.pop(name, None)
            if ended is not None and not report.exit_code and ended.item.prompts:
                self._record_work(ended, ended.item, report)
            return False
        node, number = assigned.node, assigned.item.number
        if number == LOAD_ENGINE and not report.exit_code:
            self._ready_workers.add(worker)
            return False
        if report.exit_code:
            rollout.queue.requeue(worker, number)
            # The worker may have lost the weights or its engine, or the weights were withdrawn.
            self._weights.get(rollout.weights, {}).pop(worker, None)
            rollout.has_committed_weights = False
            self._failures[node.name] += report.exit_code != EXIT_REQUEUE
            if report.exit_code == EXIT_BAD_INPUT:
                raise InputError(f"{node.name}: {report.reason}")
            log.warning("%s on %s: %s", node.name, worker, short_reason(report.reason))
            if self._failures[node.name] > self.max_failures:
                raise StageError(f"{node.name} failed on {worker}: {report.reason}")
            return False
        item = rollout.queue.mark_done(worker, number)
        if item is None:
            return True
        if report.unfinished_starts:
            unfinished = rollout.queue.reassign(item, report.unfinished_starts, report.successor)
            partial = messages.PartialSamples(
                worker=worker,
                item_number=number,
                channel=partial_samples_channel(name),
                num_samples=report.num_partial_samples,
                weights_attempt=assigned.attempt,
            )
            self._partial.append(_Partial(node, report.successor, unfinished, partial))
            item = WorkItem(number, tuple(s for s in item.prompts if s not in unfinished.prompts))
        if report.spans:
            self._record_work(assigned, item, report)
        return True

    def next_orders(
        self, workers: Sequence[str], helpers: Mapping[str, int] = MappingProxyType({})
    ) -> list[tuple[str, WorkerOrder]]:
        """Return orders for workers that are about to be idle.

        A worker gets no work item of a rollout for whose weights it would have to wait: meanwhile
        it could not compute the earlier rollouts on which these weights depend.

        Args:
            workers: the connected generators.
            helpers: workers of pools with other stages, with the earliest iteration that these
                stages still have to compute. A helper generates for no later iteration.
        """
        orders = self._continue_partial(workers)
        queues = {
            node: rollout.queue
            for node, rollout in sorted(self._rollouts.items(), key=lambda item: item[0].iteration)
            if rollout.queue is not None and self._has_weights(rollout)
        }
        max_queues = {worker: self._num_usable(worker, queues) for worker in [*workers, *helpers]}
        is_ending = bool(workers) and any(self._rollouts[node].is_ending for node in queues)
        for worker, last_iteration in helpers.items():
            num_early = sum(node.iteration <= last_iteration for node in queues)
            max_queues[worker] = 0 if is_ending else min(num_early, max_queues[worker])
        usable = [worker for worker in max_queues if worker in workers or max_queues[worker]]
        # An engine loads from committed files.
        first = next((node for node in queues if self._rollouts[node].has_committed_weights), None)
        if first is not None:
            orders += [
                (worker, self._order(first, worker, WorkItem(LOAD_ENGINE, ())))
                for worker in usable
                if worker not in self._ready_workers and not self.is_busy(worker)
            ]
        node_of = {id(queue): node for node, queue in queues.items()}
        speeds = self._speeds.speeds([worker for worker in usable if worker in self._ready_workers])
        min_size = self._speeds.min_item_size()
        for queue, worker, item in assign_work(list(queues.values()), speeds, min_size, max_queues):
            orders.append((worker, self._order(node_of[id(queue)], worker, item)))
        successors = [worker for worker in workers if worker in self._ready_workers]
        return orders + (self._name_successors(helpers, successors) if successors else [])

    def _name_successors(
        self, helpers: Mapping[str, int], successors: Sequence[str]
    ) -> list[tuple[str, WorkerOrder]]:
        """Order the helpers of rollouts with an empty queue to pass unfinished samples to
        generators."""
        orders: list[tuple[str, WorkerOrder]] = []
        for name, assigned in self._assigned.items():
            queue = (rollout := self._rollouts[assigned.node]).queue
            if (
                assigned.worker not in helpers
                or name in self._successors
                or assigned.item.number == LOAD_ENGINE
            ):
                continue
            usable = [
                worker for worker in successors if self._can_use_weights(worker, assigned.node)
            ]
            if queue is not None and not queue.num_pending and usable:
                rollout.is_ending = True
                num_items = Counter(other.worker for other in self._assigned.values())
                num_items.update(self._successors.values())
                self._successors[name] = min(usable, key=lambda worker: num_items[worker])
                order = messages.ReassignWork(work_item=name, successor=self._successors[name])
                orders.append((assigned.worker, order))
        return orders

    def _continue_partial(self, workers: Sequence[str]) -> list[tuple[str, WorkerOrder]]:
        """Order successors to continue partial work items. A work item without partial samples is
        requeued."""
        orders: list[tuple[str, WorkerOrder]] = []
        for node, successor, item, partial in self._partial:
            queue = self._rollouts[node].queue
            if queue is None or item not in queue.items_of(successor):
                continue
            if successor in workers and partial.num_samples:
                orders.append((successor, self._order(node, successor, item, partial)))
            else:
                queue.requeue(successor, item.number)
        self._partial.clear()
        return orders

    def iteration_load(
        self, node: StageNode, workers: Sequence[str], other_stages_s: float, *, overlap: bool
    ) -> IterationLoad | None:
        """Return the load of the iteration with the finished rollout ``node``; None if one of
        ``workers`` finished no work item of this rollout.

        Args:
            other_stages_s: seconds of the iteration's other stages.
            overlap: whether the other stages overlap with the next rollout.
        """
        finished = self._finished_items.get(node, Counter())
        if not workers or not set(workers) <= finished.keys():
            return None
        fixed_s, per_prompt_s = self._speeds.fit_line()
        num_prompts = sum(self._finished_prompts[node][worker] for worker in workers)
        worker_fixed_s = fixed_s * finished.total() / len(finished)
        return IterationLoad(worker_fixed_s, per_prompt_s * num_prompts, other_stages_s, overlap)

    def _order(
        self,
        node: StageNode,
        worker: str,
        item: WorkItem,
        partial: messages.PartialSamples | None = None,
    ) -> messages.GenerateStarts:
        name, rollout = secrets.token_hex(6), self._rollouts[node]
        attempt, continued_item = None, None
        if partial is not None:
            attempt, continued_item = partial.weights_attempt, partial.item_number
        elif not rollout.has_committed_weights:
            attempt = self._weights[rollout.weights][worker]
        self._assigned[name] = _Assigned(node, worker, item, attempt, continued_item)
        return messages.GenerateStarts(
            work_item=name,
            label=node.name
            if item.number == LOAD_ENGINE
            else f"{node.name} work item {item.number}",
            iteration=node.iteration,
            output=rollout.output,
            weights=rollout.weights,
            weights_attempt=attempt,
            receiver=rollout.collector,
            starts=item.prompts,
            partial=partial,
        )

    def _forget(self, name: str) -> None:
        self._assigned.pop(name, None)
        self._successors.pop(name, None)

    def _has_weights(self, rollout: _Rollout) -> bool:
        """Return whether any worker can use the weights of a rollout."""
        if not rollout.has_committed_weights:
            with contextlib.suppress(ArtifactError):  # the worker that reads it reports the error
                rollout.has_committed_weights = (
                    read_manifest(self.run / rollout.weights) is not None
                )
        return rollout.has_committed_weights or bool(self._weights.get(rollout.weights))

    def _can_use_weights(self, worker: str, node: StageNode) -> bool:
        """Return whether a worker has the weights of a rollout, or can read them."""
        rollout = self._rollouts[node]
        return rollout.has_committed_weights or worker in self._weights.get(rollout.weights, ())

    def _num_usable(self, worker: str, nodes: Iterable[StageNode]) -> int:
        """Return the number of ``nodes`` before the first whose weights a worker cannot use."""
        return len(list(takewhile(lambda node: self._can_use_weights(worker, node), nodes)))

    def _record_work(
        self, assigned: _Assigned, item: WorkItem, report: messages.WorkItemEnded
    ) -> None:
        spans, unfinished = report.spans, report.unfinished_starts
        node, worker = assigned.node, assigned.worker
        times = [(start, end) for name, start, end in spans if name == "generate"]
        seconds = sum(end - start for start, end in times)
        if assigned.continued_item is None and not unfinished:
            self._speeds.record(worker, len(item.prompts), seconds)
        self._finished_items[node][worker] += 1
        self._finished_prompts[node][worker] += len(item.prompts)
        for counter in (self._finished_items, self._finished_prompts):
            while len(counter) > HISTORY_SIZE:
                del counter[next(iter(counter))]
        row = {
            "node": node.name,
            "worker": worker,
            "host": report.host,
            "work_item": item.number,
            "starts": item.prompts,
            "unfinished_starts": unfinished,
            "continues": assigned.continued_item,
            "spans": spans,
            "used_disk_fallback": report.used_disk_fallback,
        }
        with (self.run / POOLS_FOLDER / WORK_LOG).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


def read_work_spans(run: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the spans of generators by iteration. A span named ``rollout`` is a whole work item.

    Incomplete or damaged lines are left out.
    """
    spans_by_iteration: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in _read_work_log(run):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            times = [time for _, *pair in row["spans"] for time in pair]
            worker = str(row["worker"])
            common = {"worker": worker, "rank": rank_of(worker), "host": row["host"]}
            common["work_item"] = row.get("work_item")
            spans = [*row["spans"], ["rollout", min(times), max(times)]]
            spans_by_iteration[int(row["node"].partition("/")[2])] += [
                {**common, "name": name, "start": start, "end": end} for name, start, end in spans
            ]
    return spans_by_iteration


def count_disk_fallbacks(run: Path) -> Counter[int]:
    """Return the number of work items whose weights were read from disk instead of memory, by
    iteration."""
    counts = Counter[int]()
    for row in _read_work_log(run):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            counts[int(row["node"].partition("/")[2])] += bool(row.get("used_disk_fallback"))
    return counts


def _read_work_log(run: Path) -> Iterator[Any]:
    try:
        text = (run / POOLS_FOLDER / WORK_LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)
