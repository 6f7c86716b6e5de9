"""Losses of methods that learn values of actions, as functions of tensors.

``B`` transitions, ``E`` critics. All are means over the batch; critics' are added up.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Aggregate = Literal["min", "mean"]


def aggregated(values: Tensor, how: Aggregate) -> Tensor:
    """One estimate ``[B]`` of several critics' ``[E, B]``: the least (Fujimoto et al., 2018,
    arXiv 1802.09477) or the mean."""
    return values.amin(0) if how == "min" else values.mean(0)


def bootstrapped(rewards: Tensor, terminated: Tensor, following: Tensor, gamma: float) -> Tensor:
    """Target ``[B]``: ``r + gamma (1 - terminated) V(s')``.

    A step after which the episode was cut off has a value after it as any other.
    """
    return rewards + gamma * (1 - terminated) * following


def critic_loss(values: Tensor, target: Tensor) -> Tensor:
    """``1/2 sum_e mean_b (Q_e - y)^2`` of ``[E, B]`` and ``[B]`` (SAC, arXiv 1812.05905, eq. 5)."""
    return 0.5 * (values - target).square().mean(-1).sum()


def soft_policy_loss(logprobs: Tensor, values: Tensor, temperature: Tensor) -> Tensor:
    """``mean (alpha log pi(a|s) - Q(s, a))`` (SAC, eq. 7)."""
    return (temperature.detach() * logprobs - values).mean()


def temperature_loss(log_temperature: Tensor, logprobs: Tensor, target_entropy: float) -> Tensor:
    """``mean -alpha (log pi(a|s) + H)`` for the wanted entropy ``H``, nats (SAC, eq. 18)."""
    return -(log_temperature.exp() * (logprobs.detach() + target_entropy)).mean()


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """``mean |tau - 1(u < 0)| u^2`` (IQL, arXiv 2110.06169, eq. 5)."""
    weight = (expectile - (difference < 0).to(difference.dtype)).abs()
    return (weight * difference.square()).mean()


def advantage_weights(advantages: Tensor, beta: float, limit: float) -> Tensor:
    """``min(exp(beta A), limit)``, constants of the gradient (IQL, eq. 7)."""
    return (beta * advantages.detach()).exp().clamp(max=limit)
