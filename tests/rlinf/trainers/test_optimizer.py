"""What an optimizer keeps of parameters, and how fast each group of them learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.load_balancing import StepSpan
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from rlinf.models.base import StepOutputs
from rlinf.trainers.base import Loss, loss_from_steps
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from tests.rlinf.trainers.test_spans import folder, samples

__all__ = ["folder"]


def trainer(folder: Path, settings: OptimizerSection | None = None) -> FSDPTrainer:
    policy = MLPPolicy.load(folder, MLPConfig())
    return FSDPTrainer(
        policy, FSDPConfig(device="cpu"), settings or OptimizerSection(), ProcessGroupInfo()
    )


def of_the_policy(outputs: StepOutputs, spans: list[StepSpan]) -> Loss:
    return outputs.logprobs.sum() / 50, {}


def of_both(outputs: StepOutputs, spans: list[StepSpan]) -> Loss:
    assert outputs.values is not None
    return (outputs.logprobs.sum() + outputs.values.sum()) / 50, {}


def test_parameters_that_no_loss_depends_on_are_saved_and_loaded(
    folder: Path, tmp_path: Path
) -> None:
    """As those of a value function are where the algorithm has none."""
    records = [sample.trajectory for sample in samples()]
    made, again = trainer(folder), trainer(folder)
    made.step(records, loss_from_steps(of_the_policy), lr=1e-3)
    made.save(tmp_path / "checkpoint")
    again.load(tmp_path / "checkpoint")
    for each in (made, again):
        each.step(records, loss_from_steps(of_both), lr=1e-3)
    one, other = made.snapshot(), again.snapshot()
    assert one.keys() == other.keys()
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())


def test_a_group_follows_the_schedule_from_its_own_peak() -> None:
    settings = OptimizerSection(
        lr=1e-3,
        group_lr={"value": 1e-2},
        lr_scheduler_type="linear",
        lr_warmup_iterations=2,
        min_lr_ratio=0.5,
    )
    usual = [settings.learning_rate(i, 8, "policy") for i in range(10)]
    assert usual == [settings.learning_rate(i, 8) for i in range(10)]
    assert [settings.learning_rate(i, 8, "value") for i in range(10)] == pytest.approx(
        [10 * rate for rate in usual]
    )
    assert usual[-1] == pytest.approx(5e-4)


def test_groups_may_be_clipped_by_themselves(folder: Path) -> None:
    """A large error of the value takes nothing from the policy's step then."""
    records = [sample.trajectory for sample in samples()]

    def steep(outputs: StepOutputs, spans: list[StepSpan]) -> Loss:
        assert outputs.values is not None
        return outputs.logprobs.sum() / 50 + 1000 * outputs.values.sum(), {}

    def moved(**clips: Any) -> tuple[dict[str, float], float]:
        """How far the weights of each group went, by a step of rate 1, and what was reported."""
        made = trainer(folder, OptimizerSection(name="sgd", betas=(0.0, 0.0), **clips))
        before = {name: tensor.clone() for name, tensor in made.full_state_dict().items()}
        metrics = made.step(records, loss_from_steps(steep), lr=1.0)
        squares = {"policy": 0.0, "value": 0.0}
        for name, tensor in made.full_state_dict().items():
            squares[made.policy.parameter_group(name)] += float(
                (tensor - before[name]).square().sum()
            )
        return {group: square**0.5 for group, square in squares.items()}, metrics["grad_norm"]

    free, whole = moved(clip_grad=1e9)
    joint, _ = moved(clip_grad=0.1)
    apart, norm = moved(clip_grad=0.1, group_clip_grad={"value": 0.5})
    assert joint["policy"] < free["policy"] / 100
    assert apart["policy"] == pytest.approx(min(0.1, free["policy"]), rel=1e-4)
    assert apart["value"] == pytest.approx(0.5, rel=1e-4)
    assert norm == pytest.approx(whole, rel=1e-6)
    assert moved(clip_grad=0.1, group_clip_grad={"value": 0.1, "policy": 1e9})[0] == pytest.approx(
        {"policy": free["policy"], "value": 0.1}, rel=1e-4
    )
