"""Loss terms per step; aggregation is the caller's."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Largest magnitude of a log-ratio that is exponentiated: e^89 is infinite in float32, and an
infinite ratio times an advantage of zero is not a number."""
KL_BOUND = 10.0
"""Largest divergence of one step; its estimate grows exponentially with the log-ratio."""


def bounded_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    """``exp(logprobs - others)`` within ``exp(±LOG_RATIO_BOUND)``; no gradient beyond."""
    return torch.exp((logprobs - others).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic surrogate, negated (arXiv 1707.06347, eq. 7; asymmetric as in DAPO).

    Args:
        logprobs, old_logprobs, advantages: ``[..., T]``.

    Returns:
        Loss per step, and 1 where clipping took effect, both ``[..., T]``.
    """
    ratio = bounded_ratio(logprobs, old_logprobs)
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(plain, clipped), (clipped < plain).float()


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> Tensor:
    """Half squared error of the value, pessimistic within ``clip`` of the old value, per step."""
    error = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns) ** 2)
    return 0.5 * error


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) from samples of the policy, per step, never negative.

    ``exp(r) - 1 - r`` with ``r = reference - policy`` (the k3 estimator, used by GRPO,
    arXiv 2402.03300, eq. 4), at most :data:`KL_BOUND`, so that one outlier does not rule the sum.
    """
    gap = (reference_logprobs - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (torch.exp(gap) - 1 - gap).clamp(max=KL_BOUND)
