"""Policy folders of :mod:`rlinf.models.vla`: create, read, and check against a task.

There are two kinds of ``config.json``. In folders of this project, it has all sizes. In *published*
folders (of OpenVLA and OpenVLA-OFT), it names the two vision towers (``timm_model_ids``) and has
the action statistics (``norm_stats``), unless a ``dataset_statistics.json`` has them. OpenVLA's
code defines chunk, cameras and prompt; :func:`missing_settings` adds them to a new policy folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn

from rlinf.config import Section
from rlinf.errors import ConfigError, DataError
from rlinf.models.action_encoding import (
    STATISTICS_FILE,
    VALUE_HEAD_OUTPUT,
    ValueLevel,
    read_action_statistics,
    select_action_statistics,
)
from rlinf.models.base import ModelSpec
from rlinf.models.checkpoint_tensors import TensorShapes, check_tensors
from rlinf.models.hf_folder import (
    check_checkpoint,
    read_config_json,
    read_json_object,
    tensor_files,
)
from rlinf.models.images import PREPROCESSOR_FILE
from rlinf.models.vla_network import TOWERS, VLANetwork

MODEL_TYPE = "openvla"
DEFAULT_PROMPT = "In: What action should the robot take to {instruction}?\nOut:"
KNOWN_TOWERS: dict[str, dict[str, int | None]] = {
    "vit_large_patch14_reg4_dinov2": {
        "patch_size": 14,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "registers": 4,
    },
    "vit_so400m_patch14_siglip_224": {
        "patch_size": 14,
        "hidden_size": 1152,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "intermediate_size": 4304,
        "registers": None,
    },
}
"""Vision towers of published folders by their names in timm, in the order of :data:`TOWERS`."""
LLAMA_DEFAULTS = {"hidden_size": 4096, "num_attention_heads": 32}
"""Defaults of Llama in transformers, for values that published folders omit."""
TOWER_NORMALIZATION = {
    "featurizer": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
    "fused_featurizer": {"mean": [0.5] * 3, "std": [0.5] * 3},
}
"""Mean and std of colours in [0, 1] for new towers; for DINOv2, those of ImageNet."""
OPTIONAL_TENSORS = ("value_head.", "proprio_projector.", "places")
"""Prefixes of tensor names that a folder may lack."""


class VLAConfig(Section):
    """Options of OpenVLA policies: a folder, or the sizes of a new network."""

    path: Path | None = None
    """A policy folder. It defines all sizes; published folders lack chunk, state and prompt, which
    these options then define."""
    use_fused_vision_backbone: bool = False
    """Whether a new network has OpenVLA's layout and two vision towers, each with
    the vision sizes below."""
    hidden: int = Field(default=128, gt=0)
    layers: int = Field(default=3, gt=0)
    heads: int = Field(default=4, gt=0)
    kv_heads: int = Field(default=4, gt=0)
    intermediate: int = Field(default=384, gt=0)
    vision_hidden: int = Field(default=96, gt=0)
    vision_layers: int = Field(default=2, gt=0)
    vision_heads: int = Field(default=4, gt=0)
    patch_size: int = Field(default=8, gt=0)
    """Side of a patch, pixels."""
    chunk_size: int = Field(default=8, gt=0)
    """Number of actions that the policy chooses at once and the simulator executes in turn."""
    value_level: ValueLevel = "chunk"
    """Whether there is one value (and advantage) per chunk or per action. If the value head of a
    folder has another shape, its last layer is initialized again."""
    proprio_dim: int = Field(default=0, ge=0)
    """Number of leading state dimensions that form an input token; 0: no state input."""
    prompt: str | None = None
    """Prompt template with ``{instruction}`` (inserted in lower case); null: that of OpenVLA."""
    n_action_bins: int = Field(default=256, ge=2)
    """Number of tokens per action dimension."""
    norm_stats: Path | None = None
    """A ``dataset_statistics.json``, or the folder of a LeRobot data set, whose quantiles define
    the bins of a new network; null: the action bounds of the task, or -1 and 1 without bounds."""
    unnorm_key: str | None = None
    """Name of the data set in the statistics; null: the only one."""


def new_vla_config(
    config: VLAConfig, spec: ModelSpec, vocabulary: int, dataset: str, statistics: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the ``config.json`` of a new network.

    Args:
        vocabulary: Number of tokens besides the action tokens.
        dataset: Name of the data set of the action statistics.
        statistics: The action statistics, which define the bins.
    """
    image_size = next(iter(spec["images"].values()))
    tower = {
        "image_size": image_size,
        "patch_size": config.patch_size,
        "hidden_size": config.vision_hidden,
        "num_hidden_layers": config.vision_layers,
        "num_attention_heads": config.vision_heads,
        "intermediate_size": 4 * config.vision_hidden,
    }
    fused = {
        "norm_stats": {dataset: statistics},
        "vision_config": {
            name: {**tower, "registers": known["registers"]}
            for name, known in zip(TOWERS, KNOWN_TOWERS.values(), strict=True)
        },
    }
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["OpenVLAForActionPrediction"],
        "use_fused_vision_backbone": config.use_fused_vision_backbone,
        "image_sizes": image_size,
        "vision_config": tower,
        "text_config": {
            "model_type": "llama",
            "vocab_size": vocabulary + config.n_action_bins,
            "hidden_size": config.hidden,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "intermediate_size": config.intermediate,
            "max_position_embeddings": 2048,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
        },
        "pad_to_multiple_of": 0,
        "n_action_bins": config.n_action_bins,
        "num_actions_chunk": config.chunk_size,
        "action_dim": spec["action"]["size"],
        "proprio_dim": config.proprio_dim,
        "cameras": list(spec["images"]),
        "prompt": DEFAULT_PROMPT if config.prompt is None else config.prompt,
        **(fused if config.use_fused_vision_backbone else {}),
        "unnorm_key": dataset,
    }


def new_preprocessor_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``preprocessor_config.json`` of a new network with two towers."""
    sizes = [settings["vision_config"][tower]["image_size"] for tower in TOWERS]
    return {
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, *size] for size in sizes],
        "tvf_normalize_params": [TOWER_NORMALIZATION[tower] for tower in TOWERS],
    }


def read_vla_config(folder: Path, missing: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read ``config.json``, and add sizes and normalization of the towers that it only names.

    Args:
        missing: Values that the file omits (:func:`missing_settings`).

    Raises:
        DataError: A file is missing, belongs to another model, or lacks values.
    """
    # The folder's own code is never run.
    check_checkpoint(folder, True)
    settings = {**read_config_json(folder), **(missing or {})}
    source = f"model.path: {folder}/config.json"
    if settings["model_type"] != MODEL_TYPE:
        raise DataError(
            f"model.path: {folder} is a {settings['model_type']!r} model; model.name=vla takes "
            f"folders of the type {MODEL_TYPE!r}"
        )
    is_fused = settings.setdefault("use_fused_vision_backbone", False)
    has_named_towers = is_fused and "vision_config" not in settings
    needed = ["text_config", "n_action_bins", "num_actions_chunk", "action_dim"]
    needed += ["timm_model_ids", "image_sizes"] if has_named_towers else ["vision_config"]
    absent = [name for name in (*needed, "cameras", "prompt") if name not in settings]
    if "vision_config" in settings:
        absent += _missing_vision_keys(settings["vision_config"], fused=is_fused)
    if absent:
        raise DataError(
            f"{source} has no {', '.join(absent)}; model.name=vla reads folders that it wrote, and "
            "published ones with two vision towers (use_fused_vision_backbone)"
        )
    if has_named_towers:
        settings["vision_config"] = _known_towers(source, settings)
    if is_fused:
        settings["vision_config"] = _add_normalization(folder, settings["vision_config"])
    if (kind := settings["text_config"].get("model_type", "llama")) != "llama":
        raise DataError(f"{source}: text_config.model_type: {kind!r}; model.name=vla has a Llama")
    if parts := sorted(path.name for path in folder.glob("*_checkpoint.pt")):
        raise DataError(
            f"model.path: {folder} has {', '.join(parts)}: parts beside the language model, which "
            "model.name=vla does not have. A separate action head gives no probabilities; use a "
            "checkpoint with action tokens"
        )
    return settings


def _missing_vision_keys(vision: Any, *, fused: bool) -> list[str]:
    sizes = {"image_size", *next(iter(KNOWN_TOWERS.values()))} - (set() if fused else {"registers"})
    towers = {f"vision_config.{t}": vision.get(t, {}) for t in TOWERS} if fused else {}
    return [
        f"{key}.{name}"
        for key, tower in (towers or {"vision_config": vision}).items()
        for name in sorted(sizes - tower.keys())
    ]


def _known_towers(source: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of the towers that a published folder names."""
    ids, sides = settings["timm_model_ids"], settings["image_sizes"]
    if [str(name).partition(".")[0] for name in ids] != list(KNOWN_TOWERS):
        raise DataError(
            f"{source}: timm_model_ids: {ids}; the towers that model.name=vla knows are "
            f"{', '.join(KNOWN_TOWERS)}, in this order"
        )
    sizes = [[side, side] if isinstance(side, int) else list(side) for side in sides]
    if len(sizes) != len(TOWERS) or sizes[0] != sizes[1]:
        raise DataError(f"{source}: image_sizes: {sides}; both towers read images of one size")
    return {
        tower: {**known, "image_size": size}
        for tower, known, size in zip(TOWERS, KNOWN_TOWERS.values(), sizes, strict=True)
    }


def _add_normalization(folder: Path, towers: Mapping[str, Any]) -> dict[str, Any]:
    """Add the colour normalization in the folder's preprocessor config to the towers."""
    key = "tvf_normalize_params"
    params: Any = read_json_object(folder / PREPROCESSOR_FILE).get(key)
    try:
        normalizations = [
            {name: list(map(float, values[name])) for name in ("mean", "std")} for values in params
        ]
        rows = [row for normalization in normalizations for row in normalization.values()]
        if len(normalizations) != len(TOWERS) or any(len(row) != 3 for row in rows):
            raise ValueError("not three numbers of each for each of two towers")
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"model.path: {folder / PREPROCESSOR_FILE}: {key}: it must have mean and std of three "
            f"colours for each of the two towers ({error!r}); fetch it again"
        ) from None
    return {
        tower: {**towers[tower], **normalization}
        for tower, normalization in zip(TOWERS, normalizations, strict=True)
    }


def missing_settings(folder: Path, config: VLAConfig, spec: ModelSpec) -> dict[str, Any]:
    """Return the values that a published ``config.json`` omits, for this task.

    Folders of this project omit nothing.

    Raises:
        DataError: The folder is unreadable, or lacks the statistics of the data set.
    """
    check_checkpoint(folder, True)
    settings = read_config_json(folder)
    if not settings.get("use_fused_vision_backbone") or "cameras" in settings:
        return {}
    name, statistics = read_folder_statistics(folder, settings, config)
    # In OpenVLA's training an empty token precedes the action tokens: hence the space at the end.
    return {
        "num_actions_chunk": config.chunk_size,
        "action_dim": len(statistics["action"]["q01"]),
        "proprio_dim": config.proprio_dim,
        "cameras": list(spec["images"]),
        "prompt": f"{DEFAULT_PROMPT} " if config.prompt is None else config.prompt,
        "unnorm_key": name,
    }


def read_folder_statistics(
    folder: Path, settings: Mapping[str, Any], config: VLAConfig
) -> tuple[str, dict[str, Any]]:
    """Return the name and the action statistics of the data set that defines a folder's bins.

    The statistics are in ``dataset_statistics.json``, or else in ``config.json``.

    Raises:
        DataError: The statistics are missing, malformed, or ambiguous.
    """
    dataset = config.unnorm_key or settings.get("unnorm_key")
    if "norm_stats" not in settings or (folder / STATISTICS_FILE).exists():
        return read_action_statistics(folder / STATISTICS_FILE, dataset, "model.path")
    source = f"norm_stats in {folder}/config.json"
    return select_action_statistics(settings["norm_stats"], dataset, "model.path", source)


def check_vla_tensors(folder: Path, shapes: TensorShapes, module: nn.Module) -> None:
    """Check that stored tensors fit a network, except for optional ones.

    Args:
        shapes: Shapes of the tensors in the folder.
        module: The network; may be on the meta device.

    Raises:
        DataError: Tensors do not fit; the message names files and tensors.
    """
    optional = {
        name: tensor.shape
        for name, tensor in module.state_dict().items()
        if name.startswith(OPTIONAL_TENSORS)
    }
    # The last layer of the value head may have any shape: a wrong one is initialized again.
    resettable = {n: shape for n, shape in optional.items() if n.startswith(VALUE_HEAD_OUTPUT)}
    files = ", ".join(path.name for path in tensor_files(folder))
    check_tensors(f"model.path: {folder}: {files}", {**optional, **shapes, **resettable}, module)


def new_meta_network(
    folder: Path, settings: Mapping[str, Any], value_level: ValueLevel = "chunk"
) -> VLANetwork:
    """Create the network of a folder on the meta device.

    Raises:
        DataError: The configuration is invalid.
    """
    from huggingface_hub.errors import StrictDataclassError

    malformed = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)
    try:
        with torch.device("meta"):
            return VLANetwork(settings, value_level)
    except (*malformed, StrictDataclassError) as error:
        raise DataError(
            f"model.path: {folder}/config.json describes no network ({error!r}); fetch it again"
        ) from None


def check_vla_task(settings: Mapping[str, Any], spec: ModelSpec) -> None:
    """Check that images, state and actions of a task fit a network.

    Raises:
        ConfigError: The task does not fit.
    """
    images, towers = spec["images"], tower_settings(settings)
    vision = towers[0]
    if sorted(settings["cameras"]) != sorted(images):
        raise ConfigError(
            f"task.images: the model sees {', '.join(settings['cameras'])}, the task shows "
            f"{', '.join(images)}"
        )
    for name, size in images.items():
        if list(size) != list(vision["image_size"]):
            raise ConfigError(
                f"task.images.{name}: {size[0]} x {size[1]}, and the model reads images of "
                f"{vision['image_size'][0]} x {vision['image_size'][1]}; all have one size"
            )
    if any(side % vision["patch_size"] for side in vision["image_size"]):
        raise ConfigError(
            f"model.patch_size: images of {vision['image_size'][0]} x {vision['image_size'][1]} "
            f"are not whole patches of {vision['patch_size']}"
        )
    if settings["action_dim"] != spec["action"]["size"]:
        raise ConfigError(
            f"task.action.size: {spec['action']['size']}, and the model's actions have "
            f"{settings['action_dim']} numbers"
        )
    if settings.get("proprio_dim", 0) > spec["observation"]:
        raise ConfigError(
            f"model.proprio_dim: {settings['proprio_dim']} numbers, and the state has "
            f"{spec['observation']}"
        )
    text = {**LLAMA_DEFAULTS, **settings["text_config"]}
    heads, width = text["num_attention_heads"], text["hidden_size"]
    kv_heads = text.get("num_key_value_heads", heads)
    sizes = [("heads", width, heads)]
    sizes += [("vision_heads", t["hidden_size"], t["num_attention_heads"]) for t in towers]
    for key, size, count in sizes:
        if size % count:
            raise ConfigError(f"model.{key}: a width of {size} is not {count} heads of one size")
    if heads % kv_heads:
        raise ConfigError(f"model.kv_heads: {kv_heads} cannot be shared by model.heads {heads}")
    if width // heads % 2:
        raise ConfigError(
            f"model.heads: a width of {width} in {heads} heads gives an odd size; "
            "rotary positions need an even one"
        )
    if settings["use_fused_vision_backbone"] and vision["num_hidden_layers"] < 2:
        raise ConfigError(
            "model.vision_layers: with two towers (model.use_fused_vision_backbone) the last layer "
            "is not run; give 2 or more"
        )


def tower_settings(settings: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the settings of each vision tower."""
    vision = settings["vision_config"]
    return [vision[t] for t in TOWERS] if settings["use_fused_vision_backbone"] else [vision]
