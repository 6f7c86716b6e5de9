"""A plan file may be edited by hand: what it says is kept, and what it cannot mean is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.plan import Plan, parse_plan, read_plan
from pipeline.resources import pool_resources
from rlinf import package_paths
from rlinf.errors import PlanError
from stages.flow import on_policy

PLANS = package_paths.ROOT / "configs" / "plans"

resources = st.fixed_dictionaries(
    {},
    optional={
        "partition": st.sampled_from(["a100", "h100"]),
        "nodes": st.integers(1, 4),
        "processes": st.integers(1, 4),
        "cpus": st.integers(1, 8),
        "mem_mb": st.integers(1, 9000),
        "speed_weights": st.just({"h100": 2.0, "a100": 1.0}),
    },
)


@given(resources, st.dictionaries(st.sampled_from(sorted(on_policy.all_stages)), resources))
def test_a_plan_says_the_same_after_it_was_written_and_read(
    defaults: dict[str, Any], stages: dict[str, dict[str, Any]]
) -> None:
    """Also of stages that leave something to the defaults."""
    plan = parse_plan({"defaults": defaults, "stages": stages}, "plan")
    again = parse_plan(yaml.safe_load(yaml.safe_dump(plan.to_dict())), "plan")
    assert again == plan
    assert all(again.stage_plan(stage) == plan.stage_plan(stage) for stage in on_policy.all_stages)


def test_a_stage_follows_the_defaults_in_what_it_leaves_open() -> None:
    plan = parse_plan({"defaults": {"cpus": 4}, "stages": {"train": {"processes": 2}}}, "plan")
    again = parse_plan(plan.to_dict(), "plan")
    assert (again.stage_plan("train").cpus, again.stage_plan("train").processes) == (4, 2)
    assert again.stage_plan("rollout").processes == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stages": {"trian": {}}}, "trian.*did you mean 'train'"),
        ({"stages": {"train": {"proceses": 2}}}, "proceses.*did you mean 'processes'"),
        ({"stages": {"train": {"speed_weights": [2, 1]}}}, "train.*2 numbers for 1 x 1"),
        (
            {"stages": {"train": {"speed_weights": {"h100": 0}}}},
            "speed_weights.*h100.*greater than 0",
        ),
        ({"pools": [{"stages": ["train"], "devices": {"h100": 1}}]}, "pools"),
        (
            {
                "pools": [
                    {"stages": ["train"], "devices": {"h100": 1}},
                    {"stages": ["rollout", "train"], "devices": {"h100": 1}},
                ],
            },
            "'train' is in two pools",
        ),
        (
            {"pools": [{"stages": ["trian"], "devices": {"h100": 1}}]},
            r"pools\[0\].*did you mean 'train'",
        ),
        (
            {
                "pools": [
                    {"stages": ["rollout"], "workers": 1, "devices": {"h100": 1}},
                    {"stages": ["train"], "devices": {"h100": 1}},
                ],
                "transports": {"sync -> rollout": "gloo", "sync -> evaluate": "gloo"},
            },
            "'sync -> evaluate' cannot be gloo.*set it for 'sync -> rollout'",
        ),
        ([], "expected a mapping"),
    ],
)
def test_what_a_plan_cannot_mean_is_refused_with_the_key(values: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_plan(values, "plan.yaml")


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_plans_that_come_with_it_can_be_carried_out(path: Path) -> None:
    plan = read_plan(path)
    plan.check_transports({})
    for number, pool in enumerate(plan.pools):
        parts = pool_resources(plan, number)
        assert [needs.partition for needs in parts] == list(pool.devices)
        if len(parts) == 1:
            ((kind, count),) = pool.devices.items()
            assert parts[0].gpu_type in (None, kind)
            per_job = 1 if pool.workers else count
            assert parts[0].nodes * parts[0].gpus == (0 if kind == "cpu" else per_job)


@pytest.mark.parametrize("expected", [{"nodes": 2}, {"processes": 2}, {"gpus": 2}])
def test_devices_that_do_not_fill_what_the_stages_ask_for_are_refused(
    expected: dict[str, int],
) -> None:
    pool = {"stages": ["rollout", "reward", "inference", "train"], "devices": {"h100": 3}}
    plan = parse_plan({"pools": [pool], "stages": {"train": expected}}, "plan")
    with pytest.raises(PlanError, match=r"pools\[0\].devices: 3 h100, but its stages ask for"):
        pool_resources(plan, 0)


def test_a_file_with_keys_of_an_older_version_is_refused_with_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    required = {"objective": "time", "cost": 1, "iteration_s": 1, "low_s": 1, "high_s": 1}
    forecast = {**required, "gpu_hours": 1, "recommendations": []}
    path.write_text(yaml.safe_dump({"forecast": forecast}))
    words = r"plan\.yaml\.forecast\.recommendations: unknown key; it was removed: .*delete it"
    with pytest.raises(PlanError, match=words):
        read_plan(path)
    path.write_text("predicted: {}")
    with pytest.raises(PlanError, match=r"plan\.yaml\.predicted: .*'forecast' now"):
        read_plan(path)


def test_a_plan_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("stages: [")
    with pytest.raises(PlanError, match=r"plan\.yaml, line 2: not valid YAML"):
        read_plan(path)
    with pytest.raises(PlanError, match="no file"):
        read_plan(tmp_path / "none.yaml")


def test_reward_is_one_process_whatever_the_defaults_say() -> None:
    plan = Plan.model_validate(
        {"defaults": {"nodes": 2, "processes": 2, "speed_weights": [1, 1, 2, 2]}}
    )
    assert plan.stage_plan("reward").nodes == plan.stage_plan("reward").processes == 1
    assert plan.stage_plan("reward").speed_weights is None
    assert plan.is_single_process("reward")
    assert not plan.is_single_process("train")


def test_reward_is_as_many_as_the_plan_gives_it_itself() -> None:
    plan = Plan.model_validate({"stages": {"reward": {"processes": 3}}})
    assert plan.stage_plan("reward").processes == 3
    assert not plan.is_single_process("reward")
