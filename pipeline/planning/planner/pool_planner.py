"""Finds the best plan or forecasts a user's plan for the execution ``pools``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from pipeline.plan import Forecast, Plan, PoolPlan, StagePlan
from pipeline.planning.cost.rates import RateTables
from pipeline.planning.planner.available_devices import describe_limits, request_for_devices
from pipeline.planning.planner.job_planner import NOTABLE_COST_FACTOR, with_other_stages
from pipeline.planning.planner.pool_problem import build_pool_problem
from pipeline.planning.planner.predictor import PlacementPrediction, Predictor
from pipeline.planning.planner.problem import (
    Placement,
    PlacementProblem,
    dump_problem,
    placement_from_pools,
    pools_of_stages,
)
from pipeline.planning.planner.recommendations import (
    AlternativePlan,
    PlanProposal,
    PlanRow,
    WhatIf,
    evaluate_what_ifs,
    recommend,
    stage_forecasts,
)
from pipeline.planning.planner.request import PlanRequest
from pipeline.planning.planner.search import PlacementSolution, gpus_by_job, solve
from pipeline.planning.planner.stage_options import q10_q90_interval
from pipeline.planning.planner.uncertainty import PlacementForecast, forecast_placement
from pipeline.pools.measured_times import WORK_PART
from pipeline.validate_config import check_separate_policy
from rlinf.errors import PlanError
from stages.flow import flow_of

ALTERNATIVES = 4
"""Maximum number of alternative plans in a proposal."""


def propose_pools(request: PlanRequest, what_ifs: Sequence[str] = ()) -> PlanProposal:
    """Return the best plan of pools.

    Raises:
        PlanError: no placement fits.
    """
    problem, tables = build_pool_problem(request)
    best, *others = _solve(request, problem, 1 + ALTERNATIVES)
    plan = _build_plan(request, problem, best.placement)
    request.validate_plan(plan)
    alternatives = tuple(_alternative(problem, best, other) for other in others)
    cases = evaluate_what_ifs(request, what_ifs, _best_time_and_cost)
    return _proposal(request, problem, tables, plan, best, alternatives, cases)


def assess_pools(
    request: PlanRequest, plan: Plan, plan_name: str, what_ifs: Sequence[str] = ()
) -> PlanProposal:
    """Forecast a user's plan, with the best plan among its alternatives.

    Args:
        plan_name: name of the plan in errors.

    Raises:
        PlanError: the plan is impossible; the message names the key and the limit.
    """
    check_separate_policy(request.config, plan)
    plan = request.validate_plan(plan)
    user_request, planner_request = request.for_user_plan(), request.for_planner()
    problem, tables = build_pool_problem(
        user_request, [kind for pool in plan.pools for kind in pool.devices]
    )
    placement = _user_placement(problem, plan, plan_name)
    predicted = Predictor(problem).predict(placement)
    job_gpus = gpus_by_job(placement.pools, [np.array(pool)[:, None] for pool in placement.gpus])
    total = np.array([float(predicted.total_s)])
    cost = float(request.get_objective().cost(problem, total, job_gpus)[0])
    solution = PlacementSolution(placement, predicted, cost, cost, True)
    alternatives: list[AlternativePlan] = []
    with suppress(PlanError):  # jobs as the planner requests them may not be allowed
        planner_problem, _ = build_pool_problem(planner_request)
        best = _solve(planner_request, planner_problem)[0]
        is_optimal = best.is_optimal and cost <= best.cost
        lower_bound = min(cost, best.lower_bound)
        solution = replace(solution, lower_bound=lower_bound, is_optimal=is_optimal)
        if best.cost < cost / NOTABLE_COST_FACTOR:
            alternatives.append(_alternative(planner_problem, solution, best))
    cases = evaluate_what_ifs(planner_request, what_ifs, _best_time_and_cost)
    return _proposal(user_request, problem, tables, plan, solution, alternatives, cases)


def _solve(
    request: PlanRequest, problem: PlacementProblem, max_solutions: int = 1
) -> list[PlacementSolution]:
    """Return the best placements; if none fits, the error also lists the limits of accounting."""
    try:
        return solve(problem, request.get_objective(), max_solutions)
    except PlanError as error:
        if limits := describe_limits(request.devices):
            raise PlanError(f"{error}; limits: {', '.join(limits)}") from None
        raise


def _user_placement(problem: PlacementProblem, plan: Plan, plan_name: str) -> Placement:
    """Return the placement of a plan.

    Raises:
        PlanError: the plan uses unknown or too many devices, a stage cannot run on its pool, or the
            planner cannot predict this form of plan.
    """
    stages = [stage.name for stage in problem.stages]
    for stage in plan.flow.separate_policy:
        raise PlanError(
            f"{plan_name}: pools: {stage}: the plan can be run, but its time is not predicted: "
            "a profile measures rollouts as a whole, not simulators and policy separately"
        )
    for i, pool in enumerate(plan.pools):
        if pool.also_generates:
            raise PlanError(f"{plan_name}: pools[{i}].also_generates: its effect is not predicted")
    try:
        occasional = plan.flow.all_stages.keys() - stages
        placement = placement_from_pools(problem, plan.pools, plan.num_chunks, occasional)
    except PlanError as error:
        raise PlanError(f"{plan_name}: {error}") from None
    for i, pool in enumerate(plan.pools):
        for kind in problem.kinds if pool.workers is None else ():
            if (count := pool.devices.get(kind.name, 0)) > (kind.job_gpus or count):
                raise PlanError(
                    f"{plan_name}: pools[{i}].devices: {count} {kind.name} requested, its jobs "
                    f"have at most {kind.job_gpus} (MaxNodes of the partition)"
                )
    for k, kind in enumerate(problem.kinds):
        count = sum(gpus[k] for gpus in placement.gpus)
        if count > kind.gpus:
            raise PlanError(
                f"{plan_name}: pools: {count} {kind.name} requested, there are {kind.gpus}"
            )
    for group, limit in problem.shared:
        indices = [k for k, kind in enumerate(problem.kinds) if kind.name in group]
        count = sum(gpus[k] for gpus in placement.gpus for k in indices)
        if count > limit:
            raise PlanError(
                f"{plan_name}: pools: {count} {' and '.join(group)} requested, which have {limit} "
                "together (they share nodes)"
            )
    predictor = Predictor(problem)
    for job in placement.jobs:
        members = placement.stages_of(job)
        kinds = np.array(placement.gpus)[list(job)].any(0).sum()
        if kinds > 1 and not problem.may_mix(members):
            names = ", ".join(stages[s] for s in members)
            raise PlanError(
                f"{plan_name}: pools: {names} on several kinds at once is not predicted"
            )
        for s in members:
            gpus = placement.gpus_of(s)
            if not np.isfinite(predictor.duration(s, np.array(gpus)[:, None])[0]):
                counts = zip(gpus, problem.kinds, strict=True)
                gpu_list = " ".join(f"{n} {kind.name}" for n, kind in counts if n)
                raise PlanError(
                    f"{plan_name}: pools: {stages[s]} cannot run on {gpu_list}, or was not "
                    "measured there; measure with: rlinf profile"
                )
    return placement


def _proposal(
    request: PlanRequest,
    problem: PlacementProblem,
    tables: RateTables,
    plan: Plan,
    best: PlacementSolution,
    others: Sequence[AlternativePlan],
    what_ifs: Sequence[WhatIf],
) -> PlanProposal:
    placement_forecast = forecast_placement(problem, best.placement, tables)
    rows = _rows(problem, best, tables)
    forecast = Forecast(
        objective=request.objective,
        cost=best.cost,
        iteration_s=placement_forecast.nominal_s,
        low_s=placement_forecast.q10_s,
        high_s=placement_forecast.q90_s,
        gpu_hours=placement_forecast.gpu_hours,
        stages=stage_forecasts(rows),
        sources=request.sources,
        corrections=request.learned_corrections(),
        recommendations=recommend(request, problem, plan, best),
    )
    return PlanProposal(
        plan=plan.model_copy(update={"forecast": forecast}),
        problem=dump_problem(problem, plan.pools, plan.num_chunks),
        mode=best.placement.mode,
        rows=rows,
        objective=request.objective,
        unit=request.get_objective().unit,
        lower_bound=best.lower_bound,
        is_optimal=best.is_optimal,
        alternatives=tuple(others),
        what_ifs=tuple(what_ifs),
        notes=(*request.notes, *_forecast_notes(placement_forecast, tables)),
    )


def _best_time_and_cost(request: PlanRequest) -> tuple[float, float]:
    best = _solve(request, build_pool_problem(request)[0])[0]
    return float(best.prediction.total_s), best.cost


def _rows(
    problem: PlacementProblem, best: PlacementSolution, tables: RateTables
) -> tuple[PlanRow, ...]:
    prediction, placement = best.prediction, best.placement
    rows = []
    for s, stage in enumerate(problem.stages):
        gpus = placement.gpus_of(s)
        start, finish = float(prediction.start_s[s]), float(prediction.finish_s[s])
        busy = float(prediction.busy_s[s])
        spread = max(
            float(tables[stage.name][kind.name].spread[n])
            for kind, n in zip(problem.kinds, gpus, strict=True)
            if n and kind.name in tables[stage.name]
        )
        low, high = q10_q90_interval(finish - start, spread * busy)
        parts = {"waiting": max(0.0, finish - start - busy), WORK_PART: busy}
        rows.append(
            PlanRow(
                stage.name,
                *_location(problem, placement, s),
                start,
                finish - start,
                low,
                high,
                parts,
                max(parts, key=lambda name: parts[name]),
            )
        )
    sync_s = float(prediction.sync_s)
    if sync_s:
        end = float(prediction.total_s)
        rows.append(
            PlanRow(
                "sync",
                *_location(problem, placement, 0),
                end - sync_s,
                sync_s,
                sync_s,
                sync_s,
                {"transfer": sync_s},
                "transfer",
            )
        )
    return tuple(rows)


def _location(problem: PlacementProblem, placement: Placement, stage: int) -> tuple[str, str, int]:
    """Return kinds, pool (``pool 1: 4 of 8``) and number of devices of a stage."""
    number, job = next(
        (n, job) for n, job in enumerate(placement.jobs, 1) if stage in placement.stages_of(job)
    )
    gpus, total = placement.gpus_of(stage), np.array(placement.gpus)[list(job)].sum()
    kinds = "+".join(kind.name for kind, n in zip(problem.kinds, gpus, strict=True) if n)
    part = f" of {total}" if sum(gpus) < total else ""
    return kinds, f"pool {number}: {sum(gpus)}{part}", sum(gpus)


def _build_plan(request: PlanRequest, problem: PlacementProblem, placement: Placement) -> Plan:
    pools = tuple(_build_pool(problem, placement, job) for job in placement.jobs)
    stages = {stage: _job_request(pool, request) for pool in pools for stage in pool.stages}
    flow = flow_of(request.config)
    colocated_with = flow.stages[flow.publish_stage].colocate_with
    if colocated_with is not None:
        stages[flow.publish_stage] = stages[colocated_with]
    stages = with_other_stages(stages, flow)
    return Plan(stages=stages, pools=pools, num_chunks=placement.num_chunks)


def _build_pool(problem: PlacementProblem, placement: Placement, job: tuple[int, ...]) -> PoolPlan:
    """Return the plan's pool for the placement's pools of one ``job``. If their GPUs cannot form
    one job (only for generators), each device gets a job."""
    stages = tuple(problem.stages[s].name for s in placement.stages_of(job))
    job_gpus = np.array(placement.gpus)[list(job)].sum(0)
    devices = {kind.name: int(n) for kind, n in zip(problem.kinds, job_gpus, strict=True) if n}
    if not problem.is_single_job(job_gpus):
        return PoolPlan(stages=stages, devices=devices, workers=sum(devices.values()))
    if len(job) == 1:
        return PoolPlan(stages=stages, devices=devices)
    first_rank, stage_pools = 0, pools_of_stages(placement.pools)
    ranks: dict[str, tuple[int, ...]] = {}
    for p in job:
        size = sum(placement.gpus[p])
        members = [problem.stages[s].name for s in placement.pools[p] if len(stage_pools[s]) == 1]
        ranks |= dict.fromkeys(members, tuple(range(first_rank, first_rank + size)))
        first_rank += size
    return PoolPlan(stages=stages, devices=devices, stage_ranks=ranks)


def _job_request(pool: PoolPlan, request: PlanRequest) -> StagePlan:
    """Return the request of the pool's jobs, which is the same for workers on all kinds."""
    count = 1 if pool.workers else next(iter(pool.devices.values()))
    return request_for_devices([request.devices[name].kind for name in pool.devices], count)


def _alternative(
    problem: PlacementProblem, best: PlacementSolution, other: PlacementSolution
) -> AlternativePlan:
    pools = [_describe_pool(problem, other.placement, job) for job in other.placement.jobs]
    return AlternativePlan(
        f"{other.placement.mode}: {' | '.join(pools)}",
        float(other.prediction.total_s),
        other.cost,
        _explain(problem, best.prediction, other.prediction),
    )


def _describe_pool(problem: PlacementProblem, placement: Placement, job: tuple[int, ...]) -> str:
    """Describe a pool: ``rollout on 3 + reward on 1, then train, of 4 a100``."""
    stage_pools = pools_of_stages(placement.pools)

    def names(stages: Iterable[int]) -> str:
        return "+".join(problem.stages[s].name for s in stages)

    counts = zip(problem.kinds, np.array(placement.gpus)[list(job)].sum(0), strict=True)
    gpu_list = " ".join(f"{n} {kind.name}" for kind, n in counts if n)
    if len(job) == 1:
        return f"{names(placement.pools[job[0]])} on {gpu_list}"
    parts = []
    for p in job:
        members = names(s for s in placement.pools[p] if len(stage_pools[s]) == 1)
        parts.append(f"{members} on {sum(placement.gpus[p])}")
    last_stages = names(s for s in placement.stages_of(job) if stage_pools[s] == job)
    return f"{' + '.join(parts)}, then {last_stages}, of {gpu_list}"


def _explain(
    problem: PlacementProblem, best: PlacementPrediction, other: PlacementPrediction
) -> str:
    """Describe why another placement is worse: devices, work, weight transfer or less overlap."""
    if float(other.total_s) <= float(best.total_s):
        return "it uses more devices"
    added_s = other.busy_s - best.busy_s
    s = int(added_s.argmax())
    if added_s[s] > 0.01 * float(best.total_s):
        other_s, best_s = float(other.busy_s[s]), float(best.busy_s[s])
        return f"{problem.stages[s].name} takes {other_s:.3g} s instead of {best_s:.3g} s"
    if float(other.sync_s) > float(best.sync_s):
        return f"the transfer of weights takes {float(other.sync_s):.3g} s"
    return "fewer stages run at the same time"


def _forecast_notes(forecast: PlacementForecast, tables: RateTables) -> list[str]:
    notes = []
    if forecast.sensitivities:
        largest = forecast.sensitivities[0]
        notes.append(
            f"what matters most: {largest.quantity}; 10 % less saves {largest.saved_s:.3g} s"
        )
    for pool, share in enumerate(forecast.idle_shares):
        notes.append(f"pool {pool + 1} is idle for {share:.0%} of an iteration")
    if forecast.interruption_s:
        notes.append(
            f"preemption and failures cost {forecast.interruption_s:.3g} s an iteration on average"
        )
    if forecast.unmeasured:
        notes.append(f"not measured: {', '.join(forecast.unmeasured)}; the interval is wider")
    return notes
