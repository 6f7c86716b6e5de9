"""The problem of execution ``segment`` says what the profile says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.commands.experiment import compose
from pipeline.planning.planner.available_devices import select_devices
from pipeline.planning.planner.build_problem import build_problem
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import Placement, TimeToFinish, dump_problem, read_problem
from pipeline.planning.planner.request import PlanRequest
from pipeline.planning.planner.search import solve
from pipeline.planning.planner.uncertainty import forecast_placement
from pipeline.planning.profile.schema import QueueWait
from rlinf.config import RunConfig, validate
from rlinf.errors import PlanError
from slurm.site import SiteConfig
from stages.flow import on_policy
from tests.pipeline.planning.planner import clusters
from tests.pipeline.planning.planner.test_propose import ask


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return validate(RunConfig, compose(["experiment=arithmetic_grpo", "rollout.batch_size=16"]))


@pytest.fixture(scope="module")
def plan_request(config: RunConfig) -> PlanRequest:
    profile = clusters.profile(config, "a100", "h100")
    found, _ = select_devices(clusters.inventory(4), SiteConfig(), profile, ["a100", "h100"])
    return PlanRequest(config, profile, found, execution="pools")


def test_rates_are_those_measured_with_everything_loaded(plan_request: PlanRequest) -> None:
    problem, _ = build_problem(plan_request)
    assert [stage.name for stage in problem.stages] == list(on_policy.direct_dependencies())
    for stage in problem.stages:
        for kind in problem.kinds:
            for n in (1, 2, 4):
                true = clusters.work(stage.name, kind.name, n)
                assert 1 / stage.rates[kind.name][n] == pytest.approx(true, rel=0.01)


def test_beyond_what_was_measured_tables_say_so_and_their_spread_grows(
    plan_request: PlanRequest,
) -> None:
    _, tables = build_problem(plan_request)
    train = tables["train"]["h100"]
    assert list(train.extrapolated[[4, 8]]) == [False, True]
    assert train.spread[8] > train.spread[4]


def test_parts_made_one_after_another_take_what_does_not_shrink_again(
    plan_request: PlanRequest,
) -> None:
    """Where the rollout shares its pool; where it has one to itself all is decoded at once."""
    problem, _ = build_problem(plan_request)
    times = [clusters.work("rollout", kind, 1) for kind in ("a100", "h100")]
    rollout, train = problem.stages[0], len(problem.stages) - 1
    again = np.mean([clusters.FIXED / seconds for seconds in times])
    assert rollout.again == pytest.approx(again, rel=0.02)
    rest = tuple(range(train))
    one = Predictor(problem).predict(Placement((rest, (train,)), ((1, 0), (1, 0)), 1))
    four = Predictor(problem).predict(Placement((rest, (train,)), ((1, 0), (1, 0)), 4))
    longer = float(four.finish_s[0] - one.finish_s[0])
    assert longer == pytest.approx(3 * rollout.again * times[0], rel=0.02)
    apart = Placement(((0,), rest[1:], (train,)), ((1, 0), (1, 0), (1, 0)), 4)
    assert float(Predictor(problem).predict(apart).finish_s[0]) == pytest.approx(times[0], rel=0.01)


def test_what_one_process_does_is_not_quicker_on_two_kinds(plan_request: PlanRequest) -> None:
    problem, tables = build_problem(plan_request)
    assert np.all(tables["reward"]["h100"].used[1:] == 1)
    predictor, reward = Predictor(problem), list(on_policy.direct_dependencies()).index("reward")
    seconds = [
        float(predictor.duration(reward, np.array([[a100], [h100]]))[0])
        for a100, h100 in ((1, 1), (0, 1), (4, 4))
    ]
    assert seconds[0] == seconds[1] == seconds[2]


def test_more_devices_than_pieces_of_work_stand_idle(plan_request: PlanRequest) -> None:
    """The rollout has 16 prompts; a seventeenth process would have nothing to do."""
    own = plan_request.devices["h100"]
    many = replace(own, kind=replace(own.kind, nodes=20))
    rates = build_problem(replace(plan_request, devices={"h100": many}))[1]["rollout"]["h100"].rates
    assert rates[16] == rates[40] > rates[15]


def test_no_more_processes_than_failed_are_planned_with(plan_request: PlanRequest) -> None:
    own = plan_request.devices["a100"].profile
    failed = own.points[0].model_copy(
        update={"stage": "train", "processes": 6, "time": None, "failure": "out of memory"}
    )
    profiled = own.model_copy(update={"points": (*own.points, failed)})
    changed = {
        **plan_request.devices,
        "a100": replace(plan_request.devices["a100"], profile=profiled),
    }
    _, tables = build_problem(replace(plan_request, devices=changed))
    assert list(np.flatnonzero(tables["train"]["a100"].rates)) == [1, 2, 3, 4, 5]
    assert tables["train"]["h100"].used[8] == 8


def test_a_few_measurements_count_for_what_they_are(plan_request: PlanRequest) -> None:
    """Too few for a fit: other numbers of devices are not guessed."""
    own = plan_request.devices["h100"]
    few = [p for p in own.profile.points if p.samples == 32 and p.processes in (1, 4)]
    thin = replace(own, profile=own.profile.model_copy(update={"points": tuple(few)}))
    rates = build_problem(replace(plan_request, devices={"h100": thin}))[1]["train"]["h100"].rates
    assert list(np.flatnonzero(rates)) == [1, 4]
    assert rates[4] == pytest.approx(1 / clusters.work("train", "h100", 4), rel=0.01)


def test_what_is_expected_of_the_best_plan_holds_its_prediction(plan_request: PlanRequest) -> None:
    problem, tables = build_problem(plan_request)
    best = solve(problem)[0]
    expected = forecast_placement(problem, best.placement, tables)
    assert expected.nominal_s == pytest.approx(best.prediction.total_s)
    assert expected.q10_s <= expected.nominal_s <= expected.q90_s
    assert expected.sensitivities[0][1] > 0


def test_nodes_of_two_partitions_are_counted_once(config: RunConfig) -> None:
    whole = build_problem(ask(config, execution="pools"))[0]
    assert {kind.name: kind.gpus for kind in whole.kinds} == {"a100": 4, "cpu": 8, "h100": 4}


def test_beside_gpus_a_partition_without_any_is_for_what_needs_none(config: RunConfig) -> None:
    request = ask(config, "a100", "h100", "cpu")
    problem, _ = build_problem(replace(request, execution="pools"))
    rates = {stage.name: set(stage.rates) for stage in problem.stages}
    assert rates["rollout"] == {"a100", "h100"}
    assert rates["reward"] == {"a100", "h100", "cpu"}
    assert problem.mixes == {"rollout"}  # of both kinds of GPUs, though there is a third kind
    alone, _ = build_problem(replace(ask(config, "cpu"), execution="pools"))
    assert set(alone.stages[0].rates) == {"cpu"}


def test_a_stage_that_ran_nowhere_is_named(plan_request: PlanRequest) -> None:
    broken = {
        name: replace(own, profile=own.profile.model_copy(update={"points": points}))
        for name, own in plan_request.devices.items()
        for points in [tuple(p for p in own.profile.points if p.stage != "train")]
    }
    with pytest.raises(PlanError, match="'train' fits nowhere: a100: no measurement"):
        build_problem(replace(plan_request, devices=broken))


def test_pools_whose_jobs_end_before_a_stage_does_are_not_planned(
    plan_request: PlanRequest,
) -> None:
    def limited(**minutes: int) -> PlanRequest:
        devices = {
            name: replace(own, time_limit_min=minutes.get(name, 60))
            for name, own in plan_request.devices.items()
        }
        return replace(plan_request, devices=devices)

    problem, _ = build_problem(limited(h100=0))
    assert all(set(stage.rates) == {"a100"} for stage in problem.stages)
    # Start and imports take 4 s, rollout 40 s on one device of this kind.
    problem, _ = build_problem(limited(a100=1))
    assert np.count_nonzero(problem.stages[0].rates["a100"]) == 8
    slow = {
        name: replace(
            own,
            profile=own.profile.model_copy(
                update={
                    "points": tuple(
                        p.model_copy(
                            update={"time": type(p.time).of([9 * s for s in p.time.seconds])}
                        )
                        for p in own.profile.points
                        if p.time is not None
                    )
                }
            ),
        )
        for name, own in plan_request.devices.items()
    }
    problem, _ = build_problem(
        replace(limited(a100=1), devices={**slow, "a100": replace(slow["a100"], time_limit_min=1)})
    )
    rates = problem.stages[0].rates["a100"]
    assert not rates[:7].any()
    assert rates[8] > 0
    with pytest.raises(
        PlanError, match=r"'rollout' fits nowhere: a100: start and work take .* jobs of 0"
    ):
        build_problem(limited(a100=0, h100=0))


def test_a_pool_waits_as_long_as_jobs_of_its_nodes_do(
    plan_request: PlanRequest, tmp_path: Path
) -> None:
    own = plan_request.devices["h100"]
    waits = (QueueWait(nodes=1, expected_s=10.0), QueueWait(nodes=2, expected_s=36000.0))
    queued = replace(own, profile=own.profile.model_copy(update={"waits": waits}))
    request = replace(
        plan_request,
        devices={**plan_request.devices, "h100": queued},
        objective="time-to-end",
        execution="pools",
    )
    problem, _ = build_problem(request)
    h100 = problem.kinds[1]
    assert h100.queue_wait_s(np.array([0, 1, 2, 3, 8])).tolist() == [0, 10, 10, 36000, 36000]
    gpus = np.array([[0, 0], [2, 4]])
    costs = TimeToFinish(1).cost(problem, np.ones(2), np.ones((4, 2)), [gpus])
    assert costs.tolist() == [11, 36001]
    best = solve(problem, request.get_objective())[0].placement
    assert all(pool[1] <= 2 for pool in best.gpus), "no pool waits ten hours for a second node"
    (tmp_path / "problem.yaml").write_text(dump_problem(problem))
    assert read_problem(tmp_path / "problem.yaml")[0].kinds == problem.kinds
