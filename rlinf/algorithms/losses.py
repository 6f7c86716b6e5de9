"""Losses: the clipped surrogate, value and KL terms per step, aggregation over steps, losses of
action values, and the loss of demonstrations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlinf.data.batch import gather_steps, pad_right
from rlinf.data.load_balancing import StepSpan
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.models.base import StepOutputs
from rlinf.trainers.base import Loss, LossFunction, loss_from_steps

KLEstimator = Literal["k1", "k2", "k3"]
"""Estimators of Schulman's note "Approximating KL divergence"
(http://joschu.net/blog/kl-approx.html)."""

LOG_RATIO_BOUND = 20.0
"""Largest magnitude of a log-ratio before exponentiation: e^89 is infinite in float32, and an
infinite ratio times an advantage of zero is not a number."""
KL_BOUND = 10.0
"""Largest value of the KL estimate of one step, which grows exponentially with the log-ratio. Its
gradient has a bound of its own, :data:`KL_GRADIENT_BOUND`."""
KL_GRADIENT_BOUND = math.exp(LOG_RATIO_BOUND)
"""Largest magnitude of the gradient of the KL estimate of one step; finite at any log-ratio."""


class _Clamp(torch.autograd.Function):
    """``values.clamp(low, high)`` with an identity gradient, also beyond the bounds."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, low: float, high: float) -> Tensor:
        return values.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


def straight_through_clamp(values: Tensor, low: float, high: float) -> Tensor:
    """Return ``values`` clamped to ``[low, high]``, with an identity gradient everywhere."""
    clamped: Tensor = _Clamp.apply(values, low, high)  # type: ignore[no-untyped-call]
    return clamped


def bounded_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return ``exp(logprobs - old_logprobs)``, with the log-ratio clamped to ``±LOG_RATIO_BOUND``.
    Beyond the bound, the gradient equals the gradient at the bound."""
    return torch.exp(
        straight_through_clamp(logprobs - old_logprobs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    )


def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the log-ratio of each step in GSPO-token (arXiv 2507.18071, eq. 13 and 14), ``[B,
    T]``.

    Its value is the mean over the unmasked steps of the row, so the ratio is the geometric mean
    over the response. Its gradient is the gradient of the step alone.
    """
    log_ratio = (logprobs - old_logprobs) * mask
    mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return mean.detach() + logprobs - logprobs.detach()


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return PPO's pessimistic surrogate, negated (arXiv 1707.06347, eq. 7; asymmetric as in DAPO).

    Args:
        logprobs, old_logprobs, advantages: ``[..., T]``.
        clip_ratio_c: upper bound of the loss of a negative advantage, as a multiple of its
            magnitude, for any ratio (arXiv 1912.09729, eq. 5); None: unlimited.

    Returns:
        Loss per step, and 1 where the loss was clipped, both ``[..., T]``.
    """
    ratio = bounded_ratio(logprobs, old_logprobs)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantages
    loss, is_clipped = -torch.minimum(unclipped, clipped), clipped < unclipped
    if clip_ratio_c is not None:
        bound = -clip_ratio_c * advantages
        is_above = (advantages < 0) & (loss > bound)
        loss, is_clipped = torch.where(is_above, bound, loss), is_clipped | is_above
    return loss, is_clipped.float()


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    clip: float | None,
    huber: float | None = None,
) -> Tensor:
    """Return half the squared error of the value per step, with PPO's value clipping.

    It is the larger loss of two values: ``values``, and ``values`` clipped to within ``clip`` of
    ``old_values`` (None: no clipping).

    Args:
        huber: error above which the loss grows linearly (Huber 1964); None: it is quadratic.
    """

    def penalty(error: Tensor) -> Tensor:
        square = 0.5 * error**2
        if huber is None:
            return square
        return torch.where(error.abs() <= huber, square, huber * (error.abs() - 0.5 * huber))

    loss = penalty(values - returns)
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, penalty(clipped - returns))
    return loss


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: KLEstimator = "k3") -> Tensor:
    """Return an estimate of KL(policy || reference) from samples of the policy, per step.

    With ``r = reference - policy``: ``k1`` is ``-r``, unbiased and of either sign; ``k2`` is
    ``r^2 / 2``; ``k3`` is ``exp(r) - 1 - r``, unbiased and never negative (used by GRPO,
    arXiv 2402.03300, eq. 4). The value is clipped to magnitude :data:`KL_BOUND`, so one outlier
    cannot dominate a sum or a reward. The gradient with respect to ``logprobs`` is ``1``, ``-r``
    and ``1 - exp(r)`` even beyond this bound; its magnitude is at most :data:`KL_GRADIENT_BOUND`.
    verl clips the value at the same bound, but its gradient is zero beyond the bound.
    """
    log_ratio = reference_logprobs - logprobs
    if kind == "k1":
        return straight_through_clamp(-log_ratio, -KL_BOUND, KL_BOUND)
    if kind == "k2":
        return straight_through_clamp(
            0.5 * straight_through_clamp(log_ratio, -KL_GRADIENT_BOUND, KL_GRADIENT_BOUND) ** 2,
            0.0,
            KL_BOUND,
        )
    log_ratio = straight_through_clamp(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return straight_through_clamp(torch.exp(log_ratio) - 1 - log_ratio, -KL_BOUND, KL_BOUND)


def kl_loss(logprobs: Tensor, reference_logprobs: Tensor, kind: KLEstimator) -> Tensor:
    """Return the KL term per step that keeps the policy near the reference.

    Values, and the gradients of ``k2`` and ``k3``, equal those of :func:`kl_estimate`. On samples
    of the policy, the mean gradient of ``k2`` is the gradient of the KL divergence. The mean
    gradient of ``k3`` is the gradient of the reverse KL, equal to first order near the reference.
    The mean gradient of ``k1`` is zero for any policy (arXiv 2510.01555), so ``k1`` uses the
    gradient of ``k2``.
    """
    value = kl_estimate(logprobs, reference_logprobs, kind)
    if kind != "k1":
        return value
    k2 = kl_estimate(logprobs, reference_logprobs, "k2")
    return value.detach() + k2 - k2.detach()


LossAggMode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]


def loss_agg_weights(
    mask: Tensor, mode: LossAggMode, divisor: int | None = None
) -> tuple[Tensor, float]:
    """Return the aggregation weight ``[N, T]`` of each step, and the divisor of the weighted sum.

    ``(weights * loss).sum() / max(1, divisor)`` is the aggregated loss of a batch. If a batch is
    processed in parts, weighted sums and divisors must each be summed over the parts.

    Args:
        mask: ``[N, T]`` 1 at unmasked steps.
        mode: ``token_mean`` averages over all steps (DAPO, arXiv 2503.14476),
            ``seq_mean_token_mean`` first within each sequence (GRPO, arXiv 2402.03300),
            ``seq_mean_token_sum`` sums within each sequence (Dr. GRPO, arXiv 2503.20783).
        divisor: constant by which the weights of ``seq_mean_token_sum`` are divided; None: 1.
    """
    lengths = mask.sum(-1, keepdim=True)
    if mode == "token_mean":
        return mask, float(mask.sum())
    sequences = float((lengths > 0).sum())
    if mode == "seq_mean_token_mean":
        return mask / lengths.clamp(min=1), sequences
    return mask if divisor is None else mask / divisor, sequences


QAggregation = Literal["min", "mean"]


def aggregate_q_values(values: Tensor, how: QAggregation) -> Tensor:
    """Combine the estimates of several critics ``[E, B]`` into one, ``[B]``: their minimum
    (Fujimoto et al., 2018, arXiv 1802.09477) or mean."""
    return values.amin(0) if how == "min" else values.mean(0)


def td_target(rewards: Tensor, terminated: Tensor, next_values: Tensor, gamma: float) -> Tensor:
    """Return the target ``r + gamma (1 - terminated) V(s')``, ``[B]``.

    A truncated step is followed by a state with a value, like any other step.
    """
    return rewards + gamma * (1 - terminated) * next_values


def critic_loss(values: Tensor, target: Tensor) -> Tensor:
    """Return ``1/2 sum_e mean_b (Q_e - y)^2`` of values ``[E, B]`` and target ``[B]`` (SAC, arXiv
    1812.05905, eq. 5)."""
    return 0.5 * (values - target).square().mean(-1).sum()


def sac_policy_loss(logprobs: Tensor, values: Tensor, temperature: Tensor) -> Tensor:
    """Return ``mean (alpha log pi(a|s) - Q(s, a))`` (SAC, eq. 7)."""
    return (temperature.detach() * logprobs - values).mean()


def temperature_loss(log_temperature: Tensor, logprobs: Tensor, target_entropy: float) -> Tensor:
    """Return ``mean -alpha (log pi(a|s) + H)`` for the target entropy ``H``, nats (SAC, eq. 18)."""
    return -(log_temperature.exp() * (logprobs.detach() + target_entropy)).mean()


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Return ``mean |tau - 1(u < 0)| u^2`` of differences ``u`` (IQL, arXiv 2110.06169, eq. 5)."""
    weight = (expectile - (difference < 0).to(difference.dtype)).abs()
    return (weight * difference.square()).mean()


def advantage_weights(advantages: Tensor, beta: float, limit: float) -> Tensor:
    """Return ``min(exp(beta A), limit)`` without a gradient (IQL, eq. 7)."""
    return (beta * advantages.detach()).exp().clamp(max=limit)


def token_weights(trajectory: Trajectory) -> np.ndarray:
    """Return the loss mask, float32 ``[T]``, or ``[T, ...]`` if a step has several parts."""
    weights = loss_mask(trajectory).astype(np.float32)
    if trajectory.choice_mask is not None:
        choices = np.asarray(trajectory.choice_mask, np.float32)
        weights = weights.reshape(-1, *[1] * (choices.ndim - 1)) * choices
    return weights


def sft_loss(demonstrations: Sequence[Trajectory]) -> LossFunction:
    """Return the loss of supervised fine-tuning on a batch, as a sum over its micro-batches.

    It is the mean of ``-log p`` over the unmasked tokens of the batch, in nats. A policy without a
    tractable density has another loss in place of ``-log p``
    (:meth:`rlinf.models.base.Policy.prepare_demonstration`).

    Args:
        demonstrations: results of that method.
    """
    length = max(map(len, demonstrations))
    mask = pad_right([token_weights(demonstration) for demonstration in demonstrations], length)
    weights = mask / mask.sum().clamp(min=1)

    def loss(outputs: StepOutputs, spans: list[StepSpan]) -> Loss:
        device, length = outputs.logprobs.device, outputs.logprobs.shape[1]
        step_weights = gather_steps(weights, spans, length).to(device)
        return -(step_weights * outputs.logprobs).sum(), {}

    return loss_from_steps(loss)
