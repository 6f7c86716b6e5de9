"""The shape of a causal language model, and its numbers of parameters, FLOPs and bytes.

Sources: Kaplan et al. 2020 (arXiv 2001.08361, table 1) and PaLM (arXiv 2204.02311, appendix B) for
FLOPs per token; Korthikanti et al. 2022 (arXiv 2205.05198, section 4) for activations.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlinf.errors import ConfigError, DataError, did_you_mean

Array = np.ndarray
Recompute = Literal["selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("selective", "full")
"""Activation recomputation: only attention scores (as in fused attention), or whole layers."""

FLOAT32 = 4
"""Bytes of a float32, the type of logits, router scores and softmax statistics."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder with rotary positions and RMS norms (Llama, Mistral, Mixtral, Qwen).

    Raises:
        ConfigError: sizes contradict each other.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Inner width of a dense feed-forward layer."""
    vocab: int
    tied: bool = False
    """True if the output head is the embedding."""
    embeddings: int = 1
    """Number of embeddings: 2 with a separate critic. The critic's layers follow those of the
    policy, as if both were one network."""
    gated: bool = True
    """True if the feed-forward layer has a gate (three matrices instead of two)."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    """Routed experts of a sparse layer; 0: the model is dense."""
    active_experts: int = 0
    """Routed experts per token."""
    expert_ffn: int = 0
    """Inner width of a routed expert."""
    shared_ffn: int = 0
    """Inner width of the shared expert, which every token uses; 0: there is none."""
    dense_layers: tuple[int, ...] = ()
    """Indices of the layers without experts, in a sparse model."""
    dtype_bytes: int = 2
    """Bytes per weight, activation, and element of the KV cache."""

    def __post_init__(self) -> None:
        positive = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "dtype_bytes")
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"model shape: {name} is {getattr(self, name)}; it must be >= 1")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model shape: {self.heads} heads cannot share {self.kv_heads} key-value heads"
            )
        if not 0 <= self.active_experts <= self.experts or bool(self.experts) != bool(
            self.active_experts
        ):
            raise ConfigError(
                f"model shape: a token visits {self.active_experts} of {self.experts} experts"
            )
        if self.ffn < 1 and (not self.experts or self.dense_layers):
            raise ConfigError(f"model shape: ffn is {self.ffn}; it must be >= 1")
        if self.experts and self.expert_ffn < 1:
            raise ConfigError(f"model shape: expert_ffn is {self.expert_ffn}; it must be >= 1")

    @functools.cached_property
    def sparse(self) -> Array:
        """True for each layer with experts: bool ``[layers]``."""
        is_sparse = np.full(self.layers, self.experts > 0)
        is_sparse[[i for i in self.dense_layers if i < self.layers]] = False
        return is_sparse

    @property
    def q_width(self) -> int:
        """Total width of the queries."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Total width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Parameters of one embedding; an untied head has as many."""
        return self.vocab * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of an untied output head; 0 if tied."""
        return 0 if self.tied else self.embedding_parameters

    @functools.cached_property
    def shared_parameters(self) -> Array:
        """Parameters of each layer that every token uses, int64 ``[layers]``."""
        attention = self.hidden * (2 * self.q_width + 2 * self.kv_width)
        attention += (self.q_width + 2 * self.kv_width) * self.qkv_bias
        attention += self.hidden * self.out_bias + 2 * self.head_dim * self.qk_norm
        router = self.hidden * self.experts
        shared = self._mlp_size(self.shared_ffn, bias=False) + self.hidden * (self.shared_ffn > 0)
        dense = self._mlp_size(self.ffn, bias=self.mlp_bias)
        norms = 2 * self.hidden
        return attention + norms + np.where(self.sparse, router + shared, dense).astype(np.int64)

    @property
    def expert_size(self) -> int:
        """Parameters of one routed expert."""
        return self._mlp_size(self.expert_ffn, bias=False) if self.experts else 0

    @functools.cached_property
    def expert_parameters(self) -> Array:
        """Parameters of all routed experts of each layer, int64 ``[layers]``."""
        return np.where(self.sparse, self.experts * self.expert_size, 0).astype(np.int64)

    @property
    def parameters(self) -> int:
        """The exact number of all parameters."""
        layers = int(self.shared_parameters.sum() + self.expert_parameters.sum())
        embeddings_and_head = self.embeddings * self.embedding_parameters + self.head_parameters
        return embeddings_and_head + layers + self.hidden

    @functools.cached_property
    def layer_flops(self) -> Array:
        """FLOPs of each layer's matmuls in the forward pass, per token, float64 ``[layers]``.

        There are two per active weight (Kaplan et al. 2020, section 2.1), without attention scores.
        """
        attention = self.hidden * (2 * self.q_width + 2 * self.kv_width)
        active = self.active_experts * self.expert_size + self.hidden * self.experts
        shared = self._mlp_size(self.shared_ffn, bias=False) + self.hidden * (self.shared_ffn > 0)
        dense = self._mlp_size(self.ffn, bias=False)
        return 2.0 * (attention + np.where(self.sparse, active + shared, dense))

    @property
    def head_flops(self) -> float:
        """FLOPs of the output head in the forward pass, per token."""
        return 2.0 * self.embedding_parameters

    def score_flops(self, context: Array | float) -> Array | float:
        """Return the forward FLOPs of a layer's attention scores and weighted values, per token.

        ``4 * heads * head_dim * context`` (PaLM appendix B has 12 for forward and backward).

        Args:
            context: keys per query; in a causal sequence, half of the sequence on average.
        """
        return 4.0 * self.q_width * context

    def forward_flops(self, context: Array | float) -> Array | float:
        """Return the FLOPs of the forward pass, per token."""
        scores = self.layers * self.score_flops(context)
        return float(self.layer_flops.sum()) + self.head_flops + scores

    def activation_bytes(self, recompute: Recompute = "selective") -> Array:
        """Return the bytes that each layer stores for the backward pass, per token, ``[layers]``.

        The terms follow Korthikanti et al. 2022, section 4, for fused attention without dropout. In
        their model (GELU, ``ffn = 4 hidden``, as many key-value heads as heads, 16 bits) the sum is
        their ``34 hidden`` minus two dropout masks of a byte each. ``full`` stores only the input.
        """
        e, h = self.dtype_bytes, self.hidden
        if recompute == "full":
            return np.full(self.layers, float(e * h))
        norms = 2 * e * h
        # Fused attention stores one number per head and query instead of the scores.
        attention = e * (h + 2 * self.q_width + 2 * self.kv_width) + FLOAT32 * self.heads
        if self.qk_norm:
            attention += e * (self.q_width + self.kv_width)
        dense = e * h + self._mlp_activation_bytes(self.ffn)
        routed = self.active_experts * (2 * e * h + self._mlp_activation_bytes(self.expert_ffn))
        shared = self._mlp_activation_bytes(self.shared_ffn) + e * h * (self.shared_ffn > 0)
        sparse = e * h + FLOAT32 * self.experts + routed + shared
        return norms + attention + np.where(self.sparse, sparse, dense).astype(np.float64)

    @property
    def head_activation_bytes(self) -> int:
        """Bytes per token that the last norm and the head store; logits are float32.

        ``4 hidden (1 + vocab / hidden)`` (Korthikanti et al. 2022, section 4.3).
        """
        return 2 * self.dtype_bytes * self.hidden + FLOAT32 * self.vocab

    def _mlp_size(self, width: int, *, bias: bool) -> int:
        matrices = 3 if self.gated else 2
        biases = (width * (matrices - 1) + self.hidden) * bias
        return matrices * self.hidden * width + biases

    def _mlp_activation_bytes(self, width: int) -> int:
        """Return the bytes stored inside a feed-forward layer, per token.

        Ungated: input and output of the activation. Gated: gate, activated gate, up projection, and
        the product.
        """
        return (4 if self.gated else 2) * self.dtype_bytes * width


_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def from_hf_config(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model with this ``config.json`` of transformers.

    Raises:
        DataError: the family is unknown, or a size is missing or not a whole number.
    """
    family = str(config.get("model_type", ""))
    if family not in _FAMILIES:
        raise DataError(
            f"config.json: no cost formulas for model_type {family!r}"
            f"{did_you_mean(family, _FAMILIES)}; measure its stages with a profile instead"
        )
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    layers = _size(config, "num_hidden_layers")
    qwen2 = family in ("qwen2", "qwen2_moe")
    attention_bias = bool(config.get("qkv_bias", True) if qwen2 else config.get("attention_bias"))
    experts = 0
    if family.endswith("moe") or family == "mixtral":
        experts = _size(config, "num_experts", "num_local_experts")
    ffn = _size(config, "intermediate_size")
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", default=heads),
        head_dim=_size(config, "head_dim", default=128 if family == "qwen3" else hidden // heads),
        ffn=ffn,
        vocab=_size(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias,
        out_bias=attention_bias and not qwen2,
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family.startswith("qwen3"),
        experts=experts,
        active_experts=_size(config, "num_experts_per_tok") if experts else 0,
        expert_ffn=_size(config, "moe_intermediate_size", default=ffn) if experts else 0,
        shared_ffn=_size(config, "shared_expert_intermediate_size") if family == "qwen2_moe" else 0,
        dense_layers=_dense_layers(config, layers) if experts else (),
        dtype_bytes=_DTYPE_BYTES.get(str(dtype).removeprefix("torch."), 2),
    )


def _dense_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers without experts. Every ``decoder_sparse_step``-th layer has experts, unless
    it is in ``mlp_only_layers``."""
    step = int(config.get("decoder_sparse_step") or 1)
    listed = set(config.get("mlp_only_layers") or ())
    return tuple(i for i in range(layers) if i in listed or (i + 1) % step)


def _size(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if not isinstance(value, int) or isinstance(value, bool):
        problem = "is missing" if value is None else f"is {value!r}, not a whole number"
        raise DataError(f"config.json: {names[0]} {problem}")
    return value
