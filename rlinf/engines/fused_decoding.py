"""Fast decoding of one token per row on CPUs: fused layers and attention for a single query.

The library's modules need about sixty operations per layer, whose overhead equals the arithmetic of
small models on CPUs. :class:`FusedDecodeStep` uses one product for queries, keys and values and one
for gate and up. The module's weights become views of the joined weights, so both share memory.

:func:`decode_attention` uses two batched products per group of heads that share keys. torch's fused
kernel is optimized for long queries; for a single query most of its time is overhead per head. The
products are about twice as fast at 24 to 40 cached positions. The attention function adds the
sliding window of a layer to the mask, because the engine creates one mask for all layers.
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
    """Let a ``transformers`` model use :func:`decode_attention`; its masks must be boolean, 4D."""
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
    """Restrict an attention mask to a sliding window.

    Args:
        mask: bool ``[B, 1, queries, keys]``, true where visible; None: all columns. The tokens of a
            row are in consecutive columns, and the queries are the last ones.
        queries: Number of queries.
        keys: Number of keys.
        window: Number of tokens that a token sees, including itself; None: all.
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
    """Compute softmax attention of one query per row.

    Args:
        query: ``[B, H, 1, D]``.
        key: ``[B, K, L, D]``; H is a multiple of K, and heads of one group are consecutive.
        value: ``[B, K, L, D]``.
        mask: boolean, true where visible, broadcast to ``[B, 1, 1, L]``.
        scaling: Factor of the scores; default ``D ** -0.5``.

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
"""Model types whose decoder layers :class:`FusedDecodeStep` implements."""


class FusedDecodeStep:
    """The fused decoding step of a network of :data:`FUSED_FAMILIES`."""

    def __init__(self, module: Any) -> None:
        self._network, self._head = module.model, module.lm_head
        self._layers = [_Layer(layer) for layer in module.model.layers]

    @classmethod
    def from_module(cls, module: Any) -> FusedDecodeStep | None:
        """Create the step for a module with standard layers on a CPU, otherwise return None."""
        return cls(module) if _suits(module) else None

    @property
    def is_valid(self) -> bool:
        """Whether the module still uses the joined weights, neither replaced nor sharded."""
        return not any(is_sharded(p) for p in self._network.parameters()) and all(
            layer.joined for layer in self._layers
        )

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KeyValueCache
    ) -> Tensor:
        """Return logits ``[B, V]`` after ``tokens`` ``[B, 1]`` and add them to the cache.

        Args:
            tokens: ``[B, 1]``.
            positions: Positions of the tokens, ``[B, 1]``.
            mask: bool ``[B, 1, 1, length + 1]``; None: each row attends to all columns.
            cache: The KV cache.
        """
        network = self._network
        hidden = F.embedding(tokens[:, 0], network.embed_tokens.weight)
        cos, sin = network.rotary_emb(hidden, positions)
        # Rotation swaps the halves and negates the first one; the sine includes the sign.
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
        """Whether the module's weights are still views of the joined weights."""
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
        projected = onednn_linear(_normed(hidden, self._before), self._joined, self._bias)
        projected = projected.view(rows, heads + 2 * kv_heads, self._width)
        rotated = projected[:, : heads + kv_heads]
        if self._norms[0] is not None:
            parts = rotated[:, :heads], rotated[:, heads:]
            rotated = torch.cat(
                [_normed(part, norm) for part, norm in zip(parts, self._norms, strict=True)], dim=1
            )
        swapped = rotated.roll(self._width // 2, dims=-1)
        rotated = torch.addcmul(rotated * cos, swapped, sin)
        keys, values = cache.update(
            rotated[:, heads:, None], projected[:, heads + kv_heads :, None], number
        )
        attended = decode_attention(rotated[:, :heads, None], keys, values, mask, self._scaling)
        hidden = hidden + onednn_linear(attended.view(rows, -1), self._out.weight, self._out.bias)
        gate, up = onednn_linear(_normed(hidden, self._after), self._gates, None).chunk(2, dim=-1)
        return hidden + onednn_linear(F.silu(gate) * up, self._down.weight, None)


def _normed(hidden: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


@torch.no_grad()
def _join(*parts: Any) -> tuple[Tensor, Tensor | None]:
    """Concatenate weights and biases of linear layers; the layers' parameters become views."""
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
