"""Attention of a single query gives what torch's kernel gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from rlinf.engines.fused_decoding import apply_sliding_window, decode_attention


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_same_as_the_fused_kernel(heads: int, groups: int, masked: bool) -> None:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(3, heads, 1, 8, generator=random)
    # A slice of a longer buffer, as the cache hands out.
    key = torch.randn(3, groups, 9, 8, generator=random)[:, :, :7]
    value = torch.randn(3, groups, 9, 8, generator=random)[:, :, :7]
    mask = torch.rand(3, 1, 1, 7, generator=random) < 0.6 if masked else None
    if mask is not None:
        mask[..., -1] = True
    wanted = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=True, scale=0.3
    )
    got = decode_attention(query, key, value, mask, 0.3)
    torch.testing.assert_close(got, wanted.transpose(1, 2), rtol=1e-5, atol=1e-6)


@given(st.integers(1, 6), st.integers(0, 6), st.integers(1, 9), st.booleans())
def test_a_window_is_so_many_tokens_up_to_the_query(
    queries: int, before: int, window: int, masked: bool
) -> None:
    keys = queries + before
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    for query in range(queries):
        mask[..., query, before + query + 1 :] = False
    found = apply_sliding_window(mask if masked else None, queries, keys, window)
    if found is None:
        assert window >= keys
        return
    if not masked:
        found = found & mask
    for query in range(queries):
        seen = found.expand(1, 1, queries, keys)[0, 0, query].nonzero()[:, 0].tolist()
        last = before + query
        assert seen == list(range(max(0, last - window + 1), last + 1))
