"""Resources that the jobs of stages and pools request, from the plan and the cluster section."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from pipeline.plan import Plan, StagePlan, device_keys
from rlinf.channels import INTERFACE_VARIABLE, LOOPBACK
from rlinf.channels.process_group import DATA_PARALLEL_ONLY, LAYOUT_VARIABLE
from rlinf.config import RunConfig, Section
from rlinf.errors import ConfigError, PlanError
from rlinf.interpreters import configured_interpreter, resolve_interpreter, set_interpreters
from slurm.jobs import JobResources
from slurm.sbatch_options import EnvironmentVariables, OptionText, ShellText
from stages.flow import Flow
from stages.progress_watchdog import DEFAULT_TIMEOUT_MIN, TIMEOUT_VARIABLE

if TYPE_CHECKING:
    from slurm.inventory import Inventory, PartitionInventory
    from slurm.job_limits import ClusterLimits


JobRequests = dict[str, list[JobResources]]
"""Resource requests by key of the plan. If a key has several alternatives, any one suffices."""
COUNTED_FEATURE = re.compile(r"\*(\d+)")
"""Pattern of the number of nodes with a feature, as in the constraint ``[h100*1&a100*1]``."""


def pool_resources(plan: Plan, number: int, slot: int | None = None) -> tuple[StagePlan, ...]:
    """Return the resources of each component of a pool's job: the maximum over the pool's stages.

    The job has as many nodes as its devices fill. Several kinds of devices become components of a
    heterogeneous job, unless a constraint with node counts gets them all from one partition.

    Args:
        number: index of the pool in the plan.
        slot: index of a worker of an elastic pool. Workers cycle through the kinds of devices, in
            proportion to the devices of each kind.

    Raises:
        PlanError: the devices do not fill whole nodes or do not match the processes, or the stages
            of the pool contradict each other or the pool.
    """
    pool = plan.pools[number]
    _check_devices(plan, number)
    stages = {f"plan.stages.{name}": plan.stage_plan(name) for name in pool.stages}
    request = _max_of_stages(stages, _unlisted_stages(plan, number))
    if pool.workers is not None:
        kinds = [kind for kind, size in pool.devices.items() for _ in range(size)]
        kind = kinds[(slot or 0) % len(kinds)]
        return (request.model_copy(update=_device_update(kind, stages)),)
    key, count = f"plan.pools[{number}].devices", sum(pool.devices.values())
    if request.gpus > request.processes:
        raise PlanError(
            f"{key}: {_format_devices(pool.devices)}, but its stages ask for {request.gpus} GPUs "
            f"and {request.processes} processes per node; each process has one, so give a stage "
            f"that runs on all of them processes: {request.gpus}"
        )
    if len(pool.devices) == 1 or COUNTED_FEATURE.search(request.constraint or ""):
        components = [_ordinary_job(request, stages, pool.devices, key)]
    else:
        components = list(_hetjob_components(request, stages, pool.devices, key))
    for component in components:
        _check_counts(component, key)
    if isinstance(request.speed_weights, tuple) and len(request.speed_weights) != count:
        raise PlanError(
            f"{key}: {_format_devices(pool.devices)}, but its stages give speed_weights for "
            f"{len(request.speed_weights)} processes; each device has one process, and each "
            "process one weight"
        )
    return tuple(components)


def _unlisted_stages(plan: Plan, number: int) -> dict[str, StagePlan]:
    """Return the stage plans of stages that run in a pool although its ``stages`` lack them."""
    listed = {stage for pool in plan.pools for stage in pool.stages}
    pools = plan.stage_pools()
    unlisted = [stage for stage, index in pools.items() if index == number and stage not in listed]
    return {stage: plan.stages[stage] for stage in unlisted if stage in plan.stages}


def _check_devices(plan: Plan, number: int) -> None:
    """Check that stages of a pool name no partition or GPU type that the pool lacks.

    Raises:
        PlanError: a stage names another partition or GPU type.
    """
    pool, pool_key = plan.pools[number], f"pools[{number}].devices"
    kinds = [kind.partition(":") for kind in pool.devices]
    partitions, types = {name for name, _, _ in kinds}, {gpu for _, _, gpu in kinds}
    listed = {stage: plan.stages[stage] for stage in pool.stages if stage in plan.stages}
    for stage, stage_plan in (listed | _unlisted_stages(plan, number)).items():
        for key, value, available in (
            ("partition", stage_plan.partition, partitions),
            # A kind without a type accepts any type of a stage.
            ("gpu_type", stage_plan.gpu_type, types - {""} if "" not in types else ()),
        ):
            if value is not None and available and value not in available:
                raise PlanError(
                    f"plan.stages.{stage}.{key}: {value}, but it runs in plan.{pool_key}: "
                    f"{_format_devices(pool.devices)}; the pool decides: leave {key} out, name "
                    f"another kind in {pool_key}, or give {stage} a pool of its own"
                )


def _max_of_stages(
    stages: Mapping[str, StagePlan], colocated: Mapping[str, StagePlan]
) -> StagePlan:
    """Return the resources of one job that runs several stages, in any order.

    GPUs, CPUs, memory and time are the maximum over the stages. A stage that does not set a
    resource, a constraint or speed weights accepts the value of the others.

    Args:
        stages: stage plans by key of the plan.
        colocated: plans of :func:`_unlisted_stages`; only CPUs, memory and time count, if set.

    Raises:
        PlanError: two stages contradict each other.
    """
    size = max(stage.nodes * stage.processes for stage in stages.values())
    full_size = {k: stage for k, stage in stages.items() if stage.nodes * stage.processes == size}
    update = {
        **{name: _agreed_value(name, full_size) for name in ("nodes", "processes")},
        "gpus": _largest("gpus", stages),
        **{
            name: _largest(name, {**stages, **colocated})
            for name in ("cpus", "mem_mb", "time_limit_min")
        },
        **{name: _agreed_value(name, stages) for name in ("constraint", "speed_weights")},
        # A layout belongs to a stage, not to the job: it is in the StageOrder.
        "layout": DATA_PARALLEL_ONLY,
    }
    return next(iter(full_size.values())).model_copy(update=update)


def _largest(name: str, stages: Mapping[str, StagePlan]) -> int | None:
    values = [getattr(stage, name) for stage in stages.values()]
    return max((value for value in values if value is not None), default=None)


def _agreed_value(name: str, stages: Mapping[str, StagePlan]) -> Any:
    """Return the value of a key that all stages agree on; None if none sets it."""
    return _single_value({f"{key}.{name}": getattr(stage, name) for key, stage in stages.items()})


def _device_update(kind: str, stages: Mapping[str, StagePlan]) -> dict[str, str | None]:
    """Return ``partition`` and ``gpu_type``, as keys of a stage plan, for stages on one kind."""
    devices = {key: device_keys(kind, stage) for key, stage in stages.items()}
    types = {f"{key}.gpu_type": keys["gpu_type"] for key, keys in devices.items()}
    return next(iter(devices.values())) | {"gpu_type": _single_value(types)}


def _single_value(by_key: Mapping[str, Any]) -> Any:
    """Return the value of all keys that have one, which must be equal; None if no key has one."""
    items = [(key, value) for key, value in by_key.items() if value is not None]
    for key, value in items:
        if value != items[0][1]:
            raise PlanError(
                f"{items[0][0]}: {items[0][1]}, but {key}: {value}; the stages of a pool share one "
                "job; set both to the same value, or give them separate pools"
            )
    return items[0][1] if items else None


def _ordinary_job(
    request: StagePlan, stages: Mapping[str, StagePlan], devices: Mapping[str, int], key: str
) -> StagePlan:
    """Return the resources of a pool's ordinary job; all of its devices are in one partition."""
    if len({kind.partition(":")[0] for kind in devices}) > 1:
        raise PlanError(
            f"{key}: {_format_devices(devices)} are of several partitions, but constraint "
            f"{request.constraint!r} counts the nodes of one job in one of them; name it with each "
            "kind (gpu:a100), or leave the constraint out"
        )
    nodes, remainder = divmod(sum(devices.values()), request.processes)
    if remainder or request.nodes not in (1, nodes):
        raise PlanError(
            f"{key}: {_format_devices(devices)}, but its stages ask for {request.nodes} x "
            f"{request.processes} (nodes x processes per node); make them equal"
        )
    updates = [_device_update(kind, stages) for kind in devices]
    # A request for GPUs of one type would exclude the nodes of the other kinds.
    types = {keys["gpu_type"] for keys in updates}
    update = updates[0] if len(types) == 1 else updates[0] | {"gpu_type": None}
    return request.model_copy(update=update | {"nodes": nodes})


def _hetjob_components(
    request: StagePlan, stages: Mapping[str, StagePlan], devices: Mapping[str, int], key: str
) -> Iterator[StagePlan]:
    """Yield the components of the heterogeneous job of a pool, one per kind of device."""
    for kind, count in devices.items():
        processes = min(count, request.processes)
        nodes, remainder = divmod(count, processes)
        if remainder:
            raise PlanError(
                f"{key}: {count} {kind} do not fill whole nodes of {request.processes} processes, "
                "as its stages request"
            )
        update = {"nodes": nodes, "processes": processes, "gpus": processes if request.gpus else 0}
        yield request.model_copy(update=_device_update(kind, stages) | update)


def _check_counts(request: StagePlan, key: str) -> None:
    """Check that the node counts of a constraint (``[h100*1&a100*1]``) match the job's nodes."""
    text = request.constraint or ""
    num_counted = sum(map(int, COUNTED_FEATURE.findall(text)))
    # With alternatives (|) the sum of counts means nothing. Without brackets the constraint does
    # not restrict further nodes.
    wrong = num_counted > request.nodes or (text.startswith("[") and num_counted < request.nodes)
    if num_counted and wrong and "|" not in text:
        raise PlanError(
            f"{key}: its devices fill {request.nodes} nodes, with {request.processes} processes on "
            f"each, but constraint {text!r} counts {num_counted}; make them equal"
        )


def _format_devices(devices: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {kind}" for kind, count in devices.items())


def with_default_gpus(plan: Plan, partitions: Mapping[str, PartitionInventory]) -> Plan:
    """Return the plan with defaults for its pools on GPU partitions.

    A pool that sets neither ``nodes`` nor ``processes`` fills nodes: of 8 devices, a node with 8
    GPUs gets 8 processes, and two nodes with 4 GPUs get 4 each. A pool that does not set ``gpus``
    has one GPU per process.

    Args:
        partitions: the partitions of the cluster by name.
    """
    plan = _with_full_nodes(plan, partitions)
    stages = dict(plan.stages)
    for pool in plan.pools:
        plans = [plan.defaults, *(plan.stages[name] for name in pool.stages if name in plan.stages)]
        names = [kind.partition(":")[0] for kind in pool.devices]
        infos = [partitions[name] for name in names if name in partitions]
        if any("gpus" in stage_plan.model_fields_set for stage_plan in plans) or not infos:
            continue
        if all(partition.gpus for partition in infos):
            for name in pool.stages:
                stage_plan = stages.get(name, StagePlan())
                update = {"gpus": plan.stage_plan(name).processes}
                stages[name] = stage_plan.model_copy(update=update)
    return plan if stages == plan.stages else plan.model_copy(update={"stages": stages})


def _with_full_nodes(plan: Plan, partitions: Mapping[str, PartitionInventory]) -> Plan:
    """Return the plan with as many processes per node as fill the nodes of its GPU pools."""
    stages = dict(plan.stages)
    for pool in plan.pools:
        plans = [plan.defaults, *(plan.stages[name] for name in pool.stages if name in plan.stages)]
        names_size = any(
            stage_plan.constraint or {"nodes", "processes", "gpus"} & stage_plan.model_fields_set
            for stage_plan in plans
        )
        per_node = [_gpus_per_node(kind, partitions) for kind in pool.devices]
        if names_size or pool.workers is not None or not all(per_node):
            continue
        counts = pool.devices.values()
        processes = next(
            size
            for size in range(min(max(per_node), max(counts)), 0, -1)
            # A kind with fewer devices than this fills one node.
            if all(
                count % min(count, size) == 0 and min(count, size) <= limit
                for count, limit in zip(counts, per_node, strict=True)
            )
        )
        for name in pool.stages:
            if processes > 1 and not plan.flow.all_stages[name].single_process:
                stage_plan = stages.get(name, StagePlan())
                stages[name] = stage_plan.model_copy(update={"processes": processes})
    return plan if stages == plan.stages else plan.model_copy(update={"stages": stages})


def _gpus_per_node(kind: str, partitions: Mapping[str, PartitionInventory]) -> int:
    """Return the GPUs per node of a kind of device; 0 if it has no GPUs or is unknown."""
    partition, _, gpu_type = kind.partition(":")
    gpus = partitions[partition].gpus if partition in partitions else {}
    return gpus.get(gpu_type, 0) if gpu_type else max(gpus.values(), default=0)


def with_default_partition(
    plan: Plan, cluster: ClusterConfig, inventory: Inventory, *, names_default: bool
) -> Plan:
    """Return the plan with a partition for stages that name none.

    A stage with GPUs gets the cluster's default partition. A stage without GPUs gets a partition
    without GPUs, if there is one that accepts it (:func:`slurm.inventory.partition_without_gpus`).

    Args:
        names_default: name the default partition too, instead of leaving it to Slurm.
    """
    # Imported lazily: only plans for Slurm need the client.
    from slurm.inventory import default_partition, partition_without_gpus

    default = default_partition(inventory.partitions)
    updated = {}
    for stage in plan.flow.all_stages:
        stage_plan = plan.stage_plan(stage)
        if stage_plan.partition is not None:
            continue
        partition = default
        if not stage_plan.gpus:
            accepts = partial(_accepts, stage_plan, cluster, inventory)
            partition = partition_without_gpus(inventory, accepts)
        if partition is not None and (names_default or partition != default):
            own = plan.stages.get(stage, StagePlan())
            updated[stage] = own.model_copy(update={"partition": partition})
    return plan.model_copy(update={"stages": {**plan.stages, **updated}}) if updated else plan


def _accepts(
    stage_plan: StagePlan, cluster: ClusterConfig, inventory: Inventory, partition: str
) -> bool:
    """Return whether a partition accepts the job of a stage."""
    from slurm.job_limits import check_resources, cluster_limits_from_inventory

    resources = job_resources(stage_plan.model_copy(update={"partition": partition}), cluster)
    try:
        check_resources(resources, inventory.partitions, "")
        cluster_limits_from_inventory(inventory).check(resources, "")
    except PlanError:
        return False
    return True


def plan_job_requests(plan: Plan, cluster: ClusterConfig) -> JobRequests:
    """Return the resources of all jobs of a plan: one job per stage, or the jobs of its pools."""
    if plan.pools:
        return pool_job_requests(plan, cluster)
    stages = plan.flow.all_stages
    return {f"stages.{name}": [job_resources(plan.stage_plan(name), cluster)] for name in stages}


def pool_job_requests(plan: Plan, cluster: ClusterConfig) -> JobRequests:
    """Return the resources of the jobs of all pools, which run at the same time.

    Each component of a heterogeneous job counts as a job in Slurm's limits. An elastic pool can run
    with a single worker, so workers with different resources are alternatives.
    """
    requests: JobRequests = {}
    for number, pool in enumerate(plan.pools):
        for slot in range(pool.workers or 1):
            components = pool_resources(plan, number, slot)
            has_kinds = len(components) > 1
            for kind, component in zip(pool.devices, components, strict=False):
                suffix = f" on {kind}" if has_kinds else ""
                alternatives = requests.setdefault(f"pools[{number}]{suffix}", [])
                resources = job_resources(component, cluster)
                if resources not in alternatives:
                    alternatives.append(resources)
    return requests


def check_job_limits(
    plan: Plan, jobs: JobRequests, cluster_limits: ClusterLimits, driver: JobResources | None = None
) -> None:
    """Check that accounting allows the jobs of a plan, one by one and concurrently.

    Args:
        jobs: see :func:`plan_job_requests`.
        driver: resources of the driver's job, which runs beside all of them.

    Raises:
        PlanError: a limit is exceeded; the message names the key of the plan and the limit.
    """
    for key, alternatives in jobs.items():
        for resources in alternatives:
            cluster_limits.check(resources, key)
    driver_jobs = {} if driver is None else {"cluster.driver": [driver]}
    for concurrent in [jobs] if plan.pools else [{key: value} for key, value in jobs.items()]:
        cluster_limits.check_concurrent({**driver_jobs, **concurrent})


def check_hetjobs(plan: Plan, cluster: ClusterConfig) -> None:
    """Check that the components of heterogeneous jobs can be combined.

    Raises:
        PlanError: Slurm cannot combine their options.
    """
    from launchers.sbatch import check_hetjob_options

    jobs = []
    for number in [n for n, pool in enumerate(plan.pools) if pool.workers is None]:
        components = pool_resources(plan, number)
        keys = [f"pools[{number}] on {component.partition}" for component in components]
        resources = [job_resources(component, cluster) for component in components]
        jobs.append(list(zip(keys, resources, strict=True)))
    for job_components in [[entry for job in jobs for entry in job]] if plan.hetjob else jobs:
        check_hetjob_options(job_components)


def job_resources(
    plan: StagePlan, cluster: ClusterConfig, interpreter: str | None = None
) -> JobResources:
    """Return the resources of a stage job, from its stage plan and the settings of the site file.

    Args:
        interpreter: Python of the job; see :func:`stage_interpreter`.
    """
    from slurm.site import load_site

    extra: dict[str, Any] = {}
    if cluster.site:
        site = load_site(cluster.site)
        extra = site.settings_for(plan.partition).resource_arguments()
        # This process needs the interpreters too, so the function also registers them here.
        extra["env"] = {**extra.get("env", {}), **set_interpreters(site.interpreters)}
    network = {INTERFACE_VARIABLE: cluster.bind_interface} if cluster.bind_interface else {}
    layout = {LAYOUT_VARIABLE: str(plan.layout)} if plan.layout.parallel_dims() else {}
    minutes = cluster.progress_timeout_min or 0
    deadline = {} if minutes == DEFAULT_TIMEOUT_MIN else {TIMEOUT_VARIABLE: f"{minutes:g}"}
    env = {**extra.pop("env", {}), **network, **layout, **deadline, **cluster.env}
    if plan.constraint is not None:
        extra["constraint"] = plan.constraint
    return base_resources(plan, interpreter=interpreter, env=env, **extra)


def base_resources(plan: StagePlan, **further: Any) -> JobResources:
    """Return the resources of a job from a stage plan alone, without the site file.

    Args:
        further: other fields, such as settings from the site file.
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
    """Return the Python interpreter of a process that runs some stages; None means this one.

    Raises:
        ConfigError: the interpreter does not exist, or the stages need different interpreters.
    """
    interpreters: dict[str | None, str] = {}
    for stage in stages:
        spec = flow.all_stages[stage]
        # The component that holds the model (``holds``) decides. The SFT stage depends on both
        # sections and runs under the trainer's interpreter.
        sections = [name for name in ("trainer", "engine") if name in spec.config_sections]
        section = spec.holds or next(iter(sections), None)
        name = None if section is None else configured_interpreter(config, section)
        if section is not None:
            path = None if name is None else resolve_interpreter(name, f"{section}.python")
            interpreters.setdefault(path, f"{section}.python of {stage}")
    if len(interpreters) > 1:
        raise ConfigError(
            f"{' and '.join(interpreters.values())}: one process cannot run them under two "
            "interpreters; name the same, or give these stages pools or jobs of their own"
        )
    return next(iter(interpreters), None)


def discover_cluster(cluster: ClusterConfig) -> Inventory | None:
    """Return the inventory of the cluster, without its current use; None without Slurm jobs.

    Raises:
        SlurmError: Slurm is not installed or does not answer.
    """
    if cluster.launcher != "slurm":
        return None
    from slurm.client import SlurmClient
    from slurm.discovery import discover_inventory

    return discover_inventory(SlurmClient(), with_usage=False)


def resolve_plan(plan: Plan, cluster: ClusterConfig, inventory: Inventory | None = None) -> Plan:
    """Return the plan with defaults that depend on the cluster: partitions, processes and GPUs.

    Args:
        inventory: the inventory of the cluster; None queries Slurm if its jobs are used.

    Raises:
        PlanError: the site file has partitions that the cluster lacks.
        SlurmError: Slurm is not installed or does not answer.
    """
    inventory = inventory or discover_cluster(cluster)
    if inventory is None or cluster.launcher != "slurm":
        return plan
    # The site file may have settings for the default partition.
    names_default = cluster.site is not None
    return resolve_with_inventory(plan, cluster, inventory, names_default=names_default)


def resolve_with_inventory(
    plan: Plan, cluster: ClusterConfig, inventory: Inventory, *, names_default: bool = True
) -> Plan:
    """Return the plan with defaults from a cluster, whether its jobs are used or only planned.

    Args:
        names_default: name the default partition too, instead of leaving it to Slurm.

    Raises:
        PlanError: the site file has partitions that the cluster lacks.
    """
    if cluster.site is not None:
        from slurm.site import load_site

        load_site(cluster.site).check_partitions(inventory.partitions, cluster.site)
    return (
        with_default_gpus(plan, inventory.partitions)
        if plan.pools
        else with_default_partition(plan, cluster, inventory, names_default=names_default)
    )


class DriverJobConfig(Section):
    """Resources of the job that runs the driver (``rlinf submit``).

    The job is small and has no GPUs. It uses the settings of the site file that every job needs
    (account, set-up lines, environment), but none that request GPUs or large jobs. A driver that
    submits jobs runs outside of the container, because it calls the commands of Slurm.
    """

    partition: OptionText | None = None
    """Null: the default partition of the cluster, or a partition without GPUs if that has GPUs."""
    cpus: int = Field(default=1, gt=0)
    mem_mb: int | None = Field(default=None, gt=0)
    """Memory, MiB. Null: 4000, or no request if Slurm does not know the memory of the nodes."""
    time_limit_min: int | None = Field(default=None, gt=0)
    """Wall-time limit, minutes. The job requeues itself before the limit. Null: one day, or less if
    the partition or accounting allows less."""
    mail: OptionText | None = None
    """E-mail address that Slurm notifies when the job ends or fails."""
    account: OptionText | None = None
    """Null: the account of the site file."""
    qos: OptionText | None = None
    """Null: the value of the site file for this partition if it has no GPUs, else Slurm's default.
    The same holds for ``constraint`` and ``reservation``."""
    constraint: OptionText | None = None
    reservation: OptionText | None = None
    exclude: OptionText | None = None
    """Null: the value of the site file."""
    sbatch: dict[str, str | int | bool] = {}
    """Further sbatch options by long name, checked by
    :func:`slurm.sbatch_options.check_driver_options`."""

    @field_validator("sbatch")
    @classmethod
    def _check_sbatch(cls, value: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        from slurm.sbatch_options import check_driver_options

        return check_driver_options(value)


class ClusterConfig(Section):
    """The ``cluster`` section: where stages run. These settings never change a result."""

    launcher: Literal["inprocess", "local", "slurm"] = "inprocess"
    """Run stages in the driver's process, as local processes, or as Slurm jobs."""
    site: Path | None = None
    """Site file with settings of the partitions: account, set-up lines, container, ..."""
    poll_interval_s: float = Field(default=1.0, gt=0)
    """Seconds between two queries of the queue. Use 30 or more on a shared cluster."""
    max_retries: int = Field(default=2, ge=0)
    """Number of retries of a stage that failed for an unknown reason."""
    env: EnvironmentVariables = {}
    """Environment variables of every stage."""
    network_interface: ShellText | None = None
    """Where sockets of the run listen: an interface (``ib0``), a network (``10.1.0.0/16``) or an
    address. Null: the loopback for local launchers, all interfaces for Slurm."""
    driver_reconnect_timeout_s: float = Field(default=600.0, gt=0)
    """How long pools wait for a new driver after theirs failed or was killed, before they exit."""
    progress_timeout_min: float | None = Field(default=DEFAULT_TIMEOUT_MIN, gt=0)
    """Minutes without any progress (a token, an environment step, a micro-batch, a record) after
    which an attempt at a stage is ended and retried; its log then has the stacks of all threads.
    Waiting for inputs does not count. Null: no limit."""
    driver: DriverJobConfig = DriverJobConfig()
    notify_command: tuple[ShellText, ...] = ()
    """Command, as a list of words, that is called when the run ends. Its last arguments are the
    name of the run and ``finished``, ``failed`` or ``stopped``."""

    @property
    def bind_interface(self) -> str | None:
        """The interface on which sockets listen; None: all interfaces."""
        return self.network_interface or (None if self.launcher == "slurm" else LOOPBACK)
