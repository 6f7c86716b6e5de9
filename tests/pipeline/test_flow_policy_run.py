"""PPO on a flow-matching policy, through every stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.commands.experiment import run_experiment
from pipeline.commands.results import RunResults
from pipeline.metrics import read_metrics
from tests.pipeline.helpers import contents

Compose = Callable[..., dict[str, Any]]
SMALL = ["rollout.batch_size=8", "rollout.horizon=24", "algorithm.epochs=2", "iterations=2"]
SMALL += [
    "evaluate.every=0",
    "evaluate.samples=2",
    "evaluate.horizon=20",
    "model.denoising_steps=3",
]
POOLS = {
    "pools": [
        {"stages": ["rollout"], "devices": {"local": 1}},
        {"stages": ["reward", "inference", "train"], "devices": {"local": 1}},
    ],
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("noise", ["sde", "learned"])
def test_chains_go_from_the_rollout_to_the_trainer(
    compose: Compose, tmp_path: Path, noise: str
) -> None:
    words = [*SMALL, f"model.noise_method={noise}", "algorithm.entropy_coeff=0.01"]
    run_experiment(compose(*words, "run.name=alone", experiment="inverted_pendulum_flow"))
    run = RunResults.open(tmp_path / "alone")
    rows = read_metrics(run.folder)
    # Recomputed along the chain, log-probabilities are those that were drawn with.
    assert all(row["train/rollout_logprob_diff"] < 1e-4 for row in rows)
    sample = next(iter(run.trajectories(0)))
    chain = sample.policy_columns["chain"]
    assert chain.shape == (24, 4, 1)
    np.testing.assert_array_equal(sample.actions, chain[:, -1])
    before, after = run.weights(0), run.weights(2)
    moved = {name.partition(".")[0] for name in before if not before[name].equal(after[name])}
    assert moved == {"velocity", "value"} | ({"spread"} if noise == "learned" else set())
    if noise == "sde":
        pools = compose(*words, "run.name=pools", experiment="inverted_pendulum_flow")
        run_experiment(pools | {"plan": POOLS, "cluster": {"launcher": "local"}})
        assert contents(run.folder) == contents(tmp_path / "pools")
