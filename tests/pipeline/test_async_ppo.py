"""Asynchronous PPO as one setting, on text and in a simulator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import run_experiment
from pipeline.metrics import read_metrics, stage_manifest
from pipeline.validate_config import validate_config
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError
from tests.pipeline.helpers import contents
from tests.stages.test_text_ppo import POOLS, SMALL

Compose = Callable[..., dict[str, Any]]
CARTPOLE = ["rollout.batch_size=4", "rollout.horizon=32", "evaluate.every=0", "evaluate.samples=2"]
TEXT = [word.replace("critic_warmup=1", "critic_warmup=0") for word in SMALL]
CASES = {"arithmetic_ppo": TEXT, "cartpole_ppo": CARTPOLE}
ASYNC = ["algorithm=async_ppo", "algorithm.epochs=2", "algorithm.minibatches=2", "iterations=3"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("experiment", CASES)
def test_it_is_one_setting(compose: Compose, tmp_path: Path, experiment: str) -> None:
    """In pools, where rollouts go on during updates, it is the same run as stage by stage."""
    words = [*CASES[experiment], *ASYNC]
    alone = compose(*words, "run.name=alone", experiment=experiment)
    assert alone["rollout"]["staleness"] == 1
    run_experiment(alone)
    pools = compose(*words, "run.name=pools", experiment=experiment)
    run_experiment(pools | {"plan": POOLS, "cluster": {"launcher": "local"}})
    assert contents(tmp_path / "alone") == contents(tmp_path / "pools")
    rows = read_metrics(tmp_path / "alone")
    assert [row["train/staleness"] for row in rows] == [0, 1, 1]
    assert rows[0]["train/rollout_is_mean"] == pytest.approx(1, abs=1e-3)
    # The weights of the version before are not those that are updated.
    assert rows[2]["train/rollout_is_mean"] != pytest.approx(1, abs=1e-6)
    assert all(0 <= row["train/rollout_is_clip_ratio"] < 1 for row in rows)


@pytest.mark.usefixtures("undrawn")
def test_interpolated_the_simulators_values_spare_the_pass_of_inference(
    compose: Compose, tmp_path: Path
) -> None:
    words = [*CARTPOLE, *ASYNC, "algorithm.old_logprobs=interpolate", "run.name=near"]
    run_experiment(compose(*words, experiment="cartpole_ppo"))
    done = stage_manifest(tmp_path / "near", "inference", 2)
    assert done is not None
    assert "logprob_diff_mean" not in done.metrics
    rows = read_metrics(tmp_path / "near")
    assert all(row["train/clip_ratio"] >= 0 for row in rows)
    assert rows[2]["train/rollout_is_mean"] != pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["rollout.staleness=0"], "algorithm.name: 'async_ppo' needs rollouts that go on .*ppo"),
        (["algorithm.rollout_is_threshold=null"], "algorithm.rollout_is_threshold: without importance weights"),
        (["algorithm.old_logprobs=rollout"], "old_logprobs: recompute, or interpolate"),
        (["algorithm.old_logprobs=interpolated"], "algorithm.old_logprobs: .*'interpolate'"),
        (["++flow=off_policy"], "flow: 'off_policy' needs an algorithm that learns from trans"),
        (["model=mlp_q"], "algorithm.name: 'async_ppo' needs "),
    ],
)
def test_what_cannot_work_is_refused(compose: Compose, words: list[str], match: str) -> None:
    values = compose("algorithm=async_ppo", *words, experiment="cartpole_ppo")
    with pytest.raises(ConfigError, match=match):
        validate_config(validate(RunConfig, values))
