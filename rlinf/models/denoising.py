"""Actions that are made of noise in a few denoising steps, and the likelihood of a chain of them.

A network gives the velocity ``v = noise - action`` at a point ``x = tau noise + (1 - tau) action``
of the straight line between the two (Lipman et al., 2022, arXiv 2210.02747). From ``tau = 1`` down
to 0 in ``N`` steps, the Euler method makes an action of noise, without a density that can be had.
So that a policy gradient can be taken, each step draws its next point from a normal distribution
(pi-RL, arXiv 2510.25889): the log-probability of a *chain* of points is then exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlinf.config import Section

CHAIN_COLUMN = "chain"
"""Step column of trajectories: the points of a step's chain, float32 ``[T, N + 1, ...]``."""
VelocityFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Of points ``[..., K, *E]`` at the noise fractions ``[K]``: velocities, and where the noise of a
step is learned the logarithm of its standard deviation, else None; of the points' shape."""


class DenoisingConfig(Section):
    """The noise of a denoising step."""

    noise_method: Literal["sde", "learned"] = "sde"
    """That with which points have the same distribution at every time as without it,
    for many steps (Flow-SDE), or a standard deviation that a network gives (Flow-Noise)."""
    noise_level: float = Field(default=0.5, gt=0)
    """``a`` of Flow-SDE, whose noise is ``a sqrt(tau / (1 - tau))``."""
    noise_std_range: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (
        0.08,
        0.16,
    )
    """Least and largest standard deviation of Flow-Noise."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        least, largest = self.noise_std_range
        if least >= largest:
            raise ValueError(f"noise_std_range: the first, {least}, is to be below {largest}")
        return self


def noise_fractions(steps: int) -> Tensor:
    """Noise fractions ``tau`` at which the steps begin, float32 ``[N]``: 1, 1 - 1/N, ..., 1/N."""
    # In double precision: sinusoids of the time with short periods show its last bit.
    return (1 - torch.arange(steps, dtype=torch.float64) / steps).float()


def flow_sde_sigmas(steps: int, level: float) -> Tensor:
    """``sigma`` of each step of Flow-SDE, ``[N]``: ``a sqrt(tau / (1 - tau))``; where ``tau`` is 1,
    the next one stands in the denominator."""
    tau = noise_fractions(steps)
    below = torch.where(tau == 1, 1 / steps, 1 - tau)
    return level * (tau / below).sqrt()


def step_mean(points: Tensor, velocity: Tensor, tau: Tensor, sigma: Tensor, steps: int) -> Tensor:
    """Where a step leads to in the mean: the Euler step of the flow where ``sigma`` is 0, else of
    the stochastic equation with the same marginals (Song et al., 2020, arXiv 2011.13456).

    Args:
        points, velocity: ``[..., A]``.
        tau, sigma: that can be multiplied with them.
        steps: ``N``; one is ``1 / N`` long.
    """
    length = 1 / steps
    action, noise = points - velocity * tau, points + velocity * (1 - tau)
    drift = tau - length - sigma.square() * length / (2 * tau)
    return action * (1 - tau + length) + noise * drift


def bounded_log_std(raw: Tensor, noise_range: tuple[float, float]) -> Tensor:
    """A network's output as the logarithm of a standard deviation within a range, float32."""
    low, high = (math.log(bound) for bound in noise_range)
    return 0.5 * (low + high) + 0.5 * (high - low) * raw.float().tanh()


class DenoisingChain:
    """The steps from noise to actions of a number of dimensions, and their likelihood.

    A temperature multiplies the standard deviations of the steps. At 0 a chain begins at the mean
    of the noise and is that of the Euler method, and it is judged as at 1.
    """

    def __init__(self, steps: int, level: float, dimensions: int) -> None:
        """
        Args:
            level: of Flow-SDE; without a part where the noise is learned.
            dimensions: of an action, 1 of a vector and 2 of a chunk of them.
        """
        self.steps, self.level, self.dimensions = steps, level, dimensions

    def step_distribution(
        self,
        points: Tensor,
        velocity: Tensor,
        log_std: Tensor | None,
        numbers: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation of what follows points ``[..., K, *E]`` in the steps of
        these numbers ``[K]``; at temperature 0 the mean is the Euler method's."""
        shape = (-1, *[1] * self.dimensions)
        tau = noise_fractions(self.steps).to(points.device)[numbers].reshape(shape)
        sigma = torch.zeros_like(tau)
        if log_std is None:
            levels = flow_sde_sigmas(self.steps, self.level * temperature).to(points.device)
            sigma = levels[numbers].reshape(shape)
            log_std = (sigma / math.sqrt(self.steps)).log()
        elif temperature:
            log_std = log_std + math.log(temperature)
        return step_mean(points, velocity, tau, sigma, self.steps), log_std

    def sample(
        self, velocity: VelocityFunction, first: Tensor, noise: Tensor | None, temperature: float
    ) -> Tensor:
        """Chains ``[..., N + 1, *E]``.

        Args:
            first: where they begin, ``[..., *E]``.
            noise: standard normal ``[..., N, *E]``, of each step; None at temperature 0.
        """
        axis = first.ndim - self.dimensions
        points, chain = first.unsqueeze(axis), [first]
        fractions = noise_fractions(self.steps).to(first.device)
        for number in range(self.steps):
            now = torch.tensor([number], device=first.device)
            found = velocity(points, fractions[now])
            spread = 0.0 if noise is None else temperature
            points, log_std = self.step_distribution(points, *found, now, spread)
            if noise is not None:
                points = points + noise.narrow(axis, number, 1) * log_std.exp()
            chain.append(points.squeeze(axis))
        return torch.stack(chain, axis)

    def logprobs_and_entropy(
        self, chain: Tensor, velocity: Tensor, log_std: Tensor | None, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of chains ``[..., N + 1, *E]`` given the first points,
        ``[..., *E]``: the sums of those of their steps.

        Args:
            velocity, log_std: at all points but the last, ``[..., N, *E]``.
        """
        axis = chain.ndim - self.dimensions - 1
        numbers = torch.arange(self.steps, device=chain.device)
        points, after = chain.narrow(axis, 0, self.steps), chain.narrow(axis, 1, self.steps)
        mean, log_std = self.step_distribution(
            points, velocity, log_std, numbers, temperature or 1.0
        )
        distance = (after - mean) / log_std.exp()
        logprobs = -0.5 * distance.square() - log_std - 0.5 * math.log(2 * math.pi)
        entropies = (log_std + 0.5 * math.log(2 * math.pi * math.e)).expand_as(logprobs)
        return logprobs.sum(axis), entropies.sum(axis)
