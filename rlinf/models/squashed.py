"""The tanh-Gaussian: a normal vector, squashed into [-1, 1] (SAC, arXiv 1812.05905, app. C)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

EDGE = 1e-6
"""Actions of other sources are taken so much inside of the interval: on its edge no density is."""


def unsquash(actions: Tensor, edge: float = EDGE) -> Tensor:
    """The inverse of ``tanh``; what lies outside of ``1 - edge`` counts as on that bound."""
    return torch.atanh(actions.clamp(edge - 1, 1 - edge))


def log_density(raw: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density ``[...]`` of ``tanh(raw)`` for ``raw``, ``mean``, ``log_std`` ``[..., A]``.

    ``log (1 - tanh(u)^2)`` is ``2 (log 2 - u - softplus(-2 u))``: exact where ``tanh`` rounds to 1.
    """
    distance = (raw - mean) / log_std.exp()
    normal = -0.5 * distance.square() - log_std - 0.5 * math.log(2 * math.pi)
    slope = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
    return (normal - slope).sum(-1)
