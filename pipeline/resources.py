"""Job resources: what the jobs of stages and pools request, from the plan and the cluster section."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.cluster_config import ClusterConfig
from pipeline.plan import Plan, StagePlan, device_keys
from rlinf.channels.curve_sockets import INTERFACE_VARIABLE
from rlinf.channels.process_group import DATA_PARALLEL_ONLY, LAYOUT_VARIABLE
from rlinf.config import RunConfig
from rlinf.errors import ConfigError, PlanError
from rlinf.interpreters import configured_interpreter, resolve_interpreter, set_interpreters
from slurm.jobs import JobResources
from stages.flow import Flow

if TYPE_CHECKING:
    from slurm.job_limits import Quotas

JobRequests = dict[str, list[JobResources]]
"""By key of the plan, each with what it may ask for; several ways: any one of them is enough."""
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


def plan_job_requests(plan: Plan, cluster: ClusterConfig) -> JobRequests:
    """What the jobs of a plan ask for; in pools no stage is a job of its own."""
    if plan.pools:
        return pool_job_requests(plan, cluster)
    stages = plan.flow.all_stages
    return {f"stages.{name}": [job_resources(plan.stage_plan(name), cluster)] for name in stages}


def pool_job_requests(plan: Plan, cluster: ClusterConfig) -> JobRequests:
    """What the jobs ask for that all run at the same time.

    Components of a heterogeneous job are jobs to Slurm's limits. An elastic pool goes on with any
    one of its workers: those that ask for different things stand in its list.
    """
    found: JobRequests = {}
    for number, pool in enumerate(plan.pools):
        for slot in range(pool.workers or 1):
            parts = pool_resources(plan, number, slot)
            several = zip(pool.gpus, parts, strict=False)
            named = [("", parts[0])] if len(parts) == 1 else [(f" on {k}", p) for k, p in several]
            for on, part in named:
                ways = found.setdefault(f"pools[{number}]{on}", [])
                needs = job_resources(part, cluster)
                if needs not in ways:
                    ways.append(needs)
    return found


def check_quotas(
    plan: Plan, jobs: JobRequests, quotas: Quotas, driver: JobResources | None = None
) -> None:
    """See that accounting allows the jobs of a plan, each and those that run at the same time.

    Args:
        jobs: see :func:`plan_job_requests`.
        driver: as for :func:`create_launcher`; it runs beside all of them.

    Raises:
        PlanError: it does not; names the key of the plan and the limit.
    """
    for key, ways in jobs.items():
        for needs in ways:
            quotas.check(needs, key)
    beside = {} if driver is None else {"cluster.driver": [driver]}
    for together in [jobs] if plan.pools else [{key: ways} for key, ways in jobs.items()]:
        quotas.check_concurrent({**beside, **together})


def check_hetjobs(plan: Plan, cluster: ClusterConfig) -> None:
    """See that what will be heterogeneous jobs can be.

    Raises:
        PlanError: their components ask for what Slurm cannot tell apart.
    """
    from launchers.sbatch import check_hetjob_options

    jobs = []
    for number in [n for n, pool in enumerate(plan.pools) if pool.workers is None]:
        key, parts = f"pools[{number}]", pool_resources(plan, number)
        jobs.append(
            [(f"{key} on {part.partition}", job_resources(part, cluster)) for part in parts]
        )
    for components in [[part for job in jobs for part in job]] if plan.hetjob else jobs:
        check_hetjob_options(components)


def job_resources(
    plan: StagePlan, cluster: ClusterConfig, interpreter: str | None = None
) -> JobResources:
    """What a job of a stage asks for: the plan's numbers with the site's settings.

    Args:
        interpreter: see :func:`stage_interpreter`.
    """
    from slurm.site import load_site

    extra: dict[str, Any] = {}
    if cluster.site:
        site = load_site(cluster.site)
        extra = site.settings_for(plan.partition).resource_arguments()
        extra["env"] = {**extra.get("env", {}), **set_interpreters(site.interpreters)}
    network = {INTERFACE_VARIABLE: cluster.bind_interface} if cluster.bind_interface else {}
    layout = {LAYOUT_VARIABLE: str(plan.layout)} if plan.layout.parallel_dims() else {}
    env = {**extra.pop("env", {}), **network, **layout, **cluster.env}
    if plan.constraint is not None:
        extra["constraint"] = plan.constraint
    return base_resources(plan, interpreter=interpreter, env=env, **extra)


def base_resources(plan: StagePlan, **further: Any) -> JobResources:
    """What a job asks for by the plan's numbers.

    Args:
        further: other fields, such as the site's settings.
    """
    return JobResources(
        partition=plan.partition,
        nodes=plan.nodes,
        tasks_per_node=plan.processes,
        gpus_per_node=plan.gpus,
        gpu_type=plan.gpu_type,
        speed_weights=plan.speed_weights,
        cpus_per_task=plan.cpus,
        mem_mb=plan.mem_mb,
        time_limit_min=plan.time_limit_min,
        **further,
    )


def stage_interpreter(config: RunConfig, flow: Flow, *stages: str) -> str | None:
    """The interpreter of the process that runs some stages; None: this one.

    Raises:
        ConfigError: it is not there, or they need different ones.
    """
    found: dict[str | None, str] = {}
    for stage in stages:
        entry = flow.all_stages[stage]
        # The warm start depends on both, and saves what the trainer made.
        depends = [name for name in ("trainer", "engine") if name in entry.config_sections]
        section = entry.holds or next(iter(depends), None)
        name = None if section is None else configured_interpreter(config, section)
        if section is not None:
            path = None if name is None else resolve_interpreter(name, f"{section}.python")
            found.setdefault(path, f"{section}.python of {stage}")
    if len(found) > 1:
        raise ConfigError(
            f"{' and '.join(found.values())}: one process cannot run them under two interpreters; "
            "name the same, or give these stages pools or jobs of their own"
        )
    return next(iter(found), None)


def resolve_plan(plan: Plan, cluster: ClusterConfig) -> Plan:
    """The plan with what only the cluster can tell.

    Raises:
        SlurmError: Slurm is not there or does not answer.
    """
    if cluster.launcher != "slurm" or not (plan.pools or cluster.site):
        return plan
    from slurm.client import SlurmClient

    return resolve_for(plan, SlurmClient().partitions())


def resolve_for(plan: Plan, partitions: Mapping[str, PartitionInfo]) -> Plan:
    """The same, of partitions that are known."""
    # The site file may say more of the default partition than of others.
    return (
        with_default_gpus(plan, partitions)
        if plan.pools
        else with_default_partition(plan, partitions)
    )
