"""Small networks from the configuration: what each architecture of ``transformers`` is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.models.causal_lm import CausalLMConfig

Architecture = Literal[
    "qwen2", "qwen3", "llama", "gemma2", "gemma3_text", "qwen3_moe", "mixtral", "olmoe"
]
WINDOWED = {"gemma2", "gemma3_text", "mixtral"}
"""Those with layers whose tokens see the last few alone: every other one of Gemma's, all of
Mixtral's."""
EXPERTS = {"qwen3_moe": "num_experts", "mixtral": "num_local_experts", "olmoe": "num_experts"}
"""Those whose feed-forward layers are experts, and what they call the number of them."""


def check_sizes(config: CausalLMConfig) -> None:
    """See that a network can have these sizes.

    Raises:
        ConfigError: it cannot, or its architecture has nothing that a key is for.
    """
    if config.hidden % config.heads or config.heads % config.kv_heads:
        raise ConfigError(
            f"model.heads: {config.heads} must divide model.hidden {config.hidden} and be a "
            f"multiple of model.kv_heads {config.kv_heads}"
        )
    if config.hidden // config.heads % 2:
        raise ConfigError(
            f"model.heads: model.hidden {config.hidden} / {config.heads} heads makes heads of "
            f"{config.hidden // config.heads}; rotary positions need an even size"
        )
    if config.window is not None and config.architecture not in WINDOWED:
        raise ConfigError(
            f"model.window: {config.architecture} has no layers with a window here; leave it out, "
            f"or choose model.architecture among {', '.join(sorted(WINDOWED))}"
        )
    if config.experts is None:
        return
    if config.architecture not in EXPERTS:
        raise ConfigError(
            f"model.experts: {config.architecture} has no experts; leave it out, or choose "
            f"model.architecture among {', '.join(sorted(EXPERTS))}"
        )
    if config.experts < config.experts_per_token:
        raise ConfigError(
            f"model.experts_per_token: a token cannot have {config.experts_per_token} of "
            f"model.experts={config.experts}"
        )


def settings_of(config: CausalLMConfig, vocabulary: int) -> Any:
    """The ``transformers`` configuration of a new network."""
    from transformers import AutoConfig

    head_dim = config.hidden // config.heads
    return AutoConfig.for_model(
        config.architecture,
        vocab_size=vocabulary,
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **further(config, head_dim),
    )


def further(config: CausalLMConfig, head_dim: int) -> dict[str, Any]:
    """What this architecture alone is told, by the keys of a ``config.json``."""
    told: dict[str, Any] = {}
    if config.window is not None:
        told["sliding_window"] = config.window
    if config.architecture in ("gemma2", "gemma3_text"):
        kinds = ("sliding_attention", "full_attention")
        told["layer_types"] = [kinds[layer % 2] for layer in range(config.layers)]
        told["query_pre_attn_scalar"] = head_dim
    if name := EXPERTS.get(config.architecture):
        told[name] = 4 if config.experts is None else config.experts
        told["num_experts_per_tok"] = config.experts_per_token
    if config.architecture == "qwen3_moe":
        told["moe_intermediate_size"] = config.intermediate
    return told
