"""What every algorithm keeps to: one of the registry, and that of the examples, passes this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf.algorithms import algorithms
from rlinf.algorithms.policy_gradient import PolicyGradient
from rlinf.algorithms.shares import step_shares
from rlinf.data.batch import StepBatch
from rlinf.data.packing import Span
from rlinf.models.base import StepOutputs
from tests.contracts.own import parts

NAMES = parts(algorithms)
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum")
each = pytest.mark.parametrize("name", NAMES)
seeds = st.integers(0, 2**16)
CPU = torch.device("cpu")


def made(name: str, **settings: Any) -> PolicyGradient:
    cls = algorithms.get(name)
    algorithm: PolicyGradient = cls(cls.Config(**settings))
    return algorithm


def batch_of(seed: int, groups: int = 3, size: int = 4, longest: int = 7) -> StepBatch:
    """Samples of unlike lengths; some steps inside do not count, the last one does."""
    random = np.random.default_rng(seed)
    count = groups * size
    lengths = random.integers(1, longest + 1, count)
    inside = np.arange(longest) < lengths[:, None]
    mask = inside & (random.random((count, longest)) < 0.8)
    last = np.zeros_like(mask)
    last[np.arange(count), lengths - 1] = True
    mask |= last

    def column(scale: float = 1.0) -> Tensor:
        return torch.tensor(random.normal(size=mask.shape) * scale * inside, dtype=torch.float32)

    cut = random.random((count, 1)) < 0.3
    old = column(0.3) - 1
    return StepBatch(
        mask=torch.tensor(mask, dtype=torch.float32),
        rewards=column() * torch.tensor(mask),
        groups=torch.tensor(np.repeat(np.arange(groups), size)),
        old_logprobs=old,
        rollout_logprobs=old + column(0.05),
        terminated=torch.tensor(last & ~cut, dtype=torch.float32),
        truncated=torch.tensor(last & cut, dtype=torch.float32),
        bootstrap=column() * torch.tensor(last & cut),
        values=column(),
        reference_logprobs=old + column(0.1),
    )


def outputs_of(batch: StepBatch, seed: int) -> StepOutputs:
    """What a policy near the old one says, with gradients."""
    random = torch.Generator().manual_seed(seed)

    def column(near: Tensor, scale: float) -> Tensor:
        return near + scale * torch.randn(near.shape, generator=random)

    return StepOutputs(
        column(batch.old_logprobs, 0.2).requires_grad_(),
        column(torch.ones_like(batch.mask), 0.2).requires_grad_(),
        column(batch.require("values"), 0.2).requires_grad_(),
    )


def judged(algorithm: PolicyGradient, batch: StepBatch) -> StepBatch:
    advantages, returns = algorithm.advantages(batch)
    return replace(batch, advantages=advantages, returns=returns)


def chosen(batch: StepBatch, index: Sequence[int]) -> StepBatch:
    length = batch.mask.shape[1]
    return batch.spans([Span(row, 0, length) for row in index], length, CPU)


def rows(outputs: StepOutputs, index: Sequence[int]) -> StepOutputs:
    columns = (outputs.logprobs, outputs.entropy, outputs.values)
    return StepOutputs(*(None if column is None else column[list(index)] for column in columns))  # type: ignore[arg-type]


@each
@given(seed=seeds, more=st.integers(1, 4))
def test_padding_changes_no_advantage(name: str, seed: int, more: int) -> None:
    batch, algorithm = batch_of(seed), made(name)
    padded = {
        f.name: torch.nn.functional.pad(value, (0, more)) if value.ndim > 1 else value
        for f in fields(batch)
        if (value := getattr(batch, f.name)) is not None
    }
    short, length = judged(algorithm, batch), batch.mask.shape[1]
    long = judged(algorithm, StepBatch(**padded))
    for column in ("advantages", "returns"):
        one, other = getattr(short, column), getattr(long, column)
        if one is not None:
            torch.testing.assert_close(other[:, :length], one)
            assert not other[:, length:].any()


@each
@given(seed=seeds)
def test_the_order_of_the_samples_does_not_matter(name: str, seed: int) -> None:
    batch, algorithm = batch_of(seed), made(name)
    order = np.random.default_rng(seed).permutation(len(batch)).tolist()
    moved = chosen(batch, order)
    torch.testing.assert_close(
        judged(algorithm, moved).advantages,
        judged(algorithm, batch).require("advantages")[order],
        atol=1e-5,
        rtol=1e-4,
    )
    scores, groups = batch.rewards.sum(-1).numpy(), batch.groups.numpy()
    kept = algorithm.keep(scores, groups)
    assert kept.dtype == bool
    assert np.array_equal(algorithm.keep(scores[order], groups[order]), kept[order])


@each
@given(seed=seeds)
def test_steps_that_do_not_count_have_no_influence(name: str, seed: int) -> None:
    algorithm = made(name, kl_coefficient=0.1, entropy_bonus=0.1)
    batch = batch_of(seed)
    hidden, noise = 1 - batch.mask, torch.Generator().manual_seed(seed)

    def spoiled(column: Tensor) -> Tensor:
        return column + 3 * hidden * torch.randn(column.shape, generator=noise)

    columns = ("values", "old_logprobs", "rollout_logprobs", "reference_logprobs")
    other = replace(batch, **{n: spoiled(batch.require(n)) for n in columns})
    first, second = judged(algorithm, batch), judged(algorithm, other)
    assert not (first.require("advantages") * hidden).any()
    torch.testing.assert_close(first.advantages, second.advantages)
    weights, _ = step_shares(batch.mask, "token_mean")
    said = outputs_of(batch, seed)
    unlike = StepOutputs(
        *(spoiled(c.detach()) for c in (said.logprobs, said.entropy, said.values) if c is not None)
    )
    ours, theirs = algorithm.loss(said, first, weights), algorithm.loss(unlike, second, weights)
    torch.testing.assert_close(ours[0], theirs[0])
    (gradient,) = torch.autograd.grad(ours[0], said.logprobs)
    assert not (gradient * hidden).any()


@each
@given(seed=seeds)
def test_a_step_without_advantage_has_no_gradient(name: str, seed: int) -> None:
    algorithm, batch = made(name), batch_of(seed)
    indifferent = (torch.rand(batch.mask.shape) < 0.5) & (batch.mask > 0)
    advantages = torch.where(indifferent, 0.0, batch.mask)
    batch = replace(judged(algorithm, batch), advantages=advantages)
    said = outputs_of(batch, seed)
    loss, _ = algorithm.loss(said, batch, batch.mask)
    (gradient,) = torch.autograd.grad(loss, said.logprobs)
    assert not gradient[indifferent].any()


@each
@given(seed=seeds)
def test_the_first_step_follows_the_policy_gradient(name: str, seed: int) -> None:
    """Where the policy is the old one, ``d loss / d log-prob`` is minus weight times advantage."""
    algorithm, batch = made(name), batch_of(seed)
    batch = replace(judged(algorithm, batch), rollout_logprobs=batch.old_logprobs)
    weights, _ = step_shares(batch.mask, "seq_mean_token_mean")
    same = batch.old_logprobs.clone().requires_grad_()
    loss, _ = algorithm.loss(StepOutputs(same, None, batch.values), batch, weights)
    (gradient,) = torch.autograd.grad(loss, same)
    torch.testing.assert_close(gradient, -weights * batch.require("advantages"))


@each
@given(seed=seeds, aggregation=st.sampled_from(AGGREGATIONS), data=st.data())
def test_loss_metrics_and_gradients_do_not_depend_on_the_cut(
    name: str, seed: int, aggregation: Any, data: st.DataObject
) -> None:
    algorithm = made(name, kl_coefficient=0.1, entropy_bonus=0.1, aggregation=aggregation)
    batch = judged(algorithm, batch_of(seed))
    weights, _ = step_shares(batch.mask, aggregation)
    said = outputs_of(batch, seed)
    whole, metrics = algorithm.loss(said, batch, weights)
    (gradient,) = torch.autograd.grad(whole, said.logprobs, retain_graph=True)
    order = np.random.default_rng(seed).permutation(len(batch))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(batch) - 1), max_size=4)))
    total, totals = torch.zeros(()), dict.fromkeys(metrics, torch.zeros(()))
    for part in np.split(order, cuts):
        index = part.tolist()
        local = chosen(batch, index)
        loss, found = algorithm.loss(rows(said, index), local, weights[index])
        total = total + loss
        assert found.keys() == metrics.keys()
        totals = {key: totals[key] + found[key] for key in totals}
    torch.testing.assert_close(total, whole, atol=1e-4, rtol=1e-4)
    for key, value in metrics.items():
        torch.testing.assert_close(totals[key], value, atol=1e-4, rtol=1e-4)
    (summed,) = torch.autograd.grad(total, said.logprobs)
    torch.testing.assert_close(summed, gradient, atol=1e-5, rtol=1e-4)


@each
@given(seed=seeds)
def test_what_is_said_to_be_by_group_is(name: str, seed: int) -> None:
    algorithm, batch = made(name), batch_of(seed)
    if not algorithm.by_group:
        return
    every = judged(algorithm, batch).require("advantages")
    scores, groups = batch.rewards.sum(-1).numpy(), batch.groups.numpy()
    for group in np.unique(groups):
        index = np.flatnonzero(groups == group).tolist()
        alone = judged(algorithm, chosen(batch, index))
        torch.testing.assert_close(alone.advantages, every[index])
        kept = algorithm.keep(scores, groups)[index]
        assert np.array_equal(algorithm.keep(scores[index], groups[index]), kept)
