"""Which turns stages have in their pools, and in how many parts they go through a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import checked
from pipeline.driver import call_of
from pipeline.flow import Graph, Node
from pipeline.pools.generators import Generators
from pipeline.pools.jobs import pool_states
from pipeline.pools.leases import Member
from pipeline.pools.orders import Orders
from pipeline.run import Run
from stages.worker import messages

STAGES = ("rollout", "reward", "inference", "train", "sync")
HELD = list(STAGES[:4])


@pytest.mark.parametrize(
    ("pools", "late", "parts"),
    [
        # All take turns on all: part by part.
        ([{"stages": HELD, "gpus": {"local": 2}}], {"sync"}, [4, 4, 4, 4]),
        # The rollout has a pool to itself: the engine is given the whole batch.
        (
            [
                {"stages": HELD[:1], "gpus": {"local": 1}},
                {"stages": HELD[1:], "gpus": {"local": 1}},
            ],
            {"sync"},
            [1, 4, 4, 4],
        ),
        # Side by side: what has all processes comes after, or the next part would wait for it.
        (
            [{"stages": HELD, "gpus": {"local": 2}, "ranks": {"rollout": [0], "reward": [1]}}],
            {"inference", "train", "sync"},
            [1, 4, 4, 4],
        ),
        # What waits for such a one in another pool comes late there too.
        (
            [
                {
                    "stages": ["rollout", "reward", "inference"],
                    "gpus": {"local": 2},
                    "ranks": {"rollout": [0], "reward": [1]},
                },
                {"stages": ["train"], "gpus": {"local": 1}},
            ],
            {"inference", "train", "sync"},
            [1, 4, 4, 4],
        ),
        # Judgement after all on some: it waits for the rollout, and holds nothing up.
        (
            [{"stages": HELD, "gpus": {"local": 2}, "ranks": {"evaluate": [1]}}],
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
    values = compose("cluster=local", "rollout.batch=8")
    sizes = {stage: sum(p["gpus"].values()) for p in pools for stage in p["stages"]}
    needs = {s: {"processes": sizes[s]} for s in ("rollout", "inference", "train")}
    values["plan"] = {"grain": "segment", "chunks": 4, "stages": needs, "pools": pools}
    config, plan = checked(values)
    generators = Generators(tmp_path, config.rollout.batch, 0)
    run = Run(tmp_path, config)
    orders = Orders(run, plan, pool_states(plan), generators, lambda *_: None)
    positions = {stage: orders.position(Node(stage, 3)) for stage in STAGES}
    assert {stage for stage, (_, part, _) in positions.items() if part} == late
    assert [orders.parts(stage) for stage in HELD] == parts


def test_a_rollout_does_not_keep_the_one_before_in_memory(
    compose: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """It reads what that left open from disk: the worker would hold all its trajectories for it."""
    pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
    values = compose("cluster=local", "task.continues=true", experiment="cartpole_ppo")
    values["plan"] = {"grain": "segment", "pools": [{"stages": HELD, "gpus": {"local": 1}}]}
    config, plan = checked(values)
    run, graph, pools = Run(tmp_path, config), Graph(config), pool_states(plan)
    member = Member("pool-0-0", "1", 1)
    member.join({"rank": 0, "host": "here"})
    pools[0].members.append(member)
    for stage in STAGES:
        for iteration in (1, 2):
            node = Node(stage, iteration)
            pools[0].waiting[node] = call_of(run, graph, node)
    sent: list[Any] = []
    generators = Generators(tmp_path, config.rollout.batch, 0)
    orders = Orders(run, plan, pools, generators, lambda _, order: sent.append(order))
    orders.give()
    (order,) = [order for order in sent if isinstance(order, messages.Run)]
    found = {stage.node: stage.inputs for stage in order.stages}
    assert found["rollout/2"] == {
        "weights": ("it/0001/sync", True),
        "open": ("it/0001/rollout", False),
    }
    assert found["train/1"]["trajectories"] == ("it/0001/rollout", True)
    assert not any(isinstance(order, messages.Send) for order in sent), "nobody else takes any"
