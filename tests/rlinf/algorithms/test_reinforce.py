"""REINFORCE++ and RLOO: advantages written out, and a divergence taken from the reward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given

from rlinf.algorithms import algorithms
from rlinf.algorithms.advantages import group_means, leave_one_out_advantages
from rlinf.algorithms.group_relative import GRPO, RLOO, GRPOConfig, RLOOConfig
from rlinf.algorithms.losses import KLEstimator, kl_estimate
from rlinf.algorithms.policy_gradient import reference_kl, subtract_penalty
from rlinf.algorithms.reinforce_plus_plus import (
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
)
from rlinf.config import validate
from rlinf.data.batch import StepBatch
from rlinf.errors import ConfigError
from rlinf.models.base import StepOutputs
from tests.contracts.test_algorithm import Update, alike, batch_of, outputs_of, seeds

SCORES, GROUPS = torch.tensor([1.0, 2.0, 6.0, 4.0, 4.0, 9.0]), torch.tensor([7, 7, 7, 3, 3, 5])


def test_a_response_is_compared_with_the_others_of_its_group() -> None:
    found = leave_one_out_advantages(SCORES, GROUPS)
    torch.testing.assert_close(found, torch.tensor([1 - 4.0, 2 - 3.5, 6 - 1.5, 0, 0, 0]))
    assert not found[3:].any()
    torch.testing.assert_close(group_means(SCORES, GROUPS), torch.tensor([3.0, 3, 3, 4, 4, 9]))


@given(seed=seeds)
def test_every_token_of_a_response_shares_its_advantage(seed: int) -> None:
    batch = batch_of(seed)
    found, none = RLOO(RLOOConfig()).compute_advantages(batch)
    assert none is None
    scores = leave_one_out_advantages(batch.rewards.sum(-1), batch.groups)
    torch.testing.assert_close(found, scores[:, None] * batch.mask)


def text(rewards: list[list[float]], mask: list[list[float]], groups: list[int]) -> StepBatch:
    zeros = torch.zeros(len(rewards), len(rewards[0]))
    return StepBatch(
        mask=torch.tensor(mask),
        rewards=torch.tensor(rewards),
        groups=torch.tensor(groups),
        old_logprobs=zeros,
        terminated=zeros,
        truncated=zeros,
        bootstrap_values=zeros,
    )


def test_what_comes_after_a_token_is_normalised_over_the_batch() -> None:
    """Rows of unlike lengths, the reward of each on its own last token that counts."""
    batch = text(
        [[0, -1.0, 3.0], [1.0, 0, 0], [0, 0, 0]],
        [[1, 1, 1], [1, 0, 0], [1, 1, 0]],
        [0, 0, 1],
    )
    found = (
        ReinforcePlusPlus(ReinforcePlusPlusConfig()).with_advantages(batch).require("advantages")
    )
    to_come = torch.tensor([2.0, 2.0, 3.0, 1.0, 0.0, 0.0])
    want = (to_come - to_come.mean()) / to_come.std()
    torch.testing.assert_close(found[batch.mask > 0], want)
    assert not found[batch.mask == 0].any()
    plain, _ = ReinforcePlusPlus(ReinforcePlusPlusConfig()).compute_advantages(batch)
    torch.testing.assert_close(plain[batch.mask > 0], to_come)
    config = ReinforcePlusPlusConfig(gamma=0.5)
    slow = ReinforcePlusPlus(config).with_advantages(batch).require("advantages")
    to_come = torch.tensor([0.25, 0.5, 3.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(slow[batch.mask > 0], (to_come - to_come.mean()) / to_come.std())


def test_a_baseline_of_whole_rewards_goes_with_no_discount() -> None:
    config = ReinforcePlusPlusBaseline.Config
    assert validate(config, {}, "algorithm").gamma == 1
    with pytest.raises(ConfigError, match=r"algorithm\.gamma: 0\.9 discounts .*set it to 1"):
        validate(config, {"gamma": 0.9}, "algorithm")


def test_without_whitening_a_response_has_its_reward_for_its_advantage() -> None:
    batch = text(
        [[0, 0, 3.0], [1.0, 0, 0], [0, -2.0, 0]], [[1, 1, 1], [1, 0, 0], [1, 1, 0]], [0] * 3
    )
    algorithm = ReinforcePlusPlus(ReinforcePlusPlusConfig(whiten_advantages=False))
    found = algorithm.with_advantages(batch).require("advantages")
    assert found.tolist() == [[3, 3, 3], [1, 0, 0], [-2, -2, 0]]


def test_with_a_baseline_it_is_relative_to_the_group_first() -> None:
    batch = text([[0, 1.0], [3.0, 0], [0, 5.0]], [[1, 1], [1, 0], [1, 1]], [4, 4, 9])
    algorithm = ReinforcePlusPlusBaseline(ReinforcePlusPlusBaselineConfig())
    found = algorithm.with_advantages(batch).require("advantages")
    relative = torch.tensor([-1.0, -1.0, 1.0, 0.0, 0.0])
    want = (relative - relative.mean()) / relative.std()
    torch.testing.assert_close(found[batch.mask > 0], want)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_divergence_of_every_token_that_counts_is_taken_from_its_reward(
    kind: KLEstimator,
) -> None:
    batch = text([[0, 1.0]], [[1, 0]], [0])
    batch = replace(
        batch,
        old_logprobs=torch.tensor([[-1.0, -1.0]]),
        reference_logprobs=torch.tensor([[-1.5, -9.0]]),
        loss_mask=batch.mask,
    )
    want = kl_estimate(torch.tensor(-1.0), torch.tensor(-1.5), kind)
    torch.testing.assert_close(reference_kl(batch, kind), torch.tensor([[float(want), 0.0]]))
    tokens = replace(
        batch,
        old_logprobs=torch.tensor([[[-1.0, -1.0], [-1.0, -1.0]]]),
        reference_logprobs=torch.tensor([[[-1.5, -1.5], [-9.0, -9.0]]]),
        loss_mask=torch.tensor([[[1.0, 1.0], [0.0, 0.0]]]),
    )
    remains = subtract_penalty(tokens, 0.5 * reference_kl(tokens, kind)).rewards
    torch.testing.assert_close(remains, torch.tensor([[-float(want), 1.0]]))


@pytest.mark.parametrize("name", ["rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_an_update_learns_from_what_the_divergence_left_of_the_reward(
    name: str, tmp_path: Path
) -> None:
    """As it does where the rewards come that way; it needs what the inference stage says."""
    update = Update(name, tmp_path, kl_reward_coef=0.5)
    assert update.algorithm.needs_old_logprobs
    assert update.algorithm.needs_reference
    found = update.weights([update.samples])
    cls = algorithms.get(name)
    update.algorithm = cls(cls.Config())
    assert not update.algorithm.needs_old_logprobs
    assert not update.algorithm.needs_reference
    shaped = []
    for sample in update.samples:
        assert sample.reward is not None
        assert sample.inference is not None
        result = sample.inference
        rewards = sample.reward.rewards - 0.5 * (result.logprobs - result.reference_logprobs)
        shaped.append(sample._replace(reward=replace(sample.reward, rewards=rewards)))
    alike(found, update.weights([shaped]), 1e-2 / 50)
    plain = update.weights([update.samples])
    assert any(not torch.equal(plain[key], tensor) for key, tensor in found.items())


@given(seed=seeds)
def test_a_ratio_of_the_response_is_clipped_as_a_whole(seed: int) -> None:
    """One token far out takes nothing from the others' gradient unless the mean is far out."""
    batch = batch_of(seed)
    config = GRPOConfig(
        importance_sampling_level="sequence", clip_ratio_low=0.02, clip_ratio_high=0.02
    )
    algorithm = GRPO(config)
    advantages, _ = algorithm.compute_advantages(batch)
    batch = replace(batch, advantages=advantages)
    logprobs = outputs_of(batch, seed).logprobs
    loss, _ = algorithm.total_loss(StepOutputs(logprobs), batch, batch.mask)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    gap = ((logprobs - batch.old_logprobs) * batch.mask).sum(-1) / batch.mask.sum(-1)
    ratio = gap.detach().exp()[:, None].expand_as(logprobs)
    beyond = ((ratio > 1.02) & (advantages > 0)) | ((ratio < 0.98) & (advantages < 0))
    want = torch.where(beyond, 0.0, -ratio * advantages) * batch.mask
    torch.testing.assert_close(gradient, want, atol=1e-5, rtol=1e-4)
    assert algorithm.needs_full_sequences
