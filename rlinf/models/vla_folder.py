"""The ``config.json`` of a folder of :mod:`rlinf.models.vla`: made, read, held against a task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from rlinf.config import Section
from rlinf.errors import ConfigError, DataError
from rlinf.models.base import Spec
from rlinf.models.headers import read_settings
from rlinf.models.loading import check_checkpoint

FAMILY = "openvla"


class VLAConfig(Section):
    """``path`` to a folder, or the sizes of a new network."""

    path: Path | None = None
    """A folder of this format; its sizes, chunk and prompt are its own."""
    hidden: int = Field(default=128, gt=0)
    layers: int = Field(default=3, gt=0)
    heads: int = Field(default=4, gt=0)
    kv_heads: int = Field(default=4, gt=0)
    intermediate: int = Field(default=384, gt=0)
    vision_hidden: int = Field(default=96, gt=0)
    vision_layers: int = Field(default=2, gt=0)
    vision_heads: int = Field(default=4, gt=0)
    patch: int = Field(default=8, gt=0)
    """Side of a patch, pixels."""
    chunk: int = Field(default=8, gt=0)
    """Actions that are chosen at once and carried out one after the other."""
    proprio: int = Field(default=0, ge=0)
    """So many leading numbers of the state are seen as a token; 0: pictures and the instruction
    alone."""
    prompt: str = "In: What action should the robot take to {instruction}?\nOut:"
    """What the language model reads, of an instruction in small letters."""
    bins: int = Field(default=256, ge=2)
    """Tokens of a number of an action."""
    statistics: Path | None = None
    """A ``dataset_statistics.json`` whose quantiles the bins of a new network lie between; null:
    between -1 and 1."""
    dataset: str | None = None
    """Which data set of the statistics; of a file that has one, that one."""


def new_settings(config: VLAConfig, spec: Spec, vocabulary: int) -> dict[str, Any]:
    """The ``config.json`` of a new network with so many tokens beside those of actions."""
    sizes = list(spec["images"].values())
    return {
        "model_type": FAMILY,
        "architectures": ["OpenVLAForActionPrediction"],
        "use_fused_vision_backbone": False,
        "image_sizes": sizes[0],
        "vision_config": {
            "image_size": sizes[0],
            "patch_size": config.patch,
            "hidden_size": config.vision_hidden,
            "num_hidden_layers": config.vision_layers,
            "num_attention_heads": config.vision_heads,
            "intermediate_size": 4 * config.vision_hidden,
        },
        "text_config": {
            "model_type": "llama",
            "vocab_size": vocabulary + config.bins,
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
        "n_action_bins": config.bins,
        "num_actions_chunk": config.chunk,
        "action_dim": spec["action"]["size"],
        "proprio_dim": config.proprio,
        "cameras": list(spec["images"]),
        "prompt": config.prompt,
    }


def vla_settings(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a folder of this format.

    Raises:
        DataError: it is missing, or of another model.
    """
    check_checkpoint(folder, False)
    settings = read_settings(folder)
    if settings["model_type"] != FAMILY:
        raise DataError(
            f"model.path: {folder} is a {settings['model_type']!r} model; model.name=vla takes "
            f"folders of the type {FAMILY!r}"
        )
    needed = ("vision_config", "text_config", "n_action_bins", "num_actions_chunk", "action_dim")
    lacking = [name for name in (*needed, "cameras", "prompt") if name not in settings]
    if lacking:
        raise DataError(
            f"model.path: {folder}/config.json has no {', '.join(lacking)}; folders that were "
            "published with code of their own say these things there, and have two vision towers, "
            "which model.name=vla has not"
        )
    return settings


def dataset_of(settings: Mapping[str, Any], config: VLAConfig) -> str | None:
    """Which data set's statistics a folder's bins have."""
    return config.dataset or settings.get("unnorm_key")


def check_task(settings: Mapping[str, Any], spec: Spec) -> None:
    """See that a task shows and takes what a network was made for.

    Raises:
        ConfigError: it does not.
    """
    images, vision = spec["images"], settings["vision_config"]
    if sorted(settings["cameras"]) != sorted(images):
        raise ConfigError(
            f"task.images: the model sees {', '.join(settings['cameras'])}, the task shows "
            f"{', '.join(images)}"
        )
    for name, size in images.items():
        if list(size) != list(vision["image_size"]):
            raise ConfigError(
                f"task.images.{name}: {size[0]} x {size[1]}, and the model sees pictures of "
                f"{vision['image_size'][0]} x {vision['image_size'][1]}; all have one size"
            )
    if any(side % vision["patch_size"] for side in vision["image_size"]):
        raise ConfigError(
            f"model.patch: pictures of {vision['image_size'][0]} x {vision['image_size'][1]} are "
            f"not whole patches of {vision['patch_size']}"
        )
    if settings["action_dim"] != spec["action"]["size"]:
        raise ConfigError(
            f"task.action.size: {spec['action']['size']}, and the model's actions have "
            f"{settings['action_dim']} numbers"
        )
    if settings.get("proprio_dim", 0) > spec["observation"]:
        raise ConfigError(
            f"model.proprio: {settings['proprio_dim']} numbers, and the state has "
            f"{spec['observation']}"
        )
    for part, key in (("text_config", "heads"), ("vision_config", "vision_heads")):
        width, heads = settings[part]["hidden_size"], settings[part]["num_attention_heads"]
        if width % heads:
            raise ConfigError(f"model.{key}: a width of {width} is not {heads} heads of one size")
    text = settings["text_config"]
    heads, shared = text["num_attention_heads"], text["num_key_value_heads"]
    if heads % shared:
        raise ConfigError(f"model.kv_heads: {shared} cannot be shared by model.heads {heads}")
    if text["hidden_size"] // heads % 2:
        raise ConfigError(
            f"model.heads: a width of {text['hidden_size']} in {heads} heads gives an odd size; "
            "rotary positions need an even one"
        )
