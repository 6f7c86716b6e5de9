"""What the job of a pool asks for: worked out from the stages of the plan that it holds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from pipeline.plan import Plan, StagePlan, device_keys
from rlinf.channels.process_group import DATA_PARALLEL_ONLY
from rlinf.errors import PlanError

COUNTED_FEATURE = re.compile(r"\*(\d+)")
"""In a constraint: of how many nodes a feature is asked."""


class PartitionInfo(Protocol):
    """What is read of a partition, as Slurm tells it or an inventory has it."""

    @property
    def is_default(self) -> bool: ...
    @property
    def gpus(self) -> Mapping[str, int]: ...


def pool_resources(plan: Plan, number: int, slot: int | None = None) -> tuple[StagePlan, ...]:
    """What the job of a pool asks for: of all that its stages say the most, where its devices are.

    It has as many nodes as its devices fill. Several kinds of devices are components of a
    heterogeneous job, unless a constraint that counts nodes has one partition give them all.

    Args:
        slot: which worker of an elastic pool; where that has several kinds of devices, each kind
            has its turn as often as it has devices.

    Raises:
        PlanError: the devices of a kind do not fill their nodes, are not one for each process, or
            its stages say otherwise, or that they run on others.
    """
    pool = plan.pools[number]
    _check_device(plan, number)
    stages = {f"plan.stages.{name}": plan.stage_plan(name) for name in pool.stages}
    needs = _most(stages, _guests(plan, number))
    if pool.workers is not None:
        kinds = [kind for kind, count in pool.gpus.items() for _ in range(count)]
        kind = kinds[(slot or 0) % len(kinds)]
        return (needs.model_copy(update=_device(kind, stages)),)
    key, held = f"plan.pools[{number}].gpus", sum(pool.gpus.values())
    if needs.gpus > needs.processes:
        raise PlanError(
            f"{key}: {_named(pool.gpus)}, but its stages ask for {needs.gpus} GPUs and "
            f"{needs.processes} processes per node; each process has one, so give a stage that "
            f"runs on all of them processes: {needs.gpus}"
        )
    if len(pool.gpus) == 1 or COUNTED_FEATURE.search(needs.constraint or ""):
        parts = [_alike(needs, stages, pool.gpus, key)]
    else:
        parts = list(_unlike(needs, stages, pool.gpus, key))
    for part in parts:
        _check_counts(part, key)
    if isinstance(needs.speed_weights, tuple) and len(needs.speed_weights) != held:
        raise PlanError(
            f"{key}: {_named(pool.gpus)}, but its stages give speed_weights for "
            f"{len(needs.speed_weights)} processes; each device has one process, and each process "
            "one weight"
        )
    return tuple(parts)


def _guests(plan: Plan, number: int) -> dict[str, StagePlan]:
    """What is said of stages that run in a pool though none names them, by name."""
    named = {stage for pool in plan.pools for stage in pool.stages}
    here = [
        stage for stage, home in plan.stage_pools().items() if home == number and stage not in named
    ]
    return {stage: plan.stages[stage] for stage in here if stage in plan.stages}


def _check_device(plan: Plan, number: int) -> None:
    """See that what stages say of where they run is where their pool is.

    Raises:
        PlanError: it is elsewhere, or another GPU.
    """
    pool, held = plan.pools[number], f"pools[{number}].gpus"
    kinds = [kind.partition(":") for kind in pool.gpus]
    partitions, types = {name for name, _, _ in kinds}, {gpu for _, _, gpu in kinds}
    named = {stage: plan.stages[stage] for stage in pool.stages if stage in plan.stages}
    for stage, own in (named | _guests(plan, number)).items():
        for key, said, there in (
            ("partition", own.partition, partitions),
            # A kind without a type leaves it to the stages.
            ("gpu_type", own.gpu_type, types - {""} if "" not in types else ()),
        ):
            if said is not None and there and said not in there:
                raise PlanError(
                    f"plan.stages.{stage}.{key}: {said}, but it runs in plan.{held}: "
                    f"{_named(pool.gpus)}; the pool says where: leave {key} out, name "
                    f"another kind in {held}, or give {stage} a pool of its own"
                )


def _most(stages: Mapping[str, StagePlan], guests: Mapping[str, StagePlan]) -> StagePlan:
    """What one job needs that holds several stages; their order does not matter.

    Memory, CPUs, GPUs and time are the most that one of them says. Where one says nothing of them,
    or of a constraint or shares, it is content with what the others say.

    Args:
        stages: by key of the plan.
        guests: further ones, of which CPUs, memory and time count where they are said.

    Raises:
        PlanError: two of them say what no job can have at once.
    """
    size = max(stage.nodes * stage.processes for stage in stages.values())
    largest = {k: stage for k, stage in stages.items() if stage.nodes * stage.processes == size}
    update = {
        **{name: _one(name, largest) for name in ("nodes", "processes")},
        "gpus": _largest("gpus", stages),
        **{
            name: _largest(name, {**stages, **guests})
            for name in ("cpus", "mem_mb", "time_limit_min")
        },
        **{name: _one(name, stages) for name in ("constraint", "speed_weights")},
        # An order to the pool says the layout of its stage; those of engine and trainer may differ.
        "layout": DATA_PARALLEL_ONLY,
    }
    return next(iter(largest.values())).model_copy(update=update)


def _largest(name: str, stages: Mapping[str, StagePlan]) -> int | None:
    said = [getattr(stage, name) for stage in stages.values()]
    return max((value for value in said if value is not None), default=None)


def _one(name: str, stages: Mapping[str, StagePlan]) -> Any:
    """The one value of a key that the stages say; None: none says any."""
    return _agreed({f"{key}.{name}": getattr(stage, name) for key, stage in stages.items()})


def _device(kind: str, stages: Mapping[str, StagePlan]) -> dict[str, str | None]:
    """See :func:`pipeline.plan.device_keys`, of stages that share the devices."""
    found = {key: device_keys(kind, stage) for key, stage in stages.items()}
    types = {f"{key}.gpu_type": keys["gpu_type"] for key, keys in found.items()}
    return next(iter(found.values())) | {"gpu_type": _agreed(types)}


def _agreed(said: Mapping[str, Any]) -> Any:
    values = {key: value for key, value in said.items() if value is not None}
    first = next(iter(values), None)
    other = next((key for key in values if values[key] != values[str(first)]), None)
    if other is not None:
        raise PlanError(
            f"{first}: {values[str(first)]}, but {other}: {values[other]}; the stages of a pool "
            "share one job, so say the same of both, or give them pools of their own"
        )
    return None if first is None else values[first]


def _alike(
    needs: StagePlan, stages: Mapping[str, StagePlan], held: Mapping[str, int], key: str
) -> StagePlan:
    """What a pool asks for whose devices are nodes of one partition, in an ordinary job."""
    if len({kind.partition(":")[0] for kind in held}) > 1:
        raise PlanError(
            f"{key}: {_named(held)} are of several partitions, but constraint "
            f"{needs.constraint!r} counts the nodes of one job in one of them; name it with each "
            "kind (gpu:a100), or leave the constraint out"
        )
    count = sum(held.values())
    nodes, left = divmod(count, needs.processes)
    if left or needs.nodes not in (1, nodes):
        raise PlanError(
            f"{key}: {_named(held)}, but its stages ask for {needs.nodes} x {needs.processes} "
            "(nodes, and processes of each); make the two agree"
        )
    of_kinds = [_device(kind, stages) for kind in held]
    # A request for GPUs of one type would leave the nodes of the other kinds out.
    types = {keys["gpu_type"] for keys in of_kinds}
    place = of_kinds[0] if len(types) == 1 else of_kinds[0] | {"gpu_type": None}
    return needs.model_copy(update=place | {"nodes": nodes})


def _unlike(
    needs: StagePlan, stages: Mapping[str, StagePlan], held: Mapping[str, int], key: str
) -> Iterator[StagePlan]:
    """What the components of a pool's heterogeneous job ask for, one for each kind of device."""
    for kind, count in held.items():
        processes = min(count, needs.processes)
        nodes, left = divmod(count, processes)
        if left:
            raise PlanError(
                f"{key}: {count} {kind} do not fill nodes of {needs.processes}, the processes per "
                "node of its stages"
            )
        update = {"nodes": nodes, "processes": processes, "gpus": processes if needs.gpus else 0}
        yield needs.model_copy(update=_device(kind, stages) | update)


def _check_counts(needs: StagePlan, key: str) -> None:
    """See that a constraint that counts nodes, ``[h100*1&a100*1]``, counts those of the job."""
    text = needs.constraint or ""
    counted = sum(map(int, COUNTED_FEATURE.findall(text)))
    # Alternatives (|) are counted one by one. Without brackets further nodes may be of any kind.
    wrong = counted > needs.nodes or (text.startswith("[") and counted < needs.nodes)
    if counted and wrong and "|" not in text:
        raise PlanError(
            f"{key}: its devices fill {needs.nodes} nodes, with {needs.processes} processes on "
            f"each, but constraint {text!r} counts {counted}; make the two agree"
        )


def _named(held: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {kind}" for kind, count in held.items())


def with_default_gpus(plan: Plan, partitions: Mapping[str, PartitionInfo]) -> Plan:
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
                update = {"gpus": plan.stage_plan(name).processes}
                stages[name] = own.model_copy(update=update)
    return plan if stages == plan.stages else plan.model_copy(update={"stages": stages})


def with_default_partition(plan: Plan, partitions: Mapping[str, PartitionInfo]) -> Plan:
    """The plan, with the cluster's default partition for each stage that names none.

    Args:
        partitions: of the cluster.
    """
    # Slurm's module is read where a cluster was asked alone.
    from slurm.client import default_partition

    default = default_partition(partitions)
    unnamed = [stage for stage in plan.flow.all_stages if plan.stage_plan(stage).partition is None]
    if default is None or not unnamed:
        return plan
    named = {
        stage: plan.stages.get(stage, StagePlan()).model_copy(update={"partition": default})
        for stage in unnamed
    }
    return plan.model_copy(update={"stages": {**plan.stages, **named}})
