"""Log-probabilities in parts are those of the plain way, and so are their gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlinf.models import causal_lm, logprobs
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.logprobs import head_logprobs, token_logprobs
from tests.rlinf.trainers.test_lanes import CONFIG, folder, records

__all__ = ["folder"]


def assert_alike(one: Tensor, other: Tensor) -> None:
    """To 1e-6 of the largest: elements near zero are differences of larger ones."""
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * float(other.abs().max()))


@pytest.mark.parametrize("part", [1, 301 * 5, 1 << 20])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_parts_are_the_whole_with_gradients(part: int, temperature: float) -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(17, 8, generator=random, requires_grad=True)
    weight = torch.randn(301, 8, generator=random, requires_grad=True)
    taken = torch.randint(301, (17,), generator=random)
    of_taken, of_entropy = torch.randn(2, 17, generator=random)
    chosen, entropy = token_logprobs(hidden @ weight.T, taken, temperature, True)
    assert entropy is not None
    ((chosen * of_taken).sum() + (entropy * of_entropy).sum()).backward()
    expected = (hidden.grad, weight.grad)
    hidden.grad = weight.grad = None
    out = head_logprobs(hidden, weight, taken, temperature, part)
    ((out[:, 0] * of_taken).sum() + (out[:, 1] * of_entropy).sum()).backward()
    assert_alike(out[:, 0].detach(), chosen.detach())
    assert_alike(out[:, 1].detach(), entropy.detach())
    for given, right in zip((hidden.grad, weight.grad), expected, strict=True):
        assert given is not None
        assert right is not None
        assert_alike(given, right)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_policy_computes_alike_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, tied: bool
) -> None:
    config = CausalLMConfig(**{**CONFIG.model_dump(), "architecture": architecture})
    CausalLM.create(config, {"alphabet": "0123456789+="}, 0, tmp_path)
    results = []
    for whole in (logprobs.WHOLE, 40):
        monkeypatch.setattr(causal_lm, "WHOLE", whole)
        policy = CausalLM.load(tmp_path, config)
        if not tied:
            head = policy.module.get_output_embeddings()  # type: ignore[operator]
            head.weight = torch.nn.Parameter(head.weight.detach().flip(0))
        out = policy.evaluate(policy.collate(records()), 0.9, entropy=True)
        mask = policy.collate(records())["mask"]
        assert out.entropy is not None
        (out.logprobs.sum() + (out.entropy * mask).square().sum()).backward()
        gradients = {name: p.grad for name, p in policy.module.named_parameters()}
        results.append((out.logprobs.detach(), (out.entropy * mask).detach(), gradients))
    (plain, entropies, gradients), (parts, others, theirs) = results
    assert_alike(parts, plain)
    assert_alike(others, entropies)
    for name, gradient in gradients.items():
        given = theirs[name]
        assert gradient is not None
        assert given is not None
        torch.testing.assert_close(given, gradient, rtol=0, atol=3e-6 * float(gradient.abs().max()))


def test_the_logits_are_never_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_lm, "WHOLE", 40)
    policy = CausalLM.load(folder, CONFIG)
    batch = policy.collate(records())
    seen: list[int] = []
    plain = torch.Tensor.__matmul__

    def watched(one: Tensor, other: Tensor) -> Tensor:
        product = plain(one, other)
        seen.append(product.numel())
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    policy.evaluate(batch, 1.0)
    vocabulary = policy.module.config.vocab_size  # type: ignore[union-attr]
    assert seen
    assert max(seen) <= max(40, int(vocabulary))  # type: ignore[arg-type]
