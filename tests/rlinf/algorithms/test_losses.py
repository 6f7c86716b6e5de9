"""Loss terms at points where they can be worked out by hand, and their weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlinf.algorithms.group_relative import DAPO, GRPO, DAPOConfig
from rlinf.algorithms.losses import (
    KL_BOUND,
    KL_GRADIENT_BOUND,
    KLEstimator,
    LossAggMode,
    clipped_surrogate,
    kl_estimate,
    kl_loss,
    loss_agg_weights,
    sequence_log_ratio,
)
from rlinf.algorithms.policy_gradient import PolicyGradientConfig
from rlinf.algorithms.ppo import AsyncPPOConfig, PPOConfig
from rlinf.config import OptimizerSection
from rlinf.models.base import StepOutputs
from tests.contracts.test_algorithm import batch_of, outputs_of


@pytest.mark.parametrize(
    ("ratio", "advantage", "second", "want", "clipped"),
    [
        (1.0, 2.0, None, -2.0, 0.0),
        (1.5, 1.0, None, -1.2, 1.0),
        (0.5, 1.0, None, -0.5, 0.0),
        (0.5, -1.0, None, 0.8, 1.0),
        (1.5, -1.0, None, 1.5, 0.0),
        (5.0, -1.0, 3.0, 3.0, 1.0),
        (2.0, -1.0, 3.0, 2.0, 0.0),
        (5.0, 1.0, 3.0, -1.2, 1.0),
        (0.5, -1.0, 3.0, 0.8, 1.0),
    ],
)
def test_the_surrogate_is_pessimistic_and_a_second_clip_bounds_what_a_bad_step_costs(
    ratio: float, advantage: float, second: float | None, want: float, clipped: float
) -> None:
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, took = clipped_surrogate(
        logprobs, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2, second
    )
    assert float(loss.detach()) == pytest.approx(want)
    assert float(took) == clipped
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert bool(gradient.any()) == (clipped == 0)


def test_aggregations_are_the_means_they_are_called() -> None:
    mask = torch.tensor([[1.0, 1, 1, 1], [1.0, 0, 0, 0]])
    loss = torch.tensor([[1.0, 1, 1, 1], [5.0, 9, 9, 9]])
    got = {}
    for mode in get_args(LossAggMode):
        weights, divisor = loss_agg_weights(mask, mode)
        got[mode] = float((weights * loss).sum()) / divisor
    assert got == pytest.approx(
        {"token_mean": 9 / 5, "seq_mean_token_mean": 3.0, "seq_mean_token_sum": 4.5}
    )


def test_the_schedule_warms_up_and_falls() -> None:
    settings = OptimizerSection(
        lr=1.0, lr_scheduler_type="linear", lr_warmup_iterations=2, min_lr_ratio=0.1
    )
    rates = [settings.learning_rate(i, 12) for i in range(12)]
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(rates[2:], rates[3:], strict=False))


def test_dapo_leaves_out_groups_without_a_signal() -> None:
    import numpy as np

    keep = DAPO(DAPOConfig()).select_samples(np.array([1.0, 1, 0, 1]), np.array([0, 0, 1, 1]))
    assert keep.tolist() == [False, False, True, True]


@settings(deadline=None)
@given(st.floats(-15, 0), st.floats(-15, 0))
def test_ratio_and_divergence_agree_with_double_precision(a: float, b: float) -> None:
    one, other = torch.tensor([a]), torch.tensor([b])
    gap = float(other.double() - one.double())
    loss, _ = clipped_surrogate(other, one, torch.tensor([-1.0]), 0.2, 0.2)
    assert float(loss) == pytest.approx(max(math.exp(gap), 0.8), rel=3e-6)
    exact = min(10.0, math.expm1(gap) - gap)
    assert float(kl_estimate(one, other)) == pytest.approx(exact, rel=1e-5, abs=2e-6)


def test_the_ratio_of_a_response_is_the_geometric_mean_and_has_each_steps_gradient() -> None:
    logprobs = torch.tensor([[2.0, 8.0, 5.0]]).log().requires_grad_()
    mask, gain = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, -2.0, 0.0]])
    own = sequence_log_ratio(logprobs, torch.zeros(1, 3), mask)
    torch.testing.assert_close(own.exp()[0, :2], torch.tensor([4.0, 4.0]))
    (gradient,) = torch.autograd.grad((own.exp() * gain).sum(), logprobs)
    torch.testing.assert_close(gradient, torch.tensor([[4.0, -8.0, 0.0]]))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_estimates_of_the_divergence_are_unbiased(kind: KLEstimator) -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    estimate = (policy * kl_estimate(policy.log(), reference.log(), kind)).sum()
    torch.testing.assert_close(estimate, (policy * (policy / reference).log()).sum())


@pytest.mark.parametrize(
    ("kind", "divergence"),
    [
        ("k1", lambda ours, theirs: (ours.exp() * (ours - theirs)).sum()),
        ("k2", lambda ours, theirs: (ours.exp() * (ours - theirs)).sum()),
        ("k3", lambda ours, theirs: (theirs.exp() * (theirs - ours)).sum()),
    ],
)
def test_the_mean_gradient_of_a_loss_is_that_of_a_divergence(
    kind: KLEstimator, divergence: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Over all choices of the policy, each as likely as it is: of KL(policy || reference) with k1
    and k2, of KL(reference || policy) with k3; the value is the estimate's."""
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    (exact,) = torch.autograd.grad(divergence(logits.log_softmax(-1), reference), logits)
    ours = logits.log_softmax(-1)
    loss = kl_loss(ours, reference, kind)
    torch.testing.assert_close(loss, kl_estimate(ours, reference, kind))
    (found,) = torch.autograd.grad((ours.exp().detach() * loss).sum(), logits)
    torch.testing.assert_close(found, exact)


def test_k1_itself_would_pull_nowhere() -> None:
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    ours = logits.log_softmax(-1)
    plain = (ours.exp().detach() * kl_estimate(ours, torch.zeros(3), "k1")).sum()
    (found,) = torch.autograd.grad(plain, logits)
    torch.testing.assert_close(found, torch.zeros_like(found))


def pull(kind: KLEstimator, gap: float) -> tuple[float, float]:
    """Value and gradient of the term in the loss where ``log pi_ref - log pi`` is ``gap``."""
    logprobs = torch.tensor([0.0], requires_grad=True)
    loss = kl_loss(logprobs, torch.tensor([gap]), kind)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return float(loss.detach()), float(gradient)


kinds = pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
WIDE = st.floats(-(2.0**127), 2.0**127, width=32) | st.floats(-100, 100, width=32)


@kinds
@given(gap=WIDE)
def test_the_pull_towards_the_reference_never_vanishes(kind: KLEstimator, gap: float) -> None:
    """A step that the reference likes more is made likelier, and the other way round, at any
    distance; the value is bounded and the gradient finite."""
    value, gradient = pull(kind, gap)
    assert abs(value) <= KL_BOUND
    assert abs(gradient) <= KL_GRADIENT_BOUND * (1 + 1e-6)
    if abs(gap) > 1e-6:
        assert gradient * gap < 0
    if abs(gap) > math.sqrt(2 * KL_BOUND):
        assert abs(gradient) >= 0.98


@kinds
@given(one=WIDE, other=WIDE)
def test_the_pull_grows_with_the_distance(kind: KLEstimator, one: float, other: float) -> None:
    near, far = sorted((one, other))
    assert pull(kind, near)[1] >= pull(kind, far)[1]


@kinds
@given(gap=st.floats(-19.9, 19.9))
def test_the_gradient_is_that_of_the_estimate_without_a_bound(
    kind: KLEstimator, gap: float
) -> None:
    exact = 1 - math.exp(gap) if kind == "k3" else -gap
    assert pull(kind, gap)[1] == pytest.approx(exact, rel=1e-5, abs=1e-6)


@kinds
@pytest.mark.parametrize("extreme", [-3.4e38, 3.4e38])
def test_log_probabilities_beyond_all_measure_have_finite_gradients(
    kind: KLEstimator, extreme: float
) -> None:
    """The difference of two such numbers is infinite in float32."""
    logprobs = torch.tensor([-extreme], requires_grad=True)
    loss = kl_loss(logprobs, torch.tensor([extreme]), kind)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logprobs.grad).all()
    assert float(logprobs.grad) * extreme < 0


@given(gap=WIDE, advantage=st.sampled_from([-1.0, 0.0, 1.0]))
def test_a_ratio_beyond_its_bound_still_has_a_gradient(gap: float, advantage: float) -> None:
    """What an old policy hardly ever did, and that was bad, is made less likely; nothing is
    infinite, whatever the gap."""
    logprobs, old = torch.tensor([gap], requires_grad=True), torch.zeros(1)
    loss, _ = clipped_surrogate(logprobs, old, torch.tensor([advantage]), 0.2, 0.2)
    divergence = kl_estimate(logprobs, old)
    assert -1e-6 <= float(divergence.detach()) <= KL_BOUND
    for value in (loss, divergence):
        (gradient,) = torch.autograd.grad(value.sum(), logprobs)
        assert torch.isfinite(value).all()
        assert torch.isfinite(gradient).all()
    (gradient,) = torch.autograd.grad(
        clipped_surrogate(logprobs, old, torch.tensor([-1.0]), 0.2, 0.2)[0].sum(), logprobs
    )
    assert float(gradient) > 0 or gap < 0.2


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_loss_has_the_divergence_by_the_estimator_that_is_set(kind: KLEstimator) -> None:
    config = PolicyGradientConfig(kl_loss_coef=0.5, kl_loss_type=kind)
    batch = batch_of(3)
    batch = replace(batch, advantages=torch.zeros_like(batch.mask))
    outputs = StepOutputs(outputs_of(batch, 3).logprobs)
    loss, metrics = GRPO(config).total_loss(outputs, batch, batch.mask)
    reference = batch.require("reference_logprobs")
    want = (batch.mask * kl_estimate(outputs.logprobs, reference, kind)).sum()
    torch.testing.assert_close(loss, 0.5 * want)
    torch.testing.assert_close(metrics["kl"], want.detach())
    (found,) = torch.autograd.grad(loss, outputs.logprobs)
    gap = (outputs.logprobs - reference).detach()
    pull = {"k1": gap, "k2": gap, "k3": 1 - (-gap).exp()}[kind]
    torch.testing.assert_close(found, 0.5 * batch.mask * pull, atol=1e-6, rtol=1e-4)


def test_a_fixed_length_divides_the_sum_of_each_sequence() -> None:
    mask = torch.tensor([[1.0, 1, 1, 1], [1.0, 0, 0, 0]])
    weights, divisor = loss_agg_weights(mask, "seq_mean_token_sum", 8)
    assert float((weights * torch.tensor([[1.0, 1, 1, 1], [5.0, 9, 9, 9]])).sum()) == 9 / 8
    assert divisor == 2


@pytest.mark.parametrize(
    ("config", "settings", "match"),
    [
        (PolicyGradientConfig, {"loss_agg_divisor": 8}, "seq_mean_token_sum"),
        (PolicyGradientConfig, {"clip_ratio_c": 1.0}, "clip_ratio_c"),
        (PPOConfig, {"huber_delta": 0.0}, "huber_delta"),
        (
            PolicyGradientConfig,
            {"rollout_is_threshold": 2, "old_logprobs": "rollout"},
            "old_logprobs: recompute",
        ),
        (PolicyGradientConfig, {"rollout_is_level": "sequence"}, "set rollout_is_threshold"),
        (PolicyGradientConfig, {"rollout_is_mode": "mask"}, "set rollout_is_threshold"),
        (PolicyGradientConfig, {"rollout_is_mode": "mask", "rollout_is_threshold": 1}, "above 1"),
        (AsyncPPOConfig, {"rollout_is_threshold": None}, "set algorithm=ppo"),
        (AsyncPPOConfig, {"rollout_is_threshold": 1.0}, "above 1"),
        (AsyncPPOConfig, {"old_logprobs": "rollout"}, "old_logprobs: recompute"),
    ],
)
def test_settings_of_a_loss_that_mean_nothing_are_refused(
    config: type[PolicyGradientConfig], settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        config(**settings)
