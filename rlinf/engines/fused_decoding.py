"""Fast decoding of one token per row: fused layers and attention for a single query.

A layer of ``transformers`` runs about sixty operations, whose overhead takes as long as the
arithmetic of a small model, or longer on a GPU. :class:`FusedDecodeStep` uses one matmul for
queries, keys and values, and one for the gate and up projections. The module's weights become views
of the joined weights.

On CPUs, :func:`decode_attention` uses two batched matmuls per KV head. torch's fused kernel is
optimized for long queries; for a single query most of its time is overhead per head. The matmuls
are about twice as fast at 24 to 40 cached positions. On GPUs, the fused kernel is faster.

The function that :func:`use_decode_attention` registers adds each layer's sliding window to the
mask, because the engine creates one mask for all layers.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.models.onednn_linear import OneDNNLinear, onednn_linear
from rlinf.models.packed_attention import softcapped_attention
from rlinf.sharded_tensors import is_sharded

DECODE_ATTENTION = "rlinf_decode"
"""Name of the attention function that ``transformers`` calls."""


def use_decode_attention(module: Any) -> None:
    """Let a ``transformers`` model use :func:`decode_attention`; all masks must be boolean, 4D."""
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
        # ``s_aux`` has the attention sinks of some families.
        if query.shape[2] > 1 or options.get("s_aux") is not None:
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
            row are in consecutive columns, and the queries are the last tokens.
        queries: Number of queries.
        keys: Number of keys.
        window: Number of tokens that a token sees, including itself; None: all.
    """
    if window is None or window >= keys:
        return mask
    device = None if mask is None else mask.device
    columns = torch.arange(keys, device=device)
    in_window = columns > columns[keys - queries :, None] - window
    return in_window if mask is None else mask & in_window


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
    rows, heads, _, head_dim = query.shape
    kv_heads = key.shape[1]
    scale = head_dim**-0.5 if scaling is None else scaling
    grouped = query.view(rows, kv_heads, heads // kv_heads, head_dim)
    if query.device.type != "cpu":
        # The heads of a group are the queries of one head, so the kernel needs no copies of keys.
        attended = F.scaled_dot_product_attention(grouped, key, value, mask, scale=scale)
        return attended.reshape(rows, 1, heads, head_dim)
    scores = (grouped * scale) @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).view(rows, 1, heads, head_dim)


FUSED_FAMILIES = {"llama", "qwen2", "qwen3"}
"""Model types whose decoder layers :class:`FusedDecodeStep` implements."""


class DecodeCache(Protocol):
    """The part of a KV cache that a decoding step uses."""

    def update(self, keys: Tensor, values: Tensor, layer: int, /) -> tuple[Tensor, Tensor]: ...


class FusedDecodeStep:
    """The fused decoding step of a network of :data:`FUSED_FAMILIES`."""

    def __init__(self, module: Any) -> None:
        self._network, self._head = module.model, module.lm_head
        self._layers = [_Layer(layer) for layer in module.model.layers]

    @classmethod
    def from_module(cls, module: Any) -> FusedDecodeStep | None:
        """Create the step for a module with standard layers, otherwise return None."""
        return cls(module) if _is_supported(module) else None

    @property
    def is_valid(self) -> bool:
        """Whether the module's weights are still views of the joined weights, and not sharded."""
        return not any(is_sharded(p) for p in self._network.parameters()) and all(
            layer.shares_weights for layer in self._layers
        )

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: DecodeCache
    ) -> Tensor:
        """Add ``tokens`` to the cache and return the logits ``[B, V]`` after them.

        Args:
            tokens: ``[B, 1]``.
            positions: Positions of the tokens, ``[B, 1]``.
            mask: bool ``[B, 1, 1, length + 1]``; None: each row attends to all columns.
            cache: The KV cache.
        """
        network = self._network
        hidden = F.embedding(tokens[:, 0], network.embed_tokens.weight)
        cos, sin = network.rotary_emb(hidden, positions)
        # ``rotate_half`` swaps the halves and negates the first; here the sine includes the sign.
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        for layer_index, layer in enumerate(self._layers):
            hidden = layer(hidden, cos, sin, mask, cache, layer_index)
        hidden = _rms_norm(hidden, network.norm)
        return onednn_linear(hidden, self._head.weight, self._head.bias)


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attention_norm, self._mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self._qkv_weight, self._qkv_bias = _join_weights(*projections)
        self._gate_up_weight, _ = _join_weights(mlp.gate_proj, mlp.up_proj)
        self._o_proj, self._down_proj = attention.o_proj, mlp.down_proj
        self._qk_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self._first_projections = (attention.q_proj, mlp.gate_proj)
        self._head_dim, self._scaling = attention.head_dim, attention.scaling
        self._heads = attention.q_proj.out_features // self._head_dim
        self._kv_heads = attention.k_proj.out_features // self._head_dim

    @property
    def shares_weights(self) -> bool:
        """Whether the module's weights are still views of the joined weights."""
        pairs = zip(self._first_projections, (self._qkv_weight, self._gate_up_weight), strict=True)
        return all(first.weight.data_ptr() == weight.data_ptr() for first, weight in pairs)

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cache: DecodeCache,
        layer_index: int,
    ) -> Tensor:
        rows, heads, kv_heads = len(hidden), self._heads, self._kv_heads
        normed = _rms_norm(hidden, self._attention_norm)
        projected = onednn_linear(normed, self._qkv_weight, self._qkv_bias)
        projected = projected.view(rows, heads + 2 * kv_heads, self._head_dim)
        query_key = projected[:, : heads + kv_heads]
        if self._qk_norms[0] is not None:
            query_norm, key_norm = self._qk_norms
            parts = query_key[:, :heads], query_key[:, heads:]
            query_key = torch.cat(
                [_rms_norm(parts[0], query_norm), _rms_norm(parts[1], key_norm)], dim=1
            )
        swapped = query_key.roll(self._head_dim // 2, dims=-1)
        rotated = torch.addcmul(query_key * cos, swapped, sin)
        keys, values = cache.update(
            rotated[:, heads:, None], projected[:, heads + kv_heads :, None], layer_index
        )
        query = rotated[:, :heads, None]
        attended = decode_attention(query, keys, values, mask, self._scaling)
        out = self._o_proj
        hidden = hidden + onednn_linear(attended.view(rows, -1), out.weight, out.bias)
        gate_up = onednn_linear(_rms_norm(hidden, self._mlp_norm), self._gate_up_weight, None)
        gate, up = gate_up.chunk(2, dim=-1)
        return hidden + onednn_linear(F.silu(gate) * up, self._down_proj.weight, None)


def _rms_norm(hidden: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


@torch.no_grad()
def _join_weights(*linears: Any) -> tuple[Tensor, Tensor | None]:
    """Concatenate weights and biases of linear layers; the layers' parameters become views."""
    joined = torch.cat([linear.weight for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    start = 0
    for linear in linears:
        stop = start + linear.out_features
        linear.weight.data = joined[start:stop]
        if bias is not None:
            linear.bias.data = bias[start:stop]
        start = stop
    return joined, bias


def _is_supported(module: Any) -> bool:
    settings: Any = getattr(module, "config", None)
    if getattr(settings, "model_type", None) not in FUSED_FAMILIES:
        return False
    linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
    has_known_linears = all(type(linear) in (nn.Linear, OneDNNLinear) for linear in linears)
    layer_types = set(getattr(settings, "layer_types", None) or ["full_attention"])
    return (
        has_known_linears
        and layer_types == {"full_attention"}
        and settings.hidden_act == "silu"
        and not getattr(settings, "mlp_bias", False)
    )
