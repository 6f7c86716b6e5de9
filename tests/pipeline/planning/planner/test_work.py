"""What a profile says of one stage on one kind of device."""

from __future__ import annotations

import pytest

from pipeline.commands.experiment import compose
from pipeline.planning.planner.work import work_items
from rlinf.config import RunConfig, validate


@pytest.mark.parametrize("flow", ["on_policy", "dynamic_sampling"])
def test_processes_of_a_rollout_share_whole_starts(flow: str) -> None:
    words = ["experiment=arithmetic_grpo", f"++flow={flow}", "rollout.batch=16"]
    config = validate(RunConfig, compose([*words, "rollout.group_size=4"]))
    assert work_items("rollout", config) == 16
    assert work_items("train", config) == 64
    assert work_items("reward", config) == 1
