"""Attention over cached keys and values, as the transformers engine has it computed.

Of one new token per row, on CPUs, by two batched products over the groups of heads that share keys:
torch's fused kernel is made for long queries, and with a single one it spends most of its time on
bookkeeping per head. The products are about twice as quick at 24 to 40 cached positions.

The window of a layer is put into the mask here. The engine makes one mask for all layers, and the
library takes a mask of four dimensions as it is, for layers with a window too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlinf.models.packed import capped

NAME = "rlinf_decode"


def use_decode_attention(module: Any) -> None:
    """Let a ``transformers`` model use it, whose masks are boolean and of four dimensions."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def forward(
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        mask = windowed(attention_mask, query.shape[2], key.shape[2], sliding_window)
        if softcap is not None:
            return capped(query, key, value, mask, scaling, softcap).transpose(1, 2), None
        if query.shape[2] > 1 or query.device.type != "cpu" or options.get("s_aux") is not None:
            output, _ = sdpa_attention_forward(
                layer, query, key, value, mask, dropout, scaling, **options
            )
            return output, None
        return attend(query, key, value, mask, scaling), None

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    module.set_attn_implementation(NAME)


def windowed(mask: Tensor | None, queries: int, keys: int, window: int | None) -> Tensor | None:
    """What of a mask is within the window of a layer.

    Args:
        mask: bool ``[B, 1, queries, keys]``, true where visible; None: all columns. The tokens of a
            row stand in neighbouring columns, the queries are the last of them.
        window: how many tokens a token sees, itself included; None: all.
    """
    if window is None or window >= keys:
        return mask
    device = None if mask is None else mask.device
    columns = torch.arange(keys, device=device)
    near = columns > columns[keys - queries :, None] - window
    return near if mask is None else mask & near


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Softmax attention of one query per row.

    Args:
        query: ``[B, H, 1, D]``.
        key: ``[B, K, L, D]``; H is a multiple of K, heads of one group stand together.
        value: ``[B, K, L, D]``.
        mask: boolean, true where visible, broadcast to ``[B, 1, 1, L]``.
        scaling: factor of the scores; ``D ** -0.5`` by default.

    Returns:
        ``[B, 1, H, D]``.
    """
    rows, heads, _, width = query.shape
    groups = key.shape[1]
    scale = width**-0.5 if scaling is None else scaling
    scores = (query * scale).view(rows, groups, heads // groups, width) @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).view(rows, 1, heads, width)
