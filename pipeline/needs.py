"""What the job of a pool asks for: worked out from the stages of the plan that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.plan import Plan, StagePlan, device
from rlinf.errors import PlanError

if TYPE_CHECKING:
    from slurm.client import Partition


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
