"""What Megatron cannot train is refused before anything is written; its packages are not needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.channels.process_group import ParallelLayout
from rlinf.config import OptimizerSection
from rlinf.errors import ConfigError
from rlinf.models.causal_lm import CausalLMConfig
from rlinf.trainers.megatron import hf_mapping
from rlinf.trainers.megatron.trainer import MegatronConfig, MegatronTrainer
from tests.rlinf.trainers.run_components import run_components

MODEL = {"heads": 12, "kv_heads": 4, "intermediate": 96, "layers": 6}
SIZES: dict[str, Any] = {"hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 64}
MIXTURE = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_experts": 6,
}


def _lora(*targets: str) -> dict[str, Any]:
    return {"lora": {"rank": 2, "target_modules": targets}}


@pytest.mark.parametrize(
    ("layout", "options", "text"),
    [
        ("tp=3", {}, r"^train\.tp: 3 .* share 12 heads, 4 heads of keys .* 1, 2 or 4 can$"),
        (
            "pp=4",
            {},
            r"^train\.pp: 6 layers .* 4 pipeline stages; choose 1, 2, 3 or 6, .*layers_per",
        ),
        (
            "pp=2",
            {"layers_per_pipeline_stage": [3, 2]},
            r"^trainer\.layers_per_pipeline_stage: \[3, 2\] are not the 6 layers",
        ),
        ("cp=2", {"packing": True}, r"^trainer\.packing: context parallelism \(train\.cp\)"),
        ("ep=2", {}, r"^train\.ep: this model has no experts"),
        (
            "",
            _lora("lm_head"),
            r"^trainer\.lora\.target_modules: 'lm_head' has no adapter .* q_proj",
        ),
        (
            "pp=2",
            _lora("layers.1.mlp.up_proj"),
            r"^trainer\.lora\.target_modules: 'layers\.1.* every stage .* name it .*: up_proj$",
        ),
        (
            "",
            {"lora": {"rank": 2}, "param_dtype": "bfloat16"},
            r"^trainer\.param_dtype: .* beside adapters .* it and model\.dtype to bfloat16",
        ),
    ],
)
def test_layouts_and_options(layout: str, options: dict[str, Any], text: str) -> None:
    config = MegatronConfig.model_validate(options)
    with pytest.raises(ConfigError, match=text):
        check(config, CausalLMConfig(**MODEL), layout)
    check(MegatronConfig(), CausalLMConfig(**MODEL), "tp=2,cp=2,pp=3")
    check(MegatronConfig(layers_per_pipeline_stage=(1, 5)), CausalLMConfig(**MODEL), "pp=2")
    check(MegatronConfig(layers_per_pipeline_stage=(1, 5)), CausalLMConfig(**MODEL), "")
    adapted = {**_lora("q_proj", "mlp.up_proj"), "param_dtype": "bfloat16"}
    model = CausalLMConfig(**MODEL, dtype="bfloat16")
    check(MegatronConfig.model_validate(adapted), model, "tp=2,pp=3")


def check(config: MegatronConfig, model: CausalLMConfig, layout: str, name: Any = "adamw") -> None:
    run = run_components(model, OptimizerSection(name=name))
    MegatronTrainer.check_layout(config, run, ParallelLayout.parse(layout), 1, "train")


@pytest.mark.parametrize(
    ("changes", "layout", "text"),
    [
        ({}, "ep=4", r"^train\.ep: 6 experts .* 4 processes; choose 1, 2, 3 or 6"),
        ({"model_type": "gemma2"}, "", r"^model\.path: .* of type 'gemma2' \(supported: llama"),
        ({"use_sliding_window": True}, "", r"attention has a window"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "", r"positions of kind 'yarn'"),
        ({"mlp_only_layers": [0]}, "", r"some of whose layers have no experts"),
        ({"attention_bias": True}, "", r"biases in its attention"),
    ],
)
def test_checkpoints(changes: dict[str, Any], layout: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    check(MegatronConfig(), CausalLMConfig(path=tmp_path), "ep=3")
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE | changes))
    with pytest.raises(ConfigError, match=text):
        check(MegatronConfig(), CausalLMConfig(path=tmp_path), layout)


def test_experts_have_no_adapters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    model = CausalLMConfig(path=tmp_path)
    check(MegatronConfig.model_validate(_lora("v_proj")), model, "ep=2")
    with pytest.raises(ConfigError, match=r"'down_proj' is in the experts .* name layers of the"):
        check(MegatronConfig.model_validate(_lora("down_proj")), model, "")


def test_a_mixture_that_will_be_made_has_its_experts() -> None:
    """Nothing of it is in a folder yet."""
    for result, experts in ({}, 4), ({"num_experts": 6}, 6):
        model = CausalLMConfig(architecture="qwen3_moe", **SIZES, **result)
        check(MegatronConfig(), model, "ep=2")
        with pytest.raises(ConfigError, match=rf"^train\.ep: {experts} experts .* 5 processes"):
            check(MegatronConfig(), model, "ep=5")
        with pytest.raises(ConfigError, match=r"'up_proj' is in the experts"):
            check(MegatronConfig.model_validate(_lora("up_proj")), model, "")


def test_the_distributed_optimizer_is_adamws() -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.use_distributed_optimizer: .* is sgd"):
        check(MegatronConfig(use_distributed_optimizer=True), CausalLMConfig(), "", "sgd")


def test_a_stretch_of_heads_and_columns_is_found_in_its_tensors() -> None:
    """Every element of queries, keys and values, and of columns, cut anywhere, comes back."""
    heads, hidden = {"q": 8, "k": 4, "v": 4}, 6
    prefix = "model.layers.3.self_attn."
    whole = {
        f"{prefix}{kind}_proj.weight": torch.randn(rows * 2, hidden) for kind, rows in heads.items()
    }
    whole[f"{prefix}o_proj.weight"] = torch.randn(hidden, 16)
    for rank in range(2):
        where = hf_mapping.RankSlice(
            {n: tuple(t.shape) for n, t in whole.items()}, 2, rank, 3, 0, (4, 2), True
        )
        fused = torch.cat(
            [
                whole[f"{prefix}{kind}_proj.weight"][group * count : (group + 1) * count]
                for group in (2 * rank, 2 * rank + 1)
                for kind, count in (("q", 4), ("k", 2), ("v", 2))
            ]
        )
        columns = whole[f"{prefix}o_proj.weight"][:, rank * 8 : (rank + 1) * 8].contiguous()
        for name, local in (
            ("decoder.layers.0.self_attention.linear_qkv.weight", fused),
            ("decoder.layers.0.self_attention.linear_proj.weight", columns),
        ):
            share = hf_mapping.map_param(name, tuple(local.shape), where)
            size = local.numel()
            for cut in (0, 5, 17, 31, size):
                stretches = [
                    (share, tuple(local.shape), start, stop - start)
                    for start, stop in ((0, cut), (cut, size))
                ]
                flats = [local.view(-1)[:cut], local.view(-1)[cut:]]
                for part in hf_mapping.tensor_parts(stretches, str.__len__):
                    own = torch.cat([flats[n][b : b + c] for n, b, c in part.ranges])
                    assert torch.equal(own, part.placement.extract(whole[part.name]))
                    other = torch.zeros_like(whole[part.name])
                    part.placement.insert(other, own)
                    assert torch.equal(other[other != 0], whole[part.name][other != 0])
                    assert int((other != 0).sum()) == len(own)


@pytest.mark.parametrize(
    ("linear", "tensor", "side", "cut"),
    [
        ("self_attention.linear_qkv", "self_attn.k_proj", "A", None),
        ("self_attention.linear_qkv", "self_attn.k_proj", "B", 0),
        ("mlp.linear_fc2", "mlp.down_proj", "A", 1),
        ("mlp.linear_fc2", "mlp.down_proj", "B", None),
    ],
)
def test_a_factor_is_whole_or_cut_as_the_matrix_of_its_layer(
    linear: str, tensor: str, side: str, cut: int | None
) -> None:
    own, kind = f"model.layers.3.{tensor}.lora_{side}.default.weight", tensor.rpartition(".")[2]
    whole = torch.randn(8, 6)
    for rank in range(2):
        where = hf_mapping.RankSlice({own: (8, 6)}, 2, rank, 3, 0, (4, 2), True)
        local = (whole if cut is None else whole.chunk(2, cut)[rank]).contiguous()
        name = f"decoder.layers.0.{linear}.adapter.lora_{side}.{kind}"
        share = hf_mapping.map_param(name, tuple(local.shape), where)
        assert share.is_tensor_parallel == (cut is not None)
        (part,) = hf_mapping.tensor_parts(
            [(share, tuple(local.shape), 0, local.numel())], str.__len__
        )
        assert part.name == own
        assert torch.equal(part.placement.extract(whole), local.view(-1))
