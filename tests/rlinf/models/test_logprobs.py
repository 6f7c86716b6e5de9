"""Log-probabilities in parts are those of the plain way, and so are their gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rlinf.models import causal_lm, logprobs
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.causal_lm_config import Architecture
from rlinf.models.logprobs import head_logprobs, mask_tokens, token_logprobs
from tests.rlinf.trainers.test_threaded_data_parallel import CONFIG, folder, records

__all__ = ["folder"]


def assert_alike(one: Tensor, other: Tensor) -> None:
    """To 1e-6 of the largest: elements near zero are differences of larger ones."""
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * float(other.abs().max()))


@pytest.mark.parametrize("part", [1, 301 * 5, 1 << 20])
@pytest.mark.parametrize(
    ("temperature", "biased", "cap"),
    [(0.0, False, None), (0.7, True, None), (1.0, False, None), (0.7, True, 2.0)],
)
def test_parts_are_the_whole_with_gradients(
    part: int, temperature: float, biased: bool, cap: float | None
) -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(17, 8, generator=random, requires_grad=True)
    weight = torch.randn(301, 8, generator=random, requires_grad=True)
    bias = torch.randn(301, generator=random, requires_grad=True) if biased else None
    inputs = [hidden, weight, *([] if bias is None else [bias])]
    tokens = torch.randint(301, (17,), generator=random)
    of_taken, of_entropy = torch.randn(2, 17, generator=random)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    chosen, entropy = token_logprobs(logits, tokens, temperature, True)
    assert entropy is not None
    both = torch.stack([chosen * of_taken, entropy * of_entropy], 1)
    out = head_logprobs(hidden, weight, tokens, temperature, part, bias=bias, softcap=cap)
    assert_alike(out[:, 0].detach(), chosen.detach())
    assert_alike(out[:, 1].detach(), entropy.detach())
    alone = head_logprobs(
        hidden, weight, tokens, temperature, part, bias=bias, softcap=cap, entropy=False
    )
    assert torch.equal(alone, out[:, :1])
    scales = torch.stack([of_taken, of_entropy], 1)
    for ours, theirs in ((out * scales, both), (alone * scales[:, :1], both[:, :1])):
        given = torch.autograd.grad(ours.sum(), inputs)
        right = torch.autograd.grad(theirs.sum(), inputs, retain_graph=True)
        for one, other in zip(given, right, strict=True):
            assert_alike(one, other)


def test_in_half_precision_sums_are_those_of_the_plain_way(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=random).bfloat16() for n in (40, 301))
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    tokens = torch.randint(301, (40,), generator=random)
    chosen, _ = token_logprobs(hidden @ weight.T, tokens, 1.0, False)
    out = head_logprobs(hidden, weight, tokens, 1.0, 301 * 7, entropy=False)
    assert out.dtype == torch.float32
    assert_alike(out[:, 0].detach(), chosen.detach())
    given = torch.autograd.grad(out.sum(), inputs)
    for one, other in zip(given, torch.autograd.grad(chosen.sum(), inputs), strict=True):
        assert one.dtype == torch.bfloat16
        # Two roundings to eight bits, of the logits' gradients and of their sum.
        torch.testing.assert_close(one, other, rtol=0, atol=float(other.abs().max()) / 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_never_said_has_finite_logits_of_every_type(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    hidden, weight = (10 * torch.randn(n, 16, generator=random) for n in (5, 301))
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    tokens = torch.randint(1, 300, (5,), generator=random)
    bias = mask_tokens(weight.new_zeros(301), (0, 300))
    out = head_logprobs(hidden, weight, tokens, 2.0, bias=bias)
    chosen, entropy = token_logprobs(mask_tokens(hidden @ weight.T, (0, 300)), tokens, 2.0, True)
    assert entropy is not None
    torch.testing.assert_close(out, torch.stack([chosen, entropy], 1))
    of_unsaid, _ = token_logprobs(hidden @ weight.T + bias, torch.zeros_like(tokens), 2.0, False)
    assert bool(of_unsaid.isfinite().all())
    assert float(of_unsaid.exp().max()) == 0


@pytest.mark.parametrize("architecture", get_args(Architecture))
@pytest.mark.parametrize("tied", [True, False])
def test_a_policy_computes_alike_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, tied: bool
) -> None:
    config = CausalLMConfig(**{**CONFIG.model_dump(), "architecture": architecture})
    CausalLM.create(config, {"alphabet": "0123456789+="}, 0, tmp_path)
    results = []
    for whole in (logprobs.MAX_LOGITS, 40):
        monkeypatch.setattr(causal_lm, "MAX_LOGITS", whole)
        policy = CausalLM.load(tmp_path, config)
        if not tied:
            head = policy.module.get_output_embeddings()  # type: ignore[operator]
            head.weight = torch.nn.Parameter(head.weight.detach().flip(0))
        if logprobs.final_softcap(policy.module) is not None:
            # Logits of a new network are far below the usual cap of 30.
            policy.module.config.final_logit_softcapping = 0.5  # type: ignore[union-attr]
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
    monkeypatch.setattr(causal_lm, "MAX_LOGITS", 40)
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


SIZES = {
    "hidden_size n_embd word_embed_proj_dim ffn_dim intermediate_size": 32,
    "num_attention_heads n_head": 4,
    "num_hidden_layers n_layer num_experts_per_tok": 1,
    "num_key_value_heads num_experts num_local_experts": 2,
    "head_dim": 8,
    "moe_intermediate_size shared_expert_intermediate_size": 16,
    "vocab_size": 50,
    "max_position_embeddings n_positions": 32,
    "rotary_dim": 4,
    "pad_token_id": 0,
}


def network(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    base: Any = AutoConfig.for_model(family)
    sizes: dict[str, Any] = {n: size for names, size in SIZES.items() for n in names.split()}
    if family == "qwen3_next":
        base.layer_types, sizes["layer_types"] = [], ["full_attention"]
    known = {name: size for name, size in sizes.items() if hasattr(base, name)}
    settings = AutoConfig.for_model(family, **known)
    return AutoModelForCausalLM.from_config(settings).eval()  # type: ignore[no-untyped-call]


def after_head(family: str) -> tuple[Tensor, Tensor]:
    """What the head gives, replaced, and what the network makes of that."""
    module, made = network(family), list[Tensor]()

    def compute(hidden: Tensor, *_: object) -> Tensor:
        made.append(hidden.new_ones(*hidden.shape[:-1], 2))
        return made[-1]

    tokens = torch.ones(1, 4, dtype=torch.int64)
    with torch.no_grad(), logprobs.override_head(module.get_output_embeddings(), compute):
        out: Tensor = module(input_ids=tokens, use_cache=False, logits_to_keep=3).logits
    return made[0], out


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(logprobs.PLAIN_HEAD_FAMILIES))
def test_nothing_works_on_the_logits_of_these_families_after_the_head(family: str) -> None:
    made, out = after_head(family)
    assert out is made
    assert out.shape == (1, 3, 2)


def test_a_family_that_changes_its_logits_is_not_among_them_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, out = after_head("cohere")
    assert out is not made
    module = network("cohere")
    logprobs.warn_full_logits.cache_clear()
    monkeypatch.setattr(causal_lm, "MAX_LOGITS", 40)
    policy = CausalLM(module, tmp_path)
    for _ in range(2):
        policy.evaluate(policy.collate(records()), 1.0)
    messages = [record.getMessage() for record in caplog.records]
    assert len([text for text in messages if "type cohere" in text]) == 1
