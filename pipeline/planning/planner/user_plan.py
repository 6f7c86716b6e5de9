"""The placement that a user's plan describes, with an error for each limit that it exceeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pipeline.plan import Plan, StagePlan
from pipeline.planning.planner.available_devices import PartitionDevices
from pipeline.planning.planner.build_problem import build_problem
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import Placement, PlacementProblem, placement_from_pools
from pipeline.planning.planner.request import PlanRequest
from pipeline.planning.planner.stage_times import (
    StageTables,
    StageTimes,
    num_work_items,
)
from rlinf.errors import PlanError, did_you_mean
from stages.flow import flow_of


def user_placement(
    request: PlanRequest, plan: Plan, plan_name: str
) -> tuple[Placement, PlacementProblem, StageTables]:
    """Return the placement of a plan, with the problem and the tables for its forecast.

    Args:
        plan_name: name of the plan in errors.

    Raises:
        PlanError: the plan uses unknown or too many devices, a stage cannot run on them, or the
            planner cannot predict this form of plan.
    """
    if plan.pools:
        problem, tables = build_problem(request, [kind for p in plan.pools for kind in p.devices])
        return _pools_placement(problem, plan, plan_name), problem, tables
    stages = request.stage_dependencies()
    jobs = {
        stage: _select_devices(
            plan.stage_plan(stage), request.devices, f"{plan_name}: stages.{stage}"
        )
        for stage in stages
    }
    # Time limits are checked below, with the limit that the plan requests.
    unlimited = {n: replace(e, time_limit_min=None) for n, e in request.devices.items()}
    unlimited_request = replace(request, devices=unlimited)
    problem, tables = build_problem(unlimited_request, [entry.name for entry in jobs.values()])
    gpus = []
    for stage, entry in jobs.items():
        stage_plan, key = plan.stage_plan(stage), f"{plan_name}: stages.{stage}"
        times = StageTimes(entry, stage, flow_of(request.config).all_stages[stage], request.profile)
        count = stage_plan.nodes * stage_plan.processes
        _check_size(entry, times, stage_plan, key)
        if count > (num_items := num_work_items(stage, request.config)):
            raise PlanError(
                f"{key}.processes: {count} in all, but there is work for only {num_items}"
            )
        table = tables[stage].get(entry.name)
        if table is None or not table.rates[count]:
            raise PlanError(
                f"{key}.processes: {count} processes on {entry.name} were not measured; "
                f"measure with: rlinf profile --processes {count}"
            )
        _check_time(entry, float(table.seconds[count]), stage_plan, key)
        gpus.append(tuple(count * (kind.name == entry.name) for kind in problem.kinds))
    pools = tuple((s,) for s in range(len(gpus)))
    return Placement(pools, tuple(gpus), 1), problem, tables


def _select_devices(
    request: StagePlan, devices: Mapping[str, PartitionDevices], key: str
) -> PartitionDevices:
    partition = request.partition or ""
    in_partition = [entry for entry in devices.values() if entry.kind.partition == partition]
    if request.partition is None and not in_partition:
        raise PlanError(f"{key}.partition: not given; one of {', '.join(devices)}")
    if not in_partition:
        partitions = dict.fromkeys(entry.kind.partition for entry in devices.values())
        raise PlanError(
            f"{key}.partition: {partition!r} is not here, or was not measured"
            f"{did_you_mean(partition, partitions)}; there are {', '.join(partitions)}"
        )
    if isinstance(request.speed_weights, dict):
        raise PlanError(
            f"{key}.speed_weights: the plan can be run, but the time of a job on several kinds of "
            "nodes is not predicted"
        )
    matching = [entry for entry in in_partition if request.gpu_type in (None, entry.kind.gpu_type)]
    kinds = ", ".join(entry.kind.gpu_type or "none" for entry in matching or in_partition)
    if not matching:
        raise PlanError(f"{key}.gpu_type: {partition} has no {request.gpu_type!r} (it has {kinds})")
    if len(matching) > 1:
        raise PlanError(f"{key}.gpu_type: {partition} has {kinds}, which differ in speed; name one")
    return matching[0]


def _check_size(entry: PartitionDevices, times: StageTimes, request: StagePlan, key: str) -> None:
    if request.nodes > entry.kind.nodes:
        raise PlanError(
            f"{key}.nodes: {request.nodes} requested of {entry.name}, which has {entry.kind.nodes}"
        )
    if request.nodes > entry.max_job_nodes:
        raise PlanError(
            f"{key}.nodes: {request.nodes} requested of {entry.name}, where a job has at most "
            f"{entry.max_nodes_per_job} (MaxNodes of the partition)"
        )
    if request.processes > entry.per_node:
        raise PlanError(
            f"{key}.processes: {request.processes} a node, nodes of {entry.name} have "
            f"{entry.per_node} devices"
        )
    memory_mb = request.processes * (times.peak_memory_bytes >> 20)
    if request.processes > (limit := times.max_per_node()):
        raise PlanError(
            f"{key}.processes: {request.processes} a node need {memory_mb} MiB (measured), nodes "
            f"of {entry.name} have {entry.kind.mem_mb_per_node}; at most {limit}"
        )
    uses_host_memory = not entry.has_device_memory
    if uses_host_memory and request.mem_mb is not None and request.mem_mb < memory_mb:
        raise PlanError(
            f"{key}.mem_mb: {request.mem_mb}, but {request.processes} processes needed "
            f"{memory_mb} MiB when measured on {entry.name}"
        )
    if reason := times.refusal_for(request.nodes * request.processes):
        raise PlanError(f"{key}.processes: {reason}")


def _check_time(entry: PartitionDevices, seconds: float, request: StagePlan, key: str) -> None:
    limit_min = entry.limit_s / 60
    if request.time_limit_min and request.time_limit_min > limit_min:
        raise PlanError(
            f"{key}.time_limit_min: {request.time_limit_min} requested, "
            f"{entry.time_limit_of} allows {limit_min:g}"
        )
    minutes = min(request.time_limit_min or math.inf, limit_min)
    if seconds > 60 * minutes:
        raise PlanError(
            f"{key}.time_limit_min: {minutes:g} minutes, but {seconds / 60:.1f} are expected on "
            f"{entry.name} {request.nodes}x{request.processes}; the job would be requeued forever"
        )


def _pools_placement(problem: PlacementProblem, plan: Plan, plan_name: str) -> Placement:
    names = [stage.name for stage in problem.stages]
    for stage in plan.flow.separate_policy:
        raise PlanError(
            f"{plan_name}: pools: {stage}: the plan can be run, but its time is not predicted: "
            "a profile measures rollouts as a whole, not simulators and policy separately"
        )
    try:
        occasional = plan.flow.all_stages.keys() - names
        placement = placement_from_pools(problem, plan.pools, plan.num_chunks, occasional)
    except PlanError as error:
        raise PlanError(f"{plan_name}: {error}") from None
    for i, pool in enumerate(plan.pools):
        if pool.also_generates:
            raise PlanError(f"{plan_name}: pools[{i}].also_generates: its effect is not predicted")
        for kind in problem.kinds if pool.workers is None else ():
            if (count := pool.devices.get(kind.name, 0)) > (kind.job_gpus or count):
                raise PlanError(
                    f"{plan_name}: pools[{i}].devices: {count} {kind.name} requested, its jobs "
                    f"have at most {kind.job_gpus} (MaxNodes of the partition)"
                )
    for group, limit in (*(((k.name,), k.gpus) for k in problem.kinds), *problem.shared):
        count = sum(pool.devices.get(kind, 0) for pool in plan.pools for kind in group)
        if count > limit:
            raise PlanError(
                f"{plan_name}: pools: {count} {' and '.join(group)} requested, there are {limit}"
                f"{' together (they share nodes)' if len(group) > 1 else ''}"
            )
    predictor = Predictor(problem)
    for members, counts in zip(placement.pools, placement.gpus, strict=True):
        used = [f"{n} {k.name}" for n, k in zip(counts, problem.kinds, strict=True) if n]
        if len(used) > 1 and not problem.may_mix(members):
            raise PlanError(
                f"{plan_name}: pools: {', '.join(names[s] for s in members)} on several kinds at "
                "once is not predicted"
            )
        for s in members:
            if not np.isfinite(predictor.duration(s, np.array(counts)[:, None])[0]):
                raise PlanError(
                    f"{plan_name}: pools: {names[s]} cannot run on {' '.join(used)}, or was not "
                    "measured there; measure with: rlinf profile"
                )
    return placement
