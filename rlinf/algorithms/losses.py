"""Loss terms per step; aggregation is the caller's."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]
"""Of Schulman's note "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html)."""

LOG_RATIO_BOUND = 20.0
"""Largest magnitude of a log-ratio that is exponentiated: e^89 is infinite in float32, and an
infinite ratio times an advantage of zero is not a number."""
KL_BOUND = 10.0
"""Largest value of the divergence of one step; its estimate grows exponentially with the log-ratio.
The gradient of an estimate has no such bound."""
PULL_BOUND = math.exp(LOG_RATIO_BOUND)
"""Largest magnitude of the gradient of one step's divergence: it is finite at any log-ratio."""


class _Clamp(torch.autograd.Function):
    """``values.clamp(low, high)`` whose gradient is that of ``values`` beyond the bounds too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, low: float, high: float) -> Tensor:
        return values.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


def clamp_value(values: Tensor, low: float, high: float) -> Tensor:
    """Return ``values`` within ``[low, high]``. The gradient passes as if there were no bound, so
    that what is beyond it is still pulled back."""
    clamped: Tensor = _Clamp.apply(values, low, high)  # type: ignore[no-untyped-call]
    return clamped


def bounded_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    """Return ``exp(logprobs - others)`` within ``exp(±LOG_RATIO_BOUND)``; beyond, its gradient is
    the bound's."""
    return torch.exp(clamp_value(logprobs - others, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Log-ratio of each step in GSPO-token (arXiv 2507.18071, eq. 13 and 14), ``[B, T]``.

    Its value is the mean over the steps of the row that count (``mask`` 1), so that the ratio is
    that of the whole response, to the power of one over its length; its gradient is that of the
    step alone.
    """
    gap = (logprobs - old_logprobs) * mask
    mean = gap.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return mean.detach() + logprobs - logprobs.detach()


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic surrogate, negated (arXiv 1707.06347, eq. 7; asymmetric as in DAPO).

    Args:
        logprobs, old_logprobs, advantages: ``[..., T]``.
        clip_dual: where the advantage is negative, the loss is at most so many times its magnitude,
            however large the ratio (arXiv 1912.09729, eq. 5); None: unlimited.

    Returns:
        Loss per step, and 1 where clipping took effect, both ``[..., T]``.
    """
    ratio = bounded_ratio(logprobs, old_logprobs)
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss, took = -torch.minimum(plain, clipped), clipped < plain
    if clip_dual is not None:
        above = (advantages < 0) & (loss > -clip_dual * advantages)
        loss, took = torch.where(above, -clip_dual * advantages, loss), took | above
    return loss, took.float()


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    clip: float | None,
    huber: float | None = None,
) -> Tensor:
    """Half squared error of the value, pessimistic within ``clip`` of the old value, per step.

    Args:
        huber: from this error on it grows linearly (Huber 1964); None: nowhere.
    """

    def penalty(error: Tensor) -> Tensor:
        square = 0.5 * error**2
        if huber is None:
            return square
        return torch.where(error.abs() <= huber, square, huber * (error.abs() - 0.5 * huber))

    loss = penalty(values - returns)
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, penalty(near - returns))
    return loss


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: KLEstimator = "k3") -> Tensor:
    """Return an estimate of KL(policy || reference) from samples of the policy, per step.

    With ``r = reference - policy``: ``k1`` is ``-r``, unbiased and of either sign; ``k2`` is
    ``r^2 / 2``; ``k3`` is ``exp(r) - 1 - r``, unbiased and never negative (used by GRPO,
    arXiv 2402.03300, eq. 4). Values are of magnitude :data:`KL_BOUND` at most, so that one outlier
    does not rule a sum or a reward. The gradient is that of the unbounded estimate: ``-1``, ``-r``
    and ``1 - exp(r)`` by ``logprobs``, of magnitude :data:`PULL_BOUND` at most. So the pull grows
    with the drift and never vanishes; verl's bound of the same value has no gradient beyond it.
    """
    gap = reference_logprobs - logprobs
    if kind == "k1":
        return clamp_value(-gap, -KL_BOUND, KL_BOUND)
    if kind == "k2":
        return clamp_value(0.5 * clamp_value(gap, -PULL_BOUND, PULL_BOUND) ** 2, 0.0, KL_BOUND)
    gap = clamp_value(gap, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return clamp_value(torch.exp(gap) - 1 - gap, -KL_BOUND, KL_BOUND)


def kl_loss(logprobs: Tensor, reference_logprobs: Tensor, kind: KLEstimator) -> Tensor:
    """Return what is added to a loss so that the policy stays near the reference, per step.

    Its value is that of :func:`kl_estimate`, and so is the gradient of ``k2`` and ``k3``. On
    samples of the policy the mean gradient of ``k2`` is the divergence's own; that of ``k3`` is
    the divergence's with the arguments exchanged, a first-order approximation where both are near;
    that of ``k1`` is zero, whatever the policy (arXiv 2510.01555). ``k1`` has the gradient of
    ``k2`` therefore.
    """
    value = kl_estimate(logprobs, reference_logprobs, kind)
    if kind != "k1":
        return value
    pull = kl_estimate(logprobs, reference_logprobs, "k2")
    return value.detach() + pull - pull.detach()
