"""What an optimizer keeps of parameters, and how fast each group of them learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlinf.channels.world import World
from rlinf.config import OptimizerSection
from rlinf.data.packing import Span
from rlinf.models.base import StepOutputs
from rlinf.models.mlp import MLPConfig, MLPPolicy
from rlinf.trainers.base import Loss, of_steps
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from tests.rlinf.trainers.test_spans import folder, samples

__all__ = ["folder"]


def trainer(folder: Path) -> FSDPTrainer:
    policy = MLPPolicy.load(folder, MLPConfig())
    return FSDPTrainer(policy, FSDPConfig(device="cpu"), OptimizerSection(), World())


def of_the_policy(outputs: StepOutputs, spans: list[Span]) -> Loss:
    return outputs.logprobs.sum() / 50, {}


def of_both(outputs: StepOutputs, spans: list[Span]) -> Loss:
    assert outputs.values is not None
    return (outputs.logprobs.sum() + outputs.values.sum()) / 50, {}


def test_parameters_that_no_loss_depends_on_are_saved_and_loaded(
    folder: Path, tmp_path: Path
) -> None:
    """As those of a value function are where the algorithm has none."""
    records = [sample.trajectory for sample in samples()]
    made, again = trainer(folder), trainer(folder)
    made.step(records, of_steps(of_the_policy), lr=1e-3)
    made.save(tmp_path / "checkpoint")
    again.load(tmp_path / "checkpoint")
    for each in (made, again):
        each.step(records, of_steps(of_both), lr=1e-3)
    one, other = made.snapshot(), again.snapshot()
    assert one.keys() == other.keys()
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())


def test_a_group_follows_the_schedule_from_its_own_peak() -> None:
    settings = OptimizerSection(
        lr=1e-3, group_lr={"value": 1e-2}, schedule="linear", lr_warmup=2, lr_final=0.5
    )
    usual = [settings.rate(i, 8, "policy") for i in range(10)]
    assert usual == [settings.rate(i, 8) for i in range(10)]
    assert [settings.rate(i, 8, "value") for i in range(10)] == pytest.approx(
        [10 * rate for rate in usual]
    )
    assert usual[-1] == pytest.approx(5e-4)
