"""Samples whose loss has no gradient are not computed, and weigh as if they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf.algorithms import policy_gradient as algorithms_update
from rlinf.algorithms.group_relative import GRPO, GRPOConfig
from rlinf.algorithms.learner import Learner
from rlinf.algorithms.losses import LossAggMode
from rlinf.algorithms.policy_gradient import nearest_power_of_two
from rlinf.data.batch import StepBatch, TrainingSample
from rlinf.data.trajectory import StepRewards
from rlinf.models.base import StepOutputs
from rlinf.trainers.base import Loss
from rlinf.trainers.fsdp import FSDPTrainer
from tests.rlinf.trainers.test_options import make
from tests.rlinf.trainers.test_threaded_data_parallel import folder, records, trainer

__all__ = ["folder"]
SCORES = [1, 1, 1, 0, 1, 1, 0, 0, 0, 1, 0, 1]
"""Of four groups of three: the first and the third teach nothing."""
IDLE = [0, 1, 2, 6, 7, 8]


class All(GRPO):
    """Computes every sample."""

    def zero_gradient_rows(self, batch: StepBatch) -> Tensor:
        return torch.zeros(len(batch), dtype=torch.bool)


def samples(scores: list[int]) -> list[TrainingSample]:
    found = []
    for i, (record, score) in enumerate(zip(records(len(scores)), scores, strict=True)):
        logprobs = np.full(len(record), -2.5, np.float32)
        rewards = np.zeros(len(record), np.float32)
        rewards[-1] = score
        found.append(
            TrainingSample(
                replace(record, logprobs=logprobs, group=i // 3, policy_version=0),
                StepRewards(identity=record.identity, rewards=rewards),
            )
        )
    return found


def update(
    folder: Path, algorithm: GRPO, scores: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[FSDPTrainer, dict[str, float], set[int]]:
    """The trainer after it, the metrics, and the samples that were computed."""
    made, seen = trainer(folder, 1), set[int]()
    every = samples(scores)
    numbers = {id(sample.trajectory): i for i, sample in enumerate(every)}
    accumulate = made.accumulate

    def noted(data: Any, *args: Any, **named: Any) -> None:
        seen.update(numbers[id(record)] for record in data)
        accumulate(data, *args, **named)

    monkeypatch.setattr(made, "accumulate", noted)
    learner = Learner(made, {"policy": 1e-3})
    algorithm.update(learner, [every])
    return made, learner.metrics, seen


@pytest.mark.parametrize("steps", [1, 2])
def test_samples_of_zero_advantage_are_not_computed_and_nothing_changes(
    folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GRPOConfig(epochs=steps, old_logprobs="rollout")
    one, mine, computed = update(folder, GRPO(config), SCORES, monkeypatch)
    other, theirs, every = update(folder, All(config), SCORES, monkeypatch)
    assert computed == every - set(IDLE)
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    # Adam's first step is the sign of the gradient: rounding may show where there is next to none.
    for (name, left), right in zip(
        one.full_state_dict().items(), other.full_state_dict().values(), strict=True
    ):
        assert float((left - right).abs().max()) <= 1e-3 / 50, name


def test_metrics_are_of_the_samples_that_are_computed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GRPOConfig(old_logprobs="rollout", loss_agg_mode="seq_mean_token_mean")
    _, mine, computed = update(folder, GRPO(config), SCORES, monkeypatch)
    some = samples(SCORES)
    made = trainer(folder, 1)
    outputs = dict(made.forward([sample.trajectory for sample in some], 1.0))
    gaps = []
    for row in computed:
        ratio = outputs[row].logprobs + 2.5
        gaps.append(float((ratio.exp() - 1 - ratio).mean()))
    assert mine["approx_kl"] == pytest.approx(float(np.mean(gaps)), rel=1e-4)


def test_a_batch_that_teaches_nothing_is_a_step_of_zero_gradient(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, metrics, computed = update(folder, GRPO(GRPOConfig()), [1] * 6, monkeypatch)
    assert len(computed) == 1
    assert metrics["grad_norm"] == 0
    before = trainer(folder, 1).full_state_dict()
    for name, tensor in made.full_state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("config", [GRPOConfig(entropy_coeff=0.1), GRPOConfig(kl_loss_coef=0.1)])
def test_with_other_terms_every_sample_is_computed(config: GRPOConfig) -> None:
    assert not GRPO(config).zero_gradient_rows(step_batch()).any()


def test_a_loss_of_ones_own_may_have_other_terms() -> None:
    class Own(GRPO):
        def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
            return outputs.logprobs.sum(), {}

    assert GRPO(GRPOConfig()).zero_gradient_rows(step_batch()).tolist() == [True, False]
    assert not Own(GRPOConfig()).zero_gradient_rows(step_batch()).any()


@pytest.mark.parametrize("aggregation", get_args(LossAggMode))
@pytest.mark.parametrize("streams", [True, False])
def test_what_float16_scales_is_a_mean(
    folder: Path, aggregation: LossAggMode, streams: bool
) -> None:
    """Of many samples in one micro-batch, which add up to far more than one has."""
    rest = {} if streams else {"epochs": 2, "old_logprobs": "rollout"}
    algorithm = GRPO(GRPOConfig.model_validate({"loss_agg_mode": aggregation, **rest}))
    assert algorithm.supports_streaming == streams
    every = samples([1, 0, 0] * 200)
    result = []
    for dtype in ("float32", "float16"):
        made = make(folder, param_dtype=dtype, max_tokens_per_microbatch=1 << 14)
        learner = Learner(made, {"policy": 1e-3})
        algorithm.update(learner, [every[:300], every[300:]])
        result.append(learner.metrics)
    right, half = result
    assert (half["skipped_steps"], half["loss_scale"]) == (0.0, 65536.0)
    assert half["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-2)


def test_sums_change_no_digit_whatever_they_are_divided_by(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for unit in (nearest_power_of_two, lambda weights: 1.0):
        monkeypatch.setattr(algorithms_update, "nearest_power_of_two", unit)
        made, metrics, _ = update(folder, GRPO(GRPOConfig()), SCORES, monkeypatch)
        found.append(({n: t.clone() for n, t in made.full_state_dict().items()}, metrics))
    (one, mine), (other, theirs) = found
    assert mine == theirs
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(("each", "unit"), [(0.0, 1.0), (0.1, 1.0), (1.0, 8.0), (1.5, 16.0)])
def test_units_are_powers_of_two_near_the_weight(each: float, unit: float) -> None:
    assert nearest_power_of_two(torch.full((2, 4), each)) == unit


def step_batch() -> StepBatch:
    """Two samples, the first without an advantage."""
    zero, one = torch.zeros(2, 3), torch.ones(2, 3)
    return StepBatch(
        mask=one,
        rewards=zero,
        groups=torch.tensor([0, 1]),
        old_logprobs=zero,
        terminated=zero,
        truncated=zero,
        bootstrap_values=zero,
        advantages=torch.tensor([[0.0] * 3, [1.0] * 3]),
    )
