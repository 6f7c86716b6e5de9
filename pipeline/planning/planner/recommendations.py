"""Recommendations for a plan of pools: staleness, elastic rollouts, helpers and transports, each
with the predicted saving or the reason against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from pipeline.plan import Plan, PoolPlan, Recommendation
from pipeline.planning.planner.pool_problem import transfer_seconds
from pipeline.planning.planner.predictor import Predictor, in_separate_pools
from pipeline.planning.planner.problem import (
    Objective,
    Placement,
    PlacementProblem,
    pools_of_stages,
)
from pipeline.planning.planner.request import PlanRequest
from pipeline.planning.planner.search import PlacementSolution, solve
from rlinf.errors import PlanError
from stages.flow import flow_of

CONSIDERED_STALENESS = 1


def recommend(
    request: PlanRequest, problem: PlacementProblem, plan: Plan, best: PlacementSolution
) -> tuple[Recommendation, ...]:
    """Return all recommendations for a plan of pools."""
    return (
        recommend_staleness(request, problem, best),
        recommend_elastic(request, problem, plan, best, request.get_objective()),
        recommend_helpers(problem, plan, best),
        *recommend_transports(request, problem, plan, best.placement),
    )


def _choice(what: str, chosen: bool, why: str, saved_s: float | None = None) -> Recommendation:
    return Recommendation(feature=what, chosen=chosen, reason=why, saved_s=saved_s)


def recommend_staleness(
    request: PlanRequest, problem: PlacementProblem, best: PlacementSolution
) -> Recommendation:
    """Recommend rollouts with weights that are one iteration older, beside training."""
    what = f"rollout.staleness={CONSIDERED_STALENESS}"
    now = float(best.prediction.total_s)
    own = request.config.rollout.staleness
    if own:
        least = Predictor(problem).steady_period_s(best.placement, own)
        why = f"the run has rollout.staleness={own}; the times above are as without it"
        return _choice(f"rollout.staleness={own}", True, why, now - least)
    saved = now - Predictor(problem).steady_period_s(best.placement, CONSIDERED_STALENESS)
    if saved <= 0.005 * now:
        why = "every job is busy, or waits for nothing that older weights would spare it"
        return _choice(what, False, why, max(0.0, saved))
    why = (
        f"would save {saved / now:.0%} of an iteration, but changes what is learnt: samples are "
        "of a policy an iteration old; set it in the configuration"
    )
    return _choice(what, False, why, saved)


def recommend_elastic(
    request: PlanRequest,
    problem: PlacementProblem,
    plan: Plan,
    best: PlacementSolution,
    goal: Objective,
) -> Recommendation:
    """Recommend a pool of single generators that come and go, of several kinds or any number."""
    what, generates = "elastic rollouts (workers)", flow_of(request.config).elastic_stage
    later = "; max_workers is not predicted: a run finds out whether more of them pay"
    if not generates:
        return _choice(what, False, "no stage of this flow has workers that may come and go")
    if not any(pool.workers for pool in plan.pools):
        rollout_pool = next(pool for pool in plan.pools if generates in pool.stages)
        why = f"one job gives {generates} as much"
        if set(rollout_pool.stages) != {generates}:
            why = f"{generates} shares its pool with other stages, which is quicker"
        return _choice(what, False, why + later, 0.0)
    try:
        jobs = solve(replace(problem, mixes=frozenset()), goal)[0]
    except PlanError:
        return _choice(what, True, "without them the stages find no room" + later)
    saved = float(jobs.prediction.total_s) - float(best.prediction.total_s)
    why = f"devices of several kinds, or of a part of a node, save {max(0.0, saved):.3g} s"
    return _choice(what, True, why + later, max(0.0, saved))


def recommend_helpers(
    problem: PlacementProblem, plan: Plan, best: PlacementSolution
) -> Recommendation:
    """Recommend that workers of another pool generate until no prompts are left."""
    what = "also_generates"
    first = next((i for i, pool in enumerate(plan.pools) if pool.workers), None)
    if first is None:
        return _choice(what, False, "there is no elastic pool that could take over the tail")
    stages = [stage.name for stage in problem.stages]
    rollout = next(stages.index(s) for s in plan.pools[first].stages if s in stages)
    found = [
        (saved, i)
        for i, pool in enumerate(plan.pools)
        if i != first and (saved := _helped(problem, best, rollout, pool, stages)) > 0
    ]
    if not found:
        return _choice(what, False, "no other pool stands idle while the rollout runs", 0.0)
    saved, number = max(found)
    why = (
        f"pool {number + 1} could generate before its first input is there and save at most "
        f"{saved:.3g} s; what the hand-over of the tail costs is not predicted: try it with "
        f"pools[{number}].also_generates: true"
    )
    return _choice(what, False, why, saved)


def _helped(
    problem: PlacementProblem,
    best: PlacementSolution,
    rollout: int,
    pool: PoolPlan,
    stages: Sequence[str],
) -> float:
    """Return the maximum seconds that a pool could save by generating before its own work."""
    stage = problem.stages[rollout]
    rates = [
        problem.rate_table(stage, k)[pool.devices.get(kind.name, 0)]
        for k, kind in enumerate(problem.kinds)
    ]
    idle = min(float(best.prediction.start_s[stages.index(s)]) for s in pool.stages if s in stages)
    share = min(1.0, idle * float(np.sum(rates)))
    return share * float(best.prediction.busy_s[rollout])


def recommend_transports(
    request: PlanRequest, problem: PlacementProblem, plan: Plan, placement: Placement
) -> Iterator[Recommendation]:
    """Recommend how new weights move from pool to pool, with the time of each way."""
    if problem.sync is None:
        return
    names = [stage.name for stage in problem.stages]
    if not set(problem.sync) <= set(names):
        return
    source, target = (names.index(name) for name in problem.sync)
    what = f"weights, {problem.sync[0]} to {problem.sync[1]}"
    size = request.profile.weights_bytes
    if not in_separate_pools(pools_of_stages(placement.pools), source, target):
        yield _choice(what, True, "they stay in the pool's memory", 0.0)
        return
    kinds = [kind.name for kind in problem.kinds]
    for a, source_gpus in zip(kinds, placement.gpus_of(source), strict=True):
        for b, target_gpus in zip(kinds, placement.gpus_of(target), strict=True):
            if not (source_gpus and target_gpus):
                continue
            measured = transfer_seconds(request.devices[a], request.devices[b], request.profile)
            # Pools send by sockets, which are encrypted.
            ways = {
                "socket" if way == "gloo" else way: seconds for way, seconds in measured.items()
            }
            least = min(ways, key=lambda way: ways[way])
            all_ways = ", ".join(f"{way} {seconds:.3g} s" for way, seconds in ways.items())
            why = (
                f"{size / 1e6:.3g} MB from {a} to {b}: {all_ways} (links were measured with gloo; "
                "sockets are taken to be as fast); shared memory where pools share a node; gloo "
                "itself is not chosen, for it is not encrypted, and delta is not predicted: how "
                "much an update changes is not known before a run"
            )
            others = [seconds for way, seconds in ways.items() if way != least]
            saved = min(others) - ways[least] if others else None
            yield _choice(f"{what}: {least}", True, why, saved)
