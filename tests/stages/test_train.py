"""The update compares the policy with what collected the batch, and stops where that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.commands.experiment import run_experiment, validate_experiment
from pipeline.metrics import read_metrics, stage_manifest
from rlinf.algorithms.importance_sampling import step_staleness
from rlinf.config import RunConfig, validate
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory, step_fields
from rlinf.errors import ConfigError, InputError
from rlinf.models.causal_lm import CausalLM
from rlinf.trainers.fsdp import FSDPTrainer
from stages.train import default_max_logprob_diff
from tests.pipeline.helpers import contents

Compose = Callable[..., dict[str, Any]]


def test_each_step_is_as_far_behind_as_the_weights_that_chose_it() -> None:
    def record(length: int, version: int, **columns: Any) -> Trajectory:
        steps = {"actions": np.zeros(length, np.int64), **columns}
        return Trajectory(identity=RecordId(0, 0), **step_fields(steps), policy_version=version)

    stale, fresh = record(2, 3), record(3, 4)
    mixed = record(2, 3, versions=np.array([3, 4]))
    got = step_staleness([stale, fresh, mixed], 4)
    assert got.tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("override", "limit"),
    [
        ("optimizer.lr=0.1", 0.02),
        ("model.dtype=bfloat16", 0.2),
        ("engine.dtype=bfloat16", 0.2),
        ("trainer.param_dtype=bfloat16", 0.2),
    ],
)
def test_half_precision_may_differ_more(compose: Compose, override: str, limit: float) -> None:
    assert default_max_logprob_diff(validate(RunConfig, compose(override))) == limit


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (["model.path=model"], 0.2),
        (["model.path=model", "engine.dtype=float32"], 0.2),
        (["model.path=model", "engine.dtype=float32", "trainer.param_dtype=float32"], 0.02),
        ([], 0.02),
    ],
)
def test_defaults_on_a_gpu_count_as_half_precision(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, words: list[str], limit: float
) -> None:
    monkeypatch.setattr("stages.factory.local_device", lambda name: torch.device("cuda", 0))
    assert default_max_logprob_diff(validate(RunConfig, compose(*words))) == limit


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_gap_above_the_limit_ends_the_run_before_any_update(
    compose: Compose, tmp_path: Path, minibatches: int
) -> None:
    """With one minibatch gradients are accumulated as parts arrive."""
    words = ["algorithm.max_logprob_diff=1e-12", f"algorithm.minibatches={minibatches}"]
    with pytest.raises(InputError, match=r"differ by \S+ nats in the mean, the limit is 1e-12"):
        run_experiment(compose(*words, "iterations=1"))
    assert stage_manifest(tmp_path / "tiny", "train", 0) is None


@pytest.mark.usefixtures("undrawn")
def test_the_first_step_sees_observations_as_the_old_log_probs_did(
    compose: Compose, tmp_path: Path
) -> None:
    words = ["iterations=2", "model.normalize_observations=true", "algorithm.epochs=1"]
    words += ["algorithm.minibatches=1", "rollout.batch_size=4", "rollout.horizon=40"]
    words += ["evaluate.samples=2", "run.name=seen"]
    run_experiment(compose(*words, experiment="cartpole_ppo"))
    for row in read_metrics(tmp_path / "seen"):
        assert row["train/approx_kl"] == pytest.approx(0, abs=1e-9)
        assert row["train/rollout_logprob_diff"] < 1e-5


def reached(compose: Compose, folder: Path, name: str, *words: str) -> list[dict[str, float]]:
    """Metrics of a short run on vectors of three numbers."""
    usual = ["iterations=2", "rollout.batch_size=4", "rollout.horizon=24", "evaluate.every=0"]
    usual += ["task.id=tests.stages.reaching:Reaching-v0", "task.observation=3", "run.name=" + name]
    usual += ["task.action.kind=box", "task.action.size=3", "evaluate.samples=2"]
    run_experiment(compose(*usual, *words, experiment="cartpole_ppo"))
    return read_metrics(folder / name)


@pytest.mark.usefixtures("undrawn")
def test_a_step_of_several_choices_has_the_ratio_that_its_level_says(
    compose: Compose, tmp_path: Path
) -> None:
    """Through rollout, inference and training: the whole step's is that of a policy which says no
    more than that."""
    own = "model.name=tests.stages.reaching:PerNumber"
    plain = reached(compose, tmp_path, "plain")
    chunk = reached(compose, tmp_path, "chunk", own)
    token = reached(compose, tmp_path, "token", own, "algorithm.logprob_level=token")
    for one, other, each in zip(plain, chunk, token, strict=True):
        names = [name for name in one if name.startswith(("train/", "inference/", "reward/"))]
        names = [name for name in names if not name.endswith(("_s", "_gap", "_max", "gap_mean"))]
        for name in names:
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
        assert other["train/rollout_logprob_diff"] < 1e-5
        assert each["train/rollout_logprob_diff"] < 1e-5
    assert 3 * token[0]["train/entropy"] == pytest.approx(chunk[0]["train/entropy"], rel=0.02)
    assert token[1]["train/loss"] != pytest.approx(chunk[1]["train/loss"], rel=1e-3)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_coarser_engine_is_seen_and_corrected(
    compose: Compose, tmp_path: Path, minibatches: int
) -> None:
    """With one minibatch the trainer's log-probabilities are those of the update itself."""
    words = ["iterations=1", "engine.dtype=bfloat16", "reward=digits"]
    words += [f"algorithm.minibatches={minibatches}"]
    rows = {}
    for name, more in {
        "plain": [],
        "truncated": ["algorithm.rollout_is_threshold=2.0"],
        "masked": [
            "algorithm.rollout_is_threshold=1.0001",
            "algorithm.rollout_is_mode=mask",
        ],
    }.items():
        run_experiment(compose(*words, *more, f"run.name={name}"))
        (rows[name],) = read_metrics(tmp_path / name)
    plain, truncated, masked = rows["plain"], rows["truncated"], rows["masked"]
    assert 0 < plain["train/rollout_logprob_diff"] < 0.1
    assert 0 < plain["train/rollout_kl"] < plain["train/rollout_logprob_diff"]
    assert 0 < abs(plain["train/rollout_ratio_mean"] - 1) < 0.1
    assert 1 < plain["train/rollout_ratio_max"] < 2
    assert truncated["train/rollout_logprob_diff"] == plain["train/rollout_logprob_diff"]
    assert truncated["train/loss"] != plain["train/loss"]
    assert truncated["train/rollout_is_mean"] == pytest.approx(1, abs=0.1)
    assert truncated["train/rollout_is_clip_ratio"] == 0
    assert 0.1 < masked["train/rollout_is_clip_ratio"] <= 1


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "name", ["rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gspo"]
)
def test_a_divergence_is_taken_from_the_reward_in_a_single_step_too(
    compose: Compose, tmp_path: Path, name: str
) -> None:
    """The inference stage gives old log-probabilities for it; at first they are the reference's."""
    words = [
        f"algorithm={name}",
        "algorithm.kl_reward_coef=0.1",
        "reward=digits",
        "rollout.batch_size=4",
    ]
    values = compose(*words, "evaluate.every=0", "evaluate.samples=2")
    del values["algorithm"]["filter_zero_variance_groups"]  # of the tiny run's usual algorithm
    run_experiment(values)
    first, second = read_metrics(tmp_path / "tiny")
    assert first["train/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert abs(second["train/reward_kl_penalty"]) > 1e-6
    assert first["train/grad_norm"] > 0


CO_TRAINING = ("algorithm.sft_loss_coef=0.5", "algorithm.sft_batch_size=4")
CONSTANT_RATE = ("optimizer.lr_scheduler_type=constant", "optimizer.lr_warmup_iterations=0")


@pytest.mark.usefixtures("undrawn")
def test_co_training_resumes_with_the_next_demonstrations(compose: Compose, tmp_path: Path) -> None:
    """A run in two parts has the bytes of one that was not interrupted; without demonstrations in
    the loss it has others."""
    run_experiment(compose(*CONSTANT_RATE, "run.name=plain"))
    words = (*CO_TRAINING, *CONSTANT_RATE)
    run_experiment(compose(*words, "run.name=whole"))
    for iterations in (1, 2):
        run_experiment(compose(*words, "run.name=parts", f"iterations={iterations}"))
    plain, whole, parts = (contents(tmp_path / name) for name in ("plain", "whole", "parts"))
    assert parts == whole
    assert {name for name in whole if whole[name] != plain[name]} >= {"it/0000/train"}
    assert plain["sft"] == whole["sft"]
    for row, other in zip(*(read_metrics(tmp_path / n) for n in ("whole", "plain")), strict=True):
        assert row["train/sft_loss"] > 0
        assert "train/sft_loss" not in other


class Silent(CausalLM):
    """A policy without a loss of demonstrations."""

    has_sft_loss = False


class OneLoss(FSDPTrainer):
    """A trainer that cannot add gradients."""

    supports_accumulation = False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.name=tests.stages.test_train:Silent"], "has no loss of demonstrations"),
        (["trainer.name=tests.stages.test_train:OneLoss"], "cannot add the gradients"),
    ],
)
def test_co_training_is_refused_without_its_parts(
    compose: Compose, tmp_path: Path, words: list[str], message: str
) -> None:
    values = compose(*CO_TRAINING, *words, "sft.max_steps=0")
    with pytest.raises(ConfigError, match=rf"^algorithm\.sft_loss_coef: .*{message}"):
        validate_experiment(values)
    assert not (tmp_path / "tiny").exists()
