"""The plan: what each stage runs on. A YAML file that a person may write and edit."""

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


def check_pools(plan: Plan) -> None:
    """What pools hold must be what stages of the plan's flow can do.

    Raises:
        ValueError: names the key.
    """
    flow = plan.flow
    _check_apart(plan)
    generates, elastic = (
        flow.elastic_stage,
        {n for n, stage in flow.all_stages.items() if stage.elastic},
    )
    homes = plan.stage_pools() if plan.pools else {}
    for i, pool in enumerate(plan.pools):
        if pool.stage_ranks and pool.workers:
            raise ValueError(f"pools[{i}].ranks: each worker is a job of one process; leave it out")
        for stage, ranks in pool.stage_ranks.items():
            if homes.get(stage) != i:
                raise ValueError(
                    f"pools[{i}].ranks.{stage}: this pool does not run it"
                    f"{did_you_mean(stage, flow.all_stages)}"
                )
            size = sum(pool.gpus.values())
            _check_ranks(plan, stage, ranks, size, f"pools[{i}].ranks.{stage}")
    for i, pool in enumerate(plan.pools):
        if pool.also_generates and generates in pool.stages:
            raise ValueError(
                f"pools[{i}].also_generates: this pool holds {generates}; say it of another one"
            )
        if pool.workers is None:
            continue
        if generates is None:
            more = (
                "rollouts take more than weights (flow=dynamic_sampling, task.carry_over_episodes)"
            )
            raise ValueError(f"pools[{i}].workers: {more}; leave it out")
        if not {generates} <= set(pool.stages) <= elastic:
            names = ", and ".join(sorted(elastic - {generates}))
            raise ValueError(
                f"pools[{i}].workers: only a pool of {generates}, and {names}, can be elastic"
            )
        for stage in pool.stages:
            needs = plan.stage_plan(stage)
            if needs.nodes * needs.processes > 1:
                raise ValueError(
                    f"pools[{i}].workers: each is a job of one process, but stage {stage} "
                    f"asks for {needs.nodes} x {needs.processes}"
                )
    held = {stage for pool in plan.pools for stage in pool.stages}
    alone = [name for name, stage in flow.stages.items() if stage.colocate_with is None]
    missing = next((stage for stage in alone if stage not in held), None)
    if plan.pools and missing:
        raise ValueError(f"pools: no pool holds {missing}; only other stages may be left out")
    some = any(pool.workers is not None for pool in plan.pools)
    apart = any(pool.workers is None and EVALUATE in pool.stages for pool in plan.pools)
    edge = f"{flow.publish_stage} -> {EVALUATE}"
    way = plan.transports.get(edge, "file")
    if some and not apart and way != "file":
        raise ValueError(
            f"transports: {edge!r} cannot be {way} in an elastic pool, whose evaluations begin "
            "once weights are committed and take those that came for rollouts; say it of "
            f"'{flow.publish_stage} -> {generates}'"
        )


def _check_ranks(plan: Plan, stage: str, ranks: Sequence[int], size: int, key: str) -> None:
    """What is said of the processes, of ``size``, that compute a stage in its pool.

    Raises:
        ValueError: names the key.
    """
    if sorted(set(ranks)) != list(ranks) or not ranks or ranks[-1] >= size:
        raise ValueError(f"{key}: {list(ranks)}; give some of 0 to {size - 1}, in order, each once")
    flow = plan.flow
    free = [n for n, s in flow.all_stages.items() if s.holds != "trainer" and n not in flow.offline]
    if stage not in free or plan.stage_plan(stage).layout.parallel_dims():
        raise ValueError(
            f"{key}: all processes of the pool share the model that {stage} computes with; only "
            f"{', '.join(free)} may have some of them, where no layout splits their model"
        )
    if flow.all_stages[stage].elastic and any(pool.workers for pool in plan.pools):
        raise ValueError(f"{key}: with an elastic pool one process gathers it; leave it out")


def _check_apart(plan: Plan) -> None:
    """What is said of the policy's part of rollouts, where the plan places it.

    Raises:
        ValueError: names the key.
    """
    flow = plan.flow
    part, acts = next(iter(flow.separate_policy), None), flow.rollout_stage
    if part is None:
        return
    key, homes = f"stages.{part}", {s: i for i, pool in enumerate(plan.pools) for s in pool.stages}
    if not plan.pools:
        raise ValueError(
            f"{key}: a job of execution: stage has its simulators and its policy in one process; use "
            f"execution: segment and name {part} in a pool, or leave it out"
        )
    if part not in homes:
        raise ValueError(
            f"{key}: no pool holds it; name it in the stages of one, or leave it out: {acts} then "
            "has the policy too"
        )
    if acts not in homes:
        return  # which is said of any flow
    number, sides = homes[part], plan.pools[homes[part]].stage_ranks
    for i, pool in enumerate(plan.pools):
        if pool.workers is not None:
            raise ValueError(
                f"pools[{i}].workers: workers that come and go have the simulators and the policy "
                f"in one process; leave workers out, or {part}"
            )
    if plan.stage_plan(part).layout.parallel_dims():
        raise ValueError(
            f"{key}.layout: each of its processes answers with a whole model; leave it out"
        )
    if number == homes[acts]:
        for name in (acts, EVALUATE):
            own = sides.get(name, sides.get(str(acts), ()))
            if not own or not sides.get(part) or {*own} & {*sides[part]}:
                raise ValueError(
                    f"pools[{number}].ranks: {name} and {part} in one pool need processes of "
                    f"their own, as {{{acts}: [0], {part}: [1]}}; or give {part} another pool"
                )


class StagePlan(Section):
    """Resources of one stage; null takes the default of the plan, then of the cluster."""

    partition: OptionText | None = None
    nodes: int = Field(default=1, gt=0)
    processes: int = Field(default=1, gt=0)
    """Processes per node; on GPU partitions as many as GPUs."""
    gpus: int = Field(default=0, ge=0)
    """GPUs per node."""
    gpu_type: OptionText | None = None
    speed_weights: dict[str, PositiveFloat] | tuple[PositiveFloat, ...] | None = None
    """Relative speeds where they differ: by kind of node (a GPU's GRES name, a feature), or of each
    process. Work is given out in proportion."""
    constraint: OptionText | None = None
    """Features the nodes must have, as for sbatch: ``[h100*1&a100*1]`` for one node of each."""
    layout: ParallelLayout = DATA_PARALLEL_ONLY
    """How processes share a copy of the model, where the engine or trainer can split it so. Said of
    each stage; in pools, one that runs like another has its layout."""
    cpus: int = Field(default=1, gt=0)
    """CPUs per process."""
    mem_mb: int | None = Field(default=None, gt=0)
    """Memory per node, MiB."""
    time_limit_min: int | None = Field(default=None, gt=0)
    """Wall-time limit, minutes."""

    @model_validator(mode="after")
    def _one_share_each(self) -> StagePlan:
        if (
            isinstance(self.speed_weights, tuple)
            and len(self.speed_weights) != self.nodes * self.processes
        ):
            raise ValueError(
                f"shares: {len(self.speed_weights)} numbers for {self.nodes} x {self.processes} processes"
            )
        return self


def device_keys(kind: str, needs: StagePlan) -> dict[str, str | None]:
    """A kind of device as a pool names it, as keys of a stage's plan.

    Args:
        needs: its type of GPU stays where the pool names a partition alone, and no other one.
    """
    partition, _, gpu_type = kind.partition(":")
    said = needs.gpu_type if needs.partition in (None, partition) else None
    return {"partition": partition, "gpu_type": gpu_type or said}


class PoolPlan(Section):
    """Devices held for many iterations by the stages that take turns on them."""

    stages: tuple[str, ...] = Field(min_length=1)
    gpus: dict[OptionText, PositiveInt] = Field(min_length=1)
    """Devices of each kind (``partition``, or ``partition:gpu_type``): GPUs, one for each process,
    unless its stages or the defaults say ``gpus: 0`` or the partition has none. Several kinds are
    components of one heterogeneous job, on each of which every stage of the pool runs; in an
    elastic pool they are jobs of their own."""
    workers: PositiveInt | None = None
    """Makes the pool elastic: so many jobs of one process each, which generate in claims and may
    come and go at any time (``rlinf scale``). Null: one job."""
    max_workers: PositiveInt | None = None
    """Of an elastic pool: more workers are asked for, up to so many, while each shortens iterations
    enough, and let go, down to ``workers``, where they do not. Null: their number stays."""
    stage_ranks: dict[str, tuple[NonNegativeInt, ...]] = {}
    """By stage the processes of the pool that compute it, numbered in the order of ``gpus``; all of
    them where nothing is said. Stages with others compute side by side, before or after one that
    has all: rollouts on some, their judgement and evaluations on the rest, then training on all.
    Stages that train need all, for they share the model."""
    also_generates: bool = False
    """Beside an elastic pool: its workers generate too until nothing is left to give out, hand the
    long tail over to the elastic pool, and go back to their own stages."""

    @model_validator(mode="after")
    def _at_most_so_many(self) -> PoolPlan:
        if self.max_workers is not None and self.max_workers < (self.workers or math.inf):
            raise ValueError("max_workers: needs workers, and no more of them")
        return self


class StageForecast(Section):
    """What was predicted of one stage."""

    seconds: float = Field(ge=0)
    low_s: float = Field(ge=0)
    """10 % of iterations are expected to be quicker."""
    high_s: float = Field(ge=0)
    """10 % are expected to be slower."""
    breakdown_s: dict[str, float] = {}
    """What the seconds go to; they add up."""
    bound_by: str
    """The largest of the parts."""
    start_s: float = Field(default=0.0, ge=0)
    """When it begins, from the start of the iteration."""


class PlanningSources(Section):
    """Where the facts of a prediction came from, for ``rlinf replan``."""

    profile: str
    """"": there was none; data sheets said it."""
    inventory: str | None = None
    """A saved inventory; null: Slurm was asked."""
    site: str | None = None
    partitions: tuple[str, ...] = ()
    """Only these were used; all by default."""
    pins: tuple[str, ...] = ()


class TimingCorrection(Section):
    """What runs under earlier plans have taught, and this prediction takes into account."""

    stage: str
    kind: str
    """Of device."""
    startup_factor: PositiveFloat = 1.0
    """How much longer than the profile says its jobs take to start."""
    work_factor: PositiveFloat = 1.0
    """The same of loading and work."""


class Recommendation(Section):
    """Something that a plan of pools may use."""

    feature: str
    chosen: bool
    saved_s: float | None = None
    """Seconds of an iteration that it saves, or would; null: that is not predicted."""
    reason: str
    """What it brings, or why not."""


class Forecast(Section):
    """What was predicted when the plan was made; an edited plan keeps it for comparison."""

    objective: str
    cost: float = Field(ge=0)
    """In the unit of the objective."""
    iteration_s: float = Field(ge=0)
    low_s: float = Field(ge=0)
    high_s: float = Field(ge=0)
    gpu_hours: float = Field(ge=0)
    """Of one iteration."""
    stages: dict[str, StageForecast] = {}
    sources: PlanningSources | None = None
    corrections: tuple[TimingCorrection, ...] = ()
    recommendations: tuple[Recommendation, ...] = ()
    applied_at: float | None = None
    """When the plan took the place of another one, seconds since the epoch: iterations that began
    before it are not its own."""


Execution = Literal["stage", "segment"]
Transport = Literal["shared_memory", "socket", "gloo", "nccl", "delta", "file"]
WEIGHT_TRANSPORTS = frozenset({"gloo", "nccl", "delta"})
"""Transports that carry no records."""
COMMITTED_TRANSPORTS = frozenset({"delta", "file"})
"""Transports by which nothing is sent: a stage reads what is committed."""


class Plan(Section):
    """Resources of every stage: ``defaults``, then what ``stages`` says of each."""

    execution: Execution = "stage"
    """``stage``: each stage of each iteration is a job. ``segment``: pools run many iterations."""
    defaults: StagePlan = StagePlan()
    stages: dict[str, StagePlan] = {}
    pools: tuple[PoolPlan, ...] = ()
    """Of grain ``segment``."""
    hetjob: bool = False
    """Pools start at the same moment, as one heterogeneous job, and end with each other; the
    workers of elastic pools come and go on their own. False: each starts when the queue gives it
    what it asks for."""
    num_chunks: PositiveInt = 1
    """Micro-batches that an iteration is passed on in between pools."""
    transports: dict[str, Transport] = {}
    """By edge between pools, ``rollout -> reward``; stages of one worker pass references. Where
    nothing is said, weights go by shared memory on one node, by socket between nodes; records by
    socket, but trajectories with large rows (images) by file; all else is read from files. Between
    nodes ``shared_memory`` means socket. For weights alone there are ``gloo`` and ``nccl``, process
    groups, which are fast and not encrypted, and ``delta``: as ``file``, but of weights a worker
    reads what changed since those it has."""
    forecast: Forecast | None = None
    _flow: Flow = PrivateAttr(default=on_policy)

    def stage_plan(self, stage: str) -> StagePlan:
        """The resources of a stage: the defaults, the device of its pool, what is said of it.

        Raises:
            PlanError: the defaults and what is said of the stage do not go together.
        """
        own = self.stages.get(stage)
        values = self.defaults.model_dump(exclude_unset=True)
        held = next((pool for pool in self.pools if stage in pool.stages), None)
        if held is not None:
            place = device_keys(next(iter(held.gpus)), self.defaults)
            # Of several kinds one names the partition; each has a GPU of its own.
            values |= place if len(held.gpus) == 1 else {"partition": place["partition"]}
        if self._flow.all_stages[stage].single_process:
            values |= {"nodes": 1, "processes": 1, "speed_weights": None}
        values |= own.model_dump(exclude_unset=True) if own else {}
        if "layout" in self.defaults.model_fields_set:
            raise PlanError(
                "plan.defaults.layout: say it of each stage, as plan.stages.train.layout"
            )
        values["layout"] = self._layout(stage).model_dump()
        try:
            return validate(StagePlan, values, f"plan.stages.{stage}")
        except ConfigError as error:
            raise PlanError(str(error)) from None

    def _layout(self, stage: str) -> ParallelLayout:
        own, spec = self.stages.get(stage), self._flow.all_stages[stage]
        if own is not None and "layout" in own.model_fields_set:
            return own.layout
        follows = self.pools and spec.colocate_with is not None and not spec.single_process
        return (
            self._layout(spec.colocate_with)
            if follows and spec.colocate_with
            else DATA_PARALLEL_ONLY
        )

    def is_single_process(self, stage: str) -> bool:
        """Whether one process does the work of a stage, in a pool too."""
        needs = self.stage_plan(stage)
        return self._flow.all_stages[stage].single_process and needs.nodes * needs.processes == 1

    def stage_pools(self) -> dict[str, int]:
        """The number of the pool where each stage is ordered."""
        found = {stage: i for i, pool in enumerate(self.pools) for stage in pool.stages}
        for name, stage in self._flow.all_stages.items():
            found.setdefault(name, found.get(stage.colocate_with or "", len(self.pools) - 1))
        generates = self._flow.elastic_stage
        if generates is not None and self.pools[found[generates]].workers is not None:
            # It computes nothing where it is ordered, and its consumers need no copy.
            found[generates] = found[self._flow.publish_stage]
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain values that :func:`parse_plan` reads back to an equal plan."""
        # What a stage leaves open must stay open, or it would no longer follow the defaults.
        return self.model_dump(mode="json", exclude_unset=True)

    @model_validator(mode="after")
    def _pools_hold_each_stage_once(self) -> Plan:
        held = [stage for pool in self.pools for stage in pool.stages]
        twice = next((stage for stage in held if held.count(stage) > 1), None)
        if twice:
            raise ValueError(f"pools: stage {twice!r} is in two pools")
        if bool(self.pools) != (self.execution == "segment"):
            raise ValueError("pools belong to execution: segment, and that needs some")
        return self

    @model_validator(mode="after")
    def _together_needs_two(self) -> Plan:
        if self.hetjob and sum(pool.workers is None for pool in self.pools) < 2:
            raise ValueError("together: needs two pools that are one job each (no workers)")
        return self

    def check_transports(self, edges: Mapping[str, Collection[str]]) -> None:
        """
        Args:
            edges: of the flow, with the names of what goes along each.

        Raises:
            PlanError: transports are given for what is no edge of the flow, or cannot carry what
                goes along it.
        """
        for edge, transport in self.transports.items():
            if edge not in edges:
                raise PlanError(
                    f"plan.transports: no stage gets anything by {edge!r}{did_you_mean(edge, edges)}"
                )
            if transport in WEIGHT_TRANSPORTS and "weights" not in edges[edge]:
                ways = ", ".join(way for way in get_args(Transport) if way not in WEIGHT_TRANSPORTS)
                raise PlanError(
                    f"plan.transports.{edge}: {transport} carries weights alone, and here go "
                    f"{', '.join(sorted(edges[edge]))}; use one of {ways}"
                )

    @model_validator(mode="after")
    def _helpers_have_an_elastic_pool(self) -> Plan:
        for i, pool in enumerate(self.pools):
            if pool.also_generates and not any(other.workers for other in self.pools):
                raise ValueError(
                    f"pools[{i}].also_generates: needs an elastic pool (workers: 1) that goes on "
                    "with what this one leaves"
                )
        return self

    @property
    def flow(self) -> Flow:
        """The stages that it is for."""
        return self._flow

    @classmethod
    def from_run(cls, run: Path) -> Plan:
        """The plan of a run directory.

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


def parse_plan(values: Any, where: str, flow: Flow = on_policy) -> Plan:
    """Validate the content of a plan for a flow.

    Raises:
        PlanError: names the key.
    """
    if not isinstance(values, Mapping):
        raise PlanError(f"{where}: expected a mapping with 'defaults' and 'stages'")
    try:
        plan = validate(Plan, values, where)
    except ConfigError as error:
        raise PlanError(str(error)) from None
    named = {
        "stages": tuple(plan.stages),
        **{f"pools[{i}].stages": pool.stages for i, pool in enumerate(plan.pools)},
    }
    part = flow.policy_stage
    if part is not None and any(part in stages for stages in named.values()):
        flow = flow.with_separate_policy()
    plan._flow, known = flow, [*flow.all_stages, *([part] if part else [])]
    for key, stages in named.items():
        for stage in stages:
            if stage not in known:
                hint = did_you_mean(stage, known)
                if part is None and stage.endswith(POLICY_SUFFIX):
                    hint = ": this flow collects nothing, so no simulators ask a policy"
                raise PlanError(f"{where}.{key}: unknown stage {stage!r}{hint}")
            plan.stage_plan(stage)
    try:
        check_pools(plan)
    except ValueError as error:
        raise PlanError(f"{where}.{error}") from None
    return plan


def load_plan(config: RunConfig) -> Plan:
    """The plan a configuration asks for: a file, a mapping, or one process per stage.

    Raises:
        PlanError: missing or invalid.
    """
    flow = flow_of(config)
    if isinstance(config.plan, str):
        return read_plan(Path(config.plan).expanduser(), flow)
    return parse_plan({} if config.plan is None else config.plan, "plan", flow)
