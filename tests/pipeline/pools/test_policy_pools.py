"""What is ordered of a rollout whose policy is apart, and what is said when a side is gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from pipeline.commands.experiment import validate_experiment
from pipeline.executors import stage_call
from pipeline.graph import Graph, StageNode
from pipeline.pools.dispatcher import StageDispatcher
from pipeline.pools.leases import Lease, pool_states
from pipeline.pools.rollout_scheduler import RolloutScheduler
from pipeline.run import Run
from stages.worker.messages import AttemptEnded, FetchWeights, RunStages, ServePolicy, StageOrder

PLAN = {
    "stages": {"rollout": {"processes": 3}, "rollout.generate": {"processes": 2}},
    "pools": [
        {"stages": ["rollout"], "devices": {"local": 3}},
        {"stages": ["rollout.generate"], "devices": {"local": 2}},
        {"stages": ["reward", "inference", "train"], "devices": {"local": 1}},
    ],
}
ROLLOUT = StageNode("rollout", 2)


class Driven:
    """Pools whose leases are there, and what their workers were sent."""

    def __init__(
        self, compose: Callable[..., dict[str, Any]], folder: Path, plan: dict[str, Any] = PLAN
    ) -> None:
        values = compose("cluster=local", experiment="cartpole_ppo")
        config, checked_plan = validate_experiment(values | {"plan": plan})
        self.run, self.graph = Run(folder, config), Graph(config)
        self.pools = pool_states(checked_plan)
        self.sent: list[tuple[str, Any]] = []
        generators = RolloutScheduler(folder, config.rollout.batch_size, 0)
        send = lambda worker, order: self.sent.append((worker, order))  # noqa: E731
        self.orders = StageDispatcher(self.run, checked_plan, self.pools, generators, send)

    def lease(self, pool: int, number: int = 0) -> Lease:
        member = Lease(f"pool-{pool}-{number}", "1", self.pools[pool].size)
        for rank in range(member.size):
            member.add_worker({"rank": rank, "host": "here"})
        self.pools[pool].leases.append(member)
        return member

    def wants(self, *nodes: StageNode) -> None:
        for node in nodes:
            self.orders.pool_of(node).waiting[node] = stage_call(self.run, self.graph, node)

    def given(self) -> list[tuple[str, Any]]:
        """What was sent by one look; stages one by one."""
        self.sent.clear()
        self.orders.dispatch()
        return [
            (worker, part)
            for worker, order in self.sent
            for part in (order.stages if isinstance(order, RunStages) else (order,))
        ]


@pytest.fixture
def driven(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> Driven:
    return Driven(compose, tmp_path)


def test_simulators_are_ordered_once_their_policy_is_there_and_after_it(driven: Driven) -> None:
    driven.lease(0)
    driven.wants(ROLLOUT)
    assert driven.given() == [], "there is nobody to ask"
    driven.lease(1)
    found = driven.given()
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
    assert {answer.attempt for answer in answers} == {order.attempt}
    assert answers[0].position == order.position
    assert answers[0].weights == ("it/0001/sync", False)
    assert order.inputs["weights"] == ("it/0001/sync", False), "they load none"


def test_weights_that_are_being_made_are_sent_to_the_policy_alone(driven: Driven) -> None:
    for pool in range(3):
        driven.lease(pool)
    driven.wants(StageNode("sync", 1), ROLLOUT)
    found = driven.given()
    (answer, *_) = [order for _, order in found if isinstance(order, ServePolicy)]
    assert answer.weights == ("it/0001/sync", True)
    receivers = {worker for worker, order in found if isinstance(order, FetchWeights)}
    assert receivers == {"pool-1-0-r0", "pool-1-0-r1"}


def test_evaluations_where_the_simulators_are_ask_too(driven: Driven) -> None:
    driven.lease(0)
    driven.lease(1)
    driven.wants(StageNode("evaluate", 2))
    assert {order.stage for _, order in driven.given() if isinstance(order, ServePolicy)} == {
        "evaluate"
    }


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
    driven = Driven(compose, tmp_path, plan)
    driven.lease(1)
    driven.wants(StageNode("evaluate", 0))
    ((worker, order),) = driven.given()
    assert (worker, order.ranks, order.policy_workers) == ("pool-1-0-r0", (0,), ())


def test_each_side_is_told_when_the_other_is_gone(driven: Driven) -> None:
    simulators, policy = driven.lease(0), driven.lease(1)
    driven.wants(ROLLOUT)
    attempt = next(order.attempt for _, order in driven.given() if isinstance(order, StageOrder))
    assert driven.orders.policy_assigner.is_busy(policy)
    driven.sent.clear()
    driven.orders.policy_assigner.on_lease_lost(policy)
    assert [worker for worker, _ in driven.sent] == simulators.workers()
    over = AttemptEnded(node="rollout/2", attempt=attempt, reason="its lease has ended")
    assert all(order == over for _, order in driven.sent)
    driven.sent.clear()
    driven.orders.end_attempt(ROLLOUT)
    over = over.model_copy(update={"reason": "the attempt of the simulators has ended"})
    assert driven.sent == [(worker, over) for worker in policy.workers()]
    assert not driven.orders.policy_assigner.is_busy(policy)


def test_a_rollout_that_went_well_counts_for_both(driven: Driven) -> None:
    driven.lease(0)
    policy = driven.lease(1)
    driven.pools[1].failures = 2
    driven.wants(ROLLOUT)
    driven.given()
    driven.orders.policy_assigner.count_success(ROLLOUT)
    assert (policy.num_finished, driven.pools[1].failures) == (1, 0)


def test_a_lease_had_work_in_what_it_answered_and_is_judged_by_it_once(driven: Driven) -> None:
    """Its simulators may report that it is gone before it is seen to leave."""
    driven.lease(0)
    policy, pool = driven.lease(1), driven.pools[1]
    policy.started_at, policy.ends_at = time.time() - 600.0, time.time() + 5.0
    driven.wants(ROLLOUT)
    driven.given()
    driven.orders.end_attempt(ROLLOUT)
    pool.check_lease_length(policy)
    driven.orders.policy_assigner.on_lease_lost(policy)
    pool.check_lease_length(policy)
    assert pool.unproductive_leases == 1


def test_what_a_lease_answers_it_answers_to_the_end_when_another_comes(driven: Driven) -> None:
    driven.lease(0)
    policy = driven.lease(1)
    driven.wants(ROLLOUT)
    driven.given()
    driven.lease(1, 1)
    driven.wants(StageNode("rollout", 3))
    settings = {
        order.node: order.policy_workers[0]
        for _, order in driven.given()
        if isinstance(order, StageOrder)
    }
    assert settings == {"rollout/3": "pool-1-1-r0"}
    assert driven.orders.policy_assigner.is_busy(policy)
