"""The graph of a run: every input exists, is made before, and only what is needed is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.graph import Graph, StageNode
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError

Compose = Callable[..., dict[str, Any]]


def test_nodes_come_after_their_inputs(compose: Compose) -> None:
    graph = Graph(validate(RunConfig, compose("iterations=7", "evaluate.every=3")))
    done: set[StageNode] = set()
    for node in graph.nodes():
        assert set(graph.inputs(node).values()) <= done, node
        done.add(node)
    assert {n.iteration for n in done if n.stage == "evaluate"} == {0, 3, 6, 7}
    assert sum(n.stage == "train" for n in done) == 7


def test_the_first_iteration_starts_from_the_sft_weights(compose: Compose) -> None:
    graph = Graph(validate(RunConfig, compose()))
    assert graph.inputs(StageNode("rollout", 0)) == {"weights": StageNode("sft", 0)}
    assert graph.inputs(StageNode("rollout", 1)) == {"weights": StageNode("sync", 0)}
    assert "checkpoint" not in graph.inputs(StageNode("train", 0))
    assert graph.inputs(StageNode("train", 1))["checkpoint"] == StageNode("train", 0)


def test_stale_rollouts_wait_for_older_weights_and_for_no_newer(compose: Compose) -> None:
    graph = Graph(validate(RunConfig, compose("rollout.staleness=2", "iterations=5")))
    sources = [graph.inputs(StageNode("rollout", i))["weights"] for i in range(5)]
    start = StageNode("sft", 0)
    assert sources == [start, start, start, StageNode("sync", 0), StageNode("sync", 1)]
    assert graph.inputs(StageNode("inference", 3))["weights"] == StageNode("sync", 2)


def test_an_unknown_flow_gets_a_hint(compose: Compose) -> None:
    values = compose() | {"flow": "on_polcy"}
    with pytest.raises(ConfigError, match="did you mean 'on_policy'"):
        Graph(validate(RunConfig, values))
