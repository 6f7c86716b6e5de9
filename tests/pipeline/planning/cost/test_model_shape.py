"""Parameters, FLOPs and activations of a model's shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pipeline.planning.cost.model_shape import ModelShape, from_hf_config
from rlinf.errors import ConfigError, DataError
from tests.pipeline.planning.cost.shapes import LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B, MIXTRAL, gpt

TINY = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 112,
    "vocab_size": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
CONFIGS = [
    {"model_type": "llama", **TINY},
    {"model_type": "llama", **TINY, "attention_bias": True, "mlp_bias": True},
    {"model_type": "mistral", **TINY, "head_dim": 16},
    {"model_type": "qwen2", **TINY, "tie_word_embeddings": True},
    {"model_type": "qwen3", **TINY, "head_dim": 16},
    {"model_type": "mixtral", **TINY, "num_local_experts": 4},
    {"model_type": "qwen3_moe", **TINY, **MOE, "num_experts": 8, "head_dim": 8},
    {"model_type": "qwen3_moe", **TINY, **MOE, "num_experts": 8, "mlp_only_layers": [0, 2]},
    {
        "model_type": "qwen2_moe",
        **TINY,
        **MOE,
        "num_experts": 8,
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 80,
    },
]


@pytest.mark.parametrize("values", CONFIGS, ids=lambda c: c["model_type"])
def test_parameters_are_those_of_the_model_that_transformers_builds(values):
    values = dict(values)
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert from_hf_config(config.to_dict()).parameters == model.num_parameters()


def test_parameters_are_the_published_ones():
    assert LLAMA_3_8B.parameters == 8_030_261_248
    assert LLAMA_3_70B.parameters == 70_553_706_496
    assert MIXTRAL.parameters == 46_702_792_704


def test_forward_flops_are_two_per_weight_met_and_the_scores():
    weights = LLAMA_2_7B.parameters - LLAMA_2_7B.embedding_parameters
    norms = (2 * 32 + 1) * 4096
    assert LLAMA_2_7B.forward_flops(0) == 2 * (weights - norms)
    # Of Mixtral a token meets 12.9 of 46.7 billion.
    met = 12_879_925_248 - MIXTRAL.embedding_parameters
    assert MIXTRAL.forward_flops(0) == 2 * (met - norms)
    # PaLM, appendix B: 12 L H Q T for forward and backward over all pairs.
    scores = LLAMA_2_7B.forward_flops(2048) - LLAMA_2_7B.forward_flops(0)
    assert 3 * scores == 12 * 32 * 32 * 128 * 2048


def test_activations_are_those_of_korthikanti():
    """``34 hidden`` without scores; two dropout masks less, one number per head and query more."""
    kept = gpt(4, 1024, 16).activation_bytes()
    assert np.all(kept == 34 * 1024 - 2 * 1024 + 4 * 16)
    assert np.all(gpt(4, 1024, 16).activation_bytes("full") == 2 * 1024)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 7}, "heads cannot share"),
        ({"layers": 0}, "layers is 0"),
        ({"experts": 4}, "visits 0 of 4"),
        ({"experts": 4, "active_experts": 2}, "expert_ffn"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    sizes = {"layers": 2, "hidden": 64, "heads": 8, "kv_heads": 2, "head_dim": 8, "ffn": 64}
    with pytest.raises(ConfigError, match=message):
        ModelShape(**{**sizes, "vocab": 100, **change})


def test_an_unknown_family_and_a_missing_size_are_named():
    with pytest.raises(DataError, match="did you mean 'llama'"):
        from_hf_config({"model_type": "llamma"})
    with pytest.raises(DataError, match="hidden_size is missing"):
        from_hf_config({"model_type": "llama"})
