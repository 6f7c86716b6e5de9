"""Plans of execution ``segment``: pools over the measured devices, explained, and as a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.commands.experiment import compose as hydra_compose
from pipeline.commands.experiment import prepare_run
from pipeline.plan import Plan, parse_plan, read_plan
from pipeline.planning.planner.build_problem import build_problem
from pipeline.planning.planner.plan_command import write_proposal
from pipeline.planning.planner.plan_tables import print_proposal
from pipeline.planning.planner.planner import assess_plan, propose_plan
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import read_problem
from pipeline.planning.planner.request import PlanRequest
from pipeline.planning.simulator import simulate
from pipeline.resources import pool_resources
from rlinf.config import RunConfig, validate
from rlinf.errors import PlanError
from stages.flow import flow_of, on_policy
from tests.pipeline.planning.planner.test_propose import ask


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return validate(
        RunConfig, hydra_compose(["experiment=arithmetic_grpo", "rollout.batch_size=16"])
    )


@pytest.fixture(scope="module")
def plan_request(config: RunConfig) -> PlanRequest:
    return ask(config, "a100", "h100", execution="pools")


def test_every_stage_has_a_pool_within_what_there_is(plan_request: PlanRequest) -> None:
    plan = propose_plan(plan_request).plan
    assert plan.execution == "pools"
    assert sorted(s for pool in plan.pools for s in pool.stages) == sorted(
        on_policy.direct_dependencies()
    )
    for kind, own in plan_request.devices.items():
        assert sum(pool.devices.get(kind, 0) for pool in plan.pools) <= own.count
    assert plan_request.config.rollout.batch_size % plan.num_chunks == 0


@pytest.mark.parametrize("pins", [{}, {"train": frozenset({"a100"})}])
def test_the_driver_takes_the_plan_for_unlike_partitions(
    plan_request: PlanRequest, pins: dict[str, frozenset[str]]
) -> None:
    """No job has devices of two partitions; generators are jobs of their own, of either kind."""
    plan = propose_plan(replace(plan_request, pins=pins)).plan
    assert {kind for pool in plan.pools for kind in pool.devices} == set(plan_request.devices)
    for number, pool in enumerate(plan.pools):
        assert len(pool.devices) == 1 or (pool.stages, pool.workers) == (
            ("rollout",),
            sum(pool.devices.values()),
        )
        jobs = [pool_resources(plan, number, slot) for slot in range(pool.workers or 1)]
        assert all(len(parts) == 1 for parts in jobs)
        asks = Counter[str]()
        for (needs,) in jobs:
            asks[str(needs.partition)] += needs.nodes * needs.processes
        assert asks == pool.devices


def test_pools_beat_every_plan_on_one_kind_alone(plan_request: PlanRequest) -> None:
    whole = propose_plan(plan_request).forecast.iteration_s
    for kind, own in plan_request.devices.items():
        assert (
            whole <= propose_plan(replace(plan_request, devices={kind: own})).forecast.iteration_s
        )


def test_what_is_predicted_follows_from_the_plan(plan_request: PlanRequest) -> None:
    from pipeline.planning.planner.problem import Placement

    proposal = propose_plan(plan_request)
    problem, _ = build_problem(plan_request)
    names = [stage.name for stage in problem.stages]
    pools = proposal.plan.pools
    placement = Placement(
        tuple(tuple(names.index(stage) for stage in pool.stages) for pool in pools),
        tuple(tuple(pool.devices.get(kind.name, 0) for kind in problem.kinds) for pool in pools),
        proposal.plan.num_chunks,
    )
    total = float(Predictor(problem).predict(placement).total_s)
    forecast = proposal.forecast
    assert forecast.iteration_s == pytest.approx(total)
    assert forecast.low_s < forecast.iteration_s < forecast.high_s
    ends = [entry.start_s + entry.seconds for entry in forecast.stages.values()]
    assert max(ends) == pytest.approx(total)


def test_pins_hold_for_pools(config: RunConfig) -> None:
    request = ask(config, "a100", "h100", execution="pools", pins=("train=a100", "rollout=h100"))
    for pool in propose_plan(request).plan.pools:
        assert "train" not in pool.stages or set(pool.devices) == {"a100"}
        assert "rollout" not in pool.stages or set(pool.devices) == {"h100"}


def test_it_is_explained_and_kept_as_a_file(
    plan_request: PlanRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proposal = propose_plan(plan_request, ["h100=8"])
    print_proposal(proposal)
    printed = " ".join(capsys.readouterr().out.split())
    assert "what matters most" in printed
    assert "h100=8" in printed
    assert len(proposal.alternatives) == 4
    words = [word for other in proposal.alternatives for word in other.difference.split()]
    assert max(map(len, words)) < 16, "a table of 80 columns wraps words instead of cutting them"
    costs = [proposal.forecast.cost, *(other.cost for other in proposal.alternatives)]
    assert costs == sorted(costs)
    page = write_proposal(proposal, tmp_path / "plan.yaml", "arithmetic")
    again = parse_plan(yaml.safe_load((tmp_path / "plan.yaml").read_text()), "plan.yaml")
    assert again == proposal.plan
    assert "pool 1" in page.read_text()


def test_the_simulator_takes_the_plan_as_it_is(plan_request: PlanRequest, tmp_path: Path) -> None:
    proposal = propose_plan(plan_request)
    write_proposal(proposal, tmp_path / "plan.yaml", "arithmetic")
    problem, placement = read_problem(tmp_path / "plan.problem.yaml")
    assert placement is not None
    predicted = float(Predictor(problem).predict(placement).total_s)
    assert predicted == pytest.approx(proposal.forecast.iteration_s)
    assert simulate(problem, placement).mean_s == pytest.approx(predicted, rel=0.05)


def test_a_plan_that_is_given_is_predicted_as_the_one_that_was_made(
    plan_request: PlanRequest, tmp_path: Path
) -> None:
    proposal = propose_plan(plan_request)
    write_proposal(proposal, tmp_path / "plan.yaml", "arithmetic")
    plan = read_plan(tmp_path / "plan.yaml", flow_of(plan_request.config))
    again = assess_plan(plan_request, plan, "plan.yaml")
    assert again.forecast.stages == proposal.forecast.stages
    assert again.forecast.iteration_s == proposal.forecast.iteration_s
    assert again.alternatives == ()


def test_a_slower_plan_names_the_best_one(plan_request: PlanRequest) -> None:
    slow = {"stages": list(on_policy.direct_dependencies()), "devices": {"a100": 1}}
    found = assess_plan(plan_request, pooled(slow), "plan.yaml")
    best = propose_plan(plan_request).forecast.iteration_s
    assert found.forecast.iteration_s > best
    assert [other.seconds for other in found.alternatives] == [pytest.approx(best)]
    assert not found.is_optimal


@pytest.mark.parametrize(
    ("pools", "why"),
    [
        (
            [{"devices": {"a100": 2}, "stage_ranks": {"reward": [1]}}],
            r"pools\[0\].stage_ranks.reward: .*not predicted",
        ),
        ([{"devices": {"a100": 100}}], "100 a100 requested, there are"),
        ([{"devices": {"a1000": 1}}], "no kind 'a1000'; did you mean 'a100'"),
        ([{"devices": {"a100": 1, "h100": 1}}], "several kinds at once"),
    ],
)
def test_what_is_not_there_or_not_predicted_is_refused(
    plan_request: PlanRequest, pools: list[dict[str, Any]], why: str
) -> None:
    every = list(on_policy.direct_dependencies())
    with pytest.raises(PlanError, match=why):
        assess_plan(
            plan_request, pooled(*({"stages": every, **pool} for pool in pools)), "plan.yaml"
        )


def pooled(*pools: dict[str, Any], chunks: int = 1) -> Plan:
    return parse_plan({"pools": list(pools), "num_chunks": chunks}, "plan.yaml")


def test_no_driver_takes_pools_for_jobs(
    plan_request: PlanRequest, compose: Callable[..., dict[str, Any]]
) -> None:
    values = compose()
    values["plan"] = propose_plan(plan_request).plan.to_dict()
    with pytest.raises(PlanError, match="pools need processes of their own"):
        prepare_run(values)
