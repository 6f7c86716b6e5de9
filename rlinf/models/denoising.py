"""Denoising of actions by flow matching, with exact likelihoods of denoising chains.

A network computes the velocity ``v = noise - action`` at the point ``x = tau noise + (1 - tau)
action``; ``tau`` is the *noise fraction* (Lipman et al., 2022, arXiv 2210.02747). The Euler method
integrates from ``tau = 1`` to 0 in ``N`` steps and turns noise into an action, whose density is
intractable. For policy gradients, each step samples its next point from a normal distribution
(pi-RL, arXiv 2510.25889). Then the log-probability of the *chain* of points is exact.
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
"""Column of trajectories with the chain of points of each step, float32 ``[T, N + 1, ...]``. If one
denoising step is random, it has the points before and after that step, ``[T, 2, ...]``."""
RANDOM_STEP_COLUMN = "random_step"
"""Column with the index of the only random denoising step of each step, int64 ``[T]``."""
VelocityFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Maps ``K`` points ``[..., K, *E]`` of each chain (``*E``: axes of an action) and their noise
fractions ``[K]`` to velocities and log standard deviations (None: not learned), of equal shape."""


class DenoisingConfig(Section):
    """Options of the noise of denoising steps."""

    noise_method: Literal["sde", "learned"] = "sde"
    """``sde``: noise that preserves the marginal distributions in the limit of many steps
    (Flow-SDE); ``learned``: a network computes the standard deviation (Flow-Noise)."""
    noise_level: float = Field(default=0.5, gt=0)
    """Factor ``a`` of the noise ``a sqrt(tau / (1 - tau))`` of Flow-SDE."""
    noise_std_range: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (
        0.08,
        0.16,
    )
    """Smallest and largest standard deviation of Flow-Noise."""

    @model_validator(mode="after")
    def _check_noise_range(self) -> Self:
        low, high = self.noise_std_range
        if low >= high:
            raise ValueError(f"noise_std_range: the first, {low}, is to be below {high}")
        return self


def noise_fractions(steps: int) -> Tensor:
    """Return the noise fraction ``tau`` at the start of each denoising step, float32 ``[N]``: 1 to
    1/N."""
    # In double precision, because time embeddings with short periods depend on the last bit.
    return (1 - torch.arange(steps, dtype=torch.float64) / steps).float()


def flow_sde_sigmas(steps: int, level: float) -> Tensor:
    """Return ``sigma = a sqrt(tau / (1 - tau))`` of each step of Flow-SDE, ``[N]``.

    At ``tau = 1``, the denominator would be 0; the denominator of the next step replaces it.
    """
    tau = noise_fractions(steps)
    denominator = torch.where(tau == 1, 1 / steps, 1 - tau)
    return level * (tau / denominator).sqrt()


def step_mean(points: Tensor, velocity: Tensor, tau: Tensor, sigma: Tensor, steps: int) -> Tensor:
    """Return the mean of the next point of a chain.

    For ``sigma = 0`` this is the Euler step of the flow, otherwise the Euler step of the stochastic
    differential equation with equal marginals (Song et al., 2020, arXiv 2011.13456).

    Args:
        points, velocity: ``[..., A]``.
        tau, sigma: Broadcast with the points.
        steps: Number of steps ``N``; a step has length ``1 / N``.
    """
    length = 1 / steps
    action, noise = points - velocity * tau, points + velocity * (1 - tau)
    drift = tau - length - sigma.square() * length / (2 * tau)
    return action * (1 - tau + length) + noise * drift


def bounded_log_std(raw: Tensor, noise_range: tuple[float, float]) -> Tensor:
    """Map a network output to a log standard deviation within a range, float32."""
    low, high = (math.log(bound) for bound in noise_range)
    return 0.5 * (low + high) + 0.5 * (high - low) * raw.float().tanh()


class DenoisingProcess:
    """Samples chains of points from noise to actions, and computes their likelihood.

    The temperature multiplies the standard deviations of the steps. At temperature 0, a chain
    starts at zero and follows the Euler method; its likelihood is that of temperature 1.
    """

    def __init__(self, steps: int, level: float, num_axes: int) -> None:
        """
        Args:
            steps: Number of steps ``N``.
            level: Noise level of Flow-SDE; not used if the noise is learned.
            num_axes: Number of axes of an action: 1 for a vector, 2 for a chunk of vectors.
        """
        self.steps, self.level, self.num_axes = steps, level, num_axes

    def step_distribution(
        self,
        points: Tensor,
        velocity: Tensor,
        log_std: Tensor | None,
        indices: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation of the points after ``points`` ``[..., K, *E]``.

        ``indices`` ``[K]`` or ``[..., K]`` are the denoising steps that start at the points. At
        temperature 0 the mean is the Euler step.
        """
        shape = (*indices.shape, *[1] * self.num_axes)
        tau = noise_fractions(self.steps).to(points.device)[indices].reshape(shape)
        sigma = torch.zeros_like(tau)
        if log_std is None:
            sigmas = flow_sde_sigmas(self.steps, self.level * temperature).to(points.device)
            sigma = sigmas[indices].reshape(shape)
            log_std = (sigma / math.sqrt(self.steps)).log()
        elif temperature:
            log_std = log_std + math.log(temperature)
        return step_mean(points, velocity, tau, sigma, self.steps), log_std

    def sample(
        self,
        velocity: VelocityFunction,
        first: Tensor,
        noise: Tensor | None,
        temperature: float,
        random_step: Tensor | None = None,
    ) -> Tensor:
        """Sample chains ``[..., N + 1, *E]``.

        Args:
            velocity: The velocity function of the policy.
            first: The first point of each chain, ``[..., *E]``.
            noise: Standard normal noise of each step, ``[..., N, *E]``; None at temperature 0.
            random_step: Index of the step of each chain that is random, ``[...]``; the other steps
                follow the flow. None: all are random.
        """
        axis = first.ndim - self.num_axes
        points, chain = first.unsqueeze(axis), [first]
        fractions = noise_fractions(self.steps).to(first.device)
        for index in range(self.steps):
            indices = torch.tensor([index], device=first.device)
            outputs = velocity(points, fractions[indices])
            step_temperature = 0.0 if noise is None else temperature
            start = points
            points, log_std = self.step_distribution(start, *outputs, indices, step_temperature)
            if noise is not None:
                points = points + noise.narrow(axis, index, 1) * log_std.exp()
                if random_step is not None:
                    is_random = (random_step == index).reshape(-1, *[1] * (self.num_axes + 1))
                    followed = start - outputs[0] / self.steps
                    points = torch.where(is_random, points, followed)
            chain.append(points.squeeze(axis))
        return torch.stack(chain, axis)

    def logprobs_and_entropy(
        self,
        chain: Tensor,
        velocity: Tensor,
        log_std: Tensor | None,
        temperature: float,
        random_step: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies ``[..., *E]`` of chains ``[..., K + 1, *E]`` given
        the first points, summed over the steps.

        Args:
            chain: The points of each chain.
            velocity, log_std: Outputs at all points except the last, ``[..., K, *E]``.
            random_step: If ``K`` is 1, index of the step between the two points, ``[...]``. None:
                the chains have all ``N`` steps.
        """
        axis = chain.ndim - self.num_axes - 1
        count = chain.shape[axis] - 1
        points, next_points = chain.narrow(axis, 0, count), chain.narrow(axis, 1, count)
        indices = (
            torch.arange(self.steps, device=chain.device)
            if random_step is None
            else random_step[..., None]
        )
        mean, log_std = self.step_distribution(
            points, velocity, log_std, indices, temperature or 1.0
        )
        distance = (next_points - mean) / log_std.exp()
        logprobs = -0.5 * distance.square() - log_std - 0.5 * math.log(2 * math.pi)
        entropies = (log_std + 0.5 * math.log(2 * math.pi * math.e)).expand_as(logprobs)
        return logprobs.sum(axis), entropies.sum(axis)
