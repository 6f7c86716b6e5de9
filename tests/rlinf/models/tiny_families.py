"""Tiny settings of every causal language model of the library, one of each kind of layer."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim_model", "emb_dim", "embedding_size"), 32
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "n_inner",
            "ffn_dim",
            "ffn_hidden_size",
            "dim_ff",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "intermediate_size_mlp",
            "expert_ffn_hidden_size",
            "dff",
            "feed_forward_size",
        ),
        48,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "num_layers",
            "decoder_layers",
            "encoder_layers",
            "n_layers",
            "num_decoder_layers",
            "num_encoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "n_heads",
            "num_heads",
            "num_decoder_attention_heads",
            "num_encoder_attention_heads",
        ),
        2,
    ),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num", "num_kv_heads"), 1),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 64
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "d_kv",
            "attention_head_dim",
            "v_head_dim",
            "global_head_dim",
            "swa_head_dim",
            "swa_v_head_dim",
        ),
        16,
    ),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_chunk_size": 8,
    "window_size": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
LEFT_OUT = object()
MLA = {"num_key_value_heads": 2}
MLA_OF_8 = {"num_key_value_heads": 2, "head_dim": 8}
BOS = {"bos_token_id": 1}
DECODER = {"is_decoder": True}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v3",
            "deepseek_v32",
            "dots3_note_text",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "longcat_flash",
            "youtu",
            "diffllama",
            "zamba",
            "zamba2",
        ),
        MLA,
    ),
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
        DECODER,
    ),
    "big_bird": {**DECODER, "attention_type": "original_full"},
    "xmod": {**DECODER, "default_language": "en_XX"},
    "reformer": {**DECODER, "attn_layers": ["local", "lsh"]},
    **dict.fromkeys(("cwm", "emu3", "mllama", "modernbert-decoder"), BOS),
    **dict.fromkeys(("deepseek_v3", "longcat_flash", "youtu"), MLA_OF_8),
    "axk1": {"num_key_value_heads": 2, "head_dim": 8, "n_group": 2, "topk_group": 1},
    "codegen": {"num_attention_heads": 4, "rotary_dim": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "mllama": {"text_config": BOS},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
            for kind in ("sliding_attention", "full_attention")
        }
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
    },
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_local_experts": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "nemotron_h": {"n_groups": 1},
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 2,
            "hc_lowrank": 8,
        }
    },
    "zamba": {
        "num_key_value_heads": 2,
        "num_hidden_layers": 5,
        "attention_head_dim": 32,
        "layer_types": [
            "linear_attention",
            "hybrid",
            "linear_attention",
            "hybrid",
            "linear_attention",
        ],
    },
    "zamba2": {
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "attention_head_dim": 32,
        "layer_types": LEFT_OUT,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_mem_blocks": 1,
    },
}


NOTES = {
    "gemma3n": "its images need the package timm",
    "phimoe": "with LongRoPE no longer context than its plain frequencies reach",
}
NO_CACHE = {"openai-gpt", "rwkv"}
"""Families whose networks take no cache at all."""
NEED_MORE = {"gemma3n", "mllama"}
"""Families whose small network is made otherwise (``mllama``) or needs another package."""


def tiny_settings(family: str, vocabulary: int) -> dict[str, Any]:
    """Return what ``AutoConfig.for_model`` is told."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = _shrunk(CONFIG_MAPPING[family], vocabulary)
    for name, value in OWN.get(family, {}).items():
        part = values.get(name)
        if value is LEFT_OUT:
            del values[name]
            continue
        values[name] = {**part, **value} if name.endswith("_config") and part else value
    return values


def scaled_settings(family: str, vocabulary: int, scaling: str) -> dict[str, Any] | None:
    """Return the same with a rotary scaling, for lengths of 16 and up to 64 tokens.

    Args:
        scaling: ``longrope``, ``dynamic`` or ``alpha``.

    Returns:
        None: its network has no rotary embedding, or its configuration one for each part or kind of
        layer.
    """
    from transformers import AutoConfig

    values = tiny_settings(family, vocabulary)
    known = AutoConfig.for_model(family, **values)
    rope = getattr(known, "rope_parameters", None) or {}
    if known.sub_configs or "rope_type" not in rope or not (sizes := _rotary_sizes(known)):
        return None
    if scaling == "longrope":
        made: dict[str, Any] = {
            "short_factor": [1.0] * sizes[0],
            "long_factor": [2.0 + k for k in range(sizes[0])],
            "original_max_position_embeddings": 16,
        }
        # PhiMoE has magnitudes of its own.
        made |= {"short_mscale": 1.2, "long_mscale": 1.5} if family == "phimoe" else {}
        return {**values, "rope_parameters": {**rope, "rope_type": scaling, **made}}
    made = {"factor": 4.0} if scaling == "dynamic" else {"factor": 1.0, "alpha": 1000.0}
    length = {"max_position_embeddings": 16 if scaling == "dynamic" else 64}
    return {**values, **length, "rope_parameters": {**rope, "rope_type": "dynamic", **made}}


def _rotary_sizes(settings: Any) -> list[int]:
    """Return how many frequencies each rotary embedding of a network has."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(settings)  # type: ignore[no-untyped-call]
    parts = [part for part in network.modules() if hasattr(part, "rope_type")]
    return [part.inv_freq.numel() for part in parts]


def _shrunk(cls: Any, vocabulary: int) -> dict[str, Any]:
    plain = cls()
    names, mapped = set(plain.to_dict()), getattr(cls, "attribute_map", {})
    values = {n: v for n, v in SIZES.items() if n in names or n in mapped}
    if "vocab_size" in names or "vocab_size" in mapped:
        values["vocab_size"] = vocabulary
    kinds = getattr(plain, "layer_types", None)
    own = mapped.get("layer_types", "layer_types")
    if isinstance(kinds, list) and not isinstance(getattr(cls, own, None), property):
        seen = list(dict.fromkeys(kinds))
        values["layer_types"] = seen * 2 if len(seen) == 1 else seen
        values["num_hidden_layers"] = len(values["layer_types"])
    for name, part in getattr(cls, "sub_configs", {}).items():
        inner = type(getattr(plain, name, None)) if getattr(plain, name, None) is not None else part
        if hasattr(inner, "model_type"):
            values[name] = _shrunk(inner, vocabulary)
    return values


def all_families() -> list[str]:
    """Return every type of model that the library counts among causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def page() -> str:
    """Return ``docs/reference/families.md``."""
    import transformers

    families = all_families()
    lines = [row(family) for family in families]
    ways = [line.split(" | ")[1] for line in lines]
    counts = {way: ways.count(way) for way in ("padded", "cohorts", "cohorts, read again")}
    refused = len(families) - sum(counts.values())
    return (
        "# Families of language models\n\n"
        "<!-- Written by tests/rlinf/models/tiny_families.py. Do not edit. -->\n\n"
        f"What `model.name=causal_lm` does with each of the {len(families)} types of causal "
        f"language models of transformers {transformers.__version__}.\n"
        f"{counts['padded']} are decoded padded, {counts['cohorts']} in cohorts, "
        f"{counts['cohorts, read again']} in cohorts that are read again, and {refused} are "
        "refused before the run starts.\n\n"
        "- **padded**: rows of all lengths are decoded side by side in the engine's own cache, "
        "the quickest way.\n"
        "- **cohorts**: rows of one length are decoded together, without padding, in the "
        "library's cache classes. Recurrent layers, ALiBi and chunked attention need this; the "
        "samples of a prompt are one cohort as long as they go on.\n"
        "- **read again**: the library has no cache for this family that could be used; each "
        "token reads the whole sample again, which is slow.\n"
        "- **packed**: `trainer.packing` works; other families are trained padded on the right.\n\n"
        "A slow test makes a small random network of each family and sees that a sample does not "
        "depend on its neighbours and that engine and trainer agree to 1e-4. This page is written "
        "by `python -m tests.rlinf.models.tiny_families > docs/reference/families.md`.\n\n"
        "| family | decoded | packed | note |\n|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )


def row(family: str) -> str:
    """Return a family's line in the table."""
    from rlinf.engines.kv_cache import FAMILIES_WITHOUT_CACHE
    from rlinf.models.causal_lm_config import ENCODER_FAMILIES, UNSUPPORTED_FAMILIES
    from rlinf.models.packed_attention import PACKABLE_FAMILIES

    if why := UNSUPPORTED_FAMILIES.get(family):
        return f"| `{family}` | refused | no | {why} |"
    note = "with `is_decoder` true in `config.json` only" if family in ENCODER_FAMILIES else ""
    note = NOTES.get(family, note)
    apart = family in PACKABLE_FAMILIES
    way = (
        "padded"
        if apart
        else "cohorts, read again"
        if family in FAMILIES_WITHOUT_CACHE
        else "cohorts"
    )
    if family in NO_CACHE:
        way = "cohorts, read again"
    return f"| `{family}` | {way} | {'yes' if apart else 'no'} | {note} |"


if __name__ == "__main__":
    print(page(), end="")
