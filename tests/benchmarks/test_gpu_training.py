"""What the benchmark on a GPU counts, and that it says so where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu_training
from benchmarks.gpu_training import QWEN, training_flops
from pipeline.planning.cost.model_shape import from_hf_config
from rlinf.errors import ConfigError

SMALL: dict[str, Any] = {
    **QWEN,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_the_model_has_one_and_a_half_billion_parameters() -> None:
    assert from_hf_config(QWEN).parameters == 1_543_714_304


def test_flops_are_those_of_the_products_of_a_step() -> None:
    """Torch counts the whole square of attention's scores, of which a causal pass needs half."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    options = {name: value for name, value in SMALL.items() if name != "model_type"}
    module = AutoModelForCausalLM.from_config(Qwen2Config(**options, attn_implementation="eager"))
    prompt, answer = 20, 13
    tokens = torch.zeros(1, prompt + answer - 1, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        module(input_ids=tokens, logits_to_keep=answer).logits.sum().backward()
    shape = from_hf_config(SMALL)
    read = prompt + answer - 1
    other_half = 3 * read * shape.layers * float(shape.score_flops(read / 2))
    # The turning of positions is a product too, of next to nothing.
    found = training_flops(shape, [prompt], [answer]) + other_half
    assert found == pytest.approx(counter.get_total_flops(), rel=2e-2)


def test_flops_of_sequences_add_up() -> None:
    shape = from_hf_config(QWEN)
    both = training_flops(shape, [5, 100], [7, 300])
    each = training_flops(shape, [5], [7]) + training_flops(shape, [100], [300])
    assert both == pytest.approx(each, rel=1e-12)
    # Six for each weight and token, and attention beside: PaLM's appendix B.
    weights = shape.parameters * 6.0 * 399
    assert weights < training_flops(shape, [1], [399]) < 1.1 * weights


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured() -> None:
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        gpu_training.measure()
