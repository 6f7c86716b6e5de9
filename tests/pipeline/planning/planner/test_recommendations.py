"""A plan of pools says of each thing it could use what that brings, or why it is not chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.commands.experiment import compose as hydra_compose
from pipeline.plan import Plan, Recommendation, parse_plan
from pipeline.planning.planner.plan_command import (
    assess_plan,
    print_proposal,
    propose_plan,
    render_page,
)
from pipeline.planning.planner.pool_problem import build_pool_problem, measured_links
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.request import PlanRequest
from pipeline.planning.planner.search import solve
from pipeline.planning.profile.schema import MeasuredLink
from rlinf.config import RunConfig, validate
from tests.pipeline.planning.planner.problems import random_placement, random_problem
from tests.pipeline.planning.planner.test_propose import ask

WHOLE = ["rollout", "reward", "inference", "train"]


@pytest.fixture(scope="module")
def plan_request() -> PlanRequest:
    values = hydra_compose(["experiment=arithmetic_grpo", "rollout.batch_size=16"])
    config = validate(RunConfig, values)
    return ask(config, "a100", "h100", execution="pools")


def pooled(*pools: dict[str, object]) -> Plan:
    return parse_plan({"pools": list(pools)}, "plan.yaml")


def recommend(request: PlanRequest, plan: Plan) -> dict[str, Recommendation]:
    return {
        choice.feature.partition(":")[0]: choice
        for choice in assess_plan(request, plan, "plan.yaml").forecast.recommendations
    }


def test_staleness_is_offered_with_its_gain_and_never_taken(plan_request: PlanRequest) -> None:
    apart = (
        {"stages": WHOLE[:1], "devices": {"h100": 2}},
        {"stages": WHOLE[1:], "devices": {"a100": 2}},
    )
    found = assess_plan(plan_request, pooled(*apart), "plan.yaml").forecast
    stale = next(c for c in found.recommendations if c.feature == "rollout.staleness=1")
    rows = found.stages
    learns = sum(rows[stage].breakdown_s["work"] for stage in WHOLE[1:])
    assert not stale.chosen
    busiest = max(rows["rollout"].breakdown_s["work"], learns)
    assert stale.saved_s == pytest.approx(found.iteration_s - max(busiest, found.iteration_s / 2))
    assert "changes what is learnt" in stale.reason
    # On the same devices nothing can run beside anything.
    same = recommend(plan_request, pooled({"stages": WHOLE, "devices": {"h100": 4}}))[
        "rollout.staleness=1"
    ]
    assert same.saved_s == pytest.approx(0.0, abs=1e-6)
    assert "every job is busy" in same.reason


@pytest.mark.parametrize("stale", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_the_time_with_older_weights_is_what_many_iterations_take(seed: int, stale: int) -> None:
    """Stage by stage; a pool begins with the next iteration when it is through with the last."""
    problem = random_problem(seed, (6, 6), 4, smooth=True)
    problem = replace(
        problem,
        stages=[replace(s, lead={}, again=0.0, chunk_s=0.0, switch_s={}) for s in problem.stages],
    )
    placement = replace(random_placement(problem, seed), num_chunks=1)
    predicted = Predictor(problem).predict(placement)
    if not np.isfinite(predicted.total_s):
        return
    index = {stage.name: s for s, stage in enumerate(problem.stages)}
    free, trained = [0.0] * len(placement.pools), list[float]()
    for i in range(200):
        done: list[float] = []
        for s, stage in enumerate(problem.stages):
            pool = next(p for p, own in enumerate(placement.pools) if s in own)
            start = max([free[pool], *(done[index[name]] for name in stage.after)])
            if s == 0 and i > stale:
                start = max(start, trained[i - 1 - stale])
            done.append(start + float(predicted.busy_s[s]))
            free[pool] = done[s]
        trained.append(done[3] + float(predicted.sync_s))
    took = (trained[-1] - trained[99]) / 100
    assert Predictor(problem).steady_period_s(placement, stale) == pytest.approx(took, rel=1e-9)


def test_elastic_rollouts_are_chosen_where_they_are_quicker(plan_request: PlanRequest) -> None:
    proposal = propose_plan(plan_request)
    found = {c.feature: c for c in proposal.forecast.recommendations}["elastic rollouts (workers)"]
    elastic = any(pool.workers for pool in proposal.plan.pools)
    assert found.chosen == elastic
    problem, _ = build_pool_problem(plan_request)
    jobs = solve(replace(problem, mixes=frozenset()), plan_request.get_objective())[0]
    if elastic:
        saved = float(jobs.prediction.total_s) - proposal.forecast.iteration_s
        assert found.saved_s == pytest.approx(max(0.0, saved))
    one = recommend(plan_request, pooled({"stages": WHOLE, "devices": {"h100": 4}}))
    assert "shares its pool" in one["elastic rollouts (workers)"].reason


def test_helpers_need_an_elastic_pool_and_time(plan_request: PlanRequest) -> None:
    one = recommend(plan_request, pooled({"stages": WHOLE, "devices": {"h100": 4}}))[
        "also_generates"
    ]
    assert not one.chosen
    assert "no elastic pool" in one.reason
    pools = (
        {"stages": WHOLE[:1], "devices": {"a100": 3}, "workers": 3},
        {"stages": WHOLE[1:], "devices": {"h100": 4}},
    )
    found = recommend(plan_request, pooled(*pools))["also_generates"]
    assert found.saved_s is not None
    assert found.saved_s > 0
    assert "at most" in found.reason


def test_links_are_measured_between_kinds_which_may_share_a_partition(
    plan_request: PlanRequest,
) -> None:
    a, b = (
        replace(own, kind=replace(own.kind, name=f"gpu:{name}", partition="gpu"))
        for name, own in plan_request.devices.items()
        if name in ("a100", "h100")
    )
    link = MeasuredLink(
        backend="gloo",
        between=(a.kind.name, b.kind.name),
        latency_s=0.001,
        bandwidth_bytes_per_s=1e9,
    )
    profile = plan_request.profile.model_copy(update={"links": (link,)})
    assert measured_links(profile, a, b) == measured_links(profile, b, a) == [link]
    assert measured_links(profile, a, a) == []


def test_the_way_of_the_weights_is_the_quickest_that_was_measured(
    plan_request: PlanRequest,
) -> None:
    apart = (
        {"stages": WHOLE[:1], "devices": {"h100": 2}},
        {"stages": WHOLE[1:], "devices": {"a100": 2}},
    )
    link = MeasuredLink(
        backend="gloo",
        between=("a100", "h100"),
        latency_s=0.001,
        bandwidth_bytes_per_s=1e9,
    )
    slow = link.model_copy(update={"bandwidth_bytes_per_s": 1e5})
    for given, way in ((link, "gloo"), (slow, "file")):
        profile = plan_request.profile.model_copy(update={"links": (given,)})
        kinds = {
            name: kind.model_copy(
                update={
                    "overheads": (
                        *kind.overheads,
                        *(
                            kind.overheads[0].model_copy(update={"name": part})
                            for part in ("publish", "weight_load")
                        ),
                    )
                }
            )
            for name, kind in profile.kinds.items()
        }
        devices = {
            name: replace(own, profile=kinds[name]) for name, own in plan_request.devices.items()
        }
        request = replace(plan_request, profile=profile, devices=devices)
        choices = assess_plan(request, pooled(*apart), "plan.yaml").forecast.recommendations
        (weights,) = [c for c in choices if c.feature.startswith("weights")]
        assert weights.feature.endswith(way)
        assert "not encrypted" in weights.reason
    here = recommend(plan_request, pooled({"stages": WHOLE, "devices": {"h100": 4}}))
    assert here["weights, train to rollout"].reason == "they stay in the pool's memory"


def test_choices_are_printed_drawn_and_kept(
    plan_request: PlanRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    proposal = propose_plan(plan_request)
    print_proposal(proposal)
    printed = capsys.readouterr().out
    shown = render_page(proposal, "arithmetic")
    for choice in proposal.forecast.recommendations:
        assert choice.feature.split(":")[0].split(",")[0] in printed
        assert choice.feature in shown
    assert parse_plan(proposal.plan.to_dict(), "plan.yaml") == proposal.plan
