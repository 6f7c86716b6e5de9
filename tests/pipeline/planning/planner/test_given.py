"""A plan edited by hand is assessed like one of our own, or refused with the limit it breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pipeline.commands.experiment import compose
from pipeline.plan import Execution, Plan, parse_plan
from pipeline.planning.planner.planner import assess_plan, propose_plan
from pipeline.planning.planner.request import PlanRequest
from pipeline.planning.planner.stage_times import StageTimes
from rlinf.config import RunConfig, validate
from rlinf.errors import PlanError
from stages.flow import flow_of
from tests.pipeline.planning.planner.test_propose import ask

FAILED = {"time": None, "failure": "out of memory"}
GOOD = {"partition": "h100", "gpu_type": "h100", "processes": 1, "gpus": 1}


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return validate(RunConfig, compose(["experiment=arithmetic_grpo", "rollout.batch_size=16"]))


def plan(**train: Any) -> Plan:
    stages = {"train": {**GOOD, **train}}
    return parse_plan({"defaults": {"partition": "h100"}, "stages": stages}, "plan.yaml")


def test_the_planner_agrees_with_its_own_plan(config: RunConfig) -> None:
    request = ask(config)
    best = propose_plan(request)
    again = assess_plan(request, best.plan, "plan.yaml")
    assert again.forecast.iteration_s == pytest.approx(best.forecast.iteration_s)
    assert again.alternatives == ()
    assert again.is_optimal


def test_a_worse_plan_is_told_what_the_best_would_take(config: RunConfig) -> None:
    request = ask(config)
    found = assess_plan(request, plan(), "plan.yaml")
    best = propose_plan(request)
    assert found.forecast.iteration_s > best.forecast.iteration_s
    assert found.alternatives[0].seconds == pytest.approx(best.forecast.iteration_s)
    assert not found.is_optimal
    assert found.plan.stage_plan("train").processes == 1


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"partition": "h10"}, r"train\.partition: 'h10' is not here.*did you mean 'h100'"),
        ({"nodes": 3}, r"train\.nodes: 3 requested of h100, which has 2"),
        ({"processes": 3}, r"train\.processes: 3 a node, nodes of h100 have 2 devices"),
        ({"gpu_type": "a100"}, r"train\.gpu_type: h100 has no 'a100'"),
        ({"partition": "gpu", "gpu_type": None}, r"train\.gpu_type: gpu has a100, h100"),
        ({"time_limit_min": 61}, r"train\.time_limit_min: 61 requested, partition h100 allows 60"),
        ({"mem_mb": 300}, r"train\.mem_mb: 300, but 1 processes needed 400 MiB"),
        (
            {"partition": "gpu", "gpu_type": None, "speed_weights": {"h100": 2, "a100": 1}},
            r"train\.speed_weights: .*several kinds of nodes is not predicted",
        ),
    ],
)
def test_an_impossible_plan_names_its_limit(
    config: RunConfig, train: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=r"plan\.yaml: stages\." + words):
        assess_plan(ask(config), plan(**train), "plan.yaml")


def changed(request: PlanRequest, change: Callable[[Any], Any]) -> PlanRequest:
    """The request with other measurements of training on H100s."""
    own = request.devices["h100"]
    points = tuple(change(p) if p.stage == "train" else p for p in own.profile.points)
    profile = own.profile.model_copy(update={"points": points})
    return replace(request, devices={**request.devices, "h100": replace(own, profile=profile)})


def test_a_job_that_would_be_requeued_for_ever_is_refused(config: RunConfig) -> None:
    def slow(point: Any) -> Any:
        seconds = tuple(100 * s for s in point.time.seconds)
        return point.model_copy(update={"time": type(point.time).of(seconds)})

    with pytest.raises(
        PlanError, match=r"time_limit_min: 10 minutes, but \d\d\.\d are expected on h100"
    ):
        assess_plan(changed(ask(config), slow), plan(time_limit_min=10), "plan.yaml")


def test_what_ran_out_of_memory_when_measured_is_refused(config: RunConfig) -> None:
    def failed(point: Any) -> Any:
        if point.processes < 4:
            return point
        return point.model_copy(update={"time": None, "failure": "out of memory"})

    request = changed(ask(config), failed)
    with pytest.raises(PlanError, match=r"failed on 4 processes of h100 \(out of memory\)"):
        assess_plan(request, plan(nodes=2, processes=2, gpus=2), "plan.yaml")
    assert (
        propose_plan(replace(request, devices={"h100": request.devices["h100"]}))
        .plan.stage_plan("train")
        .nodes
        < 2
    )


@pytest.mark.parametrize("objective", ["gpu-hours", "money", "time", "time-to-end"])
@pytest.mark.parametrize("execution", ["jobs", "pools"])
def test_training_is_never_put_where_it_failed(
    config: RunConfig, objective: str, execution: Execution
) -> None:
    """One device would be the cheapest; it ran out of memory, and two and four did not."""

    def failed(point: Any) -> Any:
        if point.processes > 1:
            return point
        return point.model_copy(update={"time": None, "failure": "needs 90 GiB"})

    request = changed(ask(config, "h100", objective=objective, execution=execution), failed)
    best = propose_plan(request).plan
    assert best.stage_plan("train").nodes * best.stage_plan("train").processes >= 2
    with pytest.raises(PlanError, match=r"needs 90 GiB.*does not use 1; .* 2, 4"):
        assess_plan(request, plan(), "plan.yaml")


@pytest.mark.parametrize(
    ("ran", "failed", "able"),
    [
        ({4, 8}, {1, 2}, {4, 5, 6, 7, 8, 9}),  # devices that each hold more the fewer they are
        ({2, 8}, {4}, {2, 3, 8, 9}),  # four on one node, eight on two
        ({4}, {2}, {4, 5, 6, 7, 8, 9}),
        ({1, 2, 4}, {8}, {1, 2, 3, 4, 5, 6, 7}),
        ({8}, {4}, {8, 9}),
    ],
)
def test_memory_is_a_floor_below_and_between_what_ran(
    config: RunConfig, ran: set[int], failed: set[int], able: set[int]
) -> None:
    request = ask(config)
    own = request.devices["h100"]
    some = next(p for p in own.profile.points if p.stage == "train" and p.samples == 32)
    points = tuple(
        some.model_copy(update={"processes": n} | ({} if n in ran else FAILED))
        for n in sorted(ran | failed)
    )
    profile = own.profile.model_copy(update={"points": points})
    train = flow_of(config).all_stages["train"]
    work = StageTimes(replace(own, profile=profile), "train", train, request.profile)
    assert {n for n in range(1, 10) if not work.refusal_for(n)} == able


def test_other_work_says_of_the_runs_own_what_follows(config: RunConfig) -> None:
    """A smaller batch that fails fails for the run's own too; a larger one does not."""
    request = ask(config)
    own = request.devices["h100"]
    some = next(p for p in own.profile.points if p.stage == "train" and p.samples == 32)
    more = [
        {"samples": 64, "processes": 2} | FAILED,
        {"samples": 16, "processes": 1} | FAILED,
    ]
    points = (some.model_copy(update={"processes": 2}), *(some.model_copy(update=m) for m in more))
    profile = own.profile.model_copy(update={"points": points})
    train = flow_of(config).all_stages["train"]
    work = StageTimes(replace(own, profile=profile), "train", train, request.profile)
    assert [bool(work.refusal_for(n)) for n in (1, 2)] == [True, False]


def test_a_node_too_small_for_the_processes_is_refused(config: RunConfig) -> None:
    request = ask(config)
    own = request.devices["h100"]
    small = replace(own, kind=replace(own.kind, mem_mb_per_node=700))
    devices = {**request.devices, "h100": small}
    with pytest.raises(
        PlanError, match=r"2 a node need 800 MiB.*nodes of h100 have 700; at most 1"
    ):
        assess_plan(replace(request, devices=devices), plan(processes=2, gpus=2), "plan.yaml")
