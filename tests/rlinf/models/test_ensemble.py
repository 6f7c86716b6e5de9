"""Networks side by side are as the same networks one after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf.models import tanh_normal_q
from rlinf.models.tanh_normal_q import CriticEnsemble, CriticNorm, EnsembleBatchRenorm


def alone(networks: CriticEnsemble, number: int, inputs: Tensor) -> Tensor:
    """One of them, by linear layers; without running statistics."""
    at, last = inputs, len(networks.weights) - 1
    for place, (weight, bias) in enumerate(zip(networks.weights, networks.biases, strict=True)):
        at = F.linear(at, weight[number].T, bias[number, 0])
        if place < last:
            if len(networks.norms):
                norm = networks.norms[place]
                at = F.layer_norm(at, at.shape[-1:], norm.gain[number, 0], norm.shift[number, 0])
            at = F.relu(at)
    return at[:, 0]


def made(norm: CriticNorm) -> tuple[CriticEnsemble, Tensor]:
    torch.manual_seed(0)
    networks = CriticEnsemble(3, 4, (8, 5), norm)
    for parameter in networks.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return networks, torch.randn(7, 4)


@pytest.mark.parametrize("norm", ["none", "layer"])
def test_each_is_as_if_it_were_alone(norm: CriticNorm) -> None:
    networks, inputs = made(norm)
    wanted = torch.stack([alone(networks, number, inputs) for number in range(3)])
    torch.testing.assert_close(networks(inputs), wanted)
    chosen = torch.tensor([2, 0])
    torch.testing.assert_close(networks(inputs, critics=chosen), wanted[chosen])


@pytest.mark.parametrize("norm", ["none", "layer", "batch_renorm"])
def test_frozen_ones_pass_gradients_to_their_inputs_alone(norm: CriticNorm) -> None:
    networks, inputs = made(norm)
    before = {name: tensor.clone() for name, tensor in networks.state_dict().items()}
    inputs.requires_grad_()
    networks(inputs, frozen=True).sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.any()
    assert all(parameter.grad is None for parameter in networks.parameters())
    assert all(torch.equal(before[name], t) for name, t in networks.state_dict().items())


def test_a_batch_is_normalised_by_its_own_statistics_and_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    norm, batch = EnsembleBatchRenorm(2, 3), torch.randn(2, 64, 3) * 4 + 7
    out = norm(batch, frozen=False, critics=None)
    torch.testing.assert_close(out.mean(1), torch.zeros(2, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.std(1, unbiased=False), torch.ones(2, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(norm.mean, 0.01 * batch.mean(1, keepdim=True))
    # Where the statistics have become exact, renormalisation is the normalisation by them.
    monkeypatch.setattr(tanh_normal_q, "RENORM_WARMUP_BATCHES", 0)
    norm.mean.copy_(batch.mean(1, keepdim=True) + 0.5)
    norm.variance.copy_(batch.var(1, unbiased=False, keepdim=True) * 1.5)
    wanted = norm(batch, frozen=True, critics=None)
    torch.testing.assert_close(norm(batch, frozen=False, critics=None), wanted, atol=1e-5, rtol=0)
    norm.mean.copy_(batch.mean(1, keepdim=True) + 1e4)
    shifted = norm(batch, frozen=False, critics=None)
    assert shifted.mean().item() == pytest.approx(-tanh_normal_q.D_MAX, abs=1e-3), "it is clipped"
