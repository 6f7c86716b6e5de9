"""The one table of stages: what follows from it, for the flow there is and for any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.graph import Graph, StageNode
from pipeline.plan import parse_plan
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError, PlanError
from stages import flow as flows
from stages.flow import (
    Flow,
    InputSource,
    StageSpec,
    check_flow,
    get_flow,
    on_policy,
    with_carried_episodes,
)
from stages.retention import RetentionPolicy
from tests.bad_input.door import assert_mentions

NAMES = ("a", "b", "c", "d", "e")


@st.composite
def made(draw: st.DrawFn) -> Flow:
    """Flows of up to five stages: inputs of the same iteration come from stages before."""
    names = NAMES[: draw(st.integers(1, 5))]
    stages: dict[str, StageSpec] = {}
    for place, name in enumerate(names):
        same = [
            InputSource(other) for other in draw(st.sets(st.sampled_from(names))) if other < name
        ]
        back = st.builds(
            InputSource,
            st.sampled_from(names),
            lag=st.integers(1, 3),
            initial=st.sampled_from([None, "start"]),
            history=st.integers(1, 3),
            stale=st.booleans(),
        )
        inputs = {f"x{i}": s for i, s in enumerate([*same, *draw(st.lists(back, max_size=2))])}
        stages[name] = StageSpec(inputs, output_stream=draw(st.sampled_from([None, name])))
        assert place == len(stages) - 1
    return Flow(
        stages, {"start": StageSpec()}, StageSpec({"weights": InputSource(names[-1], 1, "start")})
    )


def graph_of(flow: Flow, iterations: int, staleness: int) -> Graph:
    graph = Graph(RunConfig.model_construct(flow="on_policy", **_sections(iterations, staleness)))
    graph.flow = flow
    return graph


def _sections(iterations: int, staleness: int) -> dict[str, object]:
    from types import SimpleNamespace as Section

    return {
        "task": Section(model_extra=None),
        "algorithm": Section(model_extra=None),
        "iterations": iterations,
        "evaluate": Section(every=1),
        "rollout": Section(staleness=staleness, max_resamples=None),
    }


@given(made(), st.integers(1, 6), st.integers(0, 2))
def test_nodes_come_after_their_inputs_in_any_flow(
    flow: Flow, iterations: int, staleness: int
) -> None:
    graph, done = graph_of(flow, iterations, staleness), set[StageNode]()
    for node in graph.nodes():
        assert set(graph.inputs(node).values()) <= done, node
        done.add(node)


@given(made(), st.integers(1, 6))
def test_nothing_is_let_go_that_a_later_stage_takes(flow: Flow, iterations: int) -> None:
    graph = graph_of(flow, iterations, 0)
    for node in graph.nodes():
        for source in graph.inputs(node).values():
            if source.stage in flow.stages and node.stage in flow.stages:
                behind = node.iteration - source.iteration
                assert behind < flow.num_retained_outputs(source.stage)


@given(made())
def test_what_a_stage_waits_for_leaves_out_what_follows_from_others(flow: Flow) -> None:
    after = flow.direct_dependencies()
    assert flow.publish_stage not in after
    for name, sources in after.items():
        direct = {s.stage for s in flow.stages[name].inputs.values() if not s.lag}
        assert set(sources) <= direct, name
        assert not any(one in after[other] for one in sources for other in sources)


def test_the_flow_there_is() -> None:
    assert on_policy.publish_stage == "sync"
    assert on_policy.elastic_stage == "rollout"
    assert on_policy.stream_channels == {"trajectories", "rewards", "logprobs"}
    assert on_policy.direct_dependencies() == {
        "rollout": (),
        "reward": ("rollout",),
        "inference": ("rollout",),
        "train": ("reward", "inference"),
    }
    assert {name: on_policy.num_retained_outputs(name) for name in on_policy.stages} == {
        **{"rollout": 1, "reward": 1, "inference": 1},
        **{"train": 2, "sync": 2},
    }


@pytest.mark.parametrize("name", ["on_policy", "off_policy"])
def test_carried_over_episodes_are_an_input_of_the_next_rollout_on_fixed_workers(
    name: str, compose: Callable[..., dict[str, Any]]
) -> None:
    flow = with_carried_episodes(get_flow(name))
    assert flow.stages["rollout"].inputs["open_episodes"] == InputSource("rollout", lag=1)
    assert (flow.elastic_stage, flow.rollout_stage) == (None, "rollout")
    assert flow.num_retained_outputs("rollout") == 2, "retention keeps the one before"
    check_flow(flow, "flow")
    experiment = "cartpole_ppo" if name == "on_policy" else "pendulum_sac"
    for word, wanted in (("true", flow), ("false", get_flow(name))):
        values = compose(f"task.carry_over_episodes={word}", experiment=experiment)
        assert Graph(validate(RunConfig, values)).flow == wanted
    pool = {"stages": ["rollout"], "devices": {"local": 1}, "workers": 1}
    plan = {"pools": [pool, {"stages": ["train"], "devices": {"local": 1}}]}
    with pytest.raises(
        PlanError, match=r"pools\[0\]\.workers: .* \(.*task\.carry_over_episodes\); remove"
    ):
        parse_plan(plan, "plan", flow)


def test_a_window_takes_the_newest_outputs_and_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compose: Callable[..., dict[str, Any]]
) -> None:
    tiny, replay = validate(RunConfig, compose()), InputSource("rollout", history=4)
    train = on_policy.stages["train"]
    stages = {**on_policy.stages, "train": StageSpec({**train.inputs, "trajectories": replay})}
    flow = Flow(stages, on_policy.setup_stages, on_policy.evaluate)
    monkeypatch.setattr(flows, "on_policy", flow)
    inputs = Graph(tiny).inputs(StageNode("train", 5))
    names = ["trajectories", "trajectories.1", "trajectories.2", "trajectories.3"]
    assert [inputs[name].iteration for name in names] == [5, 4, 3, 2]
    assert "trajectories.3" not in Graph(tiny).inputs(StageNode("train", 2))
    retention = tiny.checkpoint.model_copy(update={"keep_trajectories": 1, "keep_last": 1})
    config = tiny.model_copy(update={"checkpoint": retention})
    gone = {
        path.parent.name
        for path in RetentionPolicy(config, tmp_path, 9).expired_outputs()
        if path.name == "rollout"
    }
    assert max(gone) == "0005", "iteration 9 took those of 9 to 6, and may be made again"


def test_a_plan_is_checked_against_the_flow_it_is_for() -> None:
    simulate = Flow(
        {
            "simulate": StageSpec(output_stream="trajectories", elastic=True),
            "learn": StageSpec({"trajectories": InputSource("simulate")}, holds="trainer"),
        },
        {"start": StageSpec(colocate_with="learn")},
    )
    plan = {
        "pools": [
            {"stages": ["simulate"], "devices": {"cpu": 2}, "workers": 2},
            {"stages": ["learn"], "devices": {"cpu": 1}},
        ],
    }
    assert parse_plan(plan, "plan", simulate).flow is simulate
    with pytest.raises(PlanError, match="unknown stage 'simulate'"):
        parse_plan(plan, "plan")
    plan["pools"] = plan["pools"][:1]  # type: ignore[index]
    with pytest.raises(PlanError, match="no pool holds learn"):
        parse_plan(plan, "plan", simulate)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (
            {"train": StageSpec({"rewards": InputSource("reward")})},
            "stage train reads 'reward', which is not a stage",
        ),
        (
            {"train": StageSpec({"rewards": InputSource("sync")}), "sync": StageSpec()},
            "stage train reads sync, which comes later",
        ),
        ({"train": StageSpec(config_sections=("modle",))}, "did you mean 'model'"),
        ({"learn": StageSpec(module="stages.learns")}, "stage learn: no module 'stages.learns'"),
        ({"learn": StageSpec(module="stages.layout")}, "layout.py has no 'run'"),
        ({}, "a flow needs stages"),
    ],
)
def test_a_flow_that_cannot_run_is_refused(stages: dict[str, StageSpec], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_flow(Flow(stages, on_policy.setup_stages, StageSpec()), "flow")
    assert_mentions(str(caught.value), "flow", words)


def test_a_flow_can_be_named_by_its_module() -> None:
    assert get_flow("stages.flow:on_policy") is on_policy
    with pytest.raises(ConfigError, match="is no flow"):
        get_flow("stages.flow:Flow")
    check_flow(on_policy, "flow")
