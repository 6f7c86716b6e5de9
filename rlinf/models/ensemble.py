"""Several equal networks at once: the critics of an off-policy method."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["none", "layer", "batch_renorm"]
RUNNING_RATE = 0.01
"""Of batch renormalisation's running statistics (CrossQ: momentum 0.99)."""
R_MAX, D_MAX = 3.0, 5.0
RENORM_FROM = 100_000
"""Batches after which the running statistics are used in training (CrossQ, appendix)."""


class Ensemble(nn.Module):
    """``E`` networks of rectified layers from ``[B, I]`` to ``[E, B]``; nothing is shared.

    A layer is one product of all networks' matrices.
    """

    def __init__(
        self, count: int, size: int, hidden: Sequence[int], norm: Norm = "none", gain: float = 1.0
    ) -> None:
        """
        Args:
            count: ``E``.
            size: ``I``.
            gain: of the last layer's first weights.
        """
        super().__init__()
        sizes = [size, *hidden, 1]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for place, (a, b) in enumerate(itertools.pairwise(sizes)):
            bound = 1 / math.sqrt(a)
            scale = bound * (gain if place + 2 == len(sizes) else 1.0)
            self.weights.append(nn.Parameter(torch.empty(count, a, b).uniform_(-scale, scale)))
            # [E, 1, b]: what has three dimensions decays with the weights, as gains do not.
            self.biases.append(nn.Parameter(torch.empty(count, 1, b).uniform_(-scale, scale)))
        self.norms = nn.ModuleList()
        if norm == "layer":
            self.norms.extend(LayerNorm(count, width) for width in hidden)
        elif norm == "batch_renorm":
            self.norms.extend(BatchRenorm(count, width) for width in sizes[:-1])
        self._before = norm == "batch_renorm"

    def forward(
        self, inputs: Tensor, *, frozen: bool = False, chosen: Tensor | None = None
    ) -> Tensor:
        """Outputs ``[E, B]`` of ``[B, I]``.

        Args:
            frozen: gradients flow to the inputs alone, and no running statistics change: what an
                actor's loss needs.
            chosen: int64 ``[K]``: of these networks alone, ``[K, B]``.
        """
        count = len(self.weights[0]) if chosen is None else len(chosen)
        at = inputs.expand(count, *inputs.shape)
        last = len(self.weights) - 1

        def own(parameter: Tensor) -> Tensor:
            parameter = parameter.detach() if frozen else parameter
            return parameter if chosen is None else parameter[chosen]

        for place in range(last + 1):
            if self._before:
                at = self.norms[place](at, frozen=frozen, chosen=chosen)
            weight, bias = own(self.weights[place]), own(self.biases[place])
            if place == last:
                # One column: as a product of matrices it takes six times as long.
                return (at * weight.transpose(1, 2)).sum(-1) + bias[..., 0]
            at = torch.bmm(at, weight) + bias
            if len(self.norms) and not self._before:
                at = self.norms[place](at, frozen=frozen, chosen=chosen)
            at = F.relu(at)
        raise AssertionError("an ensemble has a last layer")


class LayerNorm(nn.Module):
    """Layer normalisation of each of several networks (Ba et al., 2016)."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(count, 1, width))
        self.shift = nn.Parameter(torch.zeros(count, 1, width))

    def forward(self, at: Tensor, *, frozen: bool, chosen: Tensor | None) -> Tensor:
        gain, shift = _own(self.gain, self.shift, frozen, chosen)
        return F.layer_norm(at, at.shape[-1:]) * gain + shift


class BatchRenorm(nn.Module):
    """Batch renormalisation of each of several networks (Ioffe, 2017, arXiv 1702.03275).

    While it trains a batch is normalised by its own statistics, corrected towards the running ones
    by ``r`` and ``d``, which are constants of the gradient; else by the running ones. Before
    :data:`RENORM_FROM` batches ``r`` is 1 and ``d`` 0.
    """

    mean: Tensor
    variance: Tensor
    batches: Tensor

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(count, 1, width))
        self.shift = nn.Parameter(torch.zeros(count, 1, width))
        self.register_buffer("mean", torch.zeros(count, 1, width))
        self.register_buffer("variance", torch.ones(count, 1, width))
        self.register_buffer("batches", torch.zeros(1))

    def forward(self, at: Tensor, *, frozen: bool, chosen: Tensor | None) -> Tensor:
        gain, shift = _own(self.gain, self.shift, frozen, chosen)
        if frozen or not self.training:
            mean, variance = _own(self.mean, self.variance, True, chosen)
            return (at - mean) / (variance + 1e-5).sqrt() * gain + shift
        assert chosen is None, "running statistics are of all networks"
        variance, mean = torch.var_mean(at, 1, unbiased=False, keepdim=True)
        deviation = (variance + 1e-5).sqrt()
        out = (at - mean) / deviation
        with torch.no_grad():
            if self.batches.item() >= RENORM_FROM:
                running = (self.variance + 1e-5).sqrt()
                r = (deviation / running).clamp(1 / R_MAX, R_MAX)
                d = ((mean - self.mean) / running).clamp(-D_MAX, D_MAX)
            else:
                r, d = torch.ones_like(mean), torch.zeros_like(mean)
            self.mean.lerp_(mean, RUNNING_RATE)
            self.variance.lerp_(variance, RUNNING_RATE)
            self.batches += 1
        return (out * r + d) * gain + shift


def _own(one: Tensor, other: Tensor, frozen: bool, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
    if frozen:
        one, other = one.detach(), other.detach()
    return (one, other) if chosen is None else (one[chosen], other[chosen])
