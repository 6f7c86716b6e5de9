"""Pools as the driver keeps them: each a job that is renewed before its lease ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.flow import Node
from pipeline.plan import Plan, StagePlan, device
from rlinf.errors import PlanError
from stages.names import worker_name
from stages.runner import StageCall

if TYPE_CHECKING:
    from slurm.client import Partition

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
    given: set[Node] = field(default_factory=set)
    finished: int = 0
    leaving: bool = False
    fellows: tuple[Member, ...] = ()
    """Those that started with it and end with it."""

    @property
    def ready(self) -> bool:
        return len(self.joined) == self.size

    @property
    def ends(self) -> float | None:
        """When its time is up, if that is known."""
        known = [about["ends"] for about in self.joined.values() if about.get("ends")]
        return min(known, default=None)

    @property
    def due(self) -> bool:
        """Whether to submit a successor: the lease is nearly over, however long it was."""
        if self.ends is None:
            return False
        length = self.ends - self.began
        return self.ends - time.time() < min(RENEW_S, RENEW_SHARE * length)

    def workers(self, ranks: int) -> list[str]:
        return [worker_name(self.name, rank) for rank in range(ranks)]

    def hosts(self, ranks: int) -> dict[str, str | None]:
        """Where its workers are, as far as that is known."""
        return {
            worker: self.joined.get(rank, {}).get("host")
            for rank, worker in enumerate(self.workers(ranks))
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
    waiting: dict[Node, StageCall] = field(default_factory=dict)
    """Started by the driver, not yet ordered."""
    since: float = 0.0
    lease: int = 0
    failures: int = 0
    reason: str = ""
    resume: float = 0.0
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

    @property
    def active(self) -> Member | None:
        """The newest lease whose workers are all there."""
        if self.retired:
            return None
        return next((m for m in reversed(self.members) if m.ready and not m.leaving), None)


def rank_of(worker: str) -> int:
    """The rank in a worker's name."""
    return int(worker.rpartition("-r")[2])


def pool_needs(plan: Plan, number: int, slot: int | None = None) -> tuple[StagePlan, ...]:
    """What the job of a pool asks for: the most that one of its stages does, where its devices are.

    It has as many nodes as its devices fill. Several kinds of devices are components of a
    heterogeneous job, unless a constraint has one partition give them all.

    Args:
        slot: which worker of an elastic pool; where that has several kinds of devices, each kind
            has its turn as often as it has devices.

    Raises:
        PlanError: the devices of a kind do not fill their nodes, or its stages say otherwise.
    """
    pool = plan.pools[number]
    stages = [plan.of(stage) for stage in pool.stages]
    needs = max(stages, key=lambda stage: (stage.nodes * stage.processes, stage.gpus))
    if pool.workers is not None:
        kinds = [kind for kind, count in pool.gpus.items() for _ in range(count)]
        return (needs.model_copy(update=device(kinds[(slot or 0) % len(kinds)], needs)),)
    if len(pool.gpus) == 1:
        return (_alike(needs, *next(iter(pool.gpus.items())), f"plan.pools[{number}].gpus"),)
    if needs.constraint is not None:
        return (needs,)
    parts = []
    for kind, count in pool.gpus.items():
        processes = min(count, needs.processes)
        nodes, left = divmod(count, processes)
        if left:
            raise PlanError(
                f"plan.pools[{number}].gpus: {count} {kind} do not fill nodes of "
                f"{needs.processes}, the processes per node of its stages"
            )
        update = {"nodes": nodes, "processes": processes, "gpus": processes if needs.gpus else 0}
        parts.append(needs.model_copy(update=device(kind, needs) | update))
    return tuple(parts)


def _alike(needs: StagePlan, kind: str, count: int, key: str) -> StagePlan:
    """What a pool of one kind of device asks for."""
    per_node = max(needs.processes, needs.gpus)
    nodes, left = divmod(count, per_node)
    if left or needs.nodes not in (1, nodes):
        raise PlanError(
            f"{key}: {count} {kind}, but its stages ask for {needs.nodes} x {per_node} (nodes, and "
            "processes or gpus of each); make the two agree"
        )
    return needs.model_copy(update=device(kind, needs) | {"nodes": nodes})


def with_gpus(plan: Plan, partitions: Mapping[str, Partition]) -> Plan:
    """The plan, with a GPU for each process of pools that hold some and do not say how many.

    Args:
        partitions: of the cluster; only those with GPUs can give any.
    """
    stages = dict(plan.stages)
    for pool in plan.pools:
        said = [plan.defaults, *(plan.stages[name] for name in pool.stages if name in plan.stages)]
        names = [kind.partition(":")[0] for kind in pool.gpus]
        here = [partitions[name] for name in names if name in partitions]
        if any("gpus" in part.model_fields_set for part in said) or not here:
            continue
        if all(partition.gpus for partition in here):
            for name in pool.stages:
                own = stages.get(name, StagePlan())
                update = {"gpus": plan.of(name).processes}
                stages[name] = own.model_copy(update=update)
    return plan if stages == plan.stages else plan.model_copy(update={"stages": stages})
