"""PPO on rollouts that are updates behind: its loss, its proximal policy, its bound."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.algorithms.importance_sampling import (
    batch_at_level,
    flatten_to_level,
    interpolate_old_logprobs,
    old_logprob_interpolation,
)
from rlinf.algorithms.learner import Learner
from rlinf.algorithms.ppo import PPO, AsyncPPO, AsyncPPOConfig, PPOConfig
from rlinf.data.batch import StepBatch
from rlinf.errors import InputError
from rlinf.models.base import StepOutputs
from tests.contracts.test_algorithm import Update, alike, batch_of, outputs_of, seeds

PLAIN: dict[str, Any] = {"value_loss_coef": 0.0}


def by_the_formula(
    batch: StepBatch, ours: np.ndarray, low: float, high: float, cap: float, outside: str
) -> tuple[float, np.ndarray]:
    """The loss and its gradient by each log-probability, step by step (arXiv 2505.24298, eq. 5)."""
    gradient = np.zeros(ours.shape)
    loss = 0.0
    for row in range(ours.shape[0]):
        for step in range(ours.shape[1]):
            if not batch.mask[row, step]:
                continue
            proximal = float(batch.old_logprobs[row, step])
            behaved = float(batch.require("rollout_logprobs")[row, step])
            advantage = float(batch.require("advantages")[row, step])
            weight = math.exp(proximal - behaved)
            if outside == "mask":
                weight = weight if 1 / cap <= weight <= cap else 0.0
            else:
                weight = min(weight, cap)
            ratio = math.exp(ours[row, step] - proximal)
            near = min(max(ratio, 1 - low), 1 + high)
            loss -= weight * min(ratio * advantage, near * advantage)
            if ratio * advantage <= near * advantage:
                gradient[row, step] = -weight * ratio * advantage
    return loss, gradient


@pytest.mark.parametrize("outside", ["mask", "truncate"])
@given(seed=seeds, cap=st.floats(1.01, 3))
def test_the_loss_is_the_decoupled_objective(outside: Any, seed: int, cap: float) -> None:
    settings = {"rollout_is_threshold": cap, "rollout_is_mode": outside}
    algorithm = AsyncPPO(
        AsyncPPOConfig(clip_ratio_low=0.1, clip_ratio_high=0.15, **settings, **PLAIN)
    )
    batch, random = batch_of(seed), torch.Generator().manual_seed(seed)
    far = batch.old_logprobs + 0.5 * torch.randn(batch.mask.shape, generator=random)
    batch = algorithm.with_advantages(replace(batch, rollout_logprobs=far))
    outputs = outputs_of(batch, seed)
    loss, metrics = algorithm.total_loss(outputs, batch, batch.mask)
    (gradient,) = torch.autograd.grad(loss, outputs.logprobs)
    ours = outputs.logprobs.detach().double().numpy()
    wanted, by_step = by_the_formula(batch, ours, 0.1, 0.15, cap, outside)
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    np.testing.assert_allclose(gradient.numpy(), by_step, rtol=1e-4, atol=1e-5)
    assert 0 <= float(metrics["rollout_is_clip_ratio"]) <= float(batch.mask.sum())


def test_the_proximal_policy_lies_between_by_versions() -> None:
    """Exact where log-probabilities go straight from the version that collected to the next."""
    slope, start = torch.tensor([[0.3, -0.2, 0.1]]), torch.tensor([[-1.0, -2.0, -0.5]])
    lag = torch.tensor([[2.0, 1.0, 0.0]])
    proximal = start + slope * lag
    for done in (0.25, 0.5, 0.75):
        training = start + slope * (lag + done)
        found = interpolate_old_logprobs(training, start, old_logprob_interpolation(lag, done))
        torch.testing.assert_close(found, proximal)
    # Before the first step the policy in training is the proximal one, whatever the course.
    torch.testing.assert_close(
        interpolate_old_logprobs(proximal + 0.1, start, old_logprob_interpolation(lag, 0)),
        proximal + 0.1,
    )
    trained = (start + 1).requires_grad_()
    halfway = old_logprob_interpolation(lag, 0.5)
    assert not interpolate_old_logprobs(trained, start, halfway).requires_grad


def lagging(update: Update, versions: int) -> None:
    """The samples as those of weights so many versions before version 3."""
    for sample in update.samples:
        sample.trajectory.policy_version = 3 - versions


def test_each_choice_of_a_step_has_the_place_of_the_step() -> None:
    """Where log-probabilities are of choices ``[N, T, K]``, versions are of steps."""
    batch = batch_of(0, groups=1, size=2, longest=3)
    old = batch.old_logprobs[..., None].expand(-1, -1, 2).contiguous()
    place = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    batch = batch_at_level(
        replace(batch, old_logprobs=old, rollout_logprobs=old, old_logprob_interpolation=place),
        "token",
    )
    found_outputs = StepOutputs(old + 1)
    outputs, units, _ = flatten_to_level(found_outputs, batch, batch.require("loss_mask"), "token")
    theirs = units.require("rollout_logprobs")
    found = (
        interpolate_old_logprobs(
            outputs.logprobs, theirs, units.require("old_logprob_interpolation")
        )
        - theirs
    )
    torch.testing.assert_close(found, place.repeat_interleave(2, 1))


def learner_of(update: Update, staleness: int = 1) -> Learner:
    """That of version 3 of the weights."""
    trainer = update.trainer()
    rates = dict.fromkeys(trainer.policy.parameter_groups, 1e-2)
    return Learner(trainer, rates, iteration=3, max_staleness=staleness)


@pytest.mark.parametrize("steps", [1, 4])
def test_an_interpolated_update_needs_no_pass_of_the_policy_before(
    steps: int, tmp_path: Path
) -> None:
    """In its first step it is the recomputed one; after it, near to that."""
    found = []
    for way in ("recompute", "interpolate"):
        folder = tmp_path / way
        folder.mkdir()
        update = Update("async_ppo", folder, old_logprobs=way, minibatches=steps)
        lagging(update, 1)
        random = np.random.default_rng(0)
        for sample in update.samples:
            noise = random.normal(size=len(sample.trajectory)).astype(np.float32) / 20
            assert sample.inference is not None
            sample.trajectory.logprobs = sample.trajectory.logprobs + noise
            sample.trajectory.values = sample.inference.values * 0
        samples = update.samples
        if way == "interpolate":
            samples = [sample._replace(inference=None) for sample in samples]
        assert update.algorithm.needs_old_logprobs is (way == "recompute" and steps > 1)
        learner = learner_of(update)
        update.algorithm.update(learner, [samples])
        found.append((dict(learner.policy.module.state_dict()), learner.metrics))
    (exact, values), (near, metrics) = found
    alike(exact, near, 0 if steps == 1 else 2e-2)
    for name in ("rollout_is_mean", "policy_loss", "staleness"):
        assert metrics[name] == pytest.approx(values[name], abs=2e-2)
    assert metrics["staleness"] == 1


@pytest.mark.parametrize(("versions", "word"), [(2, "version 1"), (-1, "version 4")])
def test_steps_beyond_the_bound_are_refused(versions: int, word: str, tmp_path: Path) -> None:
    update = Update("async_ppo", tmp_path)
    lagging(update, versions)
    learner = learner_of(update)
    with pytest.raises(InputError, match=f"chosen by {word} .*rollout.staleness allows 1"):
        update.algorithm.update(learner, [update.samples])
    assert not learner.num_updates
    if versions > 0:
        learner = learner_of(update, staleness=versions)
        update.algorithm.update(learner, [update.samples])
        assert learner.num_updates


def test_where_all_is_fresh_it_is_ppo() -> None:
    batch = batch_of(7)
    batch = replace(batch, rollout_logprobs=batch.old_logprobs)
    algorithm = AsyncPPO(AsyncPPOConfig())
    batch = algorithm.with_advantages(batch)
    outputs = outputs_of(batch, 7)
    ours, _ = algorithm.total_loss(outputs, batch, batch.mask)
    plain, _ = PPO(PPOConfig()).total_loss(outputs, batch, batch.mask)
    assert torch.equal(ours, plain)
