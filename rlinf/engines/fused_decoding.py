"""One new token of every row through a dense decoder, with few and large products; for CPUs.

The library's modules take some sixty operations a layer, each with its call of a module, its
checks and its copies; with small models on a CPU that is as much time as the arithmetic. Here a
layer is one product for queries, keys and values, one for gate and up, and what stands between
them; keys and values are written where attention reads them.

The joined weights are the memory of the module's own: those are views of them, so what is written
to the one is in the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.engines.kv_cache import KeyValueCache
from rlinf.models.onednn_linear import OneDNNLinear, onednn_linear
from rlinf.models.packed_attention import softcapped_attention
from rlinf.sharded_tensors import is_sharded

DECODE_ATTENTION = "rlinf_decode"


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
        mask = apply_sliding_window(attention_mask, query.shape[2], key.shape[2], sliding_window)
        if softcap is not None:
            return softcapped_attention(query, key, value, mask, scaling, softcap).transpose(
                1, 2
            ), None
        if query.shape[2] > 1 or query.device.type != "cpu" or options.get("s_aux") is not None:
            output, _ = sdpa_attention_forward(
                layer, query, key, value, mask, dropout, scaling, **options
            )
            return output, None
        return decode_attention(query, key, value, mask, scaling), None

    AttentionInterface.register(DECODE_ATTENTION, forward)
    AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)
    module.set_attn_implementation(DECODE_ATTENTION)


def apply_sliding_window(
    mask: Tensor | None, queries: int, keys: int, window: int | None
) -> Tensor | None:
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


def decode_attention(
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


FUSED_FAMILIES = {"llama", "qwen2", "qwen3"}
"""Model types whose decoder layers are as computed here."""


class FusedDecodeStep:
    """The network of one of :data:`FAMILIES`."""

    def __init__(self, module: Any) -> None:
        self._network, self._head = module.model, module.lm_head
        self._layers = [_Layer(layer) for layer in module.model.layers]

    @classmethod
    def from_module(cls, module: Any) -> FusedDecodeStep | None:
        """For a module that is all of ordinary parts on a CPU; None: it goes its own way."""
        return cls(module) if _suits(module) else None

    @property
    def is_valid(self) -> bool:
        """Whether the module still has the weights that were joined: nothing has put others, or
        shards of them, in their place."""
        return not any(is_sharded(p) for p in self._network.parameters()) and all(
            layer.joined for layer in self._layers
        )

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KeyValueCache
    ) -> Tensor:
        """Logits ``[B, V]`` after ``tokens`` ``[B, 1]``, which join the cache.

        Args:
            positions: of the tokens in their samples, ``[B, 1]``.
            mask: bool ``[B, 1, 1, length + 1]``; None: every row attends to all columns.
        """
        network = self._network
        hidden = F.embedding(tokens[:, 0], network.embed_tokens.weight)
        cos, sin = network.rotary_emb(hidden, positions)
        # Halves are exchanged and the first one's sign turned: the sign goes to the sine.
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        for number, layer in enumerate(self._layers):
            hidden = layer(hidden, cos, sin, mask, cache, number)
        hidden = _normed(hidden, network.norm)
        return onednn_linear(hidden, self._head.weight, self._head.bias)


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._before, self._after = layer.input_layernorm, layer.post_attention_layernorm
        self._joined, self._bias = _join(attention.q_proj, attention.k_proj, attention.v_proj)
        self._gates, _ = _join(mlp.gate_proj, mlp.up_proj)
        self._out, self._down = attention.o_proj, mlp.down_proj
        self._norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self._first = (attention.q_proj, mlp.gate_proj)
        self._width, self._scaling = attention.head_dim, attention.scaling
        self._heads = attention.q_proj.out_features // self._width
        self._kv_heads = attention.k_proj.out_features // self._width

    @property
    def joined(self) -> bool:
        """Whether the joined weights begin with the module's own."""
        both = zip(self._first, (self._joined, self._gates), strict=True)
        return all(own.weight.data_ptr() == joined.data_ptr() for own, joined in both)

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cache: KeyValueCache,
        number: int,
    ) -> Tensor:
        rows, heads, kv_heads = len(hidden), self._heads, self._kv_heads
        made = onednn_linear(_normed(hidden, self._before), self._joined, self._bias)
        made = made.view(rows, heads + 2 * kv_heads, self._width)
        turned = made[:, : heads + kv_heads]
        if self._norms[0] is not None:
            parts = turned[:, :heads], turned[:, heads:]
            turned = torch.cat(
                [_normed(part, norm) for part, norm in zip(parts, self._norms, strict=True)], dim=1
            )
        swapped = turned.roll(self._width // 2, dims=-1)
        turned = torch.addcmul(turned * cos, swapped, sin)
        keys, values = cache.update(
            turned[:, heads:, None], made[:, heads + kv_heads :, None], number
        )
        seen = decode_attention(turned[:, :heads, None], keys, values, mask, self._scaling)
        hidden = hidden + onednn_linear(seen.view(rows, -1), self._out.weight, self._out.bias)
        gate, up = onednn_linear(_normed(hidden, self._after), self._gates, None).chunk(2, dim=-1)
        return hidden + onednn_linear(F.silu(gate) * up, self._down.weight, None)


def _normed(hidden: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


@torch.no_grad()
def _join(*parts: Any) -> tuple[Tensor, Tensor | None]:
    """Weights of several linear layers below each other, and their biases; theirs are views."""
    joined = torch.cat([part.weight for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    start = 0
    for part in parts:
        stop = start + part.out_features
        part.weight.data = joined[start:stop]
        if bias is not None:
            part.bias.data = bias[start:stop]
        start = stop
    return joined, bias


def _suits(module: Any) -> bool:
    settings: Any = getattr(module, "config", None)
    if getattr(settings, "model_type", None) not in FUSED_FAMILIES:
        return False
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    ordinary = all(type(part) in (nn.Linear, OneDNNLinear) for part in linear)
    kinds = set(getattr(settings, "layer_types", None) or ["full_attention"])
    return (
        ordinary
        and kinds == {"full_attention"}
        and settings.hidden_act == "silu"
        and not getattr(settings, "mlp_bias", False)
        and all(part.weight.device.type == "cpu" for part in linear)
    )
