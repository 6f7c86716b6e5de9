"""Combinations that would run and learn nothing, or fail long after they began, are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from benchmarks.combinations import compose_config
from pipeline.validate_config import validate_config
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError

Compose = Callable[..., dict[str, Any]]


@pytest.fixture
def prior(tmp_path: Path) -> Path:
    """Transitions of the pendulum."""
    path = tmp_path / "prior.hdf5"
    with h5py.File(path, "w") as file:
        for name, size in (("observations", 3), ("next_observations", 3), ("actions", 1)):
            file[name] = np.zeros((5, size))
        file["rewards"], file["terminated"] = np.zeros(5), np.ones(5)
    return path


@pytest.mark.parametrize(
    ("experiment", "words", "message"),
    [
        (
            "pendulum_sac",
            ["flow=offline", "algorithm.offline_data={prior}", "algorithm.offline_ratio=1.0"],
            r"algorithm\.gradient_steps: .*flow=offline collects none",
        ),
        (
            "pendulum_sac",
            ["trainer.param_dtype=bfloat16"],
            r"trainer\.param_dtype: the critics of 'sac' .* trainer\.param_dtype=float32",
        ),
        (
            "pendulum_bc",
            ["algorithm.offline_data={prior}", "model.normalize_observations=true"],
            r"model\.normalize_observations: bc updates no statistics",
        ),
    ],
)
def test_what_would_learn_nothing_is_refused(
    compose: Compose, prior: Path, experiment: str, words: list[str], message: str
) -> None:
    values = compose(*(word.format(prior=prior) for word in words), experiment=experiment)
    with pytest.raises(ConfigError, match=message):
        validate_config(validate(RunConfig, values))


def test_a_tail_that_nobody_judged_is_not_learned_from_as_worth_nothing(prior: Path) -> None:
    def checked(*further: str, algorithm: str = "reinforce_plus_plus") -> None:
        words = ["reward=score", "rollout.group_size=1", *further]
        validate_config(
            validate(RunConfig, compose_config(algorithm, "mlp_numbered", prior, *words))
        )

    with pytest.raises(ConfigError, match=r"^reward\.name: 'score' scores an episode when it ends"):
        checked()
    checked("rollout.group_size=2")
    checked("reward=environment")
    checked(algorithm="ppo")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["algorithm=grpo"],
            r"rollout\.group_size: 4, but .* different states .*=1; algorithm=ppo needs",
        ),
        (
            [],
            r"rollout\.group_size: 4, but .* different states .*; set rollout\.group_size=1$",
        ),
    ],
)
def test_samples_that_begin_differently_are_not_compared(
    compose: Compose, words: list[str], message: str
) -> None:
    words = [*words, "rollout.group_size=4", "task.simulator=isaaclab"]
    values = compose(*words, experiment="halfcheetah_ppo")
    with pytest.raises(ConfigError, match=message):
        validate_config(validate(RunConfig, values))
    values["task"]["simulator"] = "gymnasium"
    validate_config(validate(RunConfig, values))


def test_what_learns_offline_is_accepted(compose: Compose, prior: Path) -> None:
    words = ["flow=offline", f"algorithm.offline_data={prior}", "algorithm.offline_ratio=1.0"]
    values = compose(*words, "algorithm.gradient_steps=3", experiment="pendulum_sac")
    validate_config(validate(RunConfig, values))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.heads=2"], r"model\.kv_heads: 4 cannot be shared by model\.heads 2"),
        (["model.kv_heads=3"], r"model\.kv_heads: 3 cannot be shared"),
        (
            ["model.hidden=36", "model.heads=4"],
            r"model\.heads: a width of 36 in 4 heads gives an odd size",
        ),
    ],
)
def test_heads_that_do_not_divide_are_refused(
    compose: Compose, words: list[str], message: str
) -> None:
    seen = ["model=openvla_oft", "task.images={free: [32, 32]}", "task.instruction=balance"]
    more = ["reward=environment", "engine=direct", "algorithm=grpo", "rollout.group_size=2"]
    values = compose(*seen, *more, *words, experiment="inverted_pendulum_flow")
    with pytest.raises(ConfigError, match=message):
        validate_config(validate(RunConfig, values))


def test_a_regression_head_without_a_likelihood_only_imitates(compose: Compose) -> None:
    seen = ["model=openvla_oft", "task.images={free: [32, 32]}", "task.instruction=balance"]
    more = ["reward=environment", "engine=direct", "algorithm=grpo", "rollout.group_size=2"]
    words = [*seen, *more, "model.action_head=l1"]
    values = compose(*words, experiment="inverted_pendulum_flow")
    with pytest.raises(ConfigError, match=r"model\.action_head: l1 .*likelihood.*iterations=0"):
        validate_config(validate(RunConfig, values))
    values = compose(*words, "iterations=0", experiment="inverted_pendulum_flow")
    validate_config(validate(RunConfig, values))


def test_training_in_half_precision_is_said(
    compose: Compose, caplog: pytest.LogCaptureFixture
) -> None:
    validate_config(validate(RunConfig, compose("model.dtype=bfloat16")))
    assert "model.dtype=bfloat16: weights and moments are bfloat16 too" in caplog.text
