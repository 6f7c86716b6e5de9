"""Observations standardised by running statistics, which travel with the weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.data.counted import counted
from rlinf.data.record import Record
from rlinf.models.vectors import VectorPolicy


class Observed(nn.Module):
    """``seen``, ``mean`` and ``square`` (number, means and variances of the observations so far)
    are in double precision, for they are sums over a whole run."""

    seen: Tensor
    mean: Tensor
    square: Tensor

    def __init__(self, size: int, clip: float) -> None:
        """
        Args:
            size: of an observation.
            clip: largest magnitude of a standardised one.
        """
        super().__init__()
        self.clip = clip
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("square", torch.ones(size, dtype=torch.float64))

    def standardised(self, observations: Tensor) -> Tensor:
        """Observations ``[..., D]`` as the networks take them, float64."""
        deviation = self.square.clamp(min=1e-8).sqrt()
        return ((observations - self.mean) / deviation).clamp(-self.clip, self.clip)


class ObservingPolicy(VectorPolicy):
    """A policy of vectors that follows their statistics, if ``normalise_observations`` is set."""

    module: Observed
    observes = True

    @torch.no_grad()
    def observe(self, records: Sequence[Record]) -> None:
        """Fold the observations of a batch's steps that count into the running statistics: others
        may be of no state of the simulator.

        The pairwise update of Chan, Golub and LeVeque (1979): exact, whatever the batches.
        """
        if not self.settings["normalise_observations"]:
            return
        module = self.module
        every = [record.steps["observations"][counted(record)] for record in records]
        observations = np.concatenate(every)
        if not len(observations):
            return
        batch = torch.as_tensor(observations, dtype=torch.float64)
        mean = batch.mean(0).to(module.mean.device)
        variance = batch.var(0, unbiased=False).to(module.mean.device)
        old, new = module.seen, len(batch)
        total = old + new
        delta = mean - module.mean
        squares = module.square * old + variance * new + delta.square() * old * new / total
        module.square.copy_(squares / total)
        module.mean.add_(delta * new / total)
        module.seen.copy_(total)


def network(sizes: Sequence[int], last_gain: float | None) -> nn.Sequential:
    """Linear layers with hyperbolic tangents after all, or after all but an output of that gain."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        output = last_gain is not None and i + 2 == len(sizes)
        linear = nn.Linear(a, b)
        nn.init.orthogonal_(linear.weight, last_gain if last_gain and output else 2**0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear] if output else [linear, nn.Tanh()]
    return nn.Sequential(*layers)
