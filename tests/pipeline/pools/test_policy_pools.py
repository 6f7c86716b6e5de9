"""What is ordered of a rollout whose policy is apart, and what is said when a side is gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from pipeline.graph import StageNode
from stages.worker.messages import (
    AttemptEnded,
    FetchWeights,
    ServePolicy,
    StageOrder,
    WorkItemEnded,
)
from tests.pipeline.pools.helpers import Pools, checked

PLAN = {
    "stages": {"rollout": {"processes": 3}, "rollout.generate": {"processes": 2}},
    "pools": [
        {"stages": ["rollout"], "devices": {"local": 3}},
        {"stages": ["rollout.generate"], "devices": {"local": 2}},
        {"stages": ["reward", "inference", "train"], "devices": {"local": 1}},
    ],
}
ROLLOUT = StageNode("rollout", 2)


@pytest.fixture
def driven(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> Pools:
    return Pools(*checked(compose("cluster=local", experiment="cartpole_ppo"), PLAN), tmp_path)


def test_simulators_are_ordered_once_their_policy_is_there_and_after_it(driven: Pools) -> None:
    driven.lease(0)
    driven.add(ROLLOUT)
    assert driven.dispatch() == [], "there is nobody to ask"
    driven.lease(1)
    found = driven.dispatch()
    policies = ("pool-1-0-r0", "pool-1-0-r1")
    assert [(type(order), worker) for worker, order in found] == [
        *((ServePolicy, worker) for worker in policies),
        *((StageOrder, f"pool-0-0-r{rank}") for rank in range(3)),
    ]
    answers, (order, *_) = [order for _, order in found[:2]], [order for _, order in found[2:]]
    assert order.policy_workers == policies
    assert [answer.clients for answer in answers] == [
        ("pool-0-0-r0", "pool-0-0-r2"),
        ("pool-0-0-r1",),
    ]
    assert all(answer.stage == order and not answer.has_live_weights for answer in answers)
    assert order.inputs["weights"] == ("it/0001/sync", False), "they load none"


def test_weights_that_are_being_made_are_sent_to_the_policy_alone(driven: Pools) -> None:
    for pool in range(3):
        driven.lease(pool)
    driven.add(StageNode("sync", 1), ROLLOUT)
    found = driven.dispatch()
    (answer, *_) = [order for _, order in found if isinstance(order, ServePolicy)]
    assert answer.has_live_weights
    receivers = {worker for worker, order in found if isinstance(order, FetchWeights)}
    assert receivers == {"pool-1-0-r0", "pool-1-0-r1"}


def test_evaluations_where_the_simulators_are_ask_too(driven: Pools) -> None:
    driven.lease(0)
    driven.lease(1)
    driven.add(StageNode("evaluate", 2))
    orders = [order for _, order in driven.dispatch()]
    assert {o.stage.stage for o in orders if isinstance(o, ServePolicy)} == {"evaluate"}


@pytest.mark.parametrize("simulators", [[1], [0, 1]])
def test_evaluations_in_a_pool_of_their_own_have_its_processes(
    compose: Callable[..., dict[str, Any]], tmp_path: Path, simulators: list[int]
) -> None:
    stages = ["rollout", "rollout.generate", "reward", "inference", "train"]
    size = len(simulators) + 1
    ranks = {"rollout": simulators, "rollout.generate": [min({*range(size)} - {*simulators})]}
    plan = {
        "stages": {stage: {"processes": size} for stage in ("rollout", "inference", "train")},
        "pools": [
            {"stages": stages, "devices": {"local": size}, "stage_ranks": ranks},
            {"stages": ["evaluate"], "devices": {"local": 1}},
        ],
    }
    driven = Pools(*checked(compose("cluster=local", experiment="cartpole_ppo"), plan), tmp_path)
    driven.lease(1)
    driven.add(StageNode("evaluate", 0))
    ((worker, order),) = driven.dispatch()
    assert (worker, order.ranks, order.policy_workers) == ("pool-1-0-r0", (0,), ())


def test_each_side_is_told_when_the_other_is_gone(driven: Pools) -> None:
    simulators, policy = driven.lease(0), driven.lease(1)
    driven.add(ROLLOUT)
    attempt = next(order.attempt for _, order in driven.dispatch() if isinstance(order, StageOrder))
    assert driven.scheduler.is_busy(policy)
    driven.sent.clear()
    assert driven.scheduler.on_lease_lost(policy) == []
    ended = AttemptEnded(node="rollout/2", attempt=attempt, reason="its lease has ended")
    assert driven.sent == [(worker, ended) for worker in simulators.workers()]
    assert not driven.scheduler.is_busy(policy)
    report = WorkItemEnded(work_item="rollout/2", exit_code=75)
    assert driven.scheduler.on_ended(simulators.workers()[1], report) is not None
    policy = driven.lease(1, 1)
    driven.add(ROLLOUT)
    driven.dispatch()
    driven.sent.clear()
    assert driven.scheduler.on_lease_lost(simulators) == [ROLLOUT]
    notices = [(worker, order.reason) for worker, order in driven.sent]
    reason = "the attempt of the simulators has ended"
    assert notices == [(worker, reason) for worker in policy.workers()]


def test_a_rollout_is_work_of_both_leases(driven: Pools) -> None:
    simulators, policy = driven.lease(0), driven.lease(1)
    driven.add(ROLLOUT)
    driven.dispatch()
    assert (simulators.stages, policy.stages) == ({"rollout"}, {"rollout.generate"})


def test_what_a_lease_answers_it_answers_to_the_end_when_another_comes(driven: Pools) -> None:
    driven.lease(0)
    policy = driven.lease(1)
    driven.add(ROLLOUT)
    driven.dispatch()
    driven.lease(1, 1)
    driven.add(StageNode("rollout", 3))
    settings = {
        order.node: order.policy_workers[0]
        for _, order in driven.dispatch()
        if isinstance(order, StageOrder)
    }
    assert settings == {"rollout/3": "pool-1-1-r0"}
    assert driven.scheduler.is_busy(policy)
