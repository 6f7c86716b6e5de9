"""Stages that share a device too small for all they keep there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import run_experiment
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError
from stages.identity import stage_key
from tests.pipeline.helpers import budget_gib, contents, moves

Compose = Callable[..., dict[str, Any]]
WORDS = {
    "arithmetic_grpo": ("algorithm.kl_loss_coef=0.1", "algorithm.old_logprobs=recompute"),
    "cartpole_ppo": (
        "iterations=2",
        "rollout.batch_size=4",
        "rollout.horizon=16",
        "evaluate.samples=2",
        "evaluate.horizon=16",
        "evaluate.every=1",
    ),
}
"""What each experiment adds: a reference beside the policy, a small size."""


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("experiment", list(WORDS))
def test_a_budget_for_one_stage_at_a_time_changes_no_byte(
    compose: Compose, tmp_path: Path, experiment: str
) -> None:
    words = WORDS[experiment]
    run_experiment(compose("run.name=large", *words, experiment=experiment))
    small = f"device_memory_gib={budget_gib(tmp_path / 'large', 4.2)}"
    run_experiment(compose("run.name=small", small, *words, experiment=experiment))
    assert contents(tmp_path / "small") == contents(tmp_path / "large")
    assert min(moves(tmp_path / "small").values()) > 0
    assert not max(moves(tmp_path / "large").values())


def test_a_budget_too_small_for_one_stage_says_so(compose: Compose) -> None:
    with pytest.raises(ConfigError, match=r"device_memory_gib: .*FSDPTrainer needs .* gradients"):
        run_experiment(compose("device_memory_gib=0.0002", *WORDS["arithmetic_grpo"]))


def test_a_budget_is_no_part_of_what_a_stage_is(compose: Compose) -> None:
    one, other = (
        validate(RunConfig, compose(f"device_memory_gib={size}")) for size in ("null", "2.5")
    )
    assert other.device_memory_gib == 2.5
    for stage in ("rollout", "inference", "train", "sync"):
        assert stage_key(one, stage, 0, {}, "") == stage_key(other, stage, 0, {}, "")
