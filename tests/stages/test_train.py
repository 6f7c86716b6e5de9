"""The update compares the policy with what collected the batch, and stops where that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.commands.experiment import execute
from pipeline.metrics import collect, manifest_of
from rlinf.algorithms.update import same_version
from rlinf.config import RunConfig, validate
from rlinf.data.record import Identity, Record
from rlinf.errors import InputError
from stages.train import gap_limit

Compose = Callable[..., dict[str, Any]]


def test_only_steps_of_the_trainers_version_are_compared() -> None:
    def record(length: int, version: int, **columns: Any) -> Record:
        steps = {"actions": np.zeros(length, np.int64), **columns}
        return Record(Identity(0, 0), steps, info={"policy_version": version})

    stale, fresh = record(2, 3), record(3, 4)
    mixed = record(2, 3, versions=np.array([3, 4]))
    got = same_version([stale, fresh, mixed], 4)
    assert got.tolist() == [[0, 0, 0], [1, 1, 1], [0, 1, 0]]


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
    assert gap_limit(validate(RunConfig, compose(override))) == limit


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_gap_above_the_limit_ends_the_run_before_any_update(
    compose: Compose, tmp_path: Path, minibatches: int
) -> None:
    """With one minibatch gradients are accumulated as parts arrive."""
    words = ["algorithm.logprob_gap_limit=1e-12", f"algorithm.minibatches={minibatches}"]
    with pytest.raises(InputError, match=r"differ by \S+ nats in the mean, the limit is 1e-12"):
        execute(compose(*words, "iterations=1"))
    assert manifest_of(tmp_path / "tiny", "train", 0) is None


@pytest.mark.usefixtures("undrawn")
def test_the_first_step_sees_observations_as_the_old_log_probs_did(
    compose: Compose, tmp_path: Path
) -> None:
    words = ["iterations=2", "model.normalise_observations=true", "algorithm.epochs=1"]
    words += ["algorithm.minibatches=1", "rollout.batch=4", "rollout.horizon=40"]
    words += ["evaluate.samples=2", "run.name=seen"]
    execute(compose(*words, experiment="cartpole_ppo"))
    for row in collect(tmp_path / "seen"):
        assert row["train/kl_old"] == pytest.approx(0, abs=1e-9)
        assert row["train/engine_gap"] < 1e-5
