"""Losses of action values against slow, obvious ones, and their gradients in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from rlinf.algorithms.losses import (
    advantage_weights,
    aggregate_q_values,
    critic_loss,
    expectile_loss,
    sac_policy_loss,
    td_target,
    temperature_loss,
)

seeds = st.integers(0, 2**16)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(seeds, st.sampled_from(["min", "mean"]))
def test_critics_become_one_and_their_error_is_squared(seed: int, how: str) -> None:
    values, target = drawn(seed, 3, 5), drawn(seed + 1, 5)
    one = aggregate_q_values(values, how)  # type: ignore[arg-type]
    for b in range(5):
        column = [float(values[e, b]) for e in range(3)]
        wanted = min(column) if how == "min" else sum(column) / 3
        assert one[b].item() == pytest.approx(wanted)
    errors = [(values[e, b] - target[b]).item() ** 2 for e in range(3) for b in range(5)]
    assert critic_loss(values, target).item() == pytest.approx(sum(errors) / 2 / 5)


def test_a_cut_has_a_value_after_it_and_an_end_has_none() -> None:
    terminated = torch.tensor([0.0, 1.0])
    found = td_target(torch.tensor([1.0, 1.0]), terminated, torch.tensor([10.0, 10.0]), 0.9)
    torch.testing.assert_close(found, torch.tensor([10.0, 1.0]))


@given(seeds, st.floats(0.05, 0.95))
def test_policy_temperature_and_expectile_losses_are_those_of_the_papers(
    seed: int, tau: float
) -> None:
    logprobs, values, log_alpha = drawn(seed, 6), drawn(seed + 1, 6), drawn(seed + 2, 1)
    alpha = math.exp(float(log_alpha))
    pairs = list(zip(logprobs.tolist(), values.tolist(), strict=True))
    assert sac_policy_loss(logprobs, values, log_alpha.exp()).item() == pytest.approx(
        sum(alpha * p - q for p, q in pairs) / 6
    )
    assert temperature_loss(log_alpha, logprobs, -2.0).item() == pytest.approx(
        sum(-alpha * (p - 2.0) for p, _ in pairs) / 6
    )
    wanted = sum(abs(tau - (1 if u < 0 else 0)) * u * u for u in values.tolist()) / 6
    assert expectile_loss(values, tau).item() == pytest.approx(wanted)


@given(st.floats(0.1, 0.9))
def test_the_least_expectile_loss_is_at_the_expectile(tau: float) -> None:
    """For two equally likely numbers 0 and 1 the expectile is ``tau``."""
    value = torch.tensor(tau, dtype=torch.float64, requires_grad=True)
    expectile_loss(torch.tensor([0.0, 1.0]).double() - value, tau).backward()
    assert value.grad is not None
    assert value.grad.item() == pytest.approx(0, abs=1e-9)


def test_gradients_are_those_of_the_losses_and_reach_nothing_else() -> None:
    values, target = drawn(0, 2, 4).requires_grad_(), drawn(1, 4)
    logprobs, log_alpha = drawn(2, 4).requires_grad_(), drawn(3, 1).requires_grad_()
    assert gradcheck(lambda v: critic_loss(v, target), (values,))
    assert gradcheck(lambda p, v: sac_policy_loss(p, v, torch.tensor(0.3)), (logprobs, values[0]))
    assert gradcheck(lambda a: temperature_loss(a, logprobs.detach(), -1.0), (log_alpha,))
    assert gradcheck(lambda u: expectile_loss(u, 0.7), (values[0],))
    temperature_loss(log_alpha, logprobs, -1.0).backward()
    assert logprobs.grad is None
    sac_policy_loss(logprobs, values[0].detach(), log_alpha.exp()).backward()
    before = log_alpha.grad
    assert before is not None
    assert not advantage_weights(values, 3.0, 100.0).requires_grad


def test_advantages_weigh_exponentially_up_to_a_limit() -> None:
    found = advantage_weights(torch.tensor([-1.0, 0.0, 1.0, 9.0]), 3.0, 100.0)
    torch.testing.assert_close(found, torch.tensor([math.exp(-3), 1.0, math.exp(3), 100.0]))
