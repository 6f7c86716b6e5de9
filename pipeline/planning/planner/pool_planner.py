"""Planner for the execution ``segment``: pools that keep their devices over many iterations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from pipeline.plan import Forecast, Plan, PoolPlan, StagePlan
from pipeline.planning.planner.available_devices import describe_limits, request_for_devices
from pipeline.planning.planner.job_planner import with_offline_stages
from pipeline.planning.planner.job_search import NOTABLE_COST_FACTOR
from pipeline.planning.planner.pool_problem import Tables, build_pool_problem
from pipeline.planning.planner.predictor import PlacementPrediction, Predictor
from pipeline.planning.planner.problem import (
    Placement,
    PlacementProblem,
    dump_problem,
    placement_from_pools,
    pools_of_stages,
)
from pipeline.planning.planner.proposal import (
    AlternativePlan,
    PlanProposal,
    PlanRow,
    WhatIf,
    evaluate_what_ifs,
    stage_forecasts,
)
from pipeline.planning.planner.recommendations import recommend
from pipeline.planning.planner.request import PlanRequest
from pipeline.planning.planner.search import PlacementSolution, gpus_by_job, solve
from pipeline.planning.planner.stage_options import q10_q90_interval
from pipeline.planning.planner.uncertainty import PlacementForecast, forecast_placement
from pipeline.pools.measured_times import WORK_PART
from pipeline.validate_config import check_separate_policy
from rlinf.errors import PlanError
from stages.flow import flow_of

ALTERNATIVES = 4


def propose_pools(request: PlanRequest, what_ifs: Sequence[str] = ()) -> PlanProposal:
    """Return the best division of the stages over pools.

    Raises:
        PlanError: the stages fit nowhere.
    """
    problem, tables = build_pool_problem(request)
    best, *others = _solve(request, problem, 1 + ALTERNATIVES)
    plan = _plan(request, problem, best.placement)
    request.validate_plan(plan)
    worse = tuple(_alternative(problem, best, other) for other in others)
    bars = evaluate_what_ifs(request, what_ifs, _best)
    return _proposal(request, problem, tables, plan, best, worse, bars)


def assess_pools(
    request: PlanRequest, plan: Plan, where: str, what_ifs: Sequence[str] = ()
) -> PlanProposal:
    """Forecast a user's plan, with the best plan among its alternatives.

    Args:
        where: the plan's name in errors.

    Raises:
        PlanError: the plan is impossible; names the key and the limit.
    """
    check_separate_policy(request.config, plan)
    plan = request.validate_plan(plan)
    judging, planning = request.for_user_plan(), request.for_planner()
    problem, tables = build_pool_problem(
        judging, [kind for pool in plan.pools for kind in pool.devices]
    )
    placement = _placement(problem, plan, where)
    predicted = Predictor(problem).predict(placement)
    allocated = gpus_by_job(placement.pools, [np.array(pool)[:, None] for pool in placement.gpus])
    total = np.array([float(predicted.total_s)])
    cost = float(request.get_objective().cost(problem, total, allocated)[0])
    own, better = PlacementSolution(placement, predicted, cost, cost, True), list[AlternativePlan]()
    with suppress(PlanError):  # as the planner would ask for them no jobs may run
        among, _ = build_pool_problem(planning)
        best = _solve(planning, among)[0]
        exact = best.exact and cost <= best.cost
        own = replace(own, bound=min(cost, best.bound), exact=exact)
        if best.cost < cost / NOTABLE_COST_FACTOR:
            better.append(_alternative(among, own, best))
    bars = evaluate_what_ifs(planning, what_ifs, _best)
    return _proposal(judging, problem, tables, plan, own, better, bars)


def _solve(
    request: PlanRequest, problem: PlacementProblem, alternatives: int = 1
) -> list[PlacementSolution]:
    """Solve the problem; if no placement fits, the error also names the limits of accounting."""
    try:
        return solve(problem, request.get_objective(), alternatives)
    except PlanError as error:
        if limits := describe_limits(request.devices):
            raise PlanError(f"{error}; limits: {', '.join(limits)}") from None
        raise


def _placement(problem: PlacementProblem, plan: Plan, where: str) -> Placement:
    """Return the placement of a plan.

    Raises:
        PlanError: the plan uses devices that do not exist, or too many; a stage cannot run on its
            pool; or the plan is of a form that cannot be predicted.
    """
    stages = [stage.name for stage in problem.stages]
    for part in plan.flow.separate_policy:
        raise PlanError(
            f"{where}: pools: {part}: the plan can be run, but what it takes is not predicted: a "
            "profile has rollouts as a whole, not simulators and policy each"
        )
    for i, pool in enumerate(plan.pools):
        if pool.also_generates:
            raise PlanError(
                f"{where}: pools[{i}].also_generates: what this brings is not predicted"
            )
    try:
        seldom = plan.flow.all_stages.keys() - stages
        placement = placement_from_pools(problem, plan.pools, plan.num_chunks, seldom)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    for i, pool in enumerate(plan.pools):
        for kind in problem.kinds if pool.workers is None else ():
            if (count := pool.devices.get(kind.name, 0)) > (kind.job_gpus or count):
                raise PlanError(
                    f"{where}: pools[{i}].devices: {count} {kind.name} requested, its jobs have at "
                    f"most {kind.job_gpus} (MaxNodes of the partition)"
                )
    for k, kind in enumerate(problem.kinds):
        count = sum(gpus[k] for gpus in placement.gpus)
        if count > kind.gpus:
            raise PlanError(f"{where}: pools: {count} {kind.name} requested, there are {kind.gpus}")
    for together, most in problem.shared:
        own = [k for k, kind in enumerate(problem.kinds) if kind.name in together]
        count = sum(gpus[k] for gpus in placement.gpus for k in own)
        if count > most:
            raise PlanError(
                f"{where}: pools: {count} {' and '.join(together)} requested, which have {most} "
                "together (they share nodes)"
            )
    predictor = Predictor(problem)
    for job in placement.jobs:
        members = placement.stages_of(job)
        kinds = np.array(placement.gpus)[list(job)].any(0).sum()
        if kinds > 1 and not problem.may_mix(members):
            names = ", ".join(stages[s] for s in members)
            raise PlanError(f"{where}: pools: {names} on several kinds at once is not predicted")
        for s in members:
            gpus = placement.gpus_of(s)
            if not np.isfinite(predictor.duration(s, np.array(gpus)[:, None])[0]):
                allocated = zip(gpus, problem.kinds, strict=True)
                there = " ".join(f"{n} {kind.name}" for n, kind in allocated if n)
                raise PlanError(
                    f"{where}: pools: {stages[s]} cannot run on {there}, or nothing is known of "
                    "it there; measure with: rlinf profile"
                )
    return placement


def _proposal(
    request: PlanRequest,
    problem: PlacementProblem,
    tables: Tables,
    plan: Plan,
    best: PlacementSolution,
    others: Sequence[AlternativePlan],
    what_ifs: Sequence[WhatIf],
) -> PlanProposal:
    expected = forecast_placement(problem, best.placement, tables)
    rows = _rows(problem, best, tables)
    forecast = Forecast(
        objective=request.objective,
        cost=best.cost,
        iteration_s=expected.nominal_s,
        low_s=expected.q10_s,
        high_s=expected.q90_s,
        gpu_hours=expected.gpu_hours,
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
        bound=best.bound,
        exact=best.exact,
        alternatives=tuple(others),
        what_ifs=tuple(what_ifs),
        notes=(*request.notes, *_notes(expected, tables)),
    )


def _best(request: PlanRequest) -> tuple[float, float]:
    best = _solve(request, build_pool_problem(request)[0])[0]
    return float(best.prediction.total_s), best.cost


def _rows(
    problem: PlacementProblem, best: PlacementSolution, tables: Tables
) -> tuple[PlanRow, ...]:
    predicted, placement = best.prediction, best.placement
    rows = []
    for s, stage in enumerate(problem.stages):
        gpus = placement.gpus_of(s)
        start, finish = float(predicted.start_s[s]), float(predicted.finish_s[s])
        busy = float(predicted.busy_s[s])
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
                *_place(problem, placement, s),
                start,
                finish - start,
                low,
                high,
                parts,
                max(parts, key=lambda name: parts[name]),
            )
        )
    moved = float(predicted.sync_s)
    if moved:
        end = float(predicted.total_s)
        rows.append(
            PlanRow(
                "sync",
                *_place(problem, placement, 0),
                end - moved,
                moved,
                moved,
                moved,
                {"transfer": moved},
                "transfer",
            )
        )
    return tuple(rows)


def _place(problem: PlacementProblem, placement: Placement, stage: int) -> tuple[str, str, int]:
    """Return kinds, pool and number of devices of a stage; ``4 of 8`` if others use the rest."""
    number, job = next(
        (n, job) for n, job in enumerate(placement.jobs, 1) if stage in placement.stages_of(job)
    )
    gpus, every = placement.gpus_of(stage), np.array(placement.gpus)[list(job)].sum()
    kinds = "+".join(kind.name for kind, n in zip(problem.kinds, gpus, strict=True) if n)
    part = f" of {every}" if sum(gpus) < every else ""
    return kinds, f"pool {number}: {sum(gpus)}{part}", sum(gpus)


def _plan(request: PlanRequest, problem: PlacementProblem, placement: Placement) -> Plan:
    pools = tuple(_pool(problem, placement, job) for job in placement.jobs)
    stages = {stage: _resources(pool, request) for pool in pools for stage in pool.stages}
    flow = flow_of(request.config)
    last = flow.stages[flow.publish_stage].colocate_with
    if last is not None:
        stages[flow.publish_stage] = stages[last]
    stages = with_offline_stages(stages, flow)
    return Plan(
        stages=stages,
        pools=pools,
        num_chunks=placement.num_chunks,
    )


def _pool(problem: PlacementProblem, placement: Placement, job: tuple[int, ...]) -> PoolPlan:
    """Return a pool as one job if possible; otherwise as a job per device, for generators only."""
    stages = tuple(problem.stages[s].name for s in placement.stages_of(job))
    allocated = np.array(placement.gpus)[list(job)].sum(0)
    devices = {kind.name: int(n) for kind, n in zip(problem.kinds, allocated, strict=True) if n}
    if not problem.is_single_job(allocated):
        return PoolPlan(stages=stages, devices=devices, workers=sum(devices.values()))
    if len(job) == 1:
        return PoolPlan(stages=stages, devices=devices)
    first, home = 0, pools_of_stages(placement.pools)
    ranks: dict[str, tuple[int, ...]] = {}
    for p in job:
        size = sum(placement.gpus[p])
        own = [problem.stages[s].name for s in placement.pools[p] if len(home[s]) == 1]
        ranks |= dict.fromkeys(own, tuple(range(first, first + size)))
        first += size
    return PoolPlan(stages=stages, devices=devices, stage_ranks=ranks)


def _resources(pool: PoolPlan, request: PlanRequest) -> StagePlan:
    """Return the request of a job of the pool; workers of several kinds request the same."""
    count = 1 if pool.workers else next(iter(pool.devices.values()))
    return request_for_devices([request.devices[name].kind for name in pool.devices], count)


def _alternative(
    problem: PlacementProblem, best: PlacementSolution, other: PlacementSolution
) -> AlternativePlan:
    pools = [_described(problem, other.placement, job) for job in other.placement.jobs]
    return AlternativePlan(
        f"{other.placement.mode}: {' | '.join(pools)}",
        float(other.prediction.total_s),
        other.cost,
        _why(problem, best.prediction, other.prediction),
    )


def _described(problem: PlacementProblem, placement: Placement, job: tuple[int, ...]) -> str:
    """Describe a pool: ``rollout on 3 + reward on 1, then train, of 4 a100``."""
    home = pools_of_stages(placement.pools)

    def names(stages: Iterable[int]) -> str:
        return "+".join(problem.stages[s].name for s in stages)

    allocated = zip(problem.kinds, np.array(placement.gpus)[list(job)].sum(0), strict=True)
    there = " ".join(f"{n} {kind.name}" for kind, n in allocated if n)
    if len(job) == 1:
        return f"{names(placement.pools[job[0]])} on {there}"
    parts = []
    for p in job:
        own = names(s for s in placement.pools[p] if len(home[s]) == 1)
        parts.append(f"{own} on {sum(placement.gpus[p])}")
    every = names(s for s in placement.stages_of(job) if home[s] == job)
    return f"{' + '.join(parts)}, then {every}, of {there}"


def _why(problem: PlacementProblem, own: PlacementPrediction, its: PlacementPrediction) -> str:
    """Return the stage whose work grew most; if none did, the reason for waiting."""
    if float(its.total_s) <= float(own.total_s):
        return "it holds more devices"
    more = its.busy_s - own.busy_s
    s = int(more.argmax())
    if more[s] > 0.01 * float(own.total_s):
        name = problem.stages[s].name
        return f"{name} takes {float(its.busy_s[s]):.3g} s instead of {float(own.busy_s[s]):.3g} s"
    if float(its.sync_s) > float(own.sync_s):
        return f"weights move for {float(its.sync_s):.3g} s"
    return "less runs side by side"


def _notes(expected: PlacementForecast, tables: Tables) -> list[str]:
    notes = []
    if expected.sensitivities:
        first = expected.sensitivities[0]
        notes.append(
            f"what matters most: {first.quantity}; a tenth less saves {first.saved_s:.3g} s"
        )
    for pool, idle in enumerate(expected.idle_shares):
        notes.append(f"pool {pool + 1} stands idle for {idle:.0%} of an iteration")
    if expected.interruption_s:
        notes.append(
            f"preemption and failures cost {expected.interruption_s:.3g} s an iteration on average"
        )
    if expected.unmeasured:
        notes.append(f"not measured: {', '.join(expected.unmeasured)}; the interval is wider")
    return notes
