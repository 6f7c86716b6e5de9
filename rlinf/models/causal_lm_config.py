"""Configurations of new causal language models, and the model families that can be policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rlinf.config import Section
from rlinf.errors import ConfigError, DataError

Architecture = Literal[
    "qwen2", "qwen3", "llama", "gemma2", "gemma3_text", "qwen3_moe", "mixtral", "olmoe"
]
SLIDING_WINDOW_FAMILIES = {"gemma2", "gemma3_text", "mixtral"}
"""Architectures with sliding-window attention: in every second layer of Gemma, in all layers of
Mixtral."""
MOE_FAMILIES = {"qwen3_moe": "num_experts", "mixtral": "num_local_experts", "olmoe": "num_experts"}
"""Architectures that are mixtures of experts, with the key of the number of experts in
``config.json``."""


class CausalLMConfig(Section):
    """Options of causal language models: a checkpoint folder, or the sizes of a new model."""

    path: Path | None = None
    """Checkpoint folder in the Hugging Face format, for any ``AutoModelForCausalLM``."""
    trust_remote_code: bool = False
    """Whether to run model code in the checkpoint folder. If false, such folders are rejected."""
    max_model_len: int | None = Field(default=None, gt=0)
    """Largest number of tokens of prompt and response together; null: the limit of the model.
    Rotary scalings that depend on the length (LongRoPE, dynamic NTK) use this length for the entire
    run; for them null means the length without scaling."""
    architecture: Architecture = "qwen2"
    hidden: int = Field(default=128, gt=0)
    layers: int = Field(default=4, gt=0)
    heads: int = Field(default=4, gt=0)
    kv_heads: int = Field(default=2, gt=0)
    intermediate: int = Field(default=384, gt=0)
    max_position_embeddings: int = Field(default=512, gt=0)
    sliding_window: int | None = Field(default=None, gt=0)
    """Size of the attention window, tokens; null: the default of the architecture."""
    num_experts: int | None = Field(default=None, gt=0)
    """Experts per layer of a mixture of experts; null: 4."""
    num_experts_per_tok: int = Field(default=2, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the checkpoint's chat template (``enable_thinking: false``), for rollout,
    fine-tuning and evaluation."""


def check_model_sizes(config: CausalLMConfig) -> None:
    """Check the sizes of a new network.

    Raises:
        ConfigError: The sizes are inconsistent, or the architecture does not support an option.
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
    if config.sliding_window is not None and config.architecture not in SLIDING_WINDOW_FAMILIES:
        raise ConfigError(
            f"model.sliding_window: {config.architecture} has no layers with a window; leave "
            "it out, or choose model.architecture among "
            f"{', '.join(sorted(SLIDING_WINDOW_FAMILIES))}"
        )
    if config.num_experts is None:
        return
    if config.architecture not in MOE_FAMILIES:
        raise ConfigError(
            f"model.num_experts: {config.architecture} has no experts; leave it out, or choose "
            f"model.architecture among {', '.join(sorted(MOE_FAMILIES))}"
        )
    if config.num_experts < config.num_experts_per_tok:
        raise ConfigError(
            f"model.num_experts_per_tok: a token cannot have {config.num_experts_per_tok} of "
            f"model.num_experts={config.num_experts}"
        )


def hf_config(config: CausalLMConfig, vocabulary_size: int) -> Any:
    """Return the ``transformers`` configuration of a new network."""
    from transformers import AutoConfig

    head_dim = config.hidden // config.heads
    return AutoConfig.for_model(
        config.architecture,
        vocab_size=vocabulary_size,
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **family_settings(config, head_dim),
    )


def family_settings(config: CausalLMConfig, head_dim: int) -> dict[str, Any]:
    """Return the options that only some architectures have, by their keys in ``config.json``."""
    options: dict[str, Any] = {}
    if config.sliding_window is not None:
        options["sliding_window"] = config.sliding_window
    if config.architecture in ("gemma2", "gemma3_text"):
        kinds = ("sliding_attention", "full_attention")
        options["layer_types"] = [kinds[layer % 2] for layer in range(config.layers)]
        options["query_pre_attn_scalar"] = head_dim
    if name := MOE_FAMILIES.get(config.architecture):
        options[name] = 4 if config.num_experts is None else config.num_experts
        options["num_experts_per_tok"] = config.num_experts_per_tok
    if config.architecture == "qwen3_moe":
        options["moe_intermediate_size"] = config.intermediate
    return options


ENCODER_FAMILIES = {
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
}
"""Families that are encoders unless their ``config.json`` has ``is_decoder`` true."""
DRAFT_REASON = "it drafts tokens from the hidden states of another model and cannot be used alone"
AUDIO_REASON = "its tokens encode audio, several per step"
UNSUPPORTED_FAMILIES = {
    "blt": "a second network divides its bytes into patches",
    "cpmant": "its positions depend on the padding of its input",
    "dots3_note": "only its language model alone (dots3_note_text) was tested",
    "emu3": "it also generates image tokens, which no task supports",
    "gemma4_assistant": DRAFT_REASON,
    "gemma4_unified_assistant": DRAFT_REASON,
    "moshi": AUDIO_REASON,
    "musicgen": AUDIO_REASON,
    "musicgen_melody": AUDIO_REASON,
    "prophetnet": "each of its positions predicts several tokens",
    "reformer": "its attention draws random hashes, and lengths must be multiples of its chunks",
    "xlm": "it reads tokens in both directions",
    "xlnet": "it reads tokens in both directions",
}
"""Causal language models of ``transformers`` that cannot be policies, with the reason."""


def check_causal(settings: Any, source: str) -> None:
    """Check that a model is causal: each token depends only on the tokens before it.

    Args:
        settings: The ``transformers`` configuration of the model.
        source: The key and the folder, for error messages.

    Raises:
        DataError: The model is not causal, so it cannot be a policy.
    """
    family = settings.model_type
    reason = UNSUPPORTED_FAMILIES.get(family)
    if getattr(settings, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder model (is_encoder_decoder in config.json)"
    elif family in ENCODER_FAMILIES and not settings.is_decoder:
        reason = "it reads tokens in both directions (is_decoder is not true in config.json)"
    if reason is not None:
        raise DataError(
            f"{source} is a {family!r} model, which cannot generate and be trained token by token: "
            f"{reason}; choose a decoder such as Qwen3 or Llama"
        )
