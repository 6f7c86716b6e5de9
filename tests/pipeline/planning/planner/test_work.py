"""What a profile says of one stage on one kind of device."""

from __future__ import annotations

import pytest

from pipeline.commands.experiment import compose
from pipeline.planning.planner.stage_times import num_work_items
from rlinf.config import RunConfig, validate


@pytest.mark.parametrize("resampling", [[], ["++rollout.max_resamples=2"]])
def test_processes_of_a_rollout_share_whole_starts(resampling: list[str]) -> None:
    words = ["experiment=arithmetic_grpo", "rollout.batch_size=16", "rollout.group_size=4"]
    config = validate(RunConfig, compose([*words, *resampling]))
    assert num_work_items("rollout", config) == 16
    assert num_work_items("train", config) == 64
    assert num_work_items("reward", config) == 1
