"""Log-probabilities of choices, actions and steps, against a loop over every one of them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf.algorithms.group_relative import GRPO, GRPOConfig
from rlinf.algorithms.importance_sampling import batch_at_level, mask_like
from rlinf.algorithms.losses import loss_agg_weights
from rlinf.algorithms.policy_gradient import reference_kl, subtract_penalty
from rlinf.algorithms.ppo import PPO, PPOConfig
from rlinf.data.batch import StepBatch
from rlinf.data.load_balancing import StepSpan
from rlinf.errors import InputError
from rlinf.models.base import StepOutputs

LEVELS = ("token", "action", "chunk")
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum")
SETTINGS: dict[str, Any] = {
    "clip_ratio_low": 0.1,
    "clip_ratio_high": 0.2,
    "entropy_coeff": 0.05,
    "kl_loss_coef": 0.1,
    "epochs": 2,
}
"""Of several steps, so that the old policy is another one."""


class Saying:
    """A policy that says what it is told to."""

    def __init__(self, outputs: StepOutputs) -> None:
        self.outputs = outputs

    def evaluate(self, inputs: Any, temperature: float, *, entropy: bool = False) -> StepOutputs:
        return self.outputs


def drawn(
    seed: int, choices: tuple[int, ...], *, masked: bool
) -> tuple[StepBatch, StepOutputs, np.ndarray]:
    """A batch, what a policy near the old one says of it, and which choices count."""
    random = np.random.default_rng(seed)
    steps = (4, 5)
    mask = random.random(steps) < 0.8
    choice_mask = random.random((*steps, *choices)) < (0.7 if masked else 2)
    # A step counts where any of its choices does, as rlinf.data.trajectory has it.
    mask &= choice_mask.reshape(*steps, -1).any(-1)
    old = random.normal(-1, 0.3, (*steps, *choices))

    def near(scale: float) -> Tensor:
        return torch.tensor(old + scale * random.normal(size=old.shape), dtype=torch.float32)

    batch = StepBatch(
        mask=torch.tensor(mask, dtype=torch.float32),
        rewards=torch.zeros(steps),
        groups=torch.zeros(4, dtype=torch.int64),
        old_logprobs=torch.tensor(old, dtype=torch.float32),
        terminated=torch.zeros(steps),
        truncated=torch.zeros(steps),
        bootstrap_values=torch.zeros(steps),
        reference_logprobs=near(0.2),
        choice_mask=torch.tensor(choice_mask, dtype=torch.float32) if masked else None,
        advantages=torch.tensor(random.normal(size=steps) * mask, dtype=torch.float32),
    )
    outputs = StepOutputs(near(0.1).requires_grad_(), near(0.5).abs())
    return batch, outputs, mask.reshape(*steps, *[1] * len(choices)) & choice_mask


def computed(
    batch: StepBatch, outputs: StepOutputs, level: Any, aggregation: Any, **more: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    algorithm = GRPO(
        GRPOConfig(logprob_level=level, loss_agg_mode=aggregation, **(SETTINGS | more))
    )
    reduced = batch_at_level(batch, level)
    units = reduced.require("loss_mask")
    weights, mass = loss_agg_weights(units.flatten(1), aggregation)
    policy: Any = Saying(outputs)
    loss, metrics = algorithm.micro_batch_loss(
        policy, {}, reduced, weights.view(units.shape) / max(1, mass), temperature=1.0, entropy=True
    )
    return loss, metrics


def by_hand(
    batch: StepBatch, outputs: StepOutputs, counts: np.ndarray, level: str, aggregation: str
) -> float:
    """The same loss, choice by choice."""
    columns = (outputs.logprobs, batch.old_logprobs, batch.reference_logprobs, outputs.entropy)
    new, old, reference, entropy = (c.detach().double().numpy() for c in columns if c is not None)
    gain = batch.require("advantages").double().numpy()
    kept = max(2, {"token": counts.ndim, "action": counts.ndim - 1, "chunk": 2}[level])
    samples = []
    for row in range(counts.shape[0]):
        losses = []
        for unit in product(*map(range, counts.shape[1:kept])):
            place = (row, *unit)
            here = counts[place]
            if not here.any():
                continue
            ours, before, start, spread = (
                float(np.sum(c[place], where=here)) for c in (new, old, reference, entropy)
            )
            ratio, a = math.exp(ours - before), gain[row, unit[0]]
            loss = -min(ratio * a, min(max(ratio, 0.9), 1.2) * a)
            gap = start - ours
            losses.append(loss - 0.05 * spread + 0.1 * min(10, math.exp(gap) - 1 - gap))
        if losses:
            samples.append(losses)
    if aggregation == "token_mean":
        return sum(map(sum, samples)) / max(1, sum(map(len, samples)))
    if aggregation == "seq_mean_token_mean":
        return sum(sum(s) / len(s) for s in samples) / max(1, len(samples))
    return sum(map(sum, samples)) / max(1, len(samples))


@given(
    seed=st.integers(0, 2**16),
    choices=st.one_of(
        st.just(()), st.tuples(st.integers(1, 4)), st.tuples(st.integers(1, 3), st.integers(1, 3))
    ),
    masked=st.booleans(),
    level=st.sampled_from(LEVELS),
    aggregation=st.sampled_from(AGGREGATIONS),
)
def test_the_loss_is_that_of_a_loop_over_choices(
    seed: int, choices: tuple[int, ...], masked: bool, level: str, aggregation: str
) -> None:
    batch, outputs, counts = drawn(seed, choices, masked=masked and bool(choices))
    loss, _ = computed(batch, outputs, level, aggregation)
    assert float(loss.detach()) == pytest.approx(
        by_hand(batch, outputs, counts, level, aggregation), rel=1e-4, abs=1e-5
    )
    (gradient,) = torch.autograd.grad(loss, outputs.logprobs)
    assert not gradient.numpy()[~counts].any()


@pytest.mark.parametrize("level", LEVELS)
def test_a_single_step_is_its_own_old_policy(level: Any) -> None:
    """The forward pass of the update gives what the inference stage would have computed."""
    batch, outputs, _ = drawn(3, (2, 2), masked=True)
    same = replace(batch, old_logprobs=outputs.logprobs.detach())
    losses = [
        computed(batch, outputs, level, "token_mean", epochs=1)[0],
        computed(same, outputs, level, "token_mean")[0],
    ]
    first, second = (torch.autograd.grad(loss, outputs.logprobs)[0] for loss in losses)
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-6)
    torch.testing.assert_close(first, second)
    assert first.abs().sum() > 0


@given(seed=st.integers(0, 2**16), level=st.sampled_from(LEVELS))
def test_one_choice_is_the_step(seed: int, level: str) -> None:
    batch, outputs, _ = drawn(seed, (), masked=False)
    single = {
        name: column[..., None]
        for name in ("old_logprobs", "reference_logprobs")
        if (column := getattr(batch, name)) is not None
    }
    assert outputs.entropy is not None
    found_outputs = StepOutputs(outputs.logprobs[..., None], outputs.entropy[..., None])
    for aggregation in AGGREGATIONS:
        plain, metrics = computed(batch, outputs, level, aggregation)
        other, found = computed(replace(batch, **single), found_outputs, level, aggregation)
        assert torch.equal(plain, other)
        assert all(torch.equal(found[name], value) for name, value in metrics.items())


@given(seed=st.integers(0, 2**16), level=st.sampled_from(LEVELS))
def test_the_loss_does_not_depend_on_the_cut(seed: int, level: str) -> None:
    batch, outputs, _ = drawn(seed, (2, 3), masked=True)
    whole, _ = computed(batch, outputs, level, "token_mean")
    rows = [0, 2]
    other = [row for row in range(4) if row not in rows]
    algorithm = GRPO(GRPOConfig(logprob_level=level, **SETTINGS))  # type: ignore[arg-type]
    reduced = batch_at_level(batch, level)  # type: ignore[arg-type]
    units = reduced.require("loss_mask")
    weights, mass = loss_agg_weights(units.flatten(1), "token_mean")
    weights = weights.view(units.shape) / max(1, mass)
    total = torch.zeros(())
    for index in (rows, other):
        assert outputs.entropy is not None
        policy: Any = Saying(StepOutputs(outputs.logprobs[index], outputs.entropy[index]))
        part = reduced.select_spans([StepSpan(row, 0, 5) for row in index], 5, torch.device("cpu"))
        loss, _ = algorithm.micro_batch_loss(
            policy, {}, part, weights[index], temperature=1.0, entropy=True
        )
        total = total + loss
    torch.testing.assert_close(total, whole)


def valued(seed: int) -> tuple[StepBatch, StepOutputs]:
    """Chunks of three actions of two numbers each, every action with a value and a reward."""
    random = np.random.default_rng(seed)
    shape = (4, 5, 3)
    done = random.integers(1, 4, shape[:2])
    mask = random.random(shape[:2]) < 0.8
    counts = (np.arange(3) < done[..., None]) & mask[..., None]
    ends = (random.random(shape[:2]) < 0.3) & mask

    def drawn_like(*size: int) -> Tensor:
        return torch.tensor(random.normal(size=size), dtype=torch.float32)

    rewards = drawn_like(*shape) * torch.tensor(counts)
    old = drawn_like(*shape, 2)
    batch = StepBatch(
        mask=torch.tensor(mask, dtype=torch.float32),
        rewards=rewards.sum(-1),
        action_rewards=rewards,
        groups=torch.zeros(4, dtype=torch.int64),
        old_logprobs=old,
        reference_logprobs=old + 0.2 * drawn_like(*shape, 2),
        terminated=torch.tensor(ends, dtype=torch.float32),
        truncated=torch.zeros(shape[:2]),
        bootstrap_values=torch.zeros(shape[:2]),
        values=drawn_like(*shape),
        choice_mask=torch.tensor(counts[..., None].repeat(2, -1), dtype=torch.float32),
    )
    outputs = StepOutputs(
        (old + 0.2 * drawn_like(*shape, 2)).requires_grad_(),
        drawn_like(*shape, 2).abs(),
        drawn_like(*shape).requires_grad_(),
    )
    return batch, outputs


def as_steps(batch: StepBatch, outputs: StepOutputs) -> tuple[StepBatch, StepOutputs]:
    """The same with every action as a step of its own, and an episode's end on the last of them."""
    assert batch.choice_mask is not None
    assert batch.action_rewards is not None
    assert outputs.entropy is not None
    assert outputs.values is not None

    def at_the_end(column: Tensor) -> Tensor:
        wide = torch.zeros_like(batch.require("action_rewards"))
        wide[..., -1] = column
        return wide.flatten(1)

    other = replace(
        batch,
        mask=(batch.choice_mask[..., 0] * batch.mask[..., None]).flatten(1),
        rewards=batch.action_rewards.flatten(1),
        action_rewards=None,
        choice_mask=batch.choice_mask.flatten(1, 2),
        **{n: batch.require(n).flatten(1, 2) for n in ("old_logprobs", "reference_logprobs")},
        **{
            n: at_the_end(batch.require(n)) for n in ("terminated", "truncated", "bootstrap_values")
        },
        values=batch.require("values").flatten(1),
    )
    columns = (
        outputs.logprobs.flatten(1, 2),
        outputs.entropy.flatten(1, 2),
        outputs.values.flatten(1),
    )
    return other, StepOutputs(*columns)


@given(
    seed=st.integers(0, 2**16),
    level=st.sampled_from(["token", "action"]),
    aggregation=st.sampled_from(AGGREGATIONS),
    kl_reward=st.sampled_from([0.0, 0.3]),
)
def test_actions_with_values_of_their_own_are_learned_from_as_steps_are(
    seed: int, level: Any, aggregation: Any, kl_reward: float
) -> None:
    """Advantages, whitening, what is taken from rewards, both losses and their gradients."""
    batch, found_outputs = valued(seed)
    config = PPOConfig(
        logprob_level=level,
        loss_agg_mode=aggregation,
        epochs=2,
        entropy_coeff=0.05,
        cliprange_value=0.5,
    )
    algorithm, found = PPO(config), []
    for columns, outputs in ((batch, found_outputs), as_steps(batch, found_outputs)):
        reduced = batch_at_level(columns, level)
        reduced = subtract_penalty(reduced, kl_reward * reference_kl(reduced, "k1"))
        reduced = algorithm.with_advantages(reduced)
        units = reduced.require("loss_mask")
        weights, mass = loss_agg_weights(units.flatten(1), aggregation)
        weights = weights.view(units.shape) / max(1, mass)
        policy: Any = Saying(outputs)
        loss, metrics = algorithm.micro_batch_loss(
            policy, {}, reduced, weights, temperature=1.0, entropy=True
        )
        gradients = torch.autograd.grad(loss, [found_outputs.logprobs, found_outputs.values])  # type: ignore[list-item]
        counts = mask_like(reduced, reduced.require("advantages"))
        assert not reduced.require("advantages")[counts == 0].any()
        found.append((loss, metrics, gradients, reduced.require("advantages").flatten(1)))
    (one, metrics, gradients, advantages), (other, expected, wanted, gains) = found
    torch.testing.assert_close(advantages, gains)
    torch.testing.assert_close(one, other)
    assert metrics.keys() == expected.keys()
    for name, value in metrics.items():
        torch.testing.assert_close(value, expected[name])
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want)
    assert wanted[1].abs().sum() > 0 or not batch.mask.any()


@pytest.mark.parametrize(
    ("level", "choices"), [("chunk", (2, 3)), ("action", ()), ("chunk", (3,)), ("action", (3,))]
)
def test_values_of_actions_need_ratios_as_fine(level: Any, choices: tuple[int, ...]) -> None:
    """Others learn from the steps of such a batch as ever; of actions nothing is taken there."""
    batch, _ = valued(0)
    old = torch.zeros(4, 5, *choices)
    whole = replace(batch, old_logprobs=old, reference_logprobs=old - 0.5, choice_mask=None)
    reduced = batch_at_level(whole, level)
    with pytest.raises(InputError, match=r"algorithm\.logprob_level to action"):
        PPO(PPOConfig(logprob_level=level)).with_advantages(reduced)
    remains = subtract_penalty(reduced, reference_kl(reduced, "k2")).rewards
    expected = 0.5 * (0.5 * old[0, 0].numel()) ** 2 * batch.mask
    torch.testing.assert_close(batch.rewards - remains, expected)
