"""Policy folders of :mod:`rlinf.models.smolvla` in LeRobot's format: create, read, and check.

LeRobot loads sizes and tokenizer of the vision-language model by its name on the Hugging Face hub;
here they are in the subfolder ``vlm``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from rlinf.errors import ConfigError, DataError
from rlinf.models.base import ModelSpec
from rlinf.models.hf_folder import check_checkpoint, read_json_object
from rlinf.models.lerobot_folder import (
    LEROBOT_STEPS,
    PREPROCESSOR,
    VLM_FOLDER,
    FeatureStatistics,
    FlowVLAConfig,
    check_sections,
    check_supported,
    check_task,
    locate_vlm,
    new_features,
    read_vlm_config,
    write_processors,
)
from rlinf.models.policy_folder import FlowPolicyFolder

SMOLVLA_TYPE = "smolvla"
NEWLINE_STEP = "smolvla_new_line_processor"
"""LeRobot's name of the step that makes the prompt."""
VLM_TYPES = ("smolvlm", "idefics3")
"""Types of vision-language models."""
LEROBOT_DEFAULTS: dict[str, Any] = {
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
"""LeRobot's defaults for values that a ``config.json`` omits."""


class SmolVLAConfig(FlowVLAConfig):
    """Options of SmolVLA policies: a folder of LeRobot, or the sizes of a new network."""

    vlm_path: Path | None = None
    """A folder with ``config.json`` and ``tokenizer.json`` of the vision-language model, if the
    policy folder has no ``vlm``."""
    pixel_shuffle_factor: int = Field(default=2, gt=0)
    """A token represents a square of patches with this side (pixel shuffle)."""
    expert_width_multiplier: float = Field(default=0.75, gt=0)
    """Width of the action expert, relative to ``hidden``."""

    @model_validator(mode="after")
    def _check_width(self) -> SmolVLAConfig:
        if self.hidden % self.heads:
            raise ValueError(f"heads: {self.hidden} is no multiple of {self.heads}")
        if self.hidden // self.heads % 2:
            raise ValueError(f"heads: of {self.hidden // self.heads} numbers, which is not even")
        if (width := int(self.hidden * self.expert_width_multiplier)) % 2:
            raise ValueError(f"expert_width_multiplier: a width of {width} is not even")
        return self


def new_policy_config(config: SmolVLAConfig, spec: ModelSpec) -> dict[str, Any]:
    """Return the ``config.json`` of a new network."""
    side = config.image_size or max(max(size) for size in spec["images"].values())
    return {
        "type": SMOLVLA_TYPE,
        **LEROBOT_DEFAULTS,
        **new_features(config, spec),
        "resize_imgs_with_padding": [side, side],
        "num_steps": config.denoising_steps or 4,
        "num_vlm_layers": config.layers,
        "expert_width_multiplier": config.expert_width_multiplier,
        "vlm_model_name": VLM_FOLDER,
        "load_vlm_weights": False,
        "freeze_vision_encoder": False,
        "train_expert_only": False,
    }


def new_vlm_config(config: SmolVLAConfig, side: int, vocabulary_size: int) -> dict[str, Any]:
    """Return the ``config.json`` of a new vision-language model for images of ``side`` pixels."""
    return {
        "model_type": "smolvlm",
        "architectures": ["SmolVLMForConditionalGeneration"],
        "scale_factor": config.pixel_shuffle_factor,
        "image_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "smolvlm_vision",
            "image_size": side,
            "patch_size": config.patch_size,
            "hidden_size": config.vision_hidden,
            "num_hidden_layers": config.vision_layers,
            "num_attention_heads": config.vision_heads,
            "intermediate_size": 4 * config.vision_hidden,
        },
        "text_config": {
            "model_type": "llama",
            "vocab_size": vocabulary_size,
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


def read_policy_config(folder: Path) -> dict[str, Any]:
    """Read the ``config.json`` of a folder, completed by :data:`LEROBOT_DEFAULTS`.

    Raises:
        DataError: The file is missing, of another policy, or uses unsupported options.
    """
    check_checkpoint(folder, True)  # the folder's own code is never run
    path = folder / "config.json"
    settings = {**LEROBOT_DEFAULTS, **read_json_object(path)}
    if settings.get("type") != SMOLVLA_TYPE:
        kind = settings.get("type") or settings.get("model_type")
        raise DataError(
            f"model.path: {folder} is of the type {kind!r}; model.name=smolvla takes LeRobot's "
            f"folders of the type {SMOLVLA_TYPE!r}"
        )
    check_sections(settings, path)
    vlm_layers, expert_layers = settings["num_vlm_layers"], settings["num_expert_layers"]
    is_unsupported = {
        "adapt_to_pi_aloha": bool(settings["adapt_to_pi_aloha"]),
        "add_image_special_tokens": bool(settings["add_image_special_tokens"]),
        "prefix_length": settings["prefix_length"] > 0,
        "n_obs_steps": settings["n_obs_steps"] != 1,
        "num_expert_layers": expert_layers > 0 and expert_layers != vlm_layers,
        "resize_imgs_with_padding": settings["resize_imgs_with_padding"] is None,
    }
    check_supported(settings, is_unsupported, path, "smolvla")
    return settings


def check_smolvla_task(
    settings: Mapping[str, Any],
    vlm_settings: Mapping[str, Any],
    config: SmolVLAConfig,
    spec: ModelSpec,
) -> None:
    """Check that images, state and actions of a task fit a network.

    Raises:
        ConfigError: The task does not fit.
    """
    check_task(settings, config, spec)
    width, height = settings["resize_imgs_with_padding"]
    vision, merge = vlm_settings["vision_config"], int(vlm_settings.get("scale_factor", 2))
    token_side = int(vision.get("patch_size", 32)) * merge
    if width != height or width % token_side or width > int(vision.get("image_size", 224)):
        raise ConfigError(
            f"model.image_size: images are resized to {width} x {height}, and must be squares of "
            f"whole tokens, {merge} x {merge} patches of {token_side // merge} pixels each; change "
            "model.image_size or model.patch_size"
        )


def write_smolvla_processors(
    folder: Path, settings: Mapping[str, Any], statistics: FeatureStatistics
) -> None:
    """Write the processors of a new policy in LeRobot's format."""
    prompt = {"registry_name": NEWLINE_STEP, "config": {}}
    padding, name = settings["pad_language_to"], settings["vlm_model_name"]
    tokenizer = {"padding": padding, "tokenizer_name": name}
    write_processors(folder, settings, statistics, prompt, tokenizer)


class SmolVLAFolder(FlowPolicyFolder):
    """A folder of SmolVLA."""

    applied_steps = frozenset({*LEROBOT_STEPS, NEWLINE_STEP})

    def __init__(self, name: str, folder: Path, options: Any, spec: ModelSpec) -> None:
        super().__init__(name, folder, options, spec)
        self.settings = read_policy_config(folder)
        if options.chunk_size is not None:
            self.settings["n_action_steps"] = options.chunk_size

    @classmethod
    def recognizes(cls, name: str, folder: Path, settings: Mapping[str, Any]) -> bool:
        return settings.get("type") == SMOLVLA_TYPE

    def prompt(self) -> tuple[str, str]:
        file = self.folder / f"{PREPROCESSOR}.json"
        located = locate_vlm(self.folder, self.settings, self.options.vlm_path)
        read_vlm_config(*located, VLM_TYPES)
        if NEWLINE_STEP not in (names := [name for name, _ in self.steps()]):
            raise DataError(
                f"{file}: steps: there is no {NEWLINE_STEP}, only {', '.join(names)}; "
                "model.name=smolvla ends each prompt with a newline"
            )
        return "instruction and newline", f"{file}: {NEWLINE_STEP}"
