"""Finds the best plan of a request, or forecasts a user's plan, and explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from pipeline.plan import Forecast, Plan, PoolPlan, StageForecast, StagePlan
from pipeline.planning.planner.available_devices import (
    MAX_LEASE_MIN,
    describe_limits,
    request_for_devices,
    with_counts,
)
from pipeline.planning.planner.build_problem import build_problem
from pipeline.planning.planner.plan_proposal import (
    AlternativePlan,
    PlanProposal,
    PlanRow,
    WhatIf,
)
from pipeline.planning.planner.plan_tables import format_seconds
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import Placement, PlacementProblem, dump_problem
from pipeline.planning.planner.request import PlanRequest, parse_counts
from pipeline.planning.planner.search import PlacementSolution, solve
from pipeline.planning.planner.stage_times import StageTables
from pipeline.planning.planner.uncertainty import PlacementForecast, forecast_placement
from pipeline.planning.planner.user_plan import user_placement
from pipeline.pools.measured_times import WORK_PART
from pipeline.validate_config import check_separate_policy
from rlinf.errors import PlanError
from stages.flow import flow_of

ALTERNATIVES = 4
"""Maximum number of alternative plans in a proposal."""
NOTABLE_COST_FACTOR = 1.0005
"""Plans whose costs differ by less than this factor count as equal."""
DEVIATIONS_TO_Q90 = 1.2816
"""Standard deviations from the mean to the 10 % and 90 % quantiles of a normal distribution."""
MIN_NOTED_SHARE = 0.01
"""Minimum share of an iteration that a note mentions."""
CONSIDERED_STALENESS = 1
"""The staleness, in iterations, whose saving is predicted."""


def propose_plan(request: PlanRequest, what_ifs: Sequence[str] = ()) -> PlanProposal:
    """Return the best plan for a request.

    Args:
        what_ifs: changes of the cluster to compare with, such as ``h100=8``.

    Raises:
        PlanError: a stage cannot run anywhere, or the request is inconsistent.
    """
    request = request.with_price_note()
    if request.execution is not None:
        return _propose(request, what_ifs)
    pools_request, jobs_request = (replace(request, execution=e) for e in ("pools", "jobs"))
    jobs = None
    with suppress(PlanError):
        jobs = _propose(jobs_request, what_ifs)
    try:
        pools = _propose(pools_request, what_ifs)
    except PlanError as error:
        if jobs is None:
            raise
        return replace(jobs, notes=(*jobs.notes, f"pools are not possible: {error}"))
    if jobs is None:
        return pools
    is_pools = pools.forecast.cost <= jobs.forecast.cost
    best, other, name = (pools, jobs, "jobs") if is_pools else (jobs, pools, "pools")
    seconds = format_seconds(other.forecast.iteration_s)
    note = f"with --execution {name} an iteration would take {seconds}"
    return replace(best, notes=(*best.notes, note))


def _propose(request: PlanRequest, what_ifs: Sequence[str]) -> PlanProposal:
    problem, tables = build_problem(request)
    best, *others = _solve(request, problem, 1 + ALTERNATIVES)
    plan = build_plan(request, problem, tables, best.placement)
    request.validate_plan(plan)
    others = [other for other in others if other.cost > best.cost * NOTABLE_COST_FACTOR]
    alternatives = [_alternative(problem, best, other, problem) for other in others]
    return _proposal(
        request, problem, tables, plan, best, alternatives, _what_ifs(request, what_ifs)
    )


def assess_plan(
    request: PlanRequest, plan: Plan, plan_name: str, what_ifs: Sequence[str] = ()
) -> PlanProposal:
    """Forecast a user's plan, with the best plan of the same execution among its alternatives.

    Args:
        plan_name: name of the plan in errors.

    Raises:
        PlanError: the plan is impossible; the message names the key and the limit.
    """
    check_separate_policy(request.config, plan)
    request = replace(request.with_price_note(), execution=plan.execution)
    plan = request.validate_plan(plan)
    user_request, planner_request = request.for_user_plan(), request.for_planner()
    placement, problem, tables = user_placement(user_request, plan, plan_name)
    predicted = Predictor(problem).predict(placement)
    gpus = [np.array(pool)[:, None] for pool in placement.gpus]
    total_s, busy_s = predicted.total_s[None], predicted.busy_s[:, None]
    cost = float(request.get_objective().cost(problem, total_s, busy_s, gpus)[0])
    solution = PlacementSolution(placement, predicted, cost, is_optimal=False)
    alternatives: list[AlternativePlan] = []
    with suppress(PlanError):  # jobs as the planner requests them may not be allowed
        planner_problem, _ = build_problem(planner_request)
        best = _solve(planner_request, planner_problem)[0]
        if best.cost < cost / NOTABLE_COST_FACTOR:
            alternatives.append(_alternative(problem, solution, best, planner_problem))
        solution = replace(solution, is_optimal=best.is_optimal and not alternatives)
    cases = _what_ifs(planner_request, what_ifs)
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


def _what_ifs(request: PlanRequest, what_ifs: Sequence[str]) -> list[WhatIf]:
    """Return the best plans for different clusters: ``what_ifs``, and each kind doubled or removed.

    Kinds that have a ``better_kind`` change together with it.
    """
    cases = {text: parse_counts([text]) for text in what_ifs}
    kinds = {name: entry for name, entry in request.devices.items() if entry.better_kind is None}
    for name, entry in kinds.items():
        if len(kinds) > 1:
            cases.setdefault(f"without {name}", {name: 0})
        doubled = 2 * entry.kind.nodes * entry.per_node
        cases.setdefault(f"{name}={doubled}", {name: doubled})
    results = []
    for text, counts in cases.items():
        try:
            changed = replace(request, devices=with_counts(request.devices, counts))
            best = _solve(changed, build_problem(changed)[0])[0]
        except PlanError:
            if text in what_ifs:
                raise
            results.append(WhatIf(text, None))
        else:
            results.append(WhatIf(text, float(best.prediction.total_s)))
    return results


def _proposal(
    request: PlanRequest,
    problem: PlacementProblem,
    tables: StageTables,
    plan: Plan,
    best: PlacementSolution,
    alternatives: Sequence[AlternativePlan],
    what_ifs: Sequence[WhatIf],
) -> PlanProposal:
    expected = forecast_placement(problem, best.placement, tables)
    rows = _rows(problem, tables, plan, best)
    forecast = Forecast(
        objective=request.objective,
        cost=best.cost,
        iteration_s=expected.nominal_s,
        low_s=expected.q10_s,
        high_s=expected.q90_s,
        gpu_hours=expected.gpu_hours,
        stages={row.stage: row.forecast for row in rows},
        sources=request.sources,
        corrections=request.learned_corrections(),
    )
    notes = [*request.notes, *_forecast_notes(expected)]
    if not problem.are_jobs:
        notes += _staleness_notes(request, problem, best)
    return PlanProposal(
        plan=plan.model_copy(update={"forecast": forecast}),
        problem="" if problem.are_jobs else dump_problem(problem, plan.pools, plan.num_chunks),
        mode="a job for each stage" if problem.are_jobs else best.placement.mode,
        rows=rows,
        is_optimal=best.is_optimal,
        alternatives=tuple(alternatives),
        what_ifs=tuple(what_ifs),
        notes=tuple(notes),
    )


def _rows(
    problem: PlacementProblem, tables: StageTables, plan: Plan, best: PlacementSolution
) -> tuple[PlanRow, ...]:
    prediction, placement, rows = best.prediction, best.placement, []
    for s, stage in enumerate(problem.stages):
        counts = placement.gpus_of(s)
        used = {kind.name: n for kind, n in zip(problem.kinds, counts, strict=True) if n}
        own = {kind: t for kind, t in tables[stage.name].items() if kind in used}
        start_s, busy_s = float(prediction.start_s[s]), float(prediction.busy_s[s])
        seconds = float(prediction.finish_s[s]) - start_s
        parts = {"waiting": max(0.0, seconds - busy_s), WORK_PART: busy_s}
        pool = next(n for n, members in enumerate(placement.pools, 1) if s in members)
        size = f"pool {pool}: {sum(counts)}"
        if problem.are_jobs:
            parts = {
                n: float(part[sum(counts)]) for t in own.values() for n, part in t.parts.items()
            }
            request = plan.stage_plan(stage.name)
            size = f"{request.nodes}x{request.processes}"
        spread_s = busy_s * max(float(table.spread[used[kind]]) for kind, table in own.items())
        rows.append(_row(stage.name, "+".join(used), size, start_s, spread_s, parts))
    if sync_s := float(prediction.sync_s):
        start_s = float(prediction.total_s) - sync_s
        rows.append(_row("sync", rows[0].place, rows[0].size, start_s, 0.0, {"transfer": sync_s}))
    return tuple(rows)


def _row(
    stage: str, place: str, size: str, start_s: float, spread_s: float, parts: Mapping[str, float]
) -> PlanRow:
    seconds = sum(parts.values())
    forecast = StageForecast(
        seconds=seconds,
        low_s=max(0.0, seconds - DEVIATIONS_TO_Q90 * spread_s),
        high_s=seconds + DEVIATIONS_TO_Q90 * spread_s,
        breakdown_s=dict(parts),
        bound_by=max(parts, key=lambda name: parts[name]),
        start_s=start_s,
    )
    return PlanRow(stage, place, size, forecast)


def build_plan(
    request: PlanRequest, problem: PlacementProblem, tables: StageTables, placement: Placement
) -> Plan:
    """Return the plan of a placement."""
    flow, stages, pools = flow_of(request.config), dict[str, StagePlan](), list[PoolPlan]()
    for members, counts in zip(placement.pools, placement.gpus, strict=True):
        names = tuple(problem.stages[s].name for s in members)
        devices = {kind.name: n for kind, n in zip(problem.kinds, counts, strict=True) if n}
        if problem.are_jobs:
            ((kind, count),) = devices.items()
            stages[names[0]] = _job_request(request, tables, names[0], kind, count)
            continue
        # If the GPUs cannot form one job (only for generators), each device gets a job, and the
        # jobs on all kinds make the same request.
        is_elastic = not problem.is_single_job(np.array(counts))
        workers = sum(devices.values()) if is_elastic else None
        pools.append(PoolPlan(stages=names, devices=devices, workers=workers))
        kinds = [request.devices[name].kind for name in devices]
        job = request_for_devices(kinds, 1 if is_elastic else max(counts))
        if job.partition:  # without a limit of their own, jobs are refused at some sites
            limit_s = min(request.devices[name].limit_s for name in devices)
            minutes = int(min(MAX_LEASE_MIN, limit_s / 60))
            job = job.model_copy(update={"time_limit_min": minutes})
        stages |= dict.fromkeys(names, job)
    # A stage outside of iterations, such as evaluation, gets the request of the stage with which it
    # is colocated.
    for name, spec in flow.all_stages.items():
        if name not in stages and spec.colocate_with in stages:
            stages[name] = stages[spec.colocate_with]
    return Plan(stages=stages, pools=tuple(pools), num_chunks=placement.num_chunks)


def _job_request(
    request: PlanRequest, tables: StageTables, stage: str, kind: str, count: int
) -> StagePlan:
    """Return the request of a stage's own job on ``count`` devices of a kind."""
    entry, table = request.devices[kind], tables[stage][kind]
    memory_bytes = 0 if entry.has_device_memory else table.peak_memory_bytes
    return request_for_devices(
        [entry.kind],
        count,
        per_node=table.per_node,
        needs_gpu=flow_of(request.config).all_stages[stage].uses_device,
        process_memory_bytes=memory_bytes,
        seconds=float(table.seconds[count]),
        limit_s=entry.limit_s,
    )


def _alternative(
    problem: PlacementProblem,
    best: PlacementSolution,
    other: PlacementSolution,
    other_problem: PlacementProblem,
) -> AlternativePlan:
    """Return an alternative: for pools with all of its pools, for jobs with the changed stages."""

    def jobs(problem: PlacementProblem, solution: PlacementSolution) -> dict[str, str]:
        return {
            " + ".join(problem.stages[s].name for s in members): " ".join(
                f"{n} {kind.name}" for n, kind in zip(gpus, problem.kinds, strict=True) if n
            )
            for members, gpus in zip(solution.placement.pools, solution.placement.gpus, strict=True)
        }

    own, changed = jobs(problem, best), jobs(other_problem, other)
    if problem.are_jobs:
        changed = {stage: gpus for stage, gpus in changed.items() if own[stage] != gpus}
    text = " | ".join(f"{stages} on {gpus}" for stages, gpus in changed.items())
    difference = text if problem.are_jobs else f"{other.placement.mode}: {text}"
    seconds, reason = float(other.prediction.total_s), _explain(problem, best, other)
    return AlternativePlan(difference, seconds, other.cost, reason)


def _explain(problem: PlacementProblem, best: PlacementSolution, other: PlacementSolution) -> str:
    """Describe why another placement is worse, or better: work, devices, weights or overlap."""
    old, new, is_better = best.prediction, other.prediction, other.cost < best.cost
    added_s = new.busy_s - old.busy_s
    s = int(added_s.argmin() if is_better else added_s.argmax())
    if (is_better or new.total_s > old.total_s) and abs(added_s[s]) > 0.01 * float(old.total_s):
        times = f"{new.busy_s[s]:.3g} s instead of {old.busy_s[s]:.3g} s"
        return f"{'better: ' if is_better else ''}{problem.stages[s].name} takes {times}"
    if is_better:
        return "better: more stages run at the same time"
    if new.total_s <= old.total_s:
        return "it uses more devices, or waits longer in the queue"
    if new.sync_s > old.sync_s:
        return f"the transfer of weights takes {float(new.sync_s):.3g} s"
    return "fewer stages run at the same time"


def _forecast_notes(forecast: PlacementForecast) -> list[str]:
    notes = []
    if forecast.sensitivities:
        name, saved_s = forecast.sensitivities[0]
        notes.append(f"what matters most: seconds of {name}; 10 % less saves {saved_s:.3g} s")
    for pool, share in enumerate(forecast.idle_shares):
        if share >= MIN_NOTED_SHARE:
            notes.append(f"pool {pool + 1} is idle for {share:.0%} of an iteration")
    if forecast.interruption_s:
        notes.append(
            f"preemption and failures cost {forecast.interruption_s:.3g} s an iteration on average"
        )
    if forecast.extrapolated:
        notes.append(
            f"{', '.join(forecast.extrapolated)}: more processes than were measured; the interval "
            "is wider. Measure there with: rlinf profile"
        )
    return notes


def _staleness_notes(
    request: PlanRequest, problem: PlacementProblem, best: PlacementSolution
) -> list[str]:
    """Describe what rollouts with the weights of an earlier iteration save."""
    staleness = request.config.rollout.staleness
    total_s = float(best.prediction.total_s)
    considered = staleness or CONSIDERED_STALENESS
    share = 1 - Predictor(problem).steady_period_s(best.placement, considered) / total_s
    saved = f"rollout.staleness={considered} saves {max(0.0, share):.0%} of an iteration"
    if staleness:
        return [f"{saved}; the times above are without it"]
    if share < MIN_NOTED_SHARE:
        return []
    return [f"{saved}, but samples then come from the policy of the previous iteration"]
