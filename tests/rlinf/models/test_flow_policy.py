"""The flow-matching policy: its sampler, its likelihood, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor
from torch.distributions import Normal

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError
from rlinf.models.denoising import CHAIN_COLUMN, flow_sde_sigmas, noise_fractions, step_mean
from rlinf.models.flow_policy import FlowConfig, FlowPolicy

MEAN, STD = 1.5, 0.4
BOX = {"observation": 3, "action": {"kind": "box", "size": 2}}


def exact_velocity(points: Tensor, tau: Tensor) -> Tensor:
    """``E[noise - action | x]`` where actions are normal: a regression of one normal on another."""
    variance = tau.square() + (1 - tau).square() * STD**2
    slope = (tau - (1 - tau) * STD**2) / variance
    return -MEAN + slope * (points - (1 - tau) * MEAN)


def denoised(steps: int, level: float, count: int = 40_000) -> Tensor:
    """Actions ``[count]`` of the exact velocity."""
    random = torch.Generator().manual_seed(0)
    points = torch.randn(count, generator=random)
    sigmas = flow_sde_sigmas(steps, level)
    for tau, sigma in zip(noise_fractions(steps), sigmas, strict=True):
        mean = step_mean(points, exact_velocity(points, tau), tau, sigma, steps)
        points = mean + sigma * steps**-0.5 * torch.randn(count, generator=random)
    return points


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_many_steps_have_the_distribution_of_the_data_with_noise_and_without(level: float) -> None:
    """A drift of another sign or size would not: the noise alone would widen what comes out."""
    found = denoised(400, level)
    assert float(found.mean()) == pytest.approx(MEAN, abs=0.01)
    assert float(found.std()) == pytest.approx(STD, rel=0.02)


def test_few_steps_are_narrower_and_noise_does_not_move_the_mean() -> None:
    spreads = [float(denoised(steps, 0.5).std()) for steps in (4, 10, 50)]
    assert spreads == sorted(spreads)
    assert spreads[0] == pytest.approx(0.326, abs=0.01)
    assert float(denoised(10, 0.5).mean()) == pytest.approx(MEAN, abs=0.02)


def test_the_standard_deviation_of_each_step_is_the_closed_form() -> None:
    for steps in (1, 4, 10):
        wanted = [0.5] + [0.5 * ((steps - k) / (k * steps)) ** 0.5 for k in range(1, steps)]
        found = flow_sde_sigmas(steps, 0.5) * steps**-0.5
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6)


def policy(**options: Any) -> FlowPolicy:
    """With weights that make something of observations, points and times."""
    settings = {**BOX, **FlowConfig(hidden=(16,), **options).model_dump(mode="json")}
    torch.manual_seed(0)
    made = FlowPolicy(FlowPolicy.Network(settings), settings)
    with torch.no_grad():
        for tensor in made.module.parameters():
            tensor.add_(0.3 * torch.randn(tensor.shape))
    return made


def acted(made: FlowPolicy, temperature: float, rows: int = 6) -> tuple[Tensor, dict[str, Tensor]]:
    seen = torch.randn(rows, 3)
    noise = torch.tensor(made.draw_noise(np.random.default_rng(1), rows)) if temperature else None
    with torch.no_grad():
        return seen, made.act({"observation": seen}, noise, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("noise", ["sde", "learned"])
def test_a_chain_is_as_likely_as_its_normal_steps(noise: str, temperature: float) -> None:
    """The log-probability that was drawn with is that of the steps, one after the other."""
    made = policy(noise_method=noise, denoising_steps=5)
    seen, found = acted(made, temperature)
    chain, total = found[CHAIN_COLUMN], torch.zeros(len(seen))
    for k in range(5):
        tau = torch.tensor([[1 - k / 5]])
        with torch.no_grad():
            velocity, log_std, _ = made.module(seen, chain[:, k, None], tau)
        points, speed = chain[:, k].double(), velocity[:, 0].double()
        action, start = points - float(tau) * speed, points + (1 - float(tau)) * speed
        if log_std is None:
            sigma2 = (0.5 * temperature) ** 2 * float(tau) / (1 - float(tau) if k else 1 / 5)
            mean = action * (1 - float(tau) + 0.2)
            mean += start * (float(tau) - 0.2 - sigma2 * 0.2 / (2 * float(tau)))
            std = torch.full_like(mean, (sigma2 * 0.2) ** 0.5)
        else:
            mean = points - 0.2 * speed
            std = log_std[:, 0].double().exp() * temperature
        total += Normal(mean, std).log_prob(chain[:, k + 1].double()).sum(-1).float()
    torch.testing.assert_close(found["logprob"], total, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found["action"], chain[:, -1])


def test_learned_noise_stays_in_its_range_and_has_an_entropy_with_a_gradient() -> None:
    made = policy(noise_method="learned", noise_std_range=(0.1, 0.3))
    seen, found = acted(made, 1.0)
    _, log_std, _ = made.module(seen, found[CHAIN_COLUMN][:, :-1], noise_fractions(4)[:, None])
    assert log_std is not None
    assert 0.1 < float(log_std.detach().exp().min()) < float(log_std.detach().exp().max()) < 0.3
    _, entropy, _ = made.evaluate_chain(seen, found[CHAIN_COLUMN], 1.0)
    wanted = Normal(torch.zeros(()), log_std.exp()).entropy().sum((-2, -1))
    torch.testing.assert_close(entropy, wanted)
    assert torch.autograd.grad(entropy.sum(), made.module.spread[0].weight)[0].any()


def test_without_noise_it_is_the_solution_of_the_differential_equation() -> None:
    """That of an adaptive solver, to the first order of the step."""
    gaps = []
    for steps in (10, 20, 40, 80):
        made = policy(denoising_steps=steps)
        seen, found = acted(made, 0.0, rows=1)

        def slope(tau: float, points: np.ndarray, made: Any, seen: Tensor) -> np.ndarray:
            at = torch.tensor(points, dtype=torch.float32)[None, None]
            with torch.no_grad():
                velocity, _, _ = made.module(seen, at, torch.tensor([[tau]], dtype=torch.float32))
            return np.asarray(velocity[0, 0].double())

        known = {"rtol": 1e-6, "atol": 1e-8, "args": (made, seen)}
        solved = solve_ivp(slope, (1, 0), np.zeros(2), **known).y[:, -1]
        gaps.append(float(np.abs(found["action"][0].numpy() - solved).max()))
    assert gaps[-1] < 0.02
    for coarse, fine in zip(gaps, gaps[1:], strict=False):
        assert coarse / fine == pytest.approx(2, rel=0.2)


def test_actions_are_scaled_and_chains_are_not() -> None:
    one, other = acted(policy(), 1.0)[1], acted(policy(action_scale=3.0), 1.0)[1]
    torch.testing.assert_close(other["action"], 3 * one["action"])
    torch.testing.assert_close(other[CHAIN_COLUMN], one[CHAIN_COLUMN])


def test_what_it_cannot_make_is_refused(tmp_path: Path) -> None:
    numbered = {"observation": 3, "action": {"kind": "discrete", "size": 4}}
    with pytest.raises(ConfigError, match="not one of 4 numbers; use model=mlp"):
        FlowPolicy.create(FlowConfig(), numbered, 0, tmp_path)
    with pytest.raises(ValueError, match=r"noise_std_range: the first, 0.2, is to be below 0.1"):
        FlowConfig(noise_std_range=(0.2, 0.1))


def test_demonstrations_are_imitated_by_flow_matching(tmp_path: Path) -> None:
    config = FlowConfig(hidden=(16,), action_scale=2.0)
    FlowPolicy.create(config, BOX, 0, tmp_path)
    policy = FlowPolicy.load(tmp_path, config)
    random = np.random.default_rng(0)
    records = [
        Trajectory(
            identity=RecordId(0, length),
            observations=random.normal(size=(length, 3)).astype(np.float32),
            actions=random.normal(size=(length, 2)).astype(np.float32),
        )
        for length in (3, 5)
    ]
    shown = [policy.prepare_demonstration(record, 7) for record in records]
    again = policy.prepare_demonstration(records[0], 7)
    np.testing.assert_array_equal(again.policy_columns["noise"], shown[0].policy_columns["noise"])
    outputs = policy.evaluate(policy.collate(shown), 1.0)
    assert outputs.logprobs[0, 3:].tolist() == [0, 0], "padding"
    for row, record in enumerate(shown):
        batch = {
            name: torch.from_numpy(record.to_record().steps[name])
            for name in ("observations", "actions", "noise", "uniform")
        }
        batch["actions"] = batch["actions"] / 2
        wanted = -policy.imitation_loss(batch)
        torch.testing.assert_close(outputs.logprobs[row, : len(record)], wanted)
    outputs.logprobs.sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.module.parameters())
