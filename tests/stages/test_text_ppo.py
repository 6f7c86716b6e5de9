"""PPO on text: a critic's values of tokens, through rollout, inference, training and sync."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.commands.experiment import run_experiment
from pipeline.metrics import read_metrics
from rlinf.algorithms.ppo import PPO, PPOConfig
from rlinf.data.batch import TrainingSample, build_step_batch
from rlinf.data.record import RecordId
from rlinf.data.trajectory import PolicyOutputs, StepRewards, Trajectory
from tests.pipeline.helpers import contents

Compose = Callable[..., dict[str, Any]]
SMALL = ["model.hidden=32", "model.layers=1", "model.heads=2", "model.kv_heads=1"]
SMALL += ["model.intermediate=64", "sft.max_steps=2", "sft.batch_size=8"]
SMALL += ["rollout.batch_size=16", "evaluate.every=0", "evaluate.samples=4", "reward=digits"]
SMALL += ["algorithm.critic_warmup=1", "algorithm.minibatches=2", "trainer.cpu_threads=1"]
SMALL += ["optimizer.lr_decay_iterations=3", "checkpoint.keep_last=5"]
POOLS = {
    "pools": [
        {"stages": ["rollout"], "devices": {"local": 1}},
        {"stages": ["reward", "inference", "train"], "devices": {"local": 1}},
    ],
}


def values(compose: Compose, name: str, iterations: int, **more: Any) -> dict[str, Any]:
    words = [*SMALL, f"iterations={iterations}", f"run.name={name}"]
    return compose(*words, experiment="arithmetic_ppo") | more


def published(run: Path, iteration: int) -> dict[str, Tensor]:
    """The policy's and the critic's weights after an iteration, by the name of their file."""
    (folder,) = run.glob(f"it/{iteration:04d}/sync/*/weights")
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        tensors = load_file(path)
        kind = path.parent.name if path.parent != folder else "policy"
        found[kind] = torch.cat([tensors[name].flatten() for name in sorted(tensors)])
    return found


@pytest.mark.usefixtures("undrawn")
def test_a_run_is_the_same_in_pools_and_when_it_is_taken_up(
    compose: Compose, tmp_path: Path
) -> None:
    """And the value alone learns in the iterations of its warm-up."""
    run_experiment(values(compose, "whole", 3))
    run = tmp_path / "whole"
    run_experiment(values(compose, "parts", 1))
    run_experiment(values(compose, "parts", 3))
    local = {"plan": POOLS, "cluster": {"launcher": "local"}}
    run_experiment(values(compose, "pools", 3, **local))
    for other in ("parts", "pools"):
        for iteration in range(3):
            one, two = published(run, iteration), published(tmp_path / other, iteration)
            assert one.keys() == two.keys() == {"policy", "critic"}
            assert all(torch.equal(one[name], two[name]) for name in one), (other, iteration)
    assert contents(run) == contents(tmp_path / "pools")
    (start,) = run.glob("sft/*/weights")
    assert not (start / "critic").exists()
    tensors = load_file(start / "model.safetensors")
    begun = torch.cat([tensors[name].flatten() for name in sorted(tensors)])
    first, second, third = (published(run, iteration) for iteration in range(3))
    assert torch.equal(first["policy"], begun)
    assert not torch.equal(second["policy"], begun)
    assert not torch.equal(second["critic"], first["critic"])
    assert not torch.equal(third["critic"], second["critic"])
    rows = read_metrics(run)
    assert all(row["train/value_loss"] > 0 for row in rows)
    assert rows[0]["train/explained_variance"] == pytest.approx(0, abs=1e-6)
    assert rows[2]["train/explained_variance"] != 0


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_last_token_that_counts_is_the_end_of_a_response(reason: str) -> None:
    """Cut off or not: what a grader says of the text is all that comes, and nothing is valued
    beyond; tokens that others said take no time."""
    algorithm = PPO(PPOConfig(gamma=0.5, gae_lambda=0.8, whiten_advantages=False))
    samples = []
    for number, mask in enumerate(([1, 0, 1, 0], [1, 1, 1, 1])):
        worth = np.zeros(4, np.float32)
        worth[np.flatnonzero(mask)[-1]] = 1
        result = np.array([0.25, 9.0, 0.5, 0.75], np.float32)
        identity = RecordId(0, number)
        trajectory = Trajectory(
            identity=identity,
            actions=np.arange(4),
            logprobs=np.zeros(4, np.float32),
            mask=np.array(mask),
            group=number,
            policy_version=0,
            stop_reason=reason,
        )
        samples.append(
            TrainingSample(
                trajectory,
                StepRewards(identity=identity, rewards=worth),
                PolicyOutputs(identity=identity, values=result, logprobs=np.zeros(4, np.float32)),
            )
        )
    advantages, returns = algorithm.compute_advantages(build_step_batch(samples))
    last = 1 - 0.5
    first = 0.5 * 0.5 - 0.25
    torch.testing.assert_close(advantages[0], torch.tensor([first + 0.4 * last, 0, last, 0]))
    torch.testing.assert_close(returns[0, 2], torch.tensor(1.0))
    end = 1 - 0.75
    torch.testing.assert_close(advantages[1, 3:], torch.tensor([end]))
    torch.testing.assert_close(advantages[1, 2], torch.tensor(0.5 * 0.75 - 0.5 + 0.4 * end))
