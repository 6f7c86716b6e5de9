"""Partitions over the same nodes: the better one is used, and no device is planned twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from pipeline.commands.experiment import compose
from pipeline.plan import Plan, PoolPlan
from pipeline.planning.planner.available_devices import (
    select_devices,
    shared_capacities,
    with_counts,
)
from pipeline.planning.planner.build_problem import build_problem
from pipeline.planning.planner.planner import assess_plan, propose_plan
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import Placement
from pipeline.planning.planner.request import PlanRequest, parse_pins
from pipeline.planning.profile.schema import Measurement, Profile
from rlinf.config import RunConfig, validate
from rlinf.errors import PlanError
from slurm.inventory import Inventory, PartitionInventory
from slurm.site import SiteConfig
from stages.flow import on_policy
from tests.pipeline.planning.planner import clusters
from tests.pipeline.planning.planner.test_propose import side_by_side

Execution = Literal["jobs", "pools"]
EXECUTIONS = pytest.mark.parametrize("execution", ["jobs", "pools"])


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return validate(RunConfig, compose(["experiment=arithmetic_grpo", "rollout.batch_size=16"]))


def inventory(*partitions: PartitionInventory) -> Inventory:
    return Inventory(
        schema_version=1,
        created_at=clusters.TAKEN,
        slurm_version="25.05.1",
        partitions={partition.name: partition for partition in partitions},
    )


def partition(
    name: str, nodes: int, limit: int, *, first: int = 1, preempted: bool = False
) -> PartitionInventory:
    """Of nodes of A100s, counted from the first."""
    return PartitionInventory(
        name=name,
        groups=(clusters.group("a100", nodes, first=first),),
        time_limit_min=limit,
        preempt_mode="REQUEUE" if preempted else "OFF",
    )


def longer(profile: Profile, factor: float) -> Profile:
    """The same with stages that take so many times as long."""
    (name, own), *_ = profile.kinds.items()
    points = tuple(
        p.model_copy(update={"time": Measurement.of([factor * s for s in p.time.seconds])})
        for p in own.points
        if p.time is not None
    )
    return profile.model_copy(update={"kinds": {name: own.model_copy(update={"points": points})}})


def ask(
    config: RunConfig,
    execution: Execution,
    *partitions: PartitionInventory,
    pins: tuple[str, ...] = (),
    factor: float = 1.0,
) -> PlanRequest:
    profile = longer(clusters.profile(config, "a100"), factor)
    found, notes = select_devices(inventory(*partitions), SiteConfig(), profile)
    known = parse_pins(pins, found, on_policy)
    return PlanRequest(config, profile, found, execution=execution, pins=known, notes=notes)


@EXECUTIONS
@pytest.mark.parametrize("long", ["gpu", "a_main"])
def test_a_partition_for_short_jobs_does_not_hide_the_long_one(
    config: RunConfig, execution: Execution, long: str
) -> None:
    both = partition("debug", 2, 1), partition(long, 2, 1440)
    rows = propose_plan(ask(config, execution, *both, factor=40)).rows
    assert {row.place for row in rows} == {long}


@EXECUTIONS
def test_jobs_too_long_for_the_partition_that_is_not_preempted_go_to_the_other(
    config: RunConfig, execution: Execution
) -> None:
    both = partition("debug", 2, 1), partition("spare", 2, 1440, preempted=True)
    request = ask(config, execution, *both, factor=40)
    assert request.devices["spare"].better_kind == "debug"
    places = {row.stage: row.place for row in propose_plan(request).rows}
    assert places["rollout"] == places["train"] == "spare"
    short = ask(config, execution, partition("debug", 2, 60), both[1])
    assert {row.place for row in propose_plan(short).rows} == {"debug"}


def test_nodes_of_a_part_of_a_partition_count_once(config: RunConfig) -> None:
    request = ask(config, "pools", partition("debug", 2, 30), partition("batch", 4, 1440))
    assert {name: own.better_kind for name, own in request.devices.items()} == {
        "batch": None,
        "debug": "batch",
    }
    pools = propose_plan(request).plan.pools
    assert sum(sum(pool.devices.values()) for pool in pools) <= 8
    assert {kind for pool in pools for kind in pool.devices} == {"batch"}


def test_partitions_that_share_some_nodes_are_no_more_than_there_are(config: RunConfig) -> None:
    """Nodes 1 and 2, and 2 and 3: three of two GPUs."""
    request = ask(config, "pools", partition("a", 2, 60), partition("b", 2, 60, first=2))
    problem, _ = build_problem(request)
    assert problem.shared == ((("a", "b"), 6),)
    proposal = propose_plan(request)
    held = {"a": 0, "b": 0}
    for pool in proposal.plan.pools:
        for kind, count in pool.devices.items():
            held[kind] += count
    assert sum(held.values()) <= 6
    stages = tuple(on_policy.direct_dependencies())
    pools = (
        PoolPlan(stages=stages[:1], devices={"a": 4}),
        PoolPlan(stages=stages[1:], devices={"b": 4}),
    )
    plan = proposal.plan.model_copy(update={"pools": pools})
    with pytest.raises(PlanError, match="8 a and b requested, there are 6 together"):
        assess_plan(request, Plan.model_validate(plan.model_dump()), "plan.yaml")


@pytest.mark.parametrize(("count", "waits"), [(4, True), (2, False)])
def test_jobs_on_shared_nodes_wait_for_each_other(
    config: RunConfig, count: int, waits: bool
) -> None:
    both = partition("a", 2, 60), partition("b", 2, 60, first=2)
    problem = side_by_side(ask(config, "jobs", *both), "inference", "train")
    jobs = Placement(((0,), (1,)), ((count, 0), (0, count)), 1)
    assert bool(Predictor(problem).predict(jobs).start_s[1]) == waits


@EXECUTIONS
@pytest.mark.parametrize("name", ["debug", "gpu"])
def test_a_pin_chooses_among_the_names_of_the_same_nodes(
    config: RunConfig, execution: Execution, name: str
) -> None:
    both = partition("debug", 2, 60), partition("gpu", 2, 1440)
    proposal = propose_plan(ask(config, execution, *both, pins=(f"train={name}",)))
    assert {row.stage: row.place for row in proposal.rows}["train"] == name
    assert sum(sum(pool.devices.values()) for pool in proposal.plan.pools) <= 4


def test_a_plan_that_names_the_worse_partition_is_assessed(config: RunConfig) -> None:
    both = partition("debug", 2, 60), partition("gpu", 2, 1440)
    pinned = propose_plan(ask(config, "pools", *both, pins=("train=debug", "rollout=debug")))
    assert (
        assess_plan(ask(config, "pools", *both), pinned.plan, "plan.yaml").forecast.iteration_s > 0
    )


def test_other_numbers_of_devices_hold_for_every_name_of_the_nodes(config: RunConfig) -> None:
    request = ask(config, "pools", partition("debug", 1, 30), partition("batch", 2, 1440))
    more = with_counts(request.devices, {"batch": 8})
    assert (more["batch"].count, more["debug"].count) == (8, 2)
    assert dict(shared_capacities(more)) == {("batch", "debug"): 8}
    assert set(with_counts(request.devices, {"batch": 0})) == set()


@EXECUTIONS
def test_a_plan_asks_for_the_size_of_gpu_it_counted_on(
    config: RunConfig, execution: Execution
) -> None:
    large, small = (
        clusters.group("a100", count, first=first).model_copy(
            update={"features": ("a100", f"{size}gb"), "gpu_model": f"a100-{size}gb"}
        )
        for count, first, size in ((3, 1, 80), (2, 4, 40))
    )
    request = ask(
        config, execution, PartitionInventory(name="gpu", groups=(large, small), time_limit_min=60)
    )
    assert request.devices["gpu"].count == 6
    proposal = propose_plan(request)
    assert {proposal.plan.stages[stage].constraint for stage in ("rollout", "train")} == {"80gb"}
    assert any("left out are 2 of 2 x a100, a100, 40gb" in note for note in proposal.notes)


def test_what_shares_nodes_is_judged_where_all_of_it_is_held(config: RunConfig) -> None:
    problem, _ = build_problem(
        ask(config, "pools", partition("a", 2, 60), partition("b", 2, 60, first=2))
    )
    held = np.array([[4, 4, 2], [2, 4, 4]])
    free = replace(problem, mixes=None)
    every = tuple(range(len(problem.stages)))
    assert free.is_allowed((every,), [held]).tolist() == [True, False, True]
