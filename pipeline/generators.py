"""The driver's side of elastic pools: rollouts under way, and the claims of their generators.

A rollout is ordered from the worker that consumes it, which gathers the trajectories; generators
get claims on its starts and send what comes of them there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.claims import REMEMBERED, Claim, Claims, Pace, hand_out
from pipeline.flow import Node
from pipeline.scaling import Load
from rlinf.artifacts import read_manifest
from rlinf.errors import EXIT_REQUEUE, StageError
from stages.layout import POOLS

CLAIMS = "claims.jsonl"
PREPARES = -1
"""Number of the empty claim by which a worker loads its engine."""
log = logging.getLogger("rlinf")


@dataclass
class _Rollout:
    order: dict[str, Any]
    """What all claims say."""
    claims: Claims | None = None
    """None until the gatherer has told what it has already."""
    there: bool = False
    """Its weights."""


@dataclass
class Generators:
    """Gives out the starts of all rollouts under way, the earliest iteration first."""

    run: Path
    batch: int
    retries: int
    _rollouts: dict[Node, _Rollout] = field(default_factory=dict)
    _given: dict[str, tuple[Node, str, int]] = field(default_factory=dict)
    """Of each claim on its way: rollout, worker, number."""
    _pace: Pace = field(default_factory=Pace)
    _made: dict[Node, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Claims that each worker has done, of the newest rollouts."""
    _failures: Counter[str] = field(default_factory=Counter)
    _prepared: set[str] = field(default_factory=set)
    """Workers that have an engine: starts are not to wait until one is loaded."""

    def begin(self, node: Node, out: str, weights: str, to: str) -> None:
        """A rollout was ordered from the gatherer ``to``."""
        order = {"do": "claim", "node": node.name, "iteration": node.iteration}
        self._rollouts[node] = _Rollout({**order, "out": out, "weights": weights, "to": to})

    def arrived(self, node: Node, starts: Sequence[int]) -> None:
        """What the gatherer of a rollout has already."""
        if node in self._rollouts:
            self._rollouts[node].claims = Claims(self.batch, starts)

    def end(self, node: Node) -> set[str]:
        """A rollout is over; returns the workers that still do something for it."""
        self._rollouts.pop(node, None)
        stale = {claim: worker for claim, (of, worker, _) in self._given.items() if of == node}
        for claim in stale:
            del self._given[claim]
        return set(stale.values())

    def busy(self, worker: str) -> bool:
        return any(of == worker for _, of, _ in self._given.values())

    def lost(self, worker: str) -> None:
        """A worker is gone; what it had not finished others do."""
        self._prepared.discard(worker)
        for claim in [claim for claim, (_, of, _) in self._given.items() if of == worker]:
            del self._given[claim]
        for rollout in self._rollouts.values():
            if rollout.claims is not None:
                rollout.claims.lost(worker)

    def reported(self, worker: str, content: dict[str, Any]) -> bool:
        """A worker is through with a claim; whether it did it.

        Raises:
            StageError: a claim failed more often than is allowed.
        """
        node, _, number = self._given.pop(str(content["claim"]), (None, "", 0))
        rollout = self._rollouts.get(node) if node is not None else None
        if node is None or rollout is None or rollout.claims is None:
            return False
        code = int(content["code"])
        if number == PREPARES and not code:
            self._prepared.add(worker)
            return False
        if code:
            rollout.claims.back(worker, number)
            self._failures[node.name] += code != EXIT_REQUEUE
            log.warning("%s on %s: %s", node.name, worker, content["reason"])
            if self._failures[node.name] > self.retries:
                raise StageError(f"{node.name} failed on {worker}: {content['reason']}")
            return False
        claim = rollout.claims.finished(worker, number)
        if claim is not None:
            self._note(node, worker, claim, content)
        return True

    def orders(self, workers: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
        """Claims for those of ``workers`` that are about to have nothing to do.

        None whose weights are still to come: it would stand in the way of others they come of.
        """
        open_ = {
            node: rollout.claims
            for node, rollout in sorted(self._rollouts.items(), key=lambda item: item[0].iteration)
            if rollout.claims is not None and self._weights_there(rollout)
        }
        if not open_:
            return []
        fresh = [w for w in workers if w not in self._prepared]
        workers = [w for w in workers if w in self._prepared]
        first = next(iter(open_))
        orders = [
            (worker, self._order(first, worker, Claim(PREPARES, ())))
            for worker in fresh
            if not self.busy(worker)
        ]
        of = {id(claims): node for node, claims in open_.items()}
        speeds = self._pace.speeds(workers)
        for claims, worker, claim in hand_out(list(open_.values()), speeds, self._pace.least()):
            orders.append((worker, self._order(of[id(claims)], worker, claim)))
        return orders

    def load(
        self, node: Node, workers: Sequence[str], rest_s: float, *, overlap: bool
    ) -> Load | None:
        """What an iteration cost whose rollout is over; None if not all these workers did a part.

        Args:
            rest_s: seconds of its other stages.
            overlap: whether they run beside the next rollout.
        """
        made = self._made.get(node, Counter())
        if not workers or not set(workers) <= made.keys():
            return None
        fixed, each = self._pace.line()
        claims = made.total() / len(made)
        return Load(claims * fixed, each * self.batch, rest_s, overlap)

    def _order(self, node: Node, worker: str, claim: Claim) -> dict[str, Any]:
        name = secrets.token_hex(6)
        self._given[name] = (node, worker, claim.number)
        return {**self._rollouts[node].order, "claim": name, "starts": list(claim.starts)}

    def _weights_there(self, rollout: _Rollout) -> bool:
        if not rollout.there:
            rollout.there = read_manifest(self.run / rollout.order["weights"]) is not None
        return rollout.there

    def _note(self, node: Node, worker: str, claim: Claim, said: dict[str, Any]) -> None:
        """Keep who did what, when and where."""
        spans = said["spans"]
        times = [(start, end) for name, start, end in spans if name == "generate"]
        seconds = sum(end - start for start, end in times)
        self._pace.seen(worker, len(claim.starts), seconds)
        self._made[node][worker] += 1
        while len(self._made) > REMEMBERED:
            del self._made[next(iter(self._made))]
        about = {"node": node.name, "worker": worker, "host": said["host"]}
        row = {**about, "starts": claim.starts, "spans": spans}
        with (self.run / POOLS / CLAIMS).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


def claimed(run: Path) -> dict[int, list[dict[str, Any]]]:
    """When generators were at work, by iteration, as spans of the rollout: whole claims and parts.

    A line that is being written is left out.
    """
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    try:
        lines = (run / POOLS / CLAIMS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        with contextlib.suppress(ValueError, KeyError):
            row = json.loads(line)
            times = [time for _, *pair in row["spans"] for time in pair]
            who = {"worker": row["worker"], "rank": 0, "host": row["host"]}
            spans = [*row["spans"], ["rollout", min(times), max(times)]]
            found[int(row["node"].partition("/")[2])] += [
                {**who, "name": name, "start": start, "end": end} for name, start, end in spans
            ]
    return found
