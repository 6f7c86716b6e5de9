"""Models and devices of the cost model's tests."""

from __future__ import annotations

from pipeline.planning.cost.data_sheet import device_from_data_sheet
from pipeline.planning.cost.model_shape import ModelShape

LLAMA_2_7B = ModelShape(32, 4096, 32, 32, 128, 11008, 32000)
LLAMA_2_70B = ModelShape(80, 8192, 64, 8, 128, 28672, 32000)
LLAMA_3_8B = ModelShape(32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_3_70B = ModelShape(80, 8192, 64, 8, 128, 28672, 128256)
MIXTRAL = ModelShape(
    32, 4096, 32, 8, 128, 14336, 32000, experts=8, active_experts=2, expert_ffn=14336
)
SMALL = ModelShape(12, 768, 12, 4, 64, 2048, 32000)
A100 = device_from_data_sheet("a100-80gb-sxm", inter_bytes_per_s=200e9)
H100 = device_from_data_sheet("h100-sxm", inter_bytes_per_s=400e9)


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200) -> ModelShape:
    """A model of the GPT-3 family: no gate, biases, one key-value head per head."""
    return ModelShape(
        layers,
        hidden,
        heads,
        heads,
        hidden // heads,
        4 * hidden,
        vocab,
        tied=True,
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )
