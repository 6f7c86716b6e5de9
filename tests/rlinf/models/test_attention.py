"""Attention with grouped heads is that of repeated heads, in every combination of its arguments."""

from __future__ import annotations

import pytest
import torch

from rlinf.models.attention import grouped_query_attention


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("kind", ["all", "causal", "mask"])
def test_outputs_and_gradients_are_those_of_repeated_heads(kv_heads: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 6, 5, 8), (3, kv_heads, 5, 8), (3, kv_heads, 5, 8))
    states = [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]
    mask = torch.rand(3, 1, 5, 5, generator=generator) < 0.5
    mask[..., 0] = True
    visible = {"all": torch.ones(5, 5).bool(), "causal": torch.ones(5, 5).bool().tril()}
    out = grouped_query_attention(
        states[0],
        states[1],
        states[2],
        mask if kind == "mask" else None,
        is_causal=kind == "causal",
        scale=0.3,
    )
    key, value = (s.repeat_interleave(6 // kv_heads, dim=1) for s in states[1:])
    scores = (states[0] @ key.transpose(2, 3) * 0.3).masked_fill(
        ~visible.get(kind, mask), float("-inf")
    )
    expected = scores.softmax(-1) @ value
    torch.testing.assert_close(out, expected)
    weights = torch.randn(expected.shape, generator=generator)
    ours, theirs = (torch.autograd.grad((o * weights).sum(), states) for o in (out, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
