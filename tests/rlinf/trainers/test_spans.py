"""Trajectories of a stepwise policy are cut where they exceed a micro-batch: the same update."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf.algorithms.learner import Learner
from rlinf.algorithms.ppo import PPO, PPOConfig
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.batch import TrainingSample
from rlinf.data.load_balancing import StepSpan
from rlinf.data.record import RecordId
from rlinf.data.trajectory import PolicyOutputs, StepRewards, Trajectory
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from tests.rlinf.trainers.ranks import run_ranks

LR = 1e-3
SPEC = {"observation": 3, "action": {"kind": "box", "size": 2}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    MLPPolicy.create(MLPConfig(hidden=(16,)), SPEC, 0, path)
    return path


def trainer(
    folder: Path, budget: int, world: ProcessGroupInfo | None = None, threads: int = 1
) -> FSDPTrainer:
    return FSDPTrainer(
        MLPPolicy.load(folder, MLPConfig()),
        FSDPConfig(max_tokens_per_microbatch=budget, device="cpu", cpu_threads=threads),
        OptimizerSection(lr=LR, clip_grad=0.5),
        world or ProcessGroupInfo(),
    )


def samples() -> list[TrainingSample]:
    """Of very unlike lengths; some steps do not count."""
    random = np.random.default_rng(0)
    found = []
    for number, length in enumerate([1, 40, 3, 17, 8]):
        last = np.arange(length) == length - 1
        mask = (random.random(length) < 0.8) | last

        def column(*shape: int, length: int = length) -> Any:
            return random.normal(size=(length, *shape)).astype(np.float32)

        identity = RecordId(0, number)
        trajectory = Trajectory(
            identity=identity,
            observations=column(3),
            actions=column(2),
            logprobs=column() - 2,
            values=column(),
            terminated=last.astype(np.float32),
            mask=mask.astype(np.float32),
            group=number,
            policy_version=0,
        )
        reward = StepRewards(identity=identity, rewards=column() * mask)
        found.append(TrainingSample(trajectory, reward, PolicyOutputs(identity=identity)))
    return found


@dataclass
class Watched:
    """A trainer that notes what is evaluated at once."""

    trainer: FSDPTrainer
    seen: list[list[StepSpan]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    def accumulate(self, records: Any, loss: Any, **how: Any) -> None:
        def noted(policy: Any, inputs: Any, spans: list[StepSpan]) -> Any:
            self.seen.append(spans)
            return loss(policy, inputs, spans)

        self.trainer.accumulate(records, noted, **how)


def updated(made: FSDPTrainer) -> tuple[dict[str, Tensor], dict[str, float], list[list[StepSpan]]]:
    """Weights and metrics after PPO on the samples, and what was evaluated at once."""
    watched: Any = Watched(made, [])
    learner = Learner(watched, {"policy": LR, "value": LR}, temperature=0.9)
    PPO(PPOConfig(epochs=2, minibatches=2, entropy_coeff=0.01)).update(learner, [samples()])
    weights = {name: tensor.clone() for name, tensor in made.full_state_dict().items()}
    return weights, learner.metrics, watched.seen


@pytest.mark.parametrize(("budget", "threads"), [(1, 1), (7, 1), (16, 2)])
def test_the_update_is_that_of_whole_trajectories(folder: Path, budget: int, threads: int) -> None:
    whole, metrics, seen = updated(trainer(folder, 10_000))
    assert all(span.start == 0 for spans in seen for span in spans)
    weights, found, seen = updated(trainer(folder, budget, threads=threads))
    sizes = [len(spans) * max(span.stop - span.start for span in spans) for spans in seen]
    assert max(sizes) <= budget
    assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    for name, tensor in whole.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=LR / 50, msg=name)


def test_what_is_said_of_parts_is_that_of_the_whole(folder: Path) -> None:
    records = [sample.trajectory for sample in samples()]
    whole, cut = (trainer(folder, budget).forward(records, 1.0) for budget in (10_000, 6))
    assert [row for row, _ in cut] == list(range(len(records)))
    for (row, one), (_, other) in zip(whole, cut, strict=True):
        assert one.values is not None
        assert other.values is not None
        assert len(other.logprobs) == len(records[row])
        torch.testing.assert_close(other.logprobs, one.logprobs)
        torch.testing.assert_close(other.values, one.values)


RANKS = """
import sys
from pathlib import Path
import torch
from rlinf.channels.process_group import ProcessGroupInfo
from tests.rlinf.trainers.test_spans import samples, trainer, updated, LR

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
world = ProcessGroupInfo(rank, 2, rendezvous_file=folder.parent / "channels" / "group-spans.json")
both = trainer(folder, 6, world)
records = [sample.trajectory for sample in samples()]
alone = trainer(folder, 10_000)
right = dict(alone.forward(records, 1.0))
for row, said in both.forward(records, 1.0):
    torch.testing.assert_close(said.logprobs, right[row].logprobs)
weights, metrics, seen = updated(both)
whole, right, _ = updated(alone)
assert any(span.start for spans in seen for span in spans)
for name, tensor in whole.items():
    torch.testing.assert_close(weights[name], tensor, rtol=0, atol=LR / 50)
print("ok")
"""


def test_ranks_cut_alike(folder: Path) -> None:
    (folder.parent / "channels").mkdir(exist_ok=True)
    run_ranks(RANKS, 2, folder)
