"""The planner's output: a plan, its forecast, its alternatives and recommendations.

A recommendation is for or against an optional feature (staleness, elastic rollouts, other pools
that help to generate, transports of weights), with the predicted saving and the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.plan import Forecast, Plan, PoolPlan, Recommendation, StageForecast
from pipeline.planning.planner.available_devices import with_counts
from pipeline.planning.planner.pool_problem import transfer_seconds
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import (
    Objective,
    Placement,
    PlacementProblem,
)
from pipeline.planning.planner.request import PlanRequest, parse_counts
from pipeline.planning.planner.search import PlacementSolution, solve
from rlinf.errors import PlanError
from stages.flow import flow_of

CONSIDERED_STALENESS = 1
"""The staleness, in iterations, that is recommended or advised against."""


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


def _advice(
    feature: str, chosen: bool, reason: str, saved_s: float | None = None
) -> Recommendation:
    return Recommendation(feature=feature, chosen=chosen, reason=reason, saved_s=saved_s)


def recommend_staleness(
    request: PlanRequest, problem: PlacementProblem, best: PlacementSolution
) -> Recommendation:
    """Recommend for or against rollouts during training, with the previous iteration's weights."""
    feature = f"rollout.staleness={CONSIDERED_STALENESS}"
    total_s = float(best.prediction.total_s)
    staleness = request.config.rollout.staleness
    if staleness:
        period_s = Predictor(problem).steady_period_s(best.placement, staleness)
        reason = f"the run has rollout.staleness={staleness}; the times above are without it"
        return _advice(f"rollout.staleness={staleness}", True, reason, total_s - period_s)
    saved_s = total_s - Predictor(problem).steady_period_s(best.placement, CONSIDERED_STALENESS)
    if saved_s <= 0.005 * total_s:
        reason = "every job is busy, or its waits would not be shorter with older weights"
        return _advice(feature, False, reason, max(0.0, saved_s))
    reason = (
        f"would save {saved_s / total_s:.0%} of an iteration, but changes what is learnt: samples "
        "come from the policy of the previous iteration; set it in the configuration"
    )
    return _advice(feature, False, reason, saved_s)


def recommend_elastic(
    request: PlanRequest,
    problem: PlacementProblem,
    plan: Plan,
    best: PlacementSolution,
    objective: Objective,
) -> Recommendation:
    """Recommend for or against elastic rollouts: a pool whose generators are separate jobs."""
    feature, elastic_stage = "elastic rollouts (workers)", flow_of(request.config).elastic_stage
    caveat = "; max_workers is not predicted: only a run shows whether more workers are faster"
    if not elastic_stage:
        return _advice(feature, False, "no stage of this flow can have elastic workers")
    if not any(pool.workers for pool in plan.pools):
        generator_pool = next(pool for pool in plan.pools if elastic_stage in pool.stages)
        reason = f"one job for {elastic_stage} is as fast"
        if set(generator_pool.stages) != {elastic_stage}:
            reason = f"{elastic_stage} shares its pool with other stages, which is quicker"
        return _advice(feature, False, reason + caveat, 0.0)
    try:
        without_elastic = solve(replace(problem, mixes=frozenset()), objective)[0]
    except PlanError:
        return _advice(feature, True, "otherwise the stages do not fit on the devices" + caveat)
    saved_s = float(without_elastic.prediction.total_s) - float(best.prediction.total_s)
    reason = f"devices of several kinds, or a part of a node, save {max(0.0, saved_s):.3g} s"
    return _advice(feature, True, reason + caveat, max(0.0, saved_s))


def recommend_helpers(
    problem: PlacementProblem, plan: Plan, best: PlacementSolution
) -> Recommendation:
    """Recommend for or against ``also_generates``: other pools help the elastic pool."""
    feature = "also_generates"
    elastic = next((i for i, pool in enumerate(plan.pools) if pool.workers), None)
    if elastic is None:
        return _advice(feature, False, "there is no elastic pool that could take over samples")
    stages = [stage.name for stage in problem.stages]
    rollout = next(stages.index(s) for s in plan.pools[elastic].stages if s in stages)
    savings = [
        (saved_s, i)
        for i, pool in enumerate(plan.pools)
        if i != elastic and (saved_s := _helper_saving(problem, best, rollout, pool, stages)) > 0
    ]
    if not savings:
        return _advice(feature, False, "no other pool is idle while the rollout runs", 0.0)
    saved_s, index = max(savings)
    reason = (
        f"pool {index + 1} could generate before its first input arrives and save at most "
        f"{saved_s:.3g} s; the cost of handing over the tail is not predicted: try it with "
        f"pools[{index}].also_generates: true"
    )
    return _advice(feature, False, reason, saved_s)


def _helper_saving(
    problem: PlacementProblem,
    best: PlacementSolution,
    rollout: int,
    pool: PoolPlan,
    stages: Sequence[str],
) -> float:
    """Return the maximum seconds saved if a pool generates until its own first stage begins."""
    stage = problem.stages[rollout]
    rates = [
        problem.rate_table(stage, k)[pool.devices.get(kind.name, 0)]
        for k, kind in enumerate(problem.kinds)
    ]
    start_s = best.prediction.start_s
    idle_s = min(float(start_s[stages.index(s)]) for s in pool.stages if s in stages)
    share = min(1.0, idle_s * float(np.sum(rates)))
    return share * float(best.prediction.busy_s[rollout])


def recommend_transports(
    request: PlanRequest, problem: PlacementProblem, plan: Plan, placement: Placement
) -> Iterator[Recommendation]:
    """Recommend the fastest transport for new weights; the reason lists the times of all."""
    if problem.sync is None:
        return
    names = [stage.name for stage in problem.stages]
    if not set(problem.sync) <= set(names):
        return
    source, target = (names.index(name) for name in problem.sync)
    feature = f"weights, {problem.sync[0]} to {problem.sync[1]}"
    size = request.profile.weights_bytes
    if any({source, target} <= set(pool) for pool in placement.pools):
        yield _advice(feature, True, "they stay in the pool's memory", 0.0)
        return
    kinds = [kind.name for kind in problem.kinds]
    for a, source_gpus in zip(kinds, placement.gpus_of(source), strict=True):
        for b, target_gpus in zip(kinds, placement.gpus_of(target), strict=True):
            if not (source_gpus and target_gpus):
                continue
            seconds = transfer_seconds(request.devices[a], request.devices[b], request.profile)
            fastest = min(seconds, key=lambda name: seconds[name])
            times = ", ".join(f"{name} {s:.3g} s" for name, s in seconds.items())
            reason = (
                f"{size / 1e6:.3g} MB from {a} to {b}: {times}; pools on one node use shared "
                "memory; gloo must be set in the plan, because it is not encrypted; delta is not "
                "predicted, because its size is not known before a run"
            )
            slower = [s for name, s in seconds.items() if name != fastest]
            saved_s = min(slower) - seconds[fastest] if slower else None
            yield _advice(f"{feature}: {fastest}", fastest == "file", reason, saved_s)


@dataclass(frozen=True)
class PlanRow:
    """The forecast of one stage of the plan, as a row of a table."""

    stage: str
    place: str
    """Kinds of device on which the stage runs: ``a100+h100``."""
    size: str
    """Nodes x devices per node; or the pool and its used devices: ``pool 1: 4 of 8``."""
    devices: int
    """Number of devices."""
    start_s: float
    """Start of the stage, in seconds after the start of the iteration."""
    seconds: float
    """Predicted duration of the stage."""
    low_s: float
    """10 % quantile of ``seconds``."""
    high_s: float
    """90 % quantile of ``seconds``."""
    breakdown_s: Mapping[str, float]
    """Seconds of each part, such as start, load and work."""
    bound_by: str
    """The longest part, a key of ``breakdown_s``."""


@dataclass(frozen=True)
class AlternativePlan:
    """Another plan, which is worse by the objective (or better, beside a user's plan)."""

    difference: str
    """The stages that this plan places differently, and where; for pools, all of its pools."""
    seconds: float
    """Seconds of an iteration."""
    cost: float
    """Value of the objective, in its unit."""
    reason: str
    """Why this plan is worse, or better."""


@dataclass(frozen=True)
class WhatIf:
    """The best plan of a different cluster."""

    case: str
    """How the cluster differs: ``h100=16``, ``without a100``."""
    seconds: float
    """Seconds of an iteration; infinite if there is no plan."""
    cost: float
    """Value of the objective, in its unit."""


@dataclass(frozen=True)
class PlanProposal:
    """A plan with its forecast, alternatives and notes."""

    plan: Plan
    mode: str
    """How the stages are placed: ``collocated``, ``a job for each stage``."""
    rows: tuple[PlanRow, ...]
    objective: str
    unit: str
    """Unit of the objective: ``s`` or ``price``."""
    is_optimal: bool
    """True if no other plan costs less under these predictions: all of them were compared."""
    alternatives: tuple[AlternativePlan, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""
    """For pools: the placement problem as YAML text, for ``rlinf simulate``; empty for jobs."""

    @property
    def forecast(self) -> Forecast:
        """The forecast of the plan."""
        assert self.plan.forecast is not None
        return self.plan.forecast


def evaluate_what_ifs(
    request: PlanRequest,
    what_ifs: Sequence[str],
    best: Callable[[PlanRequest], tuple[float, float]],
) -> list[WhatIf]:
    """Return the best plans for different clusters: ``what_ifs``, and each kind doubled or removed.

    Kinds that have a ``better_kind`` change together with it.

    Args:
        best: returns the seconds and the cost of the best plan for a request.
    """
    cases = [(text, parse_counts([text])) for text in what_ifs]
    maximal_kinds = {
        name: entry for name, entry in request.devices.items() if entry.better_kind is None
    }
    for name, entry in maximal_kinds.items():
        if len(maximal_kinds) > 1:
            cases.append((f"without {name}", {name: 0}))
        doubled = 2 * entry.kind.nodes * entry.per_node
        cases.append((f"{name}={doubled}", {name: doubled}))
    results: dict[str, WhatIf] = {}
    for text, counts in cases:
        try:
            changed = replace(request, devices=with_counts(request.devices, counts))
            results.setdefault(text, WhatIf(text, *best(changed)))
        except PlanError:
            if text in what_ifs:
                raise
            results.setdefault(text, WhatIf(text, math.inf, math.inf))
    return list(results.values())


def stage_forecasts(rows: Sequence[PlanRow]) -> dict[str, StageForecast]:
    """Return the stage forecasts that a plan's file stores."""
    return {
        row.stage: StageForecast(
            seconds=row.seconds,
            low_s=row.low_s,
            high_s=row.high_s,
            breakdown_s=dict(row.breakdown_s),
            bound_by=row.bound_by,
            start_s=row.start_s,
        )
        for row in rows
    }
