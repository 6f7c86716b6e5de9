"""Which turns stages have in their pools, and in how many parts they go through a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import validate_experiment
from pipeline.executors import stage_call
from pipeline.graph import Graph, StageNode
from pipeline.pools.dispatcher import StageDispatcher
from pipeline.pools.leases import Lease, pool_states
from pipeline.pools.rollout_scheduler import RolloutScheduler
from pipeline.run import Run
from stages.worker import messages

STAGES = ("rollout", "reward", "inference", "train", "sync")
HELD = list(STAGES[:4])


@pytest.mark.parametrize(
    ("pools", "late", "parts"),
    [
        # All take turns on all: part by part.
        ([{"stages": HELD, "devices": {"local": 2}}], {"sync"}, [4, 4, 4, 4]),
        # The rollout has a pool to itself: the engine is given the whole batch.
        (
            [
                {"stages": HELD[:1], "devices": {"local": 1}},
                {"stages": HELD[1:], "devices": {"local": 1}},
            ],
            {"sync"},
            [1, 4, 4, 4],
        ),
        # Side by side: what has all processes comes after, or the next part would wait for it.
        (
            [
                {
                    "stages": HELD,
                    "devices": {"local": 2},
                    "stage_ranks": {"rollout": [0], "reward": [1]},
                }
            ],
            {"inference", "train", "sync"},
            [1, 4, 4, 4],
        ),
        # What waits for such a one in another pool comes late there too.
        (
            [
                {
                    "stages": ["rollout", "reward", "inference"],
                    "devices": {"local": 2},
                    "stage_ranks": {"rollout": [0], "reward": [1]},
                },
                {"stages": ["train"], "devices": {"local": 1}},
            ],
            {"inference", "train", "sync"},
            [1, 4, 4, 4],
        ),
        # Judgement after all on some: it waits for the rollout, and holds nothing up.
        (
            [{"stages": HELD, "devices": {"local": 2}, "stage_ranks": {"evaluate": [1]}}],
            {"sync"},
            [4, 4, 4, 4],
        ),
    ],
)
def test_stages_with_all_processes_come_after_those_side_by_side(
    pools: list[dict[str, Any]],
    late: set[str],
    parts: list[int],
    compose: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    values = compose("cluster=local", "rollout.batch_size=8")
    sizes = {stage: sum(p["devices"].values()) for p in pools for stage in p["stages"]}
    needs = {s: {"processes": sizes[s]} for s in ("rollout", "inference", "train")}
    values["plan"] = {"num_chunks": 4, "stages": needs, "pools": pools}
    config, plan = validate_experiment(values)
    generators = RolloutScheduler(tmp_path, config.rollout.batch_size, 0)
    run = Run(tmp_path, config)
    orders = StageDispatcher(run, plan, pool_states(plan), generators, lambda *_: None)
    positions = {stage: orders.position(StageNode(stage, 3)) for stage in STAGES}
    assert {stage for stage, (_, part, _) in positions.items() if part} == late
    assert [orders.num_chunks(stage) for stage in HELD] == parts


def test_a_rollout_does_not_keep_the_one_before_in_memory(
    compose: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """It reads what that left open from disk: the worker would hold all its trajectories for it."""
    pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
    values = compose("cluster=local", "task.carry_over_episodes=true", experiment="cartpole_ppo")
    values["plan"] = {"pools": [{"stages": HELD, "devices": {"local": 1}}]}
    config, plan = validate_experiment(values)
    run, graph, pools = Run(tmp_path, config), Graph(config), pool_states(plan)
    member = Lease("pool-0-0", "1", 1)
    member.add_worker({"rank": 0, "host": "here"})
    pools[0].leases.append(member)
    for stage in STAGES:
        for iteration in (1, 2):
            node = StageNode(stage, iteration)
            pools[0].waiting[node] = stage_call(run, graph, node)
    sent: list[Any] = []
    generators = RolloutScheduler(tmp_path, config.rollout.batch_size, 0)
    orders = StageDispatcher(run, plan, pools, generators, lambda _, order: sent.append(order))
    orders.dispatch()
    (order,) = [order for order in sent if isinstance(order, messages.RunStages)]
    found = {stage.node: stage.inputs for stage in order.stages}
    assert found["rollout/2"] == {
        "weights": ("it/0001/sync", True),
        "open_episodes": ("it/0001/rollout", False),
    }
    assert found["train/1"]["trajectories"] == ("it/0001/rollout", True)
    transfers = (messages.FetchOutput, messages.FetchWeights)
    assert not any(isinstance(order, transfers) for order in sent), "no other worker needs any"


def test_each_rank_fetches_from_all_others_that_produce_records(
    compose: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    values = compose("cluster=local", "rollout.batch_size=8")
    values["plan"] = {
        "num_chunks": 2,
        "stages": {stage: {"processes": 2} for stage in ("rollout", "inference", "train")},
        "pools": [
            {"stages": HELD[:1], "devices": {"local": 2}},
            {"stages": HELD[1:], "devices": {"local": 2}},
        ],
        "transports": {"rollout -> train": "shared_memory"},
    }
    config, plan = validate_experiment(values)
    run, graph, pools = Run(tmp_path, config), Graph(config), pool_states(plan)
    for number, pool in enumerate(pools):
        member = Lease(f"pool-{number}-0", str(number), 2)
        for rank in range(2):
            member.add_worker({"rank": rank, "host": "here"})
        pool.leases.append(member)
    sent: list[tuple[str, messages.FetchOutput]] = []

    def send(worker: str, order: Any) -> None:
        if isinstance(order, messages.FetchOutput):
            sent.append((worker, order))

    orders = StageDispatcher(run, plan, pools, RolloutScheduler(tmp_path, 8, 0), send)
    for stage in ("rollout", "inference", "train"):
        node = StageNode(stage, 0)
        orders.pool_of(node).waiting[node] = stage_call(run, graph, node)
    for _ in range(2):
        orders.dispatch()
    found = {(w, order.output, order.producers, order.transport) for w, order in sent}
    assert len(found) == len(sent), "each is ordered once"
    rollout, inference = "it/0000/rollout", "it/0000/inference"
    both = ("pool-0-0-r0", "pool-0-0-r1")
    assert found == {
        ("pool-1-0-r0", rollout, both, "socket"),  # by inference
        ("pool-1-0-r1", rollout, both, "socket"),
        ("pool-1-0-r0", rollout, both, "shared_memory"),  # by train
        ("pool-1-0-r1", rollout, both, "shared_memory"),
        ("pool-1-0-r0", inference, ("pool-1-0-r1",), "socket"),
        ("pool-1-0-r1", inference, ("pool-1-0-r0",), "socket"),
    }
