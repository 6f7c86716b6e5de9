"""Weights of steps by how likely the trained policy is to take what the engine's took."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given

from rlinf.algorithms.group_relative import GRPO, GRPOConfig
from rlinf.algorithms.importance_sampling import (
    MAX_RATIO,
    RolloutISLevel,
    RolloutISMode,
    rollout_is_weights,
    rollout_mismatch_metrics,
    rollout_mismatch_sums,
    rollout_ratio,
)
from tests.contracts.test_algorithm import Update, alike, batch_of, outputs_of, seeds

levels = pytest.mark.parametrize("level", get_args(RolloutISLevel))
ways = pytest.mark.parametrize("outside", get_args(RolloutISMode))


def test_steps_of_an_older_policy_weigh_what_makes_them_unbiased() -> None:
    """The mean over its choices, so weighted, is that of the policy before the update."""
    older, old = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    gain = torch.tensor([1.0, -2.0, 3.0])
    ratio = rollout_ratio(old.log(), older.log(), torch.ones(3), "token")
    weights, capped = rollout_is_weights(ratio, 10, "truncate")
    torch.testing.assert_close((older * weights * gain).sum(), (old * gain).sum())
    assert not capped.any()
    weights, capped = rollout_is_weights(ratio, 1.6, "truncate")
    torch.testing.assert_close(weights, torch.tensor([5 / 7, 1.5, 1.6]))
    assert capped.tolist() == [0, 0, 1]


def test_ratios_beyond_the_cap_on_either_side_are_left_out() -> None:
    weights, out = rollout_is_weights(torch.tensor([0.4, 0.5, 1.0, 2.0, 2.1]), 2.0, "mask")
    assert weights.tolist() == [0, 0.5, 1.0, 2.0, 0]
    assert out.tolist() == [1, 0, 0, 0, 1]


def test_a_row_has_the_product_or_the_geometric_mean_of_its_steps() -> None:
    old = torch.tensor([[2.0, 3.0, 7.0], [0.5, 1.0, 1.0]]).log()
    rollout, mask = torch.zeros(2, 3), torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    found = {
        level: rollout_ratio(old, rollout, mask, level) * mask for level in get_args(RolloutISLevel)
    }
    torch.testing.assert_close(found["token"], torch.tensor([[2, 3, 0], [0.5, 1, 1]]))
    torch.testing.assert_close(found["sequence"], torch.tensor([[6, 6, 0], [0.5, 0.5, 0.5]]))
    mean, other = math.sqrt(6), 0.5 ** (1 / 3)
    torch.testing.assert_close(
        found["geometric"], torch.tensor([[mean, mean, 0], [other, other, other]])
    )


@levels
@ways
@given(seed=seeds)
def test_where_engine_and_trainer_agree_nothing_changes_by_a_bit(
    level: RolloutISLevel, outside: RolloutISMode, seed: int
) -> None:
    batch = batch_of(seed)
    batch = replace(batch, rollout_logprobs=batch.old_logprobs)
    weighed = GRPO(
        GRPOConfig(
            rollout_is_threshold=2.0,
            rollout_is_level=level,
            rollout_is_mode=outside,
        )
    )
    found = []
    for algorithm in (GRPO(GRPOConfig()), weighed):
        outputs = outputs_of(batch, seed)
        loss, metrics = algorithm.total_loss(outputs, algorithm.with_advantages(batch), batch.mask)
        (gradient,) = torch.autograd.grad(loss, outputs.logprobs)
        found.append((loss, gradient, metrics))
    (plain, own, values), (other, its, more) = found
    assert torch.equal(plain, other)
    assert torch.equal(own, its)
    assert all(torch.equal(value, more[name]) for name, value in values.items())
    assert more["rollout_is_clip_ratio"] == 0


def test_the_gap_is_of_steps_that_both_chose_with_equal_weights() -> None:
    batch = batch_of(0, groups=1, size=2, longest=2)
    ours, theirs = torch.tensor([[-1.0, -2.0], [-1.0, -9.0]]), torch.tensor([[-1.5, -2.0], [0, 0]])
    batch = replace(
        batch,
        mask=torch.ones(2, 2),
        rollout_logprobs=theirs,
        on_policy_mask=torch.tensor([[1.0, 1.0], [0, 0]]),
    )
    totals = {name: float(value) for name, value in rollout_mismatch_sums(ours, batch).items()}
    assert totals[MAX_RATIO] == pytest.approx(math.exp(0.5))
    assert rollout_mismatch_metrics(totals) == pytest.approx(
        {
            "rollout_logprob_diff": 0.25,
            "rollout_ratio_mean": (math.exp(0.5) + 1) / 2,
            "rollout_kl": (math.exp(0.5) - 1.5) / 2,
        }
    )
    assert rollout_mismatch_sums(ours, replace(batch, on_policy_mask=None)) == {}
    assert rollout_mismatch_metrics({}) == {}


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_the_weight_of_an_episode_does_not_depend_on_the_token_budget(
    level: RolloutISLevel, tmp_path: Path
) -> None:
    """Of a policy whose steps stand alone, an episode is evaluated in parts elsewhere."""
    update = Update("ppo", tmp_path, rollout_is_threshold=1.5, rollout_is_level=level)
    random = np.random.default_rng(0)
    for sample in update.samples:
        noise = random.normal(size=len(sample.trajectory)).astype(np.float32)
        sample.trajectory.logprobs = sample.trajectory.logprobs + noise / 20
    wide = update.weights([update.samples])
    create = update.trainer

    def limited() -> Any:
        trainer = create()
        limit = {"max_tokens_per_microbatch": 2}
        trainer.config = trainer.config.model_copy(update=limit)
        return trainer

    update.trainer = limited  # type: ignore[method-assign]
    alike(wide, update.weights([update.samples]), 1e-2 / 50)


@pytest.mark.parametrize("gap", [-1e4, 1e4])
@levels
@ways
def test_an_outlier_weighs_a_finite_amount(
    gap: float, level: RolloutISLevel, outside: RolloutISMode
) -> None:
    ratio = rollout_ratio(torch.tensor([[gap]]), torch.zeros(1, 1), torch.ones(1, 1), level)
    weight, _ = rollout_is_weights(ratio, 2.0, outside)
    assert 0 <= float(weight) <= 2
