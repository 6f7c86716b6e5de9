"""What each pool of a placement has to do in every iteration, from measured rates alone.

``pipeline.planning.planner.predict`` judges a placement by formulas; this module and the simulation
share none of them (only which stages form a cycle), so that each can judge the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.planning.planner.predict import cycles
from pipeline.planning.planner.problem import Placement, Problem, Stage, homes
from rlinf.errors import PlanError

Array = np.ndarray
Edge = tuple[int, int]
"""Numbers of two stages in different pools, the second of which takes the first one's output."""


@dataclass(frozen=True)
class Speed:
    """How a stage runs on its pool."""

    seconds: float
    """Duration of an iteration's work."""
    shares: Array
    """``[kinds]`` what part of it each kind does."""
    used: Array
    """``[kinds]`` int, GPUs at work."""


@dataclass(frozen=True)
class Group:
    """Stages that work as one: a stage alone, or those of a cycle."""

    stages: tuple[int, ...]
    pools: tuple[int, ...]
    """Ascending; several where a cycle lies in several pools, or pools overlap."""
    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]
    pieces: int
    """Micro-batches it works in: as many as it takes or passes on while they are made, else 1."""
    overhead_s: float
    """Of each micro-batch; 0 where nothing comes from or goes to another pool."""
    shares: tuple[float, ...]
    """Of the time of its stages that each micro-batch takes: 1 together, but for those that are
    made one after another and each take some of it again."""


class Work:
    """The work of a placement.

    Raises:
        PlanError: the placement does not fit the problem, or a stage cannot run on its pool.
    """

    def __init__(self, problem: Problem, placement: Placement) -> None:
        _check(problem, placement)
        self.problem, self.placement = problem, placement
        stages = problem.stages
        index = {stage.name: s for s, stage in enumerate(stages)}
        self.home = homes(placement.pools)
        """By stage: the pools that it works on, together."""
        self.speeds = [
            stage_speed(problem, stage, placement.gpus_of(s)) for s, stage in enumerate(stages)
        ]
        edges = [(index[name], s) for s, stage in enumerate(stages) for name in stage.after]
        self.groups = [self._group(members, edges) for members in cycles(problem)]
        self.pieces = {s: group.pieces for group in self.groups for s in group.stages}
        """Micro-batches by stage."""
        self.turns = [
            [g for g, group in enumerate(self.groups) if p in group.pools]
            for p in range(len(placement.pools))
        ]
        """By pool: its groups in the order in which it works on them."""
        ends = problem.sync
        known = ends is not None and all(name in index for name in ends)
        self.sync: Edge | None = (index[ends[0]], index[ends[1]]) if ends and known else None
        """Between which stages weights move; None where they stay in their pool."""
        if self.sync and set(self.home[self.sync[0]]) & set(self.home[self.sync[1]]):
            self.sync = None

    def switch_s(self, pool: int, group: int) -> float:
        """Seconds until a pool that has worked on something else has a group's stages at hand.

        Each kind of GPU brings in one stage after the other, and all kinds at the same time.
        """
        if len(self.turns[pool]) == 1:
            return 0.0
        mine = [s for s in self.groups[group].stages if pool in self.home[s]]
        return max(
            sum(self.problem.stages[s].switch_s.get(kind, 0.0) for s in mine)
            for kind in self.kinds(pool)
        )

    def sync_s(self) -> float:
        """Seconds that new weights are under way; 0 where they stay in their pool."""
        if self.sync is None:
            return 0.0
        source, target = (
            {kind for pool in self.home[s] for kind in self.kinds(pool)} for s in self.sync
        )
        return max(self.problem.sync_s.get((a, b), 0.0) for a in source for b in target)

    def kinds(self, pool: int) -> list[str]:
        """Names of the kinds of GPUs that a pool holds."""
        held = zip(self.placement.gpus[pool], self.problem.kinds, strict=True)
        return [kind.name for n, kind in held if n]

    def at_work(self, stage: int, used: Sequence[int] | Array | None = None) -> dict[int, Array]:
        """By pool bool ``[gpus]``: those that a stage makes use of, in the order of kinds.

        Args:
            used: of each kind, where it is not what its speed comes of.
        """
        left = np.array(self.speeds[stage].used if used is None else used)
        masks = {}
        for pool in self.home[stage]:
            held = np.array(self.placement.gpus[pool])
            here = np.minimum(held, left)
            left -= here
            parts = [np.arange(n) < u for n, u in zip(held, here, strict=True)]
            masks[pool] = np.concatenate(parts)
        return masks

    def _group(self, members: tuple[int, ...], edges: list[Edge]) -> Group:
        stages = self.problem.stages
        crossing = [(a, b) for a, b in edges if not set(self.home[a]) & set(self.home[b])]
        inputs = tuple((a, b) for a, b in crossing if b in members and a not in members)
        outputs = tuple((a, b) for a, b in crossing if a in members and b not in members)
        streamed = any(stages[b].streams for _, b in inputs + outputs)
        pieces = self.placement.chunks if streamed else 1
        return Group(
            members,
            tuple(sorted({pool for s in members for pool in self.home[s]})),
            inputs,
            outputs,
            pieces,
            max(stages[s].chunk_s for s in members) if inputs or outputs else 0.0,
            self._shares(members, pieces),
        )

    def _shares(self, members: tuple[int, ...], pieces: int) -> tuple[float, ...]:
        stage, chunks = self.problem.stages[members[0]], self.placement.chunks
        # Those that have all of a job come after all parts of those that have some of it.
        pools = {pool for s in members for pool in self.home[s]}
        others = {s for pool in pools for s in self.placement.pools[pool]} - set(members)
        if any(len(self.home[s]) == 1 or self.home[s] == self.home[members[0]] for s in others):
            return ((1 + (chunks - 1) * stage.again) / pieces,) * pieces
        held = sum(self.placement.gpus_of(members[0]))
        first = float(stage.ahead(pieces, np.array(held))) if stage.lead else 1 / pieces
        return (first, *((1 - first) / max(1, pieces - 1) for _ in range(pieces - 1)))


def stage_speed(problem: Problem, stage: Stage, gpus: tuple[int, ...]) -> Speed:
    """The speed of a stage on GPUs of each kind: together, or of the quickest kind alone where only
    one can do it.

    Raises:
        PlanError: it cannot run there.
    """
    tables = [problem.table(stage, k) for k in range(len(gpus))]
    rates = np.array([table[n] for table, n in zip(tables, gpus, strict=True)])
    # GPUs that have nothing to do stay idle.
    used = np.array([np.argmax(t == rate) for t, rate in zip(tables, rates, strict=True)])
    if not stage.divisible:
        rates = np.where(np.arange(len(rates)) == rates.argmax(), rates, 0.0)
    elif np.any((rates == 0) & (np.array(gpus) > 0)):
        rates = 0 * rates
    together = rates.sum() * (problem.mixing if (rates > 0).sum() > 1 else 1.0)
    if not together > 0:
        held = ", ".join(f"{n} {k.name}" for n, k in zip(gpus, problem.kinds, strict=True) if n)
        raise PlanError(f"stage {stage.name!r}: cannot run on {held or 'a pool without GPUs'}")
    return Speed(float(1 / together), rates / rates.sum(), np.where(rates > 0, used, 0))


def _check(problem: Problem, placement: Placement) -> None:
    home = homes(placement.pools)
    if list(home) != list(range(len(problem.stages))):
        raise PlanError("placement: every stage must be in a pool")
    if any(len(places) > 1 and places not in placement.jobs for places in home.values()):
        raise PlanError("placement: pools that overlap must do so in the same stages")
    if len(placement.gpus) != len(placement.pools):
        raise PlanError(
            f"placement: {len(placement.pools)} pools, but GPUs for {len(placement.gpus)}"
        )
    if placement.chunks < 1:
        raise PlanError(f"placement: chunks must be at least 1 (got {placement.chunks})")
    for k, kind in enumerate(problem.kinds):
        wanted = [pool[k] if k < len(pool) else -1 for pool in placement.gpus]
        if min(wanted) < 0 or any(len(pool) != len(problem.kinds) for pool in placement.gpus):
            raise PlanError("placement: each pool needs a number of GPUs of each kind, 0 or more")
        if sum(wanted) > kind.gpus:
            raise PlanError(f"placement: {sum(wanted)} {kind.name} are asked for, of {kind.gpus}")
