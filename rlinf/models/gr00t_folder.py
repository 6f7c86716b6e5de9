"""Policy folders of :mod:`rlinf.models.gr00t`: create, read, and check.

Published folders of N1.5 have statistics in ``experiment_cfg/metadata.json``; those of N1.7 in
``statistics.json``, with ``processor_config.json`` and ``embodiment_id.json``. Both have entries
for several embodiments, of which a policy uses one. A policy folder of this package has the same
tensors, the processors of LeRobot (:mod:`rlinf.models.lerobot_folder`), and the configuration and
tokenizer of the vision-language model in the subfolder ``vlm``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlinf.data.lerobot import ACTION_FEATURE, STATE_FEATURE
from rlinf.errors import ConfigError, DataError, did_you_mean
from rlinf.models.base import ModelSpec
from rlinf.models.character_tokenizer import read_tokenizer
from rlinf.models.gr00t_network import EAGLE, QWEN3_VL, image_side
from rlinf.models.hf_folder import check_checkpoint, copy_non_weight_files, read_json_object
from rlinf.models.lerobot_folder import (
    CAMERA_PREFIX,
    LEROBOT_STEPS,
    RANGE_MODES,
    VLM_FOLDER,
    FeatureStatistics,
    FlowVLAConfig,
    check_sections,
    check_task,
    copy_processors,
    feature_size,
    locate_vlm,
    new_features,
    read_vlm_config,
    write_processors,
)
from rlinf.models.policy_folder import FlowPolicyFolder
from rlinf.verified_io import copy_file

GR00T_TYPE = "gr00t"
"""The type of policy folders of this package."""
Version = Literal["n1.5", "n1.7"]
MODEL_TYPES: dict[str, Version] = {"gr00t_n1_5": "n1.5", "Gr00tN1d7": "n1.7"}
"""Types of published folders."""
PROMPT_STEP = "gr00t_prompt_processor"
"""Name of the step that makes the prompt."""
VLM_TYPES = {"n1.5": EAGLE, "n1.7": QWEN3_VL}
IMAGE_TOKENS = {"n1.5": "<IMG_CONTEXT>", "n1.7": "<|image_pad|>"}
"""The token that represents a part of an image."""
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
METADATA_FILE = "experiment_cfg/metadata.json"
PROCESSOR_FILE, STATISTICS_FILE = "processor_config.json", "statistics.json"
EMBODIMENT_FILE = "embodiment_id.json"
UNSUPPORTED_FLAGS = ("use_mean_std", "exclude_state", "use_tactile")
"""Options of a processor of N1.7 that must be false."""
N15_EMBODIMENTS = {
    "new_embodiment": 31,
    "gr1": 24,
    "agibot_genie1": 26,
    "oxe_droid": 17,
    "unitree_g1": 3,
    "so100": 2,
}
"""Ids of the embodiments of N1.5, which its folders do not have."""
N15_CROP_FRACTION = 0.95
"""The part of an image that N1.5 sees, which its folders do not have either."""
N17_DEFAULTS: dict[str, Any] = {
    "model_name": "nvidia/Cosmos-Reason2-2B",
    "backbone_embedding_dim": 2048,
    "select_layer": 16,
    "max_state_dim": 132,
    "max_action_dim": 132,
    "action_horizon": 40,
    "hidden_size": 1024,
    "input_embedding_dim": 1536,
    "state_history_length": 1,
    "add_pos_embed": True,
    "use_vlln": True,
    "max_seq_len": 1024,
    "use_alternate_vl_dit": True,
    "attend_text_every_n_blocks": 2,
    "diffusion_model_cfg": {
        "positional_embeddings": None,
        "num_layers": 32,
        "num_attention_heads": 32,
        "attention_head_dim": 48,
        "norm_type": "ada_norm",
        "output_dim": 1024,
        "interleave_self_attention": True,
    },
    "vl_self_attention_cfg": {
        "positional_embeddings": None,
        "num_layers": 4,
        "num_attention_heads": 32,
        "attention_head_dim": 64,
    },
    "num_inference_timesteps": 4,
    "num_timestep_buckets": 1000,
    "max_num_embodiments": 32,
}
"""Defaults of LeRobot and Isaac-GR00T for values that a ``config.json`` of N1.7 omits."""
N15_DEFAULTS: dict[str, Any] = {
    "max_seq_len": 1024,
    "add_pos_embed": True,
    "use_vlln": True,
    "num_target_vision_tokens": 32,
    "num_timestep_buckets": 1000,
    "max_num_embodiments": 32,
}
"""Defaults for values that ``action_head_cfg`` of a ``config.json`` of N1.5 omits."""


class Gr00tConfig(FlowVLAConfig):
    """Options of GR00T N1.5 and N1.7: a published folder, or the sizes of a new network."""

    path: Path | None = None
    """A published folder, or a policy folder of this package; it defines all sizes."""
    vlm_path: Path | None = None
    """A folder with ``config.json`` and ``tokenizer.json`` of the vision-language model, if the
    policy folder has no ``vlm``."""
    version: Version = "n1.5"
    """Version of a new network; a folder has its own."""
    embodiment: str | None = None
    """Embodiment whose weights and statistics are used; null: the only one of the folder."""
    prompt: str | None = None
    """Text of the user's turn, with ``{instruction}``; null: as the policy folder says, or the
    instruction alone. LeRobot encloses instructions for N1.5: ``"['{instruction}']"``."""
    crop_fraction: float | None = Field(default=None, gt=0, le=1)
    """Part of the height and width of an image that the model sees, from the center; null: that of
    the folder, 0.95 for published folders of N1.5, 1 for a new network."""
    layers: int = Field(default=4, gt=0)
    """Layers of the language model."""
    expert_layers: int = Field(default=4, ge=2)
    """Blocks of the diffusion transformer; every second one attends to images and prompt."""
    expert_hidden: int = Field(default=64, gt=0)
    """Width of the diffusion transformer."""

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: str | None) -> str | None:
        if value is not None and "{instruction}" not in value:
            raise ValueError("has no {instruction}")
        return value

    @model_validator(mode="after")
    def _check_widths(self) -> Self:
        for key, width, divisor in (
            ("heads", self.hidden, 2 * self.heads),
            ("expert_hidden", self.expert_hidden, 2 * self.heads),
            ("vision_heads", self.vision_hidden, 4 * self.vision_heads),
        ):
            if width % divisor:
                raise ValueError(f"{key}: a width of {width} is no multiple of {divisor}")
        return self


def head_sizes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes in a ``config.json`` with the same keys for both versions: those of N1.7,
    and ``project_to_dim`` and ``num_target_vision_tokens`` of N1.5."""
    if version_of(settings) == "n1.7":
        sizes = {**N17_DEFAULTS, **settings, "project_to_dim": None, "num_target_vision_tokens": 0}
        if not sizes["use_alternate_vl_dit"]:
            sizes["attend_text_every_n_blocks"] = 0
        return sizes
    backbone = settings["backbone_cfg"]
    sizes = {**N15_DEFAULTS, **settings["action_head_cfg"], "attend_text_every_n_blocks": 0}
    sizes |= {name: backbone[name] for name in ("select_layer", "project_to_dim")}
    return sizes | {"max_action_dim": sizes["action_dim"]}


def version_of(settings: Mapping[str, Any]) -> Version:
    """Return the version of a ``config.json``."""
    return MODEL_TYPES[settings["model_type"]]


def new_gr00t_config(config: Gr00tConfig, spec: ModelSpec) -> dict[str, Any]:
    """Return the ``config.json`` of a new network, which has weights for one embodiment."""
    side = config.image_size or max(max(size) for size in spec["images"].values())
    features, heads = new_features(config, spec), config.heads
    attention = {"positional_embeddings": None, "num_attention_heads": heads}
    head = {
        "action_horizon": features["chunk_size"],
        "hidden_size": config.expert_hidden,
        "input_embedding_dim": config.expert_hidden,
        "backbone_embedding_dim": config.hidden,
        "max_state_dim": features["max_state_dim"],
        "max_num_embodiments": 1,
        "max_seq_len": features["chunk_size"],
        "num_inference_timesteps": config.denoising_steps or 4,
        "diffusion_model_cfg": {
            **attention,
            "attention_head_dim": config.expert_hidden // heads,
            "norm_type": "ada_norm",
            "num_layers": config.expert_layers,
            "output_dim": config.expert_hidden,
            "interleave_self_attention": True,
        },
        "vl_self_attention_cfg": {
            **attention,
            "attention_head_dim": config.hidden // heads,
            "num_layers": 1,
        },
    }
    if config.version == "n1.5":
        head |= {"action_dim": features["max_action_dim"], "num_target_vision_tokens": 4}
        backbone = {"select_layer": config.layers, "project_to_dim": None}
        stored: dict[str, Any] = {
            "model_type": "gr00t_n1_5",
            "action_head_cfg": head,
            "backbone_cfg": backbone,
        }
    else:
        stored = {"model_type": "Gr00tN1d7", **head, "select_layer": config.layers}
    modes = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "QUANTILES"}
    return {
        **stored,
        "type": GR00T_TYPE,
        **features,
        "normalization_mapping": modes,
        "vlm_model_name": VLM_FOLDER,
        "image_resolution": [side, side],
        "embodiment": config.embodiment or "new_embodiment",
        "embodiment_id": 0,
        "prompt": config.prompt or "{instruction}",
        "lower_case": False,
        "clip": False,
        "crop_fraction": config.crop_fraction or 1.0,
    }


def new_vlm_config(config: Gr00tConfig, side: int, vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """Return the ``config.json`` of a new vision-language model for images of ``side`` pixels."""
    head_dim = config.hidden // config.heads
    text = {
        "vocab_size": len(vocabulary),
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": head_dim,
        "intermediate_size": config.intermediate,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    vision: dict[str, Any] = {
        "hidden_size": config.vision_hidden,
        "intermediate_size": 4 * config.vision_hidden,
        "patch_size": config.patch_size,
    }
    heads, layers = config.vision_heads, config.vision_layers
    if config.version == "n1.5":
        names = {"num_hidden_layers": layers, "num_attention_heads": heads, "image_size": side}
        return {
            "model_type": EAGLE,
            "select_layer": -1,  # of the vision tower
            "use_pixel_shuffle": False,
            "mlp_connector_layers": 1,
            "force_image_size": side,
            "text_config": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **text},
            "vision_config": {"model_type": "siglip_vision_model", **vision, **names},
        }
    third = head_dim // 2 // 3
    rope = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_interleaved": True,
        "mrope_section": [head_dim // 2 - 2 * third, third, third],
    }
    vision |= {
        "depth": layers,
        "num_heads": heads,
        "out_hidden_size": config.hidden,
        "num_position_embeddings": (side // config.patch_size) ** 2,
        "deepstack_visual_indexes": [0],
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_act": "gelu_pytorch_tanh",
    }
    return {
        "model_type": QWEN3_VL,
        "image_token_id": vocabulary[IMAGE_TOKENS["n1.7"]],
        "text_config": {"model_type": "qwen3_vl_text", **text, "rope_parameters": rope},
        "vision_config": {"model_type": "qwen3_vl", **vision},
        "tie_word_embeddings": True,
    }


def prompt_ends(version: Version, cameras: int, image_tokens: int) -> tuple[str, str]:
    """Return the text of prompts before and after the text of the user's turn.

    Args:
        cameras: Number of images.
        image_tokens: Number of tokens of an image.
    """
    tokens = IMAGE_TOKENS[version] * image_tokens
    if version == "n1.7":
        image = f"<|vision_start|>{tokens}<|vision_end|>"
        return f"{TURN_START}user\n{image * cameras}", f"{TURN_END}\n"
    images = "".join(f"<image {i + 1}><img>{tokens}</img>" for i in range(cameras))
    system = f"{TURN_START}system\nYou are a helpful assistant.{TURN_END}\n"
    return f"{system}{TURN_START}user\n{images}", f"{TURN_END}\n{TURN_START}assistant\n"


def read_source_config(
    source: Path, config: Gr00tConfig
) -> tuple[dict[str, Any], dict[str, dict[str, list[float]]] | None]:
    """Return the ``config.json`` of a policy that starts from a folder, and its statistics.

    The statistics are None for a policy folder of this package, which has processors.

    Raises:
        ConfigError: The embodiment is not one of the folder's.
        DataError: Files are missing or malformed, or need something that is not supported.
    """
    check_checkpoint(source, True)  # the folder's own code is never run
    path = source / "config.json"
    stored = read_json_object(path)
    kind = stored.get("model_type")
    if kind not in MODEL_TYPES:
        raise DataError(
            f"model.path: {source} is of the type {stored.get('type') or kind!r}; model.name=gr00t "
            f"takes folders of the types {', '.join(MODEL_TYPES)}"
        )
    statistics = None
    try:
        _check_supported(stored, path)
        if stored.get("type") == GR00T_TYPE:
            settings = stored
            check_sections(settings, path)
            _check_one_of(config.embodiment, [settings["embodiment"]], path)
        else:
            read = _read_n15 if MODEL_TYPES[kind] == "n1.5" else _read_n17
            options, statistics = read(source, stored, config.embodiment)
            low, high = statistics[STATE_FEATURE].values()
            for index, bounds in enumerate(zip(low, high, strict=True)):
                if bounds[0] == bounds[1]:  # a constant becomes 0, the middle of its range
                    low[index], high[index] = bounds[0] - 1, bounds[1] + 1
            settings = {**stored, **_policy_entries(stored, options, statistics)}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"model.path: {path} is not as published ({error!r})") from None
    changes = {
        "n_action_steps": config.chunk_size,
        "prompt": config.prompt,
        "crop_fraction": config.crop_fraction,
    }
    settings |= {name: value for name, value in changes.items() if value is not None}
    if config.denoising_steps is not None:
        head = settings.get("action_head_cfg", settings)
        head["num_inference_timesteps"] = config.denoising_steps
    return settings, statistics


def _policy_entries(
    stored: Mapping[str, Any],
    options: Mapping[str, Any],
    statistics: Mapping[str, Mapping[str, list[float]]],
) -> dict[str, Any]:
    """Return what a policy folder adds to the ``config.json`` of a published folder.

    Args:
        options: Entries of the policy folder, the names of ``cameras``, and the ``mode`` of the
            normalization.
    """
    sizes, mode = head_sizes(stored), options["mode"]
    if (number := options["embodiment_id"]) >= sizes["max_num_embodiments"]:
        raise ValueError(f"max_num_embodiments: {options['embodiment']} has the id {number}")
    lengths = {f: len(next(iter(rows.values()))) for f, rows in statistics.items()}
    limits = {name: sizes[name] for name in ("max_state_dim", "max_action_dim")}
    for length, (name, limit) in zip(lengths.values(), limits.items(), strict=True):
        if length > limit:
            raise ValueError(f"{name} is {limit}, and there are statistics of {length} numbers")
    images = {CAMERA_PREFIX + name: {"type": "VISUAL"} for name in options["cameras"]}
    state = {"type": "STATE", "shape": [lengths[STATE_FEATURE]]}
    return {
        "type": GR00T_TYPE,
        "input_features": {**images, STATE_FEATURE: state},
        "output_features": {ACTION_FEATURE: {"type": "ACTION", "shape": [lengths[ACTION_FEATURE]]}},
        "n_action_steps": options["chunk_size"],
        **limits,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
        "prompt": "{instruction}",
        "lower_case": False,
        "clip": False,
        **{name: value for name, value in options.items() if name not in ("cameras", "mode")},
    }


def check_gr00t_task(
    settings: Mapping[str, Any],
    vlm_settings: Mapping[str, Any],
    config: Gr00tConfig,
    spec: ModelSpec,
) -> None:
    """Check that images, state and actions of a task fit a network.

    Raises:
        ConfigError: The task does not fit.
    """
    check_task(settings, config, spec)
    size = feature_size(settings, STATE_FEATURE)
    if config.proprio_dim not in (None, size):
        raise ConfigError(
            f"model.proprio_dim: {config.proprio_dim}, and the folder has statistics of {size} "
            "numbers; set it to null"
        )
    side, vision = image_side(settings, vlm_settings), vlm_settings["vision_config"]
    token_side = vision["patch_size"] * vision.get("spatial_merge_size", 1)
    if side % token_side:
        raise ConfigError(
            f"model.image_size: images are resized to {side} x {side}, which is no multiple of "
            f"tokens of {token_side} pixels; change model.image_size or model.patch_size"
        )


def write_gr00t_processors(
    folder: Path, settings: Mapping[str, Any], statistics: FeatureStatistics
) -> None:
    """Write the processors of a policy in LeRobot's format."""
    prompt = {"registry_name": PROMPT_STEP, "config": {"prompt": settings["prompt"]}}
    write_processors(folder, settings, statistics, prompt, {"tokenizer_name": VLM_FOLDER})


def copy_gr00t_files(source: Path, vlm_folder: Path, folder: Path) -> None:
    """Copy all files of a policy except the weights.

    Args:
        source: The folder of the policy.
        vlm_folder: The folder of its vision-language model.
        folder: The new folder.
    """
    copy_processors(source, folder)
    (folder / VLM_FOLDER).mkdir(exist_ok=True)
    copy_non_weight_files(vlm_folder, folder / VLM_FOLDER)
    if (source / METADATA_FILE).is_file():
        (folder / METADATA_FILE).parent.mkdir(exist_ok=True)
        copy_file(source / METADATA_FILE, folder / METADATA_FILE)


def read_gr00t_vlm(source: Path, settings: Mapping[str, Any], vlm_path: Path | None) -> Any:
    """Return the folder of a policy's vision-language model, and its ``config.json``.

    Raises:
        DataError: The folder is missing, of another model, or of an unsupported form.
    """
    folder, key = locate_vlm(source, settings, vlm_path)
    vlm_settings = read_vlm_config(folder, key, [VLM_TYPES[version_of(settings)]])
    if vlm_settings["model_type"] == EAGLE:
        # The defaults are those of Eagle.
        for name, default, needed in (
            ("use_pixel_shuffle", True, False),
            ("mlp_connector_layers", 2, 1),
        ):
            if (value := vlm_settings.get(name, default)) != needed:
                raise DataError(f"{key}: {folder}/config.json: {name} is {value}, not {needed}")
    return folder, vlm_settings


def _check_supported(stored: Mapping[str, Any], path: Path) -> None:
    """Check that a network needs nothing that :mod:`rlinf.models.gr00t_network` does not have."""
    sizes = head_sizes(stored)
    dit, attention = sizes["diffusion_model_cfg"], sizes["vl_self_attention_cfg"]
    width = dit["num_attention_heads"] * dit["attention_head_dim"]
    source = attention["num_attention_heads"] * attention["attention_head_dim"]
    wrong = {
        "diffusion_model_cfg": dit["positional_embeddings"] is not None
        or dit["norm_type"] != "ada_norm",
        "vl_self_attention_cfg": attention["positional_embeddings"] is not None,
        "input_embedding_dim": sizes["input_embedding_dim"] != width,
        "backbone_embedding_dim": sizes["backbone_embedding_dim"] != source,
        "hidden_size": sizes["hidden_size"] != dit["output_dim"],
        "use_vlln": not sizes["use_vlln"],
        "add_pos_embed": not sizes["add_pos_embed"],
        "state_history_length": sizes.get("state_history_length", 1) != 1,
    }
    _refuse(wrong, path)


def _refuse(wrong: Mapping[str, bool], path: Path) -> None:
    """Raise an error for the first unsupported key of a file."""
    for key in (key for key, is_wrong in wrong.items() if is_wrong):
        raise DataError(f"model.path: {path}: model.name=gr00t does not support its {key}")


def _check_one_of(name: str | None, known: list[str], path: Path) -> str:
    """Return the embodiment to use."""
    if name is None and len(known) == 1:
        return known[0]
    if name is None:
        raise ConfigError(f"model.embodiment: choose one of {path}: {', '.join(sorted(known))}")
    if name not in known:
        raise ConfigError(f"model.embodiment: {path} has no {name!r}{did_you_mean(name, known)}")
    return name


def _concatenated(
    groups: Mapping[str, Any], names: list[str], statistics: tuple[str, str], where: str
) -> dict[str, list[float]]:
    """Return statistics of the concatenated groups of a state or an action."""
    result: dict[str, list[float]] = {name: [] for name in statistics}
    for group in names:
        if group not in groups:
            raise DataError(f"model.path: {where} has no {group}")
        for name in statistics:
            if not isinstance(groups[group].get(name), list):
                raise DataError(f"model.path: {where}.{group} has no list {name}")
            result[name] += [float(number) for number in groups[group][name]]
    return result


def _read_n15(
    source: Path, stored: Mapping[str, Any], embodiment: str | None
) -> tuple[dict[str, Any], dict[str, dict[str, list[float]]]]:
    path = source / METADATA_FILE
    metadata = read_json_object(path)
    tag = _check_one_of(embodiment, list(metadata), path)
    if tag not in N15_EMBODIMENTS:
        raise ConfigError(
            f"model.embodiment: N1.5 has no weights for {tag!r}{did_you_mean(tag, N15_EMBODIMENTS)}"
        )
    entry, statistics = metadata[tag], dict[str, dict[str, list[float]]]()
    for feature, kind in ((STATE_FEATURE, "state"), (ACTION_FEATURE, "action")):
        groups = entry.get("statistics", {}).get(kind)
        where = f"{path}: {tag}.statistics.{kind}"
        if not groups:
            raise DataError(f"model.path: {where} is missing")
        statistics[feature] = _concatenated(groups, list(groups), RANGE_MODES["MIN_MAX"], where)
    options = {
        "embodiment": tag,
        "embodiment_id": N15_EMBODIMENTS[tag],
        "cameras": list(entry["modalities"]["video"]),
        "chunk_size": stored["action_horizon"],
        "vlm_model_name": "Eagle 2.5 (lerobot/eagle2hg-processor-groot-n1p5)",
        "mode": "MIN_MAX",
        "crop_fraction": N15_CROP_FRACTION,
    }
    return options, statistics


def _read_n17(
    source: Path, stored: Mapping[str, Any], embodiment: str | None
) -> tuple[dict[str, Any], dict[str, dict[str, list[float]]]]:
    path, statistics_path = source / PROCESSOR_FILE, source / STATISTICS_FILE
    processor = read_json_object(path)["processor_kwargs"]
    ids, all_statistics = (
        read_json_object(source / EMBODIMENT_FILE),
        read_json_object(statistics_path),
    )
    tag = _check_one_of(embodiment, list(processor["modality_configs"]), path)
    _check_one_of(tag, list(ids), source / EMBODIMENT_FILE)
    _check_one_of(tag, list(all_statistics), statistics_path)
    modalities = processor["modality_configs"][tag]
    actions = modalities["action"].get("action_configs") or ()
    is_relative = any(each and each.get("rep") == "RELATIVE" for each in actions)
    wrong = {
        **{key: bool(processor.get(key)) for key in UNSUPPORTED_FLAGS},
        "use_relative_action": bool(processor.get("use_relative_action")) and is_relative,
        "apply_sincos_state_encoding": bool(processor.get("apply_sincos_state_encoding"))
        and bool(modalities["state"].get("sin_cos_embedding_keys")),
        "delta_indices": any(
            modalities[kind]["delta_indices"] != [0] for kind in ("video", "state")
        ),
    }
    _refuse(wrong, path)
    mode = "QUANTILES" if processor.get("use_percentiles") else "MIN_MAX"
    statistics = {}
    for feature, kind in ((STATE_FEATURE, "state"), (ACTION_FEATURE, "action")):
        groups, where = all_statistics[tag].get(kind, {}), f"{statistics_path}: {tag}.{kind}"
        names = modalities[kind]["modality_keys"]
        statistics[feature] = _concatenated(groups, names, RANGE_MODES[mode], where)
    side = (processor.get("image_target_size") or [processor.get("shortest_image_edge") or 256])[0]
    crop_size = processor.get("image_crop_size") or [side]
    options = {
        "embodiment": tag,
        "embodiment_id": int(ids[tag]),
        "cameras": modalities["video"]["modality_keys"],
        "chunk_size": len(modalities["action"]["delta_indices"]),
        "vlm_model_name": stored.get("model_name", N17_DEFAULTS["model_name"]),
        "mode": mode,
        "crop_fraction": processor.get("crop_fraction") or crop_size[0] / side,
        "image_resolution": [side, side],
        "lower_case": bool(processor.get("formalize_language", True)),
        "clip": bool(processor.get("clip_outliers", True)),
    }
    return options, statistics


class Gr00tFolder(FlowPolicyFolder):
    """A published folder of GR00T, or a policy folder of this package."""

    applied_steps = frozenset({*LEROBOT_STEPS, PROMPT_STEP})

    def __init__(self, name: str, folder: Path, options: Any, spec: ModelSpec) -> None:
        super().__init__(name, folder, options, spec)
        self.settings, self._statistics = read_source_config(folder, options)
        self.has_processors = self._statistics is None

    @classmethod
    def recognizes(cls, name: str, folder: Path, settings: Mapping[str, Any]) -> bool:
        return settings.get("model_type") in MODEL_TYPES

    def prompt(self) -> tuple[str, str]:
        vlm_folder, _ = read_gr00t_vlm(self.folder, self.settings, self.options.vlm_path)
        read_tokenizer(vlm_folder)
        source = f"{self.config_file}: prompt" if self.has_processors else "model.prompt"
        case = ", in lower case without punctuation" if self.settings["lower_case"] else ""
        return f"{self.settings['prompt']}{case}", source

    def replaced_statistics(self) -> tuple[FeatureStatistics | None, str]:
        if self.options.norm_stats is not None or self._statistics is None:
            return super().replaced_statistics()
        file = METADATA_FILE if version_of(self.settings) == "n1.5" else STATISTICS_FILE
        return self._statistics, f"{self.folder / file}: {self.settings['embodiment']}"

    def num_predicted(self) -> int:
        return int(head_sizes(self.settings)["action_horizon"])
