"""What the policy of off-policy methods samples, and how its target networks follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.errors import ConfigError, DataError
from rlinf.models.tanh_normal_q import MLPQConfig, MLPQPolicy

BOX = {"observation": 4, "action": {"kind": "box", "size": 2}}


def made(folder: Path, **options: Any) -> MLPQPolicy:
    config = MLPQConfig(**{"hidden": (16,), "critic_hidden": (8,), **options})
    MLPQPolicy.create(config, BOX, 0, folder)
    return MLPQPolicy.load(folder, config)


def test_sampled_actions_fill_the_interval_and_have_the_density_of_acting(tmp_path: Path) -> None:
    policy = made(tmp_path, action_scale=3.0)
    random = torch.Generator().manual_seed(0)
    seen = torch.randn(2000, 4, generator=random)
    noise = torch.randn(2000, 2, generator=random)
    actions, logprobs = policy.rsample(seen, noise)
    assert 0.8 < actions.abs().max() < 1
    with torch.no_grad():
        acted = policy.act({"observation": seen}, noise, 1.0)
    torch.testing.assert_close(acted["action"].float(), 3 * actions.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(acted["logprob"], logprobs.detach(), atol=1e-4, rtol=1e-4)
    greedy = policy.act({"observation": seen}, None, 0.0)["action"]
    mean, _ = policy.module(seen)
    torch.testing.assert_close(greedy.float(), 3 * torch.tanh(mean), atol=1e-5, rtol=0)


def test_the_density_is_the_gradient_through_the_noise(tmp_path: Path) -> None:
    """Of one component: d action / d noise times the density of the action is that of the noise."""
    policy = made(tmp_path)
    seen, noise = torch.zeros(1, 4), torch.tensor([[0.3, -0.2]], requires_grad=True)
    actions, logprob = policy.rsample(seen, noise)
    slopes = [torch.autograd.grad(actions[0, i], noise, retain_graph=True)[0][0, i] for i in (0, 1)]
    normal = torch.distributions.Normal(0, 1).log_prob(noise).sum()
    torch.testing.assert_close(logprob[0], normal - torch.stack(slopes).log().sum())


def test_targets_begin_as_the_critics_and_follow_them(tmp_path: Path) -> None:
    module = made(tmp_path).module
    assert module.targets is not None
    first = {name: tensor.clone() for name, tensor in module.critics.state_dict().items()}
    for name, tensor in module.targets.state_dict().items():
        assert torch.equal(tensor, first[name])
    with torch.no_grad():
        for parameter in module.critics.parameters():
            parameter.add_(1.0)
    module.polyak_update(0.1)
    module.polyak_update(0.1)
    for name, tensor in module.targets.state_dict().items():
        torch.testing.assert_close(tensor, first[name] + 0.19)
    assert not any(parameter.requires_grad for parameter in module.targets.parameters())


def test_groups_are_those_that_are_named(tmp_path: Path) -> None:
    policy = made(tmp_path, use_state_value=True)
    found = {policy.parameter_group(name) for name, _ in policy.module.named_parameters()}
    assert found == set(policy.parameter_groups)
    assert policy.parameter_group("targets.weights.0") == "critic"


def test_what_it_cannot_be_made_for_or_read_is_refused(tmp_path: Path) -> None:
    discrete = {"observation": 4, "action": {"kind": "discrete", "size": 3}}
    with pytest.raises(ConfigError, match=r"model\.name: mlp_q chooses vectors"):
        MLPQPolicy.check_spec(MLPQConfig(), discrete)
    made(tmp_path)
    (tmp_path / "config.json").write_text('{"observation": 5}')
    with pytest.raises(DataError, match="not a policy folder"):
        MLPQPolicy.load(tmp_path, MLPQConfig())


def test_data_on_the_edge_of_the_interval_have_a_finite_density(tmp_path: Path) -> None:
    policy = made(tmp_path)
    actions = torch.tensor([[1.0, -1.0], [0.0, 5.0]])
    outputs = policy.action_logprob(torch.zeros(2, 4), actions, eps=1e-3)
    assert outputs.isfinite().all()
    inside = policy.action_logprob(torch.zeros(1, 4), torch.tensor([[0.999, -0.999]]))
    np.testing.assert_allclose(outputs[0].item(), inside.item(), rtol=1e-4)
