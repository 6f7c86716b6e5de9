"""The driver's side of elastic pools: rollouts under way, and the claims of their generators.

A rollout is ordered from the worker that consumes it, which gathers the trajectories; generators
get claims on its starts and send what comes of them there. Helpers, the workers of pools that have
other stages besides, get claims as well until nothing is left to give out: generators then go on
with the tails of what helpers have begun.

Claims of a rollout go to those who have its weights in their memory, and to all once these are
committed. What was made of weights that another attempt commits in the end who gathers refuses.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pipeline.graph import StageNode
from pipeline.pools.autoscaler import IterationLoad
from pipeline.pools.leases import rank_of
from pipeline.pools.work_queue import HISTORY_SIZE, WorkerSpeeds, WorkItem, WorkQueue, assign_work
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

WORK_LOG = "claims.jsonl"
LOAD_ENGINE = -1
"""Number of the empty claim by which a worker loads its engine."""
log = logging.getLogger("rlinf")


@dataclass
class _Rollout:
    out: str
    weights: str
    to: str
    """The gatherer."""
    claims: WorkQueue | None = None
    """None until the gatherer has told what it has already."""
    there: bool = False
    """Its weights are committed."""
    ends: bool = False
    """All starts were given out once: helpers get no more."""


class _Given(NamedTuple):
    """A claim on its way."""

    node: StageNode
    """Its rollout."""
    worker: str
    claim: WorkItem
    attempt: str | None
    """By which its weights were made, while they were not committed."""
    begun: int | None
    """Number of the claim in which another worker has begun its samples."""


class _Left(NamedTuple):
    """A claim whose samples another worker has begun, for the one that is to go on with them."""

    node: StageNode
    successor: str
    claim: WorkItem
    begun: messages.PartialSamples


@dataclass
class RolloutScheduler:
    """Gives out the starts of all rollouts under way, the earliest iteration first."""

    run: Path
    batch: int
    retries: int
    _rollouts: dict[StageNode, _Rollout] = field(default_factory=dict)
    _given: dict[str, _Given] = field(default_factory=dict)
    _over: dict[str, _Given] = field(default_factory=dict)
    """Claims of rollouts that are over; the word that one is done may come a little later."""
    _successors: dict[str, str] = field(default_factory=dict)
    """The worker that is to go on with the tail of a claim that is on its way."""
    _left: list[_Left] = field(default_factory=list)
    """Not ordered yet."""
    _pace: WorkerSpeeds = field(default_factory=WorkerSpeeds)
    _made: dict[StageNode, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Claims that each worker has done, of the newest rollouts."""
    _starts: dict[StageNode, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Starts in them."""
    _failures: Counter[str] = field(default_factory=Counter)
    _weights: dict[str, dict[str, str]] = field(default_factory=dict)
    """By weights on their way: the workers that have them in memory, by which attempt."""
    _version: dict[str, int] = field(default_factory=dict)
    """By worker: the iteration whose weights came to it last."""
    _prepared: set[str] = field(default_factory=set)
    """Workers that have an engine: starts are not to wait until one is loaded."""

    def start_rollout(self, node: StageNode, out: str, weights: str, to: str) -> None:
        """A rollout was ordered from the gatherer ``to``."""
        self._rollouts[node] = _Rollout(out, weights, to)

    def on_collected(self, node: StageNode, starts: Sequence[int]) -> None:
        """What the gatherer of a rollout has already."""
        if node in self._rollouts:
            self._rollouts[node].claims = WorkQueue(self.batch, starts)

    def on_weights(self, worker: str, weights: str, attempt: str, iteration: int) -> None:
        """A worker has the weights of an iteration in its memory; nobody has committed them yet."""
        self._weights.setdefault(weights, {})[worker] = attempt
        evict_oldest(self._weights, HISTORY_SIZE)
        self._version[worker] = iteration

    def invalidate_weights(self, weights: str) -> None:
        """Weights are made anew: what workers have of them counts no more."""
        self._weights.pop(weights, None)

    def weights_iteration(self, worker: str) -> int:
        """The iteration whose weights came to a worker last; all of it was computed by then."""
        return self._version.get(worker, -1)

    def end_rollout(self, node: StageNode) -> set[str]:
        """A rollout is over; returns the workers that still do something for it."""
        self._rollouts.pop(node, None)
        self._left = [left for left in self._left if left.node != node]
        stale = {name: given for name, given in self._given.items() if given.node == node}
        for name in stale:
            self._forget(name)
        self._over = dict([*self._over.items(), *stale.items()][-HISTORY_SIZE:])
        return {given.worker for given in stale.values()}

    def is_busy(self, worker: str) -> bool:
        """Whether it has something to do, or will have."""
        known = {given.worker for given in self._given.values()}
        known.update(left.successor for left in self._left)
        return worker in known or worker in self._successors.values()

    def on_worker_lost(self, worker: str) -> None:
        """A worker is gone; what it had not finished others do."""
        self._prepared.discard(worker)
        for name in [name for name, given in self._given.items() if given.worker == worker]:
            self._forget(name)
        self._successors = {
            name: successor for name, successor in self._successors.items() if successor != worker
        }
        for rollout in self._rollouts.values():
            if rollout.claims is not None:
                rollout.claims.requeue_worker(worker)

    def on_report(self, worker: str, said: messages.WorkItemEnded) -> bool:
        """A worker is through with a claim; whether it did it.

        Raises:
            InputError: a claim met bad input, or an error of the user's own code.
            StageError: a claim failed more often than is allowed.
        """
        name = said.work_item
        given = self._given.get(name)
        self._forget(name)
        rollout = self._rollouts.get(given.node) if given is not None else None
        if given is None or rollout is None or rollout.claims is None:
            late = self._over.pop(name, None)
            if late is not None and not said.exit_code and late.claim.starts:
                self._note(late, late.claim, said)
            return False
        node, number = given.node, given.claim.number
        if number == LOAD_ENGINE and not said.exit_code:
            self._prepared.add(worker)
            return False
        if said.exit_code:
            rollout.claims.requeue(worker, number)
            # Maybe it has its weights no more, or no engine that takes them, or they are withdrawn.
            self._weights.get(rollout.weights, {}).pop(worker, None)
            rollout.there = False
            self._failures[node.name] += said.exit_code != EXIT_REQUEUE
            if said.exit_code == EXIT_BAD_INPUT:
                raise InputError(f"{node.name}: {said.reason}")
            log.warning("%s on %s: %s", node.name, worker, short_reason(said.reason))
            if self._failures[node.name] > self.retries:
                raise StageError(f"{node.name} failed on {worker}: {said.reason}")
            return False
        claim = rollout.claims.mark_done(worker, number)
        if claim is None:
            return True
        if said.unfinished_starts:
            rest = rollout.claims.reassign(claim, said.unfinished_starts, said.successor)
            begun = messages.PartialSamples(
                work_item=number,
                channel=partial_samples_channel(name),
                num_samples=said.num_partial_samples,
                weights_attempt=given.attempt,
            )
            self._left.append(_Left(node, said.successor, rest, begun))
            claim = WorkItem(number, tuple(s for s in claim.starts if s not in rest.starts))
        if said.spans:
            self._note(given, claim, said)
        return True

    def next_orders(
        self, workers: Sequence[str], helpers: Mapping[str, int] = MappingProxyType({})
    ) -> list[tuple[str, WorkerOrder]]:
        """Orders for those who are about to have nothing to do, or something better.

        No claim to one whose weights are still to come: it would stand in the way of others, which
        they come of.

        Args:
            workers: the generators that are there.
            helpers: and the workers that generate beside other stages, with the earliest iteration
                that these are of: until it is trained they generate for no later one.
        """
        orders = self._handed_over(workers)
        open_ = {
            node: rollout.claims
            for node, rollout in sorted(self._rollouts.items(), key=lambda item: item[0].iteration)
            if rollout.claims is not None and self._weights_there(rollout)
        }
        only = {worker: self._reach(worker, open_) for worker in [*workers, *helpers]}
        over = bool(workers) and any(self._rollouts[node].ends for node in open_)
        for worker, latest in helpers.items():
            early = sum(node.iteration <= latest for node in open_)
            only[worker] = 0 if over else min(early, only[worker])
        able = [worker for worker in only if worker in workers or only[worker]]
        # An engine is loaded from files.
        first = next((node for node in open_ if self._rollouts[node].there), None)
        if first is not None:
            orders += [
                (worker, self._order(first, worker, WorkItem(LOAD_ENGINE, ())))
                for worker in able
                if worker not in self._prepared and not self.is_busy(worker)
            ]
        of = {id(claims): node for node, claims in open_.items()}
        speeds = self._pace.speeds([worker for worker in able if worker in self._prepared])
        batches = list(open_.values())
        for claims, worker, claim in assign_work(batches, speeds, self._pace.min_items(), only):
            orders.append((worker, self._order(of[id(claims)], worker, claim)))
        successors = [worker for worker in workers if worker in self._prepared]
        return orders + (self._hand_over(helpers, successors) if successors else [])

    def _hand_over(
        self, helpers: Mapping[str, int], successors: Sequence[str]
    ) -> list[tuple[str, WorkerOrder]]:
        """Name a generator that goes on with what a helper has begun when nothing is left."""
        orders: list[tuple[str, WorkerOrder]] = []
        for name, given in self._given.items():
            claims = (rollout := self._rollouts[given.node]).claims
            if (
                given.worker not in helpers
                or name in self._successors
                or given.claim.number == LOAD_ENGINE
            ):
                continue
            able = [worker for worker in successors if self._has(worker, given.node)]
            if claims is not None and not claims.num_pending and able:
                rollout.ends = True
                held = Counter(given.worker for given in self._given.values())
                held.update(self._successors.values())
                self._successors[name] = min(able, key=lambda worker: held[worker])
                order = messages.ReassignWork(work_item=name, successor=self._successors[name])
                orders.append((given.worker, order))
        return orders

    def _handed_over(self, workers: Sequence[str]) -> list[tuple[str, WorkerOrder]]:
        """Have successors go on with what was left to them; what those gone had begins anew."""
        orders: list[tuple[str, WorkerOrder]] = []
        for node, successor, claim, begun in self._left:
            claims = self._rollouts[node].claims
            if claims is None or claim not in claims.items_of(successor):
                continue
            if successor in workers and begun.num_samples:
                orders.append((successor, self._order(node, successor, claim, begun)))
            else:
                claims.requeue(successor, claim.number)
        self._left.clear()
        return orders

    def iteration_load(
        self, node: StageNode, workers: Sequence[str], rest_s: float, *, overlap: bool
    ) -> IterationLoad | None:
        """What an iteration cost whose rollout is over; None if not all these workers did a part.

        Args:
            rest_s: seconds of its other stages.
            overlap: whether they run beside the next rollout.
        """
        made = self._made.get(node, Counter())
        if not workers or not set(workers) <= made.keys():
            return None
        fixed, each = self._pace.fit_line()
        claims = made.total() / len(made)
        starts = sum(self._starts[node][worker] for worker in workers)
        return IterationLoad(claims * fixed, each * starts, rest_s, overlap)

    def _order(
        self,
        node: StageNode,
        worker: str,
        claim: WorkItem,
        begun: messages.PartialSamples | None = None,
    ) -> messages.GenerateStarts:
        name, rollout = secrets.token_hex(6), self._rollouts[node]
        attempt, number = None, None
        if begun is not None:
            attempt, number = begun.weights_attempt, begun.work_item
        elif not rollout.there:
            attempt = self._weights[rollout.weights][worker]
        self._given[name] = _Given(node, worker, claim, attempt, number)
        return messages.GenerateStarts(
            work_item=name,
            label=node.name if claim.number == LOAD_ENGINE else f"{node.name} claim {claim.number}",
            iteration=node.iteration,
            output=rollout.out,
            weights=rollout.weights,
            weights_attempt=attempt,
            receiver=rollout.to,
            starts=claim.starts,
            partial=begun,
        )

    def _forget(self, name: str) -> None:
        self._given.pop(name, None)
        self._successors.pop(name, None)

    def _weights_there(self, rollout: _Rollout) -> bool:
        """Whether anybody has them."""
        if not rollout.there:
            with contextlib.suppress(ArtifactError):  # seen by whoever reads it
                rollout.there = read_manifest(self.run / rollout.weights) is not None
        return rollout.there or bool(self._weights.get(rollout.weights))

    def _has(self, worker: str, node: StageNode) -> bool:
        """Whether a worker has the weights of a rollout, or can read them."""
        rollout = self._rollouts[node]
        return rollout.there or worker in self._weights.get(rollout.weights, ())

    def _reach(self, worker: str, nodes: Iterable[StageNode]) -> int:
        """How many rollouts of these, from the first on, it has the weights of."""
        return len(list(takewhile(lambda node: self._has(worker, node), nodes)))

    def _note(self, given: _Given, claim: WorkItem, said: messages.WorkItemEnded) -> None:
        """Keep which worker did what, when and where."""
        spans, rest, node, worker = said.spans, said.unfinished_starts, given.node, given.worker
        times = [(start, end) for name, start, end in spans if name == "generate"]
        seconds = sum(end - start for start, end in times)
        if given.begun is None and not rest:
            self._pace.record(worker, len(claim.starts), seconds)
        self._made[node][worker] += 1
        self._starts[node][worker] += len(claim.starts)
        for kept in (self._made, self._starts):
            while len(kept) > HISTORY_SIZE:
                del kept[next(iter(kept))]
        about = {"node": node.name, "worker": worker, "host": said.host, "claim": claim.number}
        row = {**about, "starts": claim.starts, "rest": rest, "begun": given.begun, "spans": spans}
        row["fell"] = said.used_disk_fallback
        with (self.run / POOLS_FOLDER / WORK_LOG).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


def read_work_spans(run: Path) -> dict[int, list[dict[str, Any]]]:
    """When generators were at work, by iteration, as spans of the rollout: whole claims and parts.

    A line that is being written, or was damaged, is left out.
    """
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in _noted(run):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            times = [time for _, *pair in row["spans"] for time in pair]
            worker = str(row["worker"])
            who = {"worker": worker, "rank": rank_of(worker), "host": row["host"]}
            who["claim"] = row.get("claim")
            spans = [*row["spans"], ["rollout", min(times), max(times)]]
            found[int(row["node"].partition("/")[2])] += [
                {**who, "name": name, "start": start, "end": end} for name, start, end in spans
            ]
    return found


def count_disk_fallbacks(run: Path) -> Counter[int]:
    """By iteration: claims whose weights were to come by memory, and were read from disk."""
    found = Counter[int]()
    for row in _noted(run):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            found[int(row["node"].partition("/")[2])] += bool(row.get("fell"))
    return found


def _noted(run: Path) -> Iterator[Any]:
    try:
        text = (run / POOLS_FOLDER / WORK_LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)
