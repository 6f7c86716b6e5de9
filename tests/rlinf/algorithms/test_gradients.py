"""Gradients of losses are what differences of the losses say, in double precision."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from rlinf.algorithms import algorithms
from rlinf.algorithms.group_relative import GRPO
from rlinf.algorithms.importance_sampling import rollout_is_weights, rollout_ratio
from rlinf.algorithms.losses import (
    clipped_surrogate,
    clipped_value_loss,
    kl_estimate,
    kl_loss,
    loss_agg_weights,
    sequence_log_ratio,
)
from rlinf.algorithms.policy_gradient import PolicyGradientConfig
from rlinf.data.batch import StepBatch
from rlinf.models.base import StepOutputs
from tests.contracts.test_algorithm import AGGREGATIONS, NAMES, batch_of, outputs_of

RATIOS = torch.tensor([0.05, 0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.0, 2.9, 3.1, 9.0]).double()
"""On both sides of every bound, and not on one: there the loss has a kink."""
CLIPS = ((0.2, 0.28, None), (0.2, 0.28, 3.0))


def doubled(batch: StepBatch) -> StepBatch:
    columns = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(
        batch,
        **{n: c.double() for n, c in columns.items() if c is not None and c.is_floating_point()},
    )


@pytest.mark.parametrize(("low", "high", "dual"), CLIPS)
@pytest.mark.parametrize("advantage", [-1.5, 0.0, 0.7])
def test_of_the_clipped_surrogate(
    low: float, high: float, dual: float | None, advantage: float
) -> None:
    old, gains = torch.full_like(RATIOS, -1.0), torch.full_like(RATIOS, advantage)
    logprobs = (old + RATIOS.log()).requires_grad_()

    def loss(given: Tensor) -> Tensor:
        return clipped_surrogate(given, old, gains, low, high, dual)[0]

    assert gradcheck(loss, (logprobs,))
    # From the formulas, step by step.
    for ratio, found in zip(RATIOS.tolist(), loss(logprobs).tolist(), strict=True):
        want = max(-ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage)
        if dual is not None and advantage < 0:
            want = min(want, -dual * advantage)
        assert found == pytest.approx(want)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("outside", ["truncate", "mask"])
def test_of_the_decoupled_surrogate(level: Any, outside: Any) -> None:
    """Weights of what was collected by another policy are constants: they have no gradient."""
    batch = doubled(batch_of(11))
    old, theirs = batch.old_logprobs, batch.require("rollout_logprobs")
    advantages = torch.where(batch.groups[:, None] == 0, 1.0, -1.0).double() * batch.mask
    config = PolicyGradientConfig(
        rollout_is_threshold=1.02, rollout_is_level=level, rollout_is_mode=outside
    )
    batch = replace(batch, advantages=advantages)
    outputs = outputs_of(batch, 11).logprobs.detach().double().requires_grad_()

    def loss(given: Tensor) -> Tensor:
        return GRPO(config).total_loss(StepOutputs(given), batch, batch.mask)[0]

    assert gradcheck(loss, (outputs,))
    ratio = rollout_ratio(old, theirs, batch.mask, level)
    weights, _ = rollout_is_weights(ratio, 1.02, outside)
    plain = clipped_surrogate(outputs, old, advantages, 0.2, 0.2)[0]
    torch.testing.assert_close(loss(outputs), (weights * plain * batch.mask).sum())
    moved = theirs.clone().requires_grad_()
    assert not rollout_is_weights(rollout_ratio(old, moved, batch.mask, level), 2.0, outside)[
        0
    ].requires_grad


def test_of_the_ratio_of_a_response() -> None:
    """Where a response has one advantage, that of GSPO-token is GSPO's, whose loss is
    ``-exp(mean log-ratio) A`` for each response (arXiv 2507.18071, eq. 5 and 7)."""
    batch = doubled(batch_of(5))
    gain = torch.linspace(-1, 1, len(batch)).double()
    old, mask = batch.old_logprobs, batch.mask
    weights, divisor = loss_agg_weights(mask, "seq_mean_token_mean")
    outputs = outputs_of(batch, 5).logprobs.detach().double().requires_grad_()

    def whole(given: Tensor) -> Tensor:
        ratio = (((given - old) * mask).sum(-1) / mask.sum(-1)).exp()
        pessimistic = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return -pessimistic.sum() / divisor

    def ours(given: Tensor) -> Tensor:
        ratio = sequence_log_ratio(given, old, mask)
        gains = gain[:, None] * mask
        loss = clipped_surrogate(ratio, torch.zeros_like(ratio), gains, 0.2, 0.2)[0]
        return (weights * loss).sum() / divisor

    assert gradcheck(whole, (outputs,))
    torch.testing.assert_close(ours(outputs), whole(outputs))
    (found,) = torch.autograd.grad(ours(outputs), outputs)
    (want,) = torch.autograd.grad(whole(outputs), outputs)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("huber", [None, 0.5])
@pytest.mark.parametrize("wanted", [0.31, 1.31, -1.19])
def test_of_the_value_loss(clip: float | None, huber: float | None, wanted: float) -> None:
    """What is wanted is near the old value, or farther away than the clip on either side."""
    values = torch.linspace(-2, 2, 21).double().requires_grad_()
    old, returns = (torch.full_like(values, one).detach() for one in (0.13, wanted))

    def loss(given: Tensor) -> Tensor:
        return clipped_value_loss(given, old, returns, clip, huber)

    assert gradcheck(loss, (values,))

    def cost(error: float) -> float:
        if huber is None or abs(error) <= huber:
            return 0.5 * error**2
        return huber * (abs(error) - 0.5 * huber)

    for value, found in zip(values.tolist(), loss(values).tolist(), strict=True):
        want = cost(value - wanted)
        if clip is not None:
            want = max(want, cost(0.13 + min(max(value - 0.13, -clip), clip) - wanted))
        assert found == pytest.approx(want)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_of_the_divergence(kind: Any) -> None:
    reference = torch.linspace(-3, 0, 13).double()
    logprobs = torch.linspace(-0.2, -2.5, 13).double().requires_grad_()
    # k1 has the value of the one and the gradient of the other.
    like = "k2" if kind == "k1" else kind
    assert gradcheck(lambda given: kl_estimate(given, reference, like), (logprobs,))
    found = kl_loss(logprobs, reference, kind)
    torch.testing.assert_close(found, kl_estimate(logprobs, reference, kind))
    (ours,) = torch.autograd.grad(found.sum(), logprobs)
    (want,) = torch.autograd.grad(kl_estimate(logprobs, reference, like).sum(), logprobs)
    torch.testing.assert_close(ours, want)


@pytest.mark.parametrize("name", NAMES)
def test_of_a_whole_loss(name: str) -> None:
    cls = algorithms.get(name)
    settings = {"kl_loss_coef": 0.3, "kl_loss_type": "k2", "entropy_coeff": 0.1}
    algorithm = cls(cls.Config(**settings))
    batch = doubled(algorithm.with_advantages(batch_of(9)))
    weights, _ = loss_agg_weights(batch.mask, "seq_mean_token_mean")
    outputs = outputs_of(batch, 9)
    columns = [c.detach().double().requires_grad_() for c in vars(outputs).values()]
    assert gradcheck(
        lambda *given: algorithm.total_loss(StepOutputs(*given), batch, weights)[0], tuple(columns)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_where_no_step_counts_all_is_zero(name: str, aggregation: Any, ratio: Any) -> None:
    """Whatever stands on the steps, far out of range too; and no gradient is anything else."""
    cls = algorithms.get(name)
    algorithm = cls(
        cls.Config(
            kl_loss_coef=0.3,
            entropy_coeff=0.1,
            loss_agg_mode=aggregation,
            importance_sampling_level=ratio,
            rollout_is_threshold=2.0,
            rollout_is_level="geometric",
            clip_ratio_c=3.0,
        )
    )
    batch = batch_of(2)
    none = torch.zeros_like(batch.mask)
    far = torch.full_like(none, 1e4)
    batch = replace(batch, mask=none, rewards=none, rollout_logprobs=batch.old_logprobs - far)
    batch = algorithm.with_advantages(batch)
    assert torch.equal(batch.require("advantages"), none)
    if batch.returns is not None:
        assert torch.equal(batch.returns, none)
    weights, divisor = loss_agg_weights(batch.mask, aggregation)
    assert not weights.any()
    outputs = outputs_of(batch, 2)
    loss, metrics = algorithm.total_loss(outputs, batch, weights / max(1.0, divisor))
    assert float(loss.detach()) == 0
    assert all(float(metric) == 0 for metric in metrics.values()), metrics
    columns = [c for c in vars(outputs).values() if c is not None]
    for gradient in torch.autograd.grad(loss, columns, allow_unused=True):
        assert gradient is None or not gradient.any()
