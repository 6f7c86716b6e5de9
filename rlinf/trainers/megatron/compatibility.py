"""Checks of the models and layouts that Megatron can train."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from rlinf.channels.process_group import ParallelLayout
from rlinf.config import OptimizerSection
from rlinf.errors import ConfigError
from rlinf.models.causal_lm_config import CausalLMConfig, family_settings
from rlinf.models.hf_folder import read_config_json
from rlinf.trainers.minibatch import MinibatchTrainerConfig

SUPPORTED_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose layers Megatron implements."""
ONLY_CAUSAL_LM_MESSAGE = (
    "model.name: trainer=megatron trains only causal language models, without a critic; choose "
    "trainer=fsdp"
)
ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
"""Linear layers that can have adapters; those of MLPs only if the model has no experts."""
SUPPORTED_ROPE = ("default", "linear", "llama3")
"""Types of rotary position embeddings (``rope_type``) that consist of frequencies only."""


def read_model_config(model: Any) -> Mapping[str, Any]:
    """Return the ``config.json`` of an existing language model, or of one that will be created.

    Raises:
        ConfigError: the model is not a causal language model.
        DataError: as :func:`rlinf.models.hf_folder.read_config_json`.
    """
    if not isinstance(model, CausalLMConfig) or hasattr(model, "critic"):
        raise ConfigError(ONLY_CAUSAL_LM_MESSAGE)
    if model.path is not None:
        return read_config_json(model.path.expanduser())
    return {
        "model_type": model.architecture,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        **family_settings(model, model.hidden // model.heads),
    }


def check_options(
    config: MinibatchTrainerConfig,
    layout: ParallelLayout,
    optimizer: OptimizerSection,
    layout_key: str,
    *,
    distributed_optimizer: bool,
) -> None:
    """Check that the trainer's options are compatible with each other.

    Args:
        layout_key: configuration key of the layout.
        distributed_optimizer: whether the optimizer's state is sharded.

    Raises:
        ConfigError: two options are incompatible.
    """
    if layout.cp > 1 and config.packing:
        raise ConfigError(
            f"trainer.packing: context parallelism ({layout_key}.cp) needs padded rows; set it to "
            "null or false, or remove cp"
        )
    if distributed_optimizer and optimizer.name != "adamw":
        raise ConfigError(
            f"trainer.use_distributed_optimizer: it supports only AdamW, and optimizer.name is "
            f"{optimizer.name}; set it to false"
        )


def check_model(model: Mapping[str, Any], key: str = "model.path") -> None:
    """Check that Megatron can implement a network's layers.

    Args:
        model: a checkpoint's ``config.json``.

    Raises:
        ConfigError: a property of the network is not supported.
    """

    def unsupported(feature: str) -> ConfigError:
        return ConfigError(
            f"{key}: trainer=megatron cannot train a model {feature}; choose trainer=fsdp or "
            "trainer=deepspeed"
        )

    if (family := model.get("model_type")) not in SUPPORTED_FAMILIES:
        raise unsupported(f"of type {family!r} (supported: {', '.join(SUPPORTED_FAMILIES)})")
    if model.get("hidden_act", "silu") != "silu":
        raise unsupported(f"with the activation {model['hidden_act']!r}")
    if (family != "qwen2" and model.get("attention_bias")) or model.get("mlp_bias"):
        raise unsupported("with biases in its attention or its MLPs")
    layer_types = set(model.get("layer_types") or ())
    if layer_types - {"full_attention"} or model.get("use_sliding_window"):
        raise unsupported("whose attention has a window")
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in SUPPORTED_ROPE or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported(f"with positions of kind {rope_type!r}")
    if family == "qwen3_moe" and (
        model.get("mlp_only_layers") or model.get("decoder_sparse_step", 1) != 1
    ):
        raise unsupported("some of whose layers have no experts")


def check_layout(
    model: Mapping[str, Any], layout: ParallelLayout, stage_layers: tuple[int, ...], layout_key: str
) -> None:
    """Check that a network can be split evenly over the processes.

    Args:
        stage_layers: number of layers of each pipeline stage; empty: evenly distributed.
        layout_key: configuration key of the layout.

    Raises:
        ConfigError: an even split is impossible; the message has the numbers that would work.
    """
    experts = _num_experts(model)
    size_key = "moe_intermediate_size" if experts else "intermediate_size"
    split_sizes = {
        "heads": model["num_attention_heads"],
        "heads of keys and values": model.get("num_key_value_heads")
        or model["num_attention_heads"],
        "rows of its MLPs": model[size_key],
    }
    if any(size % layout.tp for size in split_sizes.values()):
        sizes = ", ".join(f"{size} {name}" for name, size in split_sizes.items())
        raise ConfigError(
            f"{layout_key}.tp: {layout.tp} processes cannot share {sizes} evenly; "
            f"{_format_divisors(gcd(*split_sizes.values()))} can"
        )
    layers = model["num_hidden_layers"]
    if layout.pp > 1 and stage_layers:
        if len(stage_layers) != layout.pp or sum(stage_layers) != layers or min(stage_layers) < 1:
            raise ConfigError(
                f"trainer.layers_per_pipeline_stage: {list(stage_layers)} are not the {layers} "
                f"layers of the model on {layout.pp} pipeline stages ({layout_key}.pp), one or "
                "more on each"
            )
    elif layers % layout.pp:
        raise ConfigError(
            f"{layout_key}.pp: {layers} layers cannot be split evenly over {layout.pp} pipeline "
            f"stages; choose {_format_divisors(layers)}, or set trainer.layers_per_pipeline_stage"
        )
    if layout.ep > 1 and not experts:
        raise ConfigError(f"{layout_key}.ep: this model has no experts; remove the key")
    if experts % layout.ep:
        raise ConfigError(
            f"{layout_key}.ep: {experts} experts cannot be split evenly over {layout.ep} "
            f"processes; choose {_format_divisors(experts)}"
        )


def check_adapters(
    config: MinibatchTrainerConfig, model: Mapping[str, Any], layout: ParallelLayout, dtype: str
) -> None:
    """Check that Megatron supports the configured adapters, if any.

    Args:
        model: a checkpoint's ``config.json``.
        dtype: data type of the checkpoint's weights.

    Raises:
        ConfigError: a target layer or the data type is not supported.
    """
    if config.lora is None:
        return
    key = "trainer.lora.target_modules"
    for target in config.lora.target_modules:
        projection = target.rpartition(".")[2]
        if projection not in (*ATTENTION_LINEARS, *MLP_LINEARS):
            raise ConfigError(
                f"{key}: {target!r} has no adapter with trainer=megatron, which supports "
                f"{', '.join((*ATTENTION_LINEARS, *MLP_LINEARS))}; remove it, or choose "
                "trainer=fsdp"
            )
        if projection in MLP_LINEARS and _num_experts(model):
            raise ConfigError(
                f"{key}: {target!r} is in the experts of a mixture, which have no adapters; name "
                "layers of the attention"
            )
        if layout.pp > 1 and "layers." in target:
            raise ConfigError(
                f"{key}: {target!r} is in one block, but every stage of a pipeline needs "
                f"adapters; name it without the block: {projection}"
            )
    if config.compute_dtype not in ("float32", dtype):
        raise ConfigError(
            "trainer.param_dtype: trainer=megatron rounds the frozen weights beside adapters to "
            "this type; set it to float32, or it and model.dtype to bfloat16"
        )


def _num_experts(model: Mapping[str, Any]) -> int:
    return model.get("num_experts") or model.get("num_local_experts") or 0


def _format_divisors(number: int) -> str:
    divisors = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return divisors[0] if len(divisors) == 1 else f"{', '.join(divisors[:-1])} or {divisors[-1]}"
