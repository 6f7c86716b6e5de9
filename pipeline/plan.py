"""The plan: the resources, pools and transports of every stage.

A plan is a YAML file that ``rlinf plan`` writes and that users may write or edit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    field_validator,
    model_validator,
)

from rlinf.channels.process_group import DATA_PARALLEL_ONLY, ParallelLayout
from rlinf.config import RunConfig, Section, validate
from rlinf.errors import ConfigError, PlanError, did_you_mean
from rlinf.yaml_file import read_yaml
from slurm.sbatch_options import OptionText
from stages.flow import EVALUATE, POLICY_SUFFIX, Flow, flow_of, on_policy
from stages.layout import CONFIG_FILE, PLAN_FILE
from stages.runner import load_config


class StagePlan(Section):
    """Resources of one stage. Null uses the default of the plan, then of the cluster."""

    partition: OptionText | None = None
    nodes: int = Field(default=1, gt=0)
    processes: int = Field(default=1, gt=0)
    """Processes per node; one per GPU on GPU partitions."""
    gpus: int = Field(default=0, ge=0)
    """GPUs per node."""
    gpu_type: OptionText | None = None
    speed_weights: dict[str, PositiveFloat] | tuple[PositiveFloat, ...] | None = None
    """Relative speeds if they differ: by kind of node (GRES name of the GPU, or a feature), or one
    per process. Work is distributed in proportion."""
    constraint: OptionText | None = None
    """Required node features, in sbatch syntax: ``[h100*1&a100*1]`` for one node of each."""
    layout: ParallelLayout = DATA_PARALLEL_ONLY
    """Parallel layout (tensor, pipeline, ... degrees) of a model replica, if the engine or trainer
    supports it. Set per stage; in pools, a colocated stage inherits the layout of its host
    stage."""
    cpus: int = Field(default=1, gt=0)
    """CPUs per process."""
    mem_mb: int | None = Field(default=None, gt=0)
    """Memory per node, MiB."""
    time_limit_min: int | None = Field(default=None, gt=0)
    """Wall-time limit, minutes."""

    @field_validator("gpus", mode="before")
    @classmethod
    def _check_gpus(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            kind, count = next(iter(value.items()), ("TYPE", 1))
            raise ValueError(
                f"{dict(value)} is not a number; for {count} GPUs of one node write gpus: {count}, "
                f"gpu_type: {kind} and processes: {count} (one per GPU); with nodes: 2, gpus and "
                "processes are those of each node"
            )
        return value

    @model_validator(mode="after")
    def _check_speed_weights(self) -> StagePlan:
        if (
            isinstance(self.speed_weights, tuple)
            and len(self.speed_weights) != self.nodes * self.processes
        ):
            raise ValueError(
                f"speed_weights: {len(self.speed_weights)} numbers for {self.nodes} x "
                f"{self.processes} processes"
            )
        return self


def device_keys(kind: str, stage_plan: StagePlan) -> dict[str, str | None]:
    """Return the partition and GPU type of a pool's device kind, as keys of a stage plan.

    Args:
        kind: ``partition`` or ``partition:gpu_type``.
        stage_plan: a stage plan. Unless it names another partition, its GPU type is the default.
    """
    partition, _, gpu_type = kind.partition(":")
    default_type = stage_plan.gpu_type if stage_plan.partition in (None, partition) else None
    return {"partition": partition, "gpu_type": gpu_type or default_type}


class PoolPlan(Section):
    """A pool: devices that several stages share for many iterations, taking turns."""

    stages: tuple[str, ...] = Field(min_length=1)
    devices: dict[OptionText, PositiveInt] = Field(min_length=1)
    """Number of devices of each kind (``partition`` or ``partition:gpu_type``). Each process has
    one GPU, unless the stages or defaults set ``gpus: 0`` or the partition has no GPUs. On GPU
    partitions the processes fill nodes, unless ``nodes``, ``processes`` or ``gpus`` is set. Several
    kinds become components of one heterogeneous job, and every stage of the pool runs on all of
    them; in an elastic pool each worker is a separate job."""
    workers: PositiveInt | None = None
    """Makes the pool elastic: this many jobs of one process each, which generate from a shared work
    queue and may join or leave at any time (``rlinf scale``). Null: the pool is one job."""
    max_workers: PositiveInt | None = None
    """Upper limit of the autoscaler of an elastic pool. Workers are added while each shortens the
    iteration enough, and removed (down to ``workers``) when it does not. Null: a fixed number."""
    stage_ranks: dict[str, tuple[NonNegativeInt, ...]] = {}
    """Ranks of the pool that compute a stage, by stage, numbered in the order of ``devices``; all
    ranks by default. Stages on different ranks run concurrently, before or after a stage on all
    ranks: rollouts on some, rewards and evaluations on the rest, then training on all. Training
    stages need all ranks, because these share the model."""
    also_generates: bool = False
    """Lets the workers of this pool also generate, beside an elastic pool, until the work queue is
    empty. They pass the long tail to the elastic pool and return to their own stages."""

    @model_validator(mode="after")
    def _check_max_workers(self) -> PoolPlan:
        if self.max_workers is not None and self.max_workers < (self.workers or math.inf):
            raise ValueError("max_workers: set workers too, and no more than max_workers")
        return self


class StageForecast(Section):
    """The predicted times of one stage."""

    seconds: float = Field(ge=0)
    """Expected time."""
    low_s: float = Field(ge=0)
    """10th percentile."""
    high_s: float = Field(ge=0)
    """90th percentile."""
    breakdown_s: dict[str, float] = {}
    """Parts that add up to ``seconds``."""
    bound_by: str
    """Key of the largest part in ``breakdown_s``."""
    start_s: float = Field(default=0.0, ge=0)
    """Start time, relative to the start of the iteration."""


class PlanningSources(Section):
    """Inputs of a forecast; ``rlinf replan`` reads them again."""

    profile: str
    """Path of the profile; empty if data sheets were used instead."""
    inventory: str | None = None
    """Path of a saved inventory; null if Slurm was queried."""
    site: str | None = None
    """Path of the site file."""
    partitions: tuple[str, ...] = ()
    """Partitions that were considered; empty for all."""
    pins: tuple[str, ...] = ()
    """Placements that the user fixed (``rlinf plan --pin``)."""


class TimingCorrection(Section):
    """Correction factors that were measured under earlier plans and applied to this forecast."""

    stage: str
    kind: str
    """Kind of device."""
    startup_factor: PositiveFloat = 1.0
    """Measured start-up time of its jobs, divided by the profiled one."""
    work_factor: PositiveFloat = 1.0
    """Measured time of loading and computing, divided by the profiled one."""


class Forecast(Section):
    """The prediction made with the plan. An edited plan keeps it for comparison."""

    objective: str
    """Name of the objective, such as ``time`` or ``gpu-hours``."""
    cost: float = Field(ge=0)
    """Value of the objective, in its unit."""
    iteration_s: float = Field(ge=0)
    low_s: float = Field(ge=0)
    high_s: float = Field(ge=0)
    """10th (``low_s``) and 90th percentile of the time of an iteration."""
    gpu_hours: float = Field(ge=0)
    """GPU hours per iteration."""
    stages: dict[str, StageForecast] = {}
    sources: PlanningSources | None = None
    corrections: tuple[TimingCorrection, ...] = ()
    applied_at: float | None = None
    """When the plan replaced another one (seconds since the epoch); null if it did not. Iterations
    before that do not measure this plan."""


Execution = Literal["jobs", "pools"]
Transport = Literal["shared_memory", "socket", "gloo", "nccl", "delta", "file"]
WEIGHT_TRANSPORTS = frozenset({"gloo", "nccl", "delta"})
"""Transports for weights only; they carry no records."""
COMMITTED_TRANSPORTS = frozenset({"delta", "file"})
"""Transports that send nothing live: the consumer reads committed files."""


class Plan(Section):
    """Resources of every stage (``defaults``, overridden by ``stages``), pools and transports."""

    defaults: StagePlan = StagePlan()
    stages: dict[str, StagePlan] = {}
    pools: tuple[PoolPlan, ...] = ()
    """Pools that run many iterations. Without pools each stage of each iteration is a job."""
    hetjob: bool = False
    """Submit the pools as one heterogeneous Slurm job, so that they start and end together. Workers
    of elastic pools stay independent. False: each pool starts when the queue allows it."""
    num_chunks: PositiveInt = 1
    """Number of chunks in which the batch of an iteration is passed between pools."""
    transports: dict[str, Transport] = {}
    """Transport by edge between pools (``rollout -> reward``); stages in one worker pass
    references. Defaults: weights use shared memory within a node and files between nodes; records
    use sockets, or files if their rows are large (images); everything else is read from files.
    Between nodes ``shared_memory`` means ``socket`` for records and ``file`` for weights. Weights
    also have ``gloo`` and ``nccl`` (process groups: fast, not encrypted) and ``delta`` (files, of
    which a worker reads only changed tensors)."""
    forecast: Forecast | None = None
    _flow: Flow = PrivateAttr(default=on_policy)

    def stage_plan(self, stage: str) -> StagePlan:
        """Return the resources of a stage: the defaults, overridden by the device of its pool and
        by its own keys.

        Raises:
            PlanError: the combined values are invalid.
        """
        overrides = self.stages.get(stage)
        values = self.defaults.model_dump(exclude_unset=True)
        pool = next((pool for pool in self.pools if stage in pool.stages), None)
        if pool is not None:
            device = device_keys(next(iter(pool.devices)), self.defaults)
            # With several kinds the first one names the partition; GPU types differ.
            values |= device if len(pool.devices) == 1 else {"partition": device["partition"]}
        if self._flow.all_stages[stage].single_process:
            values |= {"nodes": 1, "processes": 1, "speed_weights": None}
        values |= overrides.model_dump(exclude_unset=True) if overrides else {}
        if "layout" in self.defaults.model_fields_set:
            raise PlanError(
                "plan.defaults.layout: set it per stage, as in plan.stages.train.layout"
            )
        values["layout"] = self._layout(stage).model_dump()
        try:
            return validate(StagePlan, values, f"plan.stages.{stage}")
        except ConfigError as error:
            raise PlanError(str(error)) from None

    def _layout(self, stage: str) -> ParallelLayout:
        stage_plan, spec = self.stages.get(stage), self._flow.all_stages[stage]
        if stage_plan is not None and "layout" in stage_plan.model_fields_set:
            return stage_plan.layout
        if self.pools and spec.colocate_with and not spec.single_process:
            return self._layout(spec.colocate_with)
        return DATA_PARALLEL_ONLY

    def is_single_process(self, stage: str) -> bool:
        """Return whether one process computes a stage, even in a pool."""
        stage_plan, spec = self.stage_plan(stage), self._flow.all_stages[stage]
        return spec.single_process and stage_plan.nodes * stage_plan.processes == 1

    def stage_pools(self) -> dict[str, int]:
        """Return the index of the pool that runs each stage, by stage."""
        pools = {stage: i for i, pool in enumerate(self.pools) for stage in pool.stages}
        for name, stage in self._flow.all_stages.items():
            pools.setdefault(name, pools.get(stage.colocate_with or "", len(self.pools) - 1))
        elastic = self._flow.elastic_stage
        if elastic is not None and self.pools[pools[elastic]].workers is not None:
            # The pool of its consumers collects the samples that elastic workers generate.
            pools[elastic] = pools[self._flow.publish_stage]
        return pools

    def to_dict(self) -> dict[str, Any]:
        """Return plain values from which :func:`parse_plan` restores an equal plan."""
        # Unset keys stay unset, so that they still follow the defaults.
        return self.model_dump(mode="json", exclude_unset=True)

    @model_validator(mode="after")
    def _check_stage_in_one_pool(self) -> Plan:
        placed = [stage for pool in self.pools for stage in pool.stages]
        duplicate = next((stage for stage in placed if placed.count(stage) > 1), None)
        if duplicate:
            raise ValueError(f"pools: stage {duplicate!r} is in two pools")
        return self

    @model_validator(mode="after")
    def _check_hetjob(self) -> Plan:
        if self.hetjob and sum(pool.workers is None for pool in self.pools) < 2:
            raise ValueError("hetjob: needs two pools that are one job each (no workers)")
        return self

    def check_transports(self, edges: Mapping[str, Collection[str]]) -> None:
        """Check that every transport belongs to an edge of the flow and can carry its inputs.

        Args:
            edges: names of the inputs by edge of the flow (:meth:`Graph.edges`).

        Raises:
            PlanError: the flow has no such edge, or the transport cannot carry its inputs.
        """
        for edge, transport in self.transports.items():
            if edge not in edges:
                raise PlanError(
                    f"plan.transports: the flow has no edge {edge!r}{did_you_mean(edge, edges)}"
                )
            if transport in WEIGHT_TRANSPORTS and "weights" not in edges[edge]:
                allowed = ", ".join(t for t in get_args(Transport) if t not in WEIGHT_TRANSPORTS)
                raise PlanError(
                    f"plan.transports.{edge}: {transport} carries weights alone, but this edge has "
                    f"{', '.join(sorted(edges[edge]))}; use one of {allowed}"
                )
            if transport == "socket" and "weights" in edges[edge]:
                raise PlanError(
                    f"plan.transports.{edge}: weights do not go by socket; remove the entry "
                    "(shared memory within a node, files between nodes), or use gloo or nccl"
                )

    @model_validator(mode="after")
    def _check_also_generates(self) -> Plan:
        for i, pool in enumerate(self.pools):
            if pool.also_generates and not any(other.workers for other in self.pools):
                raise ValueError(
                    f"pools[{i}].also_generates: needs an elastic pool (workers: 1) that "
                    "finishes what this one leaves"
                )
        return self

    @property
    def execution(self) -> Execution:
        """``pools`` if the plan has pools, else ``jobs``: each stage of each iteration is a job."""
        return "pools" if self.pools else "jobs"

    @property
    def flow(self) -> Flow:
        """The flow whose stages the plan places."""
        return self._flow

    @classmethod
    def from_run(cls, run: Path) -> Plan:
        """Read the plan of a run directory.

        Raises:
            ConfigError: the run's configuration cannot be read.
            PlanError: missing or invalid.
        """
        return read_plan(run / PLAN_FILE, flow_of(load_config(run / CONFIG_FILE)))


def read_plan(path: Path, flow: Flow = on_policy) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: missing, not YAML, or invalid; names the key.
    """
    values = read_yaml(path, "plan", PlanError)
    return parse_plan({} if values is None else values, str(path), flow)


def parse_plan(values: Any, label: str, flow: Flow = on_policy) -> Plan:
    """Validate the content of a plan for a flow.

    Raises:
        PlanError: names the key.
    """
    if not isinstance(values, Mapping):
        raise PlanError(f"{label}: expected a mapping with 'defaults' and 'stages'")
    try:
        plan = validate(Plan, values, "plan")
    except ConfigError as error:
        raise PlanError(f"{label}{str(error).removeprefix('plan')}") from None
    stages_by_key = {
        "stages": tuple(plan.stages),
        **{f"pools[{i}].stages": pool.stages for i, pool in enumerate(plan.pools)},
    }
    policy_stage = flow.policy_stage
    if policy_stage is not None and any(
        policy_stage in stages for stages in stages_by_key.values()
    ):
        flow = flow.with_separate_policy()
    plan._flow, known_stages = flow, [*flow.all_stages, *([policy_stage] if policy_stage else [])]
    for key, stages in stages_by_key.items():
        for stage in stages:
            if stage not in known_stages:
                hint = did_you_mean(stage, known_stages)
                if policy_stage is None and stage.endswith(POLICY_SUFFIX):
                    hint = ": this flow collects nothing, so no simulators query a policy"
                raise PlanError(f"{label}.{key}: unknown stage {stage!r}{hint}")
            plan.stage_plan(stage)
    try:
        check_pools(plan)
    except ValueError as error:
        raise PlanError(f"{label}.{error}") from None
    return plan


def load_plan(config: RunConfig) -> Plan:
    """Load the plan of a configuration: a file, a mapping, or one process per stage by default.

    Raises:
        PlanError: missing or invalid.
    """
    flow = flow_of(config)
    if isinstance(config.plan, str):
        return read_plan(Path(config.plan).expanduser(), flow)
    return parse_plan({} if config.plan is None else config.plan, "plan", flow)


def check_pools(plan: Plan) -> None:
    """Check that the pools of a plan fit the stages of its flow.

    Raises:
        ValueError: a pool cannot run its stages; the message names the key.
    """
    flow = plan.flow
    _check_separate_policy(plan)
    elastic_stage = flow.elastic_stage
    elastic_capable = {n for n, stage in flow.all_stages.items() if stage.elastic}
    pool_by_stage = plan.stage_pools() if plan.pools else {}
    for i, pool in enumerate(plan.pools):
        if pool.stage_ranks and pool.workers:
            raise ValueError(
                f"pools[{i}].stage_ranks: each worker is a job of one process; remove the key"
            )
        for stage, ranks in pool.stage_ranks.items():
            if pool_by_stage.get(stage) != i:
                raise ValueError(
                    f"pools[{i}].stage_ranks.{stage}: this pool does not run it"
                    f"{did_you_mean(stage, flow.all_stages)}"
                )
            size = sum(pool.devices.values())
            _check_ranks(plan, stage, ranks, size, f"pools[{i}].stage_ranks.{stage}")
    for i, pool in enumerate(plan.pools):
        if pool.also_generates and elastic_stage in pool.stages:
            raise ValueError(
                f"pools[{i}].also_generates: this pool runs {elastic_stage}; set it on another pool"
            )
        if pool.workers is None:
            continue
        if elastic_stage is None:
            raise ValueError(
                f"pools[{i}].workers: these rollouts need more than the weights "
                "(rollout.max_resamples, task.carry_over_episodes); remove the key"
            )
        if not {elastic_stage} <= set(pool.stages) <= elastic_capable:
            names = ", and ".join(sorted(elastic_capable - {elastic_stage}))
            raise ValueError(
                f"pools[{i}].workers: only a pool of {elastic_stage}, and {names}, can be elastic"
            )
        for stage in pool.stages:
            stage_plan = plan.stage_plan(stage)
            if stage_plan.nodes * stage_plan.processes > 1:
                raise ValueError(
                    f"pools[{i}].workers: each is a job of one process, but stage {stage} "
                    f"requests {stage_plan.nodes} x {stage_plan.processes}"
                )
    placed = {stage for pool in plan.pools for stage in pool.stages}
    required = [name for name, stage in flow.stages.items() if stage.colocate_with is None]
    missing = next((stage for stage in required if stage not in placed), None)
    if plan.pools and missing:
        raise ValueError(f"pools: no pool holds {missing}; only other stages may be left out")
    has_elastic = any(pool.workers is not None for pool in plan.pools)
    has_evaluation_pool = any(
        pool.workers is None and EVALUATE in pool.stages for pool in plan.pools
    )
    edge = f"{flow.publish_stage} -> {EVALUATE}"
    transport = plan.transports.get(edge, "file")
    if has_elastic and not has_evaluation_pool and transport != "file":
        raise ValueError(
            f"transports: {edge!r} cannot be {transport} in an elastic pool: its evaluations start "
            "after the weights are committed and use the ones sent for rollouts; set it for "
            f"'{flow.publish_stage} -> {elastic_stage}'"
        )


def _check_ranks(plan: Plan, stage: str, ranks: Sequence[int], size: int, key: str) -> None:
    """Check the ranks that compute a stage in a pool of ``size`` processes.

    Raises:
        ValueError: the stage cannot run on these ranks; the message names the key.
    """
    if sorted(set(ranks)) != list(ranks) or not ranks or ranks[-1] >= size:
        raise ValueError(f"{key}: {list(ranks)}; use distinct ranks of 0 to {size - 1}, ascending")
    flow = plan.flow
    allowed = [n for n, s in flow.all_stages.items() if s.holds != "trainer"]
    allowed = [name for name in allowed if name not in flow.setup_stages]
    if stage not in allowed or plan.stage_plan(stage).layout.parallel_dims():
        raise ValueError(
            f"{key}: all processes of the pool share the model that {stage} computes with; only "
            f"{', '.join(allowed)} may have some of them, where no layout splits their model"
        )
    if flow.all_stages[stage].elastic and any(pool.workers for pool in plan.pools):
        raise ValueError(f"{key}: with an elastic pool one process collects it; remove the key")


def _check_separate_policy(plan: Plan) -> None:
    """Check the placement of a policy that runs separately from its simulators.

    Raises:
        ValueError: the policy cannot run where the plan places it; the message names the key.
    """
    flow = plan.flow
    policy, rollout = next(iter(flow.separate_policy), None), flow.rollout_stage
    if policy is None:
        return
    key, pools = f"stages.{policy}", {s: i for i, p in enumerate(plan.pools) for s in p.stages}
    if not plan.pools:
        raise ValueError(
            f"{key}: without pools, a stage job has its simulators and its policy in one process; "
            f"name {policy} in a pool, or leave it out"
        )
    if policy not in pools:
        raise ValueError(
            f"{key}: no pool holds it; name it in the stages of one, or leave it out: {rollout} "
            "then has the policy too"
        )
    if rollout not in pools:
        return  # check_pools reports the missing stage
    policy_pool = pools[policy]
    ranks_by_stage = plan.pools[policy_pool].stage_ranks
    for i, pool in enumerate(plan.pools):
        if pool.workers is not None:
            raise ValueError(
                f"pools[{i}].workers: elastic workers have the simulators and the policy in one "
                f"process; remove workers, or {policy}"
            )
    if plan.stage_plan(policy).layout.parallel_dims():
        raise ValueError(f"{key}.layout: each of its processes holds a whole model; remove the key")
    if policy_pool == pools[rollout]:
        for name in (rollout, EVALUATE):
            ranks = ranks_by_stage.get(name, ranks_by_stage.get(str(rollout), ()))
            if not ranks or not ranks_by_stage.get(policy) or {*ranks} & {*ranks_by_stage[policy]}:
                raise ValueError(
                    f"pools[{policy_pool}].stage_ranks: {name} and {policy} in one pool need "
                    f"processes of their own, as {{{rollout}: [0], {policy}: [1]}}; or give "
                    f"{policy} another pool"
                )
