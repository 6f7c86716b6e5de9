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
ONLY_CAUSAL_LM = (
    "model.name: trainer=megatron trains causal language models alone, without a critic; choose "
    "trainer=fsdp"
)
ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
"""Linear layers that can have adapters."""
SUPPORTED_ROPE = ("default", "linear", "llama3")
"""Kinds of rotary position embeddings that consist of frequencies only."""


def read_model_config(model: Any) -> Mapping[str, Any]:
    """Return the ``config.json`` of an existing language model, or of one that will be created.

    Raises:
        ConfigError: the model is not a causal language model.
        DataError: as :func:`rlinf.models.hf_folder.read_config_json`.
    """
    if not isinstance(model, CausalLMConfig) or hasattr(model, "critic"):
        raise ConfigError(ONLY_CAUSAL_LM)
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
    where: str,
    *,
    distributed: bool,
) -> None:
    """Check that options of the trainer are compatible.

    Args:
        where: configuration key of the layout.
        distributed: whether the optimizer's state is sharded.

    Raises:
        ConfigError: they are not.
    """
    if layout.cp > 1 and config.packing:
        raise ConfigError(
            f"trainer.packing: context parallelism ({where}.cp) needs padded rows; set it to "
            "null or false, or remove cp"
        )
    if distributed and optimizer.name != "adamw":
        raise ConfigError(
            f"trainer.use_distributed_optimizer: it steps by AdamW alone, and optimizer.name is "
            f"{optimizer.name}; set it to false"
        )


def check_model(model: Mapping[str, Any], where: str = "model.path") -> None:
    """Check that Megatron can implement a network's layers.

    Args:
        model: a checkpoint's ``config.json``.

    Raises:
        ConfigError: it cannot.
    """

    def refuse(what: str) -> ConfigError:
        return ConfigError(
            f"{where}: trainer=megatron cannot train a model {what}; choose trainer=fsdp or "
            "trainer=deepspeed"
        )

    if (family := model.get("model_type")) not in SUPPORTED_FAMILIES:
        raise refuse(f"of type {family!r}, but those of {', '.join(SUPPORTED_FAMILIES)}")
    if model.get("hidden_act", "silu") != "silu":
        raise refuse(f"with the activation {model['hidden_act']!r}")
    if (family != "qwen2" and model.get("attention_bias")) or model.get("mlp_bias"):
        raise refuse("with biases in its attention or its MLPs")
    kinds = set(model.get("layer_types") or ())
    if kinds - {"full_attention"} or model.get("use_sliding_window"):
        raise refuse("whose attention has a window")
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in SUPPORTED_ROPE or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise refuse(f"with positions of kind {kind!r}")
    if family == "qwen3_moe" and (
        model.get("mlp_only_layers") or model.get("decoder_sparse_step", 1) != 1
    ):
        raise refuse("some of whose layers have no experts")


def check_layout(
    model: Mapping[str, Any], layout: ParallelLayout, stage_layers: tuple[int, ...], where: str
) -> None:
    """Check that processes can share a network evenly.

    Args:
        stage_layers: number of layers of each pipeline stage; empty: evenly distributed.
        where: configuration key of the layout.

    Raises:
        ConfigError: they cannot; says which layout would work.
    """
    experts = _experts(model)
    inner = "moe_intermediate_size" if experts else "intermediate_size"
    shared = {
        "heads": model["num_attention_heads"],
        "heads of keys and values": model.get("num_key_value_heads")
        or model["num_attention_heads"],
        "rows of its MLPs": model[inner],
    }
    if any(size % layout.tp for size in shared.values()):
        sizes = ", ".join(f"{size} {what}" for what, size in shared.items())
        raise ConfigError(
            f"{where}.tp: {layout.tp} processes cannot share {sizes} evenly; "
            f"{_divisors(gcd(*shared.values()))} can"
        )
    layers = model["num_hidden_layers"]
    if layout.pp > 1 and stage_layers:
        if len(stage_layers) != layout.pp or sum(stage_layers) != layers or min(stage_layers) < 1:
            raise ConfigError(
                f"trainer.layers_per_pipeline_stage: {list(stage_layers)} are not the "
                f"{layers} layers of the model on {layout.pp} pipeline stages ({where}.pp), one "
                "or more on each"
            )
    elif layers % layout.pp:
        raise ConfigError(
            f"{where}.pp: {layers} layers are not as many on each of {layout.pp} pipeline stages; "
            f"{_divisors(layers)} can have them so, or say in trainer.layers_per_pipeline_stage "
            "how many each has"
        )
    if layout.ep > 1 and not experts:
        raise ConfigError(f"{where}.ep: this model has no experts to share out; leave it out")
    if experts % layout.ep:
        raise ConfigError(
            f"{where}.ep: {experts} experts are not as many on each of {layout.ep} processes; "
            f"{_divisors(experts)} can have them so"
        )


def check_adapters(
    config: MinibatchTrainerConfig, model: Mapping[str, Any], layout: ParallelLayout, dtype: str
) -> None:
    """Check that Megatron supports adapters in the target layers, if any.

    Args:
        model: a checkpoint's ``config.json``.
        dtype: data type of its weights.

    Raises:
        ConfigError: it does not.
    """
    if config.lora is None:
        return
    key = "trainer.lora.target_modules"
    for target in config.lora.target_modules:
        kind = target.rpartition(".")[2]
        if kind not in (*ATTENTION_LINEARS, *MLP_LINEARS):
            raise ConfigError(
                f"{key}: {target!r} has no adapter with trainer=megatron, which has those of "
                f"{', '.join((*ATTENTION_LINEARS, *MLP_LINEARS))}; leave it out, or choose "
                "trainer=fsdp"
            )
        if kind in MLP_LINEARS and _experts(model):
            raise ConfigError(
                f"{key}: {target!r} is in the experts of a mixture, which have no adapters; name "
                "layers of the attention"
            )
        if layout.pp > 1 and "layers." in target:
            raise ConfigError(
                f"{key}: {target!r} is of one block, and every stage of a pipeline needs some to "
                f"train; name it in all blocks: {kind}"
            )
    if config.param_dtype not in ("float32", dtype):
        raise ConfigError(
            "trainer.param_dtype: trainer=megatron rounds the frozen weights beside adapters to "
            "this type; set it to float32, or it and model.dtype to bfloat16"
        )


def _experts(model: Mapping[str, Any]) -> int:
    return model.get("num_experts") or model.get("num_local_experts") or 0


def _divisors(number: int) -> str:
    divisors = [str(each) for each in range(1, number + 1) if number % each == 0]
    return divisors[0] if len(divisors) == 1 else f"{', '.join(divisors[:-1])} or {divisors[-1]}"
