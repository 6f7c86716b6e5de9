"""Algorithms with losses and loops of their own learn, through the stages as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.commands.experiment import run_experiment
from pipeline.metrics import read_metrics
from rlinf import package_paths

Compose = Callable[..., dict[str, Any]]
OWN = "tests.stages.own_algorithms"
pytestmark = pytest.mark.usefixtures("undrawn")


def own(compose: Compose, algorithm: dict[str, Any], *words: str, **how: str) -> dict[str, Any]:
    """Values of a run with an algorithm that has none of the others' settings."""
    return {**compose(*words, **how), "algorithm": algorithm}


def test_preferences_within_groups_are_learned(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DPO: pairs in one micro-batch, the reference's log-probabilities, no advantages."""
    monkeypatch.syspath_prepend(package_paths.ROOT / "docs" / "examples")
    run_experiment(
        own(
            compose,
            {"name": "mylab.preferences:Preferences", "beta": 1.0, "steps": 4},
            f"reward.name={OWN}:Favourite",
            "trainer.max_tokens_per_microbatch=60",
            "iterations=8",
            "rollout.batch_size=8",
            "evaluate.every=0",
            "optimizer.lr_warmup_iterations=0",
        )
    )
    rows = read_metrics(tmp_path / "tiny")
    means = [row["reward/mean"] for row in rows]
    assert np.mean(means[-3:]) > 2 * means[0]
    assert np.mean([row["train/accuracy"] for row in rows[1:]]) > 0.7


def published(folder: Path) -> dict[str, bytes]:
    """The last weights that a run published."""
    newest = sorted(folder.glob("it/*/sync/*/weights/*.safetensors"))[-1].parent
    return {file.name: file.read_bytes() for file in newest.glob("*.safetensors")}


def test_terms_of_the_configuration_stand_around_a_loss_of_ones_own(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever an outside algorithm returns, each of these keys changes the weights."""
    monkeypatch.syspath_prepend(package_paths.ROOT / "docs" / "examples")
    terms = {
        "none": {},
        "divergence": {"kl_loss_coef": 5.0},
        "entropy": {"entropy_coeff": 1.0},
        "importance": {"rollout_is_threshold": 1.5, "rollout_is_mode": "mask"},
        "reward": {"kl_reward_coef": 5.0},
        "mean": {"loss_agg_mode": "seq_mean_token_sum"},
    }
    found = {}
    for name, settings in terms.items():
        words = [f"reward.name={OWN}:Favourite", f"run.name={name}", "rollout.staleness=1"]
        words += ["evaluate.every=0", "optimizer.lr_warmup_iterations=0", "iterations=3"]
        algorithm = {"name": "mylab.algorithm:LeaveOneOut", **settings}
        run_experiment(own(compose, algorithm, *words))
        found[name] = published(tmp_path / name)
    assert all(list(found["none"]) == list(weights) for weights in found.values())
    plain = found.pop("none")
    assert [name for name, weights in found.items() if weights == plain] == []


def test_a_loss_may_ask_the_policy_for_more_than_its_step_outputs(
    compose: Compose, tmp_path: Path
) -> None:
    """The task does not reward the token: all that teaches it is the term that the loss adds."""
    run_experiment(
        compose(
            f"algorithm.name={OWN}:Coached",
            "algorithm.entropy_coeff=0",
            "iterations=6",
            "rollout.batch_size=8",
            "evaluate.every=0",
            "optimizer.lr_warmup_iterations=0",
        )
    )
    rows = read_metrics(tmp_path / "tiny")
    assert rows[-1]["train/wanted"] > rows[0]["train/wanted"] + 0.5


def test_an_actor_and_a_critic_learn_at_their_own_pace(compose: Compose, tmp_path: Path) -> None:
    """Two groups of parameters, updates of one alone, and the samples of the iteration before."""
    run_experiment(
        own(
            compose,
            {"name": f"{OWN}:TwoTimescales"},
            f"++flow={OWN}:replayed",
            "optimizer.lr=1e-2",
            "optimizer.group_lr.value=2e-2",
            "optimizer.lr_scheduler_type=constant",
            "iterations=10",
            "rollout.batch_size=16",
            "rollout.horizon=120",
            "evaluate.every=0",
            "evaluate.samples=2",
            "run.name=two",
            experiment="cartpole_ppo",
        )
    )
    rows = read_metrics(tmp_path / "two")
    assert [row["train/seen"] for row in rows] == [16, *[32] * 9]
    scores = [row["reward/score"] for row in rows]
    assert np.mean(scores[-3:]) > 2 * scores[0], scores


PLAN = {
    "pools": [
        {"stages": ["rollout"], "devices": {"local": 1}},
        {"stages": ["reward", "inference", "train"], "devices": {"local": 1}},
    ],
}


def test_earlier_samples_are_the_same_in_pools(compose: Compose, tmp_path: Path) -> None:
    """Those in memory are of this iteration alone."""
    small = [f"++flow={OWN}:replayed", "iterations=3", "rollout.batch_size=4", "rollout.horizon=16"]
    small += ["evaluate.samples=2", "evaluate.every=0"]
    found = {}
    for name, more in (("one", {}), ("two", {"plan": PLAN, "cluster": {"launcher": "local"}})):
        words = [*small, f"run.name={name}"]
        values = own(compose, {"name": f"{OWN}:TwoTimescales"}, *words, experiment="cartpole_ppo")
        run_experiment({**values, **more})
        files = sorted((tmp_path / name).glob("it/*/train/*/checkpoint/*.safetensors"))
        found[name] = [file.read_bytes() for file in files]
    assert len(found["one"]) == 2
    assert found["one"] == found["two"]
