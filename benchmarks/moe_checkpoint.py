"""A small mixture-of-experts checkpoint: four experts per layer, two active per token."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig


def create_moe_checkpoint(sizes: CausalLMConfig, alphabet: str, folder: Path) -> None:
    """Write a Qwen3-MoE checkpoint with the sizes and the tokenizer of a dense model.

    The weights are larger than usual initial weights. Otherwise the router would have almost equal
    scores, and rounding would change which experts it selects.
    """
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    CausalLM.create(sizes, {"alphabet": alphabet}, 0, folder)
    settings = json.loads((folder / "config.json").read_text())
    config = Qwen3MoeConfig(
        vocab_size=settings["vocab_size"],
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.hidden // sizes.heads,  # type: ignore[call-arg]
        moe_intermediate_size=sizes.intermediate // 4,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=sizes.max_position_embeddings,
        tie_word_embeddings=False,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
