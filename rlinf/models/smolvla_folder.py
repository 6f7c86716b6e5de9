"""The folder of :mod:`rlinf.models.smolvla`: made, read, held against a task.

It is LeRobot's (version 0.4): ``config.json`` of the type ``smolvla``, ``model.safetensors``, and
the processors with their statistics (:mod:`rlinf.models.lerobot_scaling`). LeRobot finds the sizes
and the tokenizer of the vision-language model by a name on a hub; here they lie in ``vlm``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from rlinf.errors import ConfigError, DataError
from rlinf.models.base import Spec
from rlinf.models.chunks import ValueLevel
from rlinf.models.denoising import DenoisingConfig
from rlinf.models.lerobot_scaling import ACTION, STATE
from rlinf.models.published_folder import check_checkpoint, check_links, read_object
from rlinf.models.tokenizer import TOKENIZER

KIND = "smolvla"
VLM = "vlm"
"""Folder of the vision-language model's ``config.json`` and tokenizer."""
CAMERA, EMPTY = "observation.images.", "observation.images.empty_camera_"
DEFAULTS: dict[str, Any] = {
    "chunk_size": 50,
    "n_action_steps": 50,
    "n_obs_steps": 1,
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    "max_state_dim": 32,
    "max_action_dim": 32,
    "resize_imgs_with_padding": [512, 512],
    "empty_cameras": 0,
    "adapt_to_pi_aloha": False,
    "tokenizer_max_length": 48,
    "num_steps": 10,
    "add_image_special_tokens": False,
    "attention_mode": "cross_attn",
    "prefix_length": -1,
    "pad_language_to": "longest",
    "num_expert_layers": -1,
    "num_vlm_layers": 16,
    "self_attn_every_n_layers": 2,
    "expert_width_multiplier": 0.75,
    "min_period": 4e-3,
    "max_period": 4.0,
}
"""LeRobot's, of what a ``config.json`` leaves out."""


class SmolVLAConfig(DenoisingConfig):
    """``path`` to a folder, or the sizes of a new network."""

    path: Path | None = None
    """A folder of LeRobot's; its sizes are its own."""
    vlm: Path | None = None
    """The folder with ``config.json`` and ``tokenizer.json`` of its vision-language model, where it
    has none."""
    cameras: dict[str, str] = {}
    """Which camera of the task is which one of the folder (``{camera1: corner}``); those that are
    not named are left out. None named: cameras have the same names."""
    steps: int | None = Field(default=None, gt=0, le=100)
    """Denoising steps ``N``; null: the folder's, 4 of a new network."""
    chunk: int | None = Field(default=None, gt=0)
    """Actions that are carried out one after the other; null: the folder's, 8 of a new network."""
    value_level: ValueLevel = "chunk"
    """Whether there is one value for a chunk, or one for each of its actions; advantages are of the
    same then. The last layer of a folder's value head begins anew where that has another
    shape."""
    statistics: Path | None = None
    """A ``meta/stats.json`` of a data set of LeRobot's, by which states and actions are scaled
    instead; null: the folder's, and mean 0 and deviation 1 of a new network."""
    hidden: int = Field(default=96, gt=0)
    layers: int = Field(default=4, gt=0)
    """Of the language model, and of the action expert."""
    heads: int = Field(default=4, gt=0)
    kv_heads: int = Field(default=2, gt=0)
    intermediate: int = Field(default=256, gt=0)
    vision_hidden: int = Field(default=64, gt=0)
    vision_layers: int = Field(default=2, gt=0)
    vision_heads: int = Field(default=4, gt=0)
    image: int | None = Field(default=None, gt=0)
    """Side of the squares that the vision transformer sees, pixels; null: the longest side of the
    task's pictures. Others are made as large as fits."""
    patch: int = Field(default=8, gt=0)
    """Side of a patch, pixels."""
    merge: int = Field(default=2, gt=0)
    """So many patches in a row, and as many in a column, are one token."""
    expert: float = Field(default=0.75, gt=0)
    """Width of the action expert, as a share of ``hidden``."""
    proprio: int | None = Field(default=None, gt=0)
    """So many leading numbers of the state are seen; null: all."""

    @model_validator(mode="after")
    def _heads(self) -> SmolVLAConfig:
        for key, width, heads in (
            ("heads", self.hidden, self.heads),
            ("kv_heads", self.heads, self.kv_heads),
            ("vision_heads", self.vision_hidden, self.vision_heads),
        ):
            if width % heads:
                raise ValueError(f"{key}: {width} is no multiple of {heads}")
        if self.hidden // self.heads % 2:
            raise ValueError(f"heads: of {self.hidden // self.heads} numbers each, and not even")
        if int(self.hidden * self.expert) % 2:
            raise ValueError(f"expert: a width of {int(self.hidden * self.expert)} is not even")
        return self


def new_settings(config: SmolVLAConfig, spec: Spec) -> dict[str, Any]:
    """The ``config.json`` of a new network."""
    side = config.image or max(max(size) for size in spec["images"].values())
    state = config.proprio or int(spec["observation"])
    size, chunk = int(spec["action"]["size"]), config.chunk or 8
    pictures = {
        CAMERA + name: {"type": "VISUAL", "shape": [3, *size]}
        for name, size in spec["images"].items()
    }
    return {
        "type": KIND,
        **DEFAULTS,
        "input_features": {**pictures, STATE: {"type": "STATE", "shape": [state]}},
        "output_features": {ACTION: {"type": "ACTION", "shape": [size]}},
        "chunk_size": chunk,
        "n_action_steps": chunk,
        "max_state_dim": state,
        "max_action_dim": size,
        "resize_imgs_with_padding": [side, side],
        "num_steps": config.steps or 4,
        "num_vlm_layers": config.layers,
        "expert_width_multiplier": config.expert,
        "vlm_model_name": VLM,
        "load_vlm_weights": False,
        "freeze_vision_encoder": False,
        "train_expert_only": False,
    }


def new_vlm(config: SmolVLAConfig, side: int, vocabulary: int) -> dict[str, Any]:
    """The ``config.json`` of a new network's vision-language model."""
    return {
        "model_type": "smolvlm",
        "architectures": ["SmolVLMForConditionalGeneration"],
        "scale_factor": config.merge,
        "image_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "smolvlm_vision",
            "image_size": side,
            "patch_size": config.patch,
            "hidden_size": config.vision_hidden,
            "num_hidden_layers": config.vision_layers,
            "num_attention_heads": config.vision_heads,
            "intermediate_size": 4 * config.vision_hidden,
        },
        "text_config": {
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": config.hidden,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.hidden // config.heads,
            "intermediate_size": config.intermediate,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
            "tie_word_embeddings": False,
        },
    }


def read_policy(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a folder, with :data:`DEFAULTS`.

    Raises:
        DataError: it is missing, of another policy, or of a kind of this one that is not here.
    """
    check_checkpoint(folder, True)  # code that it may bring is not run
    path = folder / "config.json"
    settings = {**DEFAULTS, **read_object(path)}
    if settings.get("type") != KIND:
        said = settings.get("type") or settings.get("model_type")
        raise DataError(
            f"model.path: {folder} is of the type {said!r}; model.name=smolvla takes LeRobot's "
            f"folders of the type {KIND!r}"
        )
    lacking = [n for n in ("input_features", "output_features") if not settings.get(n)]
    if lacking:
        raise DataError(f"model.path: {path} has no {', '.join(lacking)}")
    for feature, where in ((STATE, "input_features"), (ACTION, "output_features")):
        if feature not in settings[where]:
            raise DataError(f"model.path: {path}: {where} has no {feature}")
    layers, own = settings["num_vlm_layers"], settings["num_expert_layers"]
    others = {
        "adapt_to_pi_aloha": bool(settings["adapt_to_pi_aloha"]),
        "add_image_special_tokens": bool(settings["add_image_special_tokens"]),
        "prefix_length": settings["prefix_length"] > 0,
        "n_obs_steps": settings["n_obs_steps"] != 1,
        "num_expert_layers": own > 0 and own != layers,
        "resize_imgs_with_padding": settings["resize_imgs_with_padding"] is None,
        "use_peft": bool(settings.get("use_peft")),
        "normalization_mapping": settings["normalization_mapping"].get("VISUAL", "IDENTITY")
        != "IDENTITY",
    }
    if wrong := [name for name, is_other in others.items() if is_other]:
        raise DataError(
            f"model.path: {path}: {wrong[0]} is {settings[wrong[0]]}, which model.name=smolvla "
            "has not"
        )
    return settings


def read_vlm(folder: Path, where: str) -> dict[str, Any]:
    """The ``config.json`` of a vision-language model of SmolVLM's kind.

    Args:
        where: the key that errors name.

    Raises:
        DataError: it is not there, or of another kind.
    """
    settings = read_object(folder / "config.json", where)
    check_links(folder)
    if settings.get("model_type") not in ("smolvlm", "idefics3"):
        raise DataError(
            f"{where}: {folder} is a {settings.get('model_type')!r} model, not 'smolvlm'"
        )
    for part in ("vision_config", "text_config"):
        if not isinstance(settings.get(part), dict):
            raise DataError(f"{where}: {folder}/config.json has no {part}")
    if not (folder / TOKENIZER).is_file():
        raise DataError(f"{where}: {folder} has no {TOKENIZER}; copy it from that model's folder")
    return settings


def vlm_folder(folder: Path, settings: Mapping[str, Any], other: Path | None) -> tuple[Path, str]:
    """Where a folder's vision-language model is described, and the key that errors name.

    Raises:
        DataError: nowhere.
    """
    if other is not None:
        return other.expanduser(), "model.vlm"
    if not (folder / VLM).is_dir():
        raise DataError(
            f"model.vlm: {folder} has no folder {VLM!r}; give the one that holds config.json and "
            f"tokenizer.json of {settings.get('vlm_model_name')}"
        )
    return folder / VLM, "model.path"


def cameras_of(settings: Mapping[str, Any], chosen: Mapping[str, str]) -> dict[str, str]:
    """The camera of the task of each one of a folder, in its order.

    Empty ones have no part in anything: what stands for them is seen by nothing.
    """
    names = [
        name.removeprefix(CAMERA)
        for name, feature in settings["input_features"].items()
        if feature["type"] == "VISUAL" and not name.startswith(EMPTY)
    ]
    return {name: chosen.get(name, name) for name in names if not chosen or name in chosen}


def size_of(settings: Mapping[str, Any], feature: str) -> int:
    """Numbers of the state or of an action."""
    where = "output_features" if feature == ACTION else "input_features"
    return int(settings[where][feature]["shape"][0])


def check_task(
    settings: Mapping[str, Any], vlm: Mapping[str, Any], config: SmolVLAConfig, spec: Spec
) -> None:
    """See that a task shows and takes what a network was made for.

    Raises:
        ConfigError: it does not.
    """
    known, images = cameras_of(settings, {}), spec["images"]
    if unknown := sorted(config.cameras.keys() - known.keys()):
        raise ConfigError(
            f"model.cameras: {unknown[0]} is none of the model's; it sees {', '.join(known)}"
        )
    used = cameras_of(settings, config.cameras)
    if missing := [name for name in used.values() if name not in images]:
        raise ConfigError(
            f"task.images: the model sees {', '.join(known)}, the task shows "
            f"{', '.join(images)}; set model.cameras to which is which ({{{next(iter(known))}: "
            f"{next(iter(images))}}})"
            if not config.cameras
            else f"model.cameras: the task shows no {missing[0]}, only {', '.join(images)}"
        )
    width, height = settings["resize_imgs_with_padding"]
    vision, merge = vlm["vision_config"], int(vlm.get("scale_factor", 2))
    tile = int(vision.get("patch_size", 32)) * merge
    if width != height or width % tile or width > int(vision.get("image_size", 224)):
        raise ConfigError(
            f"model.image: pictures are shown as {width} x {height}, and must be squares of whole "
            f"tokens, {merge} x {merge} patches of {tile // merge} pixels each; change model.image "
            "or model.patch"
        )
    if (size := size_of(settings, ACTION)) != spec["action"]["size"]:
        raise ConfigError(
            f"task.action.size: {spec['action']['size']}, and the model's actions have {size} "
            "numbers"
        )
    if (size := size_of(settings, STATE)) > spec["observation"]:
        raise ConfigError(f"model.proprio: {size} numbers, and the state has {spec['observation']}")
    if (config.chunk or 0) > settings["chunk_size"]:
        raise ConfigError(
            f"model.chunk: {config.chunk}, and the model answers with {settings['chunk_size']} "
            "actions"
        )
