"""The density of squashed actions is right, and finite where tanh rounds to one."""

from __future__ import annotations

import math

import pytest
import torch

from rlinf.models.tanh_normal_q import inverse_tanh, tanh_normal_log_prob


def test_it_is_a_density() -> None:
    """Over the interval it adds up to one (trapezoids)."""
    actions = torch.linspace(-1, 1, 200_003, dtype=torch.float64)[1:-1]
    raw = torch.atanh(actions)[:, None]
    mean, log_std = torch.tensor([0.4]).double(), torch.tensor([-0.5]).double()
    density = tanh_normal_log_prob(raw, mean, log_std).exp()
    assert float(torch.trapezoid(density, actions)) == pytest.approx(1, abs=1e-4)


def test_it_is_that_of_torch_where_that_is_exact() -> None:
    raw = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, log_std = torch.zeros(3).double(), torch.full((3,), -0.2).double()
    known = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log_std.exp()),
        [torch.distributions.TanhTransform()],
    )
    wanted = known.log_prob(torch.tanh(raw)).sum(-1)
    torch.testing.assert_close(tanh_normal_log_prob(raw, mean, log_std), wanted)


def test_it_and_its_gradient_stay_finite_at_the_edge() -> None:
    raw = torch.tensor([[40.0], [-40.0], [9.5]], requires_grad=True)
    found = tanh_normal_log_prob(raw, torch.zeros(1), torch.zeros(1))
    # log(1 - tanh(u)^2) is log 4 - 2|u| there.
    wanted = -0.5 * 40.0**2 - 0.5 * math.log(2 * math.pi) - (math.log(4) - 80)
    assert found[0].item() == pytest.approx(wanted, rel=1e-6) == found[1].item()
    found.sum().backward()
    assert raw.grad is not None
    torch.testing.assert_close(raw.grad[:, 0], torch.tensor([-38.0, 38.0, -7.5]))


def test_squashing_can_be_undone() -> None:
    raw = torch.linspace(-6, 6, 101, dtype=torch.float64)[:, None]
    torch.testing.assert_close(inverse_tanh(torch.tanh(raw), 1e-12), raw, atol=1e-8, rtol=0)
    assert inverse_tanh(torch.tensor([1.0, -7.0])).isfinite().all()
