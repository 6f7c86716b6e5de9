"""Policy folders of :mod:`rlinf.models.smolvla` in LeRobot's format: create, read, and check.

A folder of LeRobot 0.4 has a ``config.json`` of the type ``smolvla``, ``model.safetensors``, and
the processors ``policy_preprocessor.json`` and ``policy_postprocessor.json``. A processor is a list
of steps. Safetensors files of its normalization steps have the statistics of states and actions,
which belong to the weights and are never computed again. LeRobot loads sizes and tokenizer of the
vision-language model by its name on the Hugging Face hub; here they are in the subfolder ``vlm``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlinf.errors import ConfigError, DataError
from rlinf.models.action_encoding import ValueLevel
from rlinf.models.base import ModelSpec
from rlinf.models.character_tokenizer import TOKENIZER_FILE
from rlinf.models.denoising import DenoisingConfig
from rlinf.models.hf_folder import check_checkpoint, check_links, read_json_object
from rlinf.safetensors_io import load_tensors
from rlinf.verified_io import read_text

STATE_FEATURE, ACTION_FEATURE = "observation.state", "action"
PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"
NORMALIZER_STEP, UNNORMALIZER_STEP = "normalizer_processor", "unnormalizer_processor"
"""LeRobot's names of features, processors and normalization steps."""
EPS = 1e-8
"""Constant against division by zero."""
MEAN_STD = "MEAN_STD"
RANGE_MODES = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
"""Normalization modes that map the range between two statistics to [-1, 1]."""
FeatureStatistics = Mapping[str, Mapping[str, Sequence[float]]]
"""Statistics by feature and name, as in ``meta/stats.json`` of a data set."""


@dataclass(frozen=True)
class FeatureNormalizer:
    """The normalization of one feature, vectors ``[..., D]``."""

    mode: str
    """``IDENTITY``, :data:`MEAN_STD`, or one of :data:`RANGE_MODES`."""
    low: Tensor
    """Mean, or the value that becomes -1, float32 ``[D]``."""
    high: Tensor
    """Standard deviation, or the value that becomes 1."""
    eps: float = EPS

    @classmethod
    def from_statistics(
        cls, mode: str, statistics: Mapping[str, Any], size: int, source: str, eps: float = EPS
    ) -> FeatureNormalizer:
        """
        Args:
            mode: The normalization mode.
            statistics: Statistics by name.
            size: Number of dimensions.
            source: Prefix of error messages.
            eps: See :data:`EPS`.

        Raises:
            DataError: The statistics of the mode are missing or have another size.
        """
        names = ("mean", "std") if mode == MEAN_STD else RANGE_MODES.get(mode)
        if mode == "IDENTITY":
            return cls(mode, torch.zeros(size), torch.ones(size), eps)
        if names is None:
            modes = ", ".join(("IDENTITY", MEAN_STD, *RANGE_MODES))
            raise DataError(f"{source}: scaled by {mode!r}; known are {modes}")
        if missing := [name for name in names if name not in statistics]:
            raise DataError(
                f"{source}: no {', '.join(missing)} for the normalization {mode}; give "
                "model.norm_stats, the meta/stats.json of the data set that the policy acts on"
            )
        low, high = (torch.as_tensor(statistics[name], dtype=torch.float32) for name in names)
        if low.shape != (size,) or high.shape != (size,):
            raise DataError(f"{source}: of {low.numel()} numbers, and there are {size}")
        return cls(mode, low, high, eps)

    def normalize(self, values: Tensor) -> Tensor:
        """Return normalized values, float32."""
        low, high = self.low.to(values.device), self.high.to(values.device)
        if self.mode == "IDENTITY":
            return values.float()
        if self.mode == MEAN_STD:
            return (values.float() - low) / (high + self.eps)
        return 2 * (values.float() - low) / self._width(low, high) - 1

    def unnormalize(self, values: Tensor) -> Tensor:
        """Return values in the task's units, float32."""
        low, high = self.low.to(values.device), self.high.to(values.device)
        if self.mode == "IDENTITY":
            return values.float()
        if self.mode == MEAN_STD:
            return values.float() * high + low
        return (values.float() + 1) / 2 * self._width(low, high) + low

    def _width(self, low: Tensor, high: Tensor) -> Tensor:
        return torch.where(high == low, torch.full_like(low, self.eps), high - low)


def read_normalizer(
    folder: Path, processor: str, step: str, feature: str, size: int
) -> FeatureNormalizer:
    """Read the normalization of a feature from a processor of a folder.

    Args:
        processor: :data:`PREPROCESSOR` or :data:`POSTPROCESSOR`.
        step: Name of the processor's step.
        feature: Name of the feature.
        size: Number of dimensions of the feature.

    Raises:
        DataError: The normalization is missing or has another size.
    """
    path = folder / f"{processor}.json"
    source = f"model.path: {path}: {feature}"
    try:
        steps = json.loads(read_text(path))["steps"]
        entry = next((entry for entry in steps if entry.get("registry_name") == step), None)
        if entry is None:
            raise DataError(f"model.path: {path}: no step {step}, which normalizes {feature}")
        settings = entry["config"]
        kind = settings["features"][feature]["type"]
        mode = settings["norm_map"].get(kind, "IDENTITY")
        tensors: dict[str, Tensor] = {}
        if "state_file" in entry:
            tensors = load_tensors(folder / Path(entry["state_file"]).name)
        prefix = f"{feature}."
        statistics = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        return FeatureNormalizer.from_statistics(
            mode, statistics, size, source, float(settings.get("eps", EPS))
        )
    except FileNotFoundError as error:
        raise DataError(
            f"model.path: no {error.filename}, which has the normalization of actions; folders of "
            "LeRobot before 0.4 lack it: convert the folder with LeRobot's "
            "migrate_policy_normalization"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise DataError(f"{source}: the file is not as LeRobot writes it ({error!r})") from None


def read_feature_statistics(
    path: Path, sizes: Mapping[str, int]
) -> dict[str, dict[str, list[float]]]:
    """Read the statistics of the leading dimensions of features from a data set's ``stats.json``.

    Args:
        sizes: Number of dimensions to read, by feature.

    Raises:
        DataError: The file cannot be read, or lacks a feature or dimensions.
    """
    try:
        stored, statistics = json.loads(read_text(path)), dict[str, dict[str, list[float]]]()
        for feature, size in sizes.items():
            rows = stored[feature]
            statistics[feature] = {
                name: [float(number) for number in rows[name][:size]]
                for name in ("mean", "std", *(n for pair in RANGE_MODES.values() for n in pair))
                if name in rows
            }
            for name, numbers in statistics[feature].items():
                if len(numbers) != size:
                    raise DataError(
                        f"model.norm_stats: {path}: {feature}.{name} has {len(numbers)} numbers; "
                        f"{size} are needed"
                    )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"model.norm_stats: {path} is no stats.json of a data set of LeRobot ({error!r}); it "
            f"must have lists such as mean and std for {' and '.join(sizes)}"
        ) from None
    return statistics


def write_processors(
    folder: Path, settings: Mapping[str, Any], statistics: FeatureStatistics
) -> None:
    """Write both processors of a new policy in LeRobot's format.

    Args:
        folder: The policy folder.
        settings: Its ``config.json``.
        statistics: Statistics of states and actions.
    """
    inputs, outputs = settings["input_features"], settings["output_features"]
    normalization = {"eps": EPS, "norm_map": settings["normalization_mapping"]}
    tokenizer = {
        "max_length": settings["tokenizer_max_length"],
        "task_key": "task",
        "padding_side": "right",
        "padding": settings["pad_language_to"],
        "truncation": True,
        "tokenizer_name": settings["vlm_model_name"],
    }
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    steps: dict[str, list[dict[str, Any]]] = {
        PREPROCESSOR: [
            {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
            {"registry_name": "to_batch_processor", "config": {}},
            {"registry_name": "smolvla_new_line_processor", "config": {}},
            {"registry_name": "tokenizer_processor", "config": tokenizer},
            device,
            {
                "registry_name": NORMALIZER_STEP,
                "config": {**normalization, "features": {**inputs, **outputs}},
            },
        ],
        POSTPROCESSOR: [
            {"registry_name": UNNORMALIZER_STEP, "config": {**normalization, "features": outputs}},
            device,
        ],
    }
    for processor, entries in steps.items():
        for index, step in enumerate(entries):
            if (name := step["registry_name"]) in (NORMALIZER_STEP, UNNORMALIZER_STEP):
                step["state_file"] = f"{processor}_step_{index}_{name}.safetensors"
        write_statistics(folder, entries, statistics)
        (folder / f"{processor}.json").write_text(
            json.dumps({"name": processor, "steps": entries}, indent=2)
        )


def replace_statistics(folder: Path, statistics: FeatureStatistics) -> None:
    """Replace the statistics in both processors of a folder.

    Raises:
        DataError: A processor is missing or malformed.
    """
    for processor in (PREPROCESSOR, POSTPROCESSOR):
        path = folder / f"{processor}.json"
        try:
            values = json.loads(read_text(path))
            for index, step in enumerate(values["steps"]):
                if (name := step.get("registry_name")) in (NORMALIZER_STEP, UNNORMALIZER_STEP):
                    step["state_file"] = f"{processor}_step_{index}_{name}.safetensors"
            write_statistics(folder, values["steps"], statistics)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"model.path: {path} is not as LeRobot writes it ({error!r})") from None
        path.write_text(json.dumps(values, indent=2))


def write_statistics(
    folder: Path, steps: Sequence[Mapping[str, Any]], statistics: FeatureStatistics
) -> None:
    """Write the statistics files of the normalization steps, each with all statistics."""
    flat = {
        f"{feature}.{name}": torch.tensor(numbers, dtype=torch.float32)
        for feature, rows in statistics.items()
        for name, numbers in rows.items()
    }
    for step in steps:
        if (
            step.get("registry_name") in (NORMALIZER_STEP, UNNORMALIZER_STEP)
            and "state_file" in step
        ):
            save_file(flat, folder / Path(step["state_file"]).name)


SMOLVLA_TYPE = "smolvla"
VLM_FOLDER = "vlm"
"""Subfolder with the vision-language model's ``config.json`` and tokenizer."""
CAMERA_PREFIX, EMPTY_CAMERA_PREFIX = "observation.images.", "observation.images.empty_camera_"
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


class SmolVLAConfig(DenoisingConfig):
    """Options of SmolVLA policies: a folder of LeRobot, or the sizes of a new network."""

    path: Path | None = None
    """A policy folder of LeRobot, which defines all sizes."""
    vlm_path: Path | None = None
    """A folder with ``config.json`` and ``tokenizer.json`` of the vision-language model, if the
    policy folder has no ``vlm``."""
    camera_map: dict[str, str] = {}
    """Maps cameras of the folder to cameras of the task (``{camera1: corner}``); other cameras of
    the folder are not used. Empty: cameras have equal names."""
    denoising_steps: int | None = Field(default=None, gt=0, le=100)
    """Number of denoising steps ``N``; null: that of the folder, 4 for a new network."""
    chunk_size: int | None = Field(default=None, gt=0)
    """Number of executed actions per chunk (LeRobot's ``n_action_steps``); null: that of the
    folder, 8 for a new network."""
    value_level: ValueLevel = "chunk"
    """Whether there is one value (and advantage) per chunk or per action. If the value head of a
    folder has another shape, its last layer is initialized again."""
    norm_stats: Path | None = None
    """A ``meta/stats.json`` of a LeRobot data set to normalize states and actions; null: that of
    the folder, and mean 0 and standard deviation 1 for the states of a new network."""
    hidden: int = Field(default=96, gt=0)
    layers: int = Field(default=4, gt=0)
    """Layers of the language model and of the action expert."""
    heads: int = Field(default=4, gt=0)
    kv_heads: int = Field(default=2, gt=0)
    intermediate: int = Field(default=256, gt=0)
    vision_hidden: int = Field(default=64, gt=0)
    vision_layers: int = Field(default=2, gt=0)
    vision_heads: int = Field(default=4, gt=0)
    image_size: int | None = Field(default=None, gt=0)
    """Side of the square input of the vision transformer, pixels; null: the longest side of the
    task's images. Images are resized to fit."""
    patch_size: int = Field(default=8, gt=0)
    """Side of a patch, pixels."""
    pixel_shuffle_factor: int = Field(default=2, gt=0)
    """A token represents a square of patches with this side (pixel shuffle)."""
    expert_width_multiplier: float = Field(default=0.75, gt=0)
    """Width of the action expert, relative to ``hidden``."""
    proprio_dim: int | None = Field(default=None, gt=0)
    """Number of leading state dimensions that are inputs; null: all."""

    @model_validator(mode="after")
    def _check_sizes(self) -> SmolVLAConfig:
        for key, width, heads in (
            ("heads", self.hidden, self.heads),
            ("kv_heads", self.heads, self.kv_heads),
            ("vision_heads", self.vision_hidden, self.vision_heads),
        ):
            if width % heads:
                raise ValueError(f"{key}: {width} is no multiple of {heads}")
        if self.hidden // self.heads % 2:
            raise ValueError(f"heads: of {self.hidden // self.heads} numbers, which is not even")
        if (width := int(self.hidden * self.expert_width_multiplier)) % 2:
            raise ValueError(f"expert_width_multiplier: a width of {width} is not even")
        return self


def new_policy_config(config: SmolVLAConfig, spec: ModelSpec) -> dict[str, Any]:
    """Return the ``config.json`` of a new network."""
    side = config.image_size or max(max(size) for size in spec["images"].values())
    state_size = config.proprio_dim or int(spec["observation"])
    action_size, chunk_size = int(spec["action"]["size"]), config.chunk_size or 8
    images = {
        CAMERA_PREFIX + name: {"type": "VISUAL", "shape": [3, *shape]}
        for name, shape in spec["images"].items()
    }
    return {
        "type": SMOLVLA_TYPE,
        **LEROBOT_DEFAULTS,
        "input_features": {**images, STATE_FEATURE: {"type": "STATE", "shape": [state_size]}},
        "output_features": {ACTION_FEATURE: {"type": "ACTION", "shape": [action_size]}},
        "chunk_size": chunk_size,
        "n_action_steps": chunk_size,
        "max_state_dim": state_size,
        "max_action_dim": action_size,
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
    missing = [n for n in ("input_features", "output_features") if not settings.get(n)]
    if missing:
        raise DataError(f"model.path: {path} has no {', '.join(missing)}")
    for feature, key in ((STATE_FEATURE, "input_features"), (ACTION_FEATURE, "output_features")):
        if feature not in settings[key]:
            raise DataError(f"model.path: {path}: {key} has no {feature}")
    vlm_layers, expert_layers = settings["num_vlm_layers"], settings["num_expert_layers"]
    is_unsupported = {
        "adapt_to_pi_aloha": bool(settings["adapt_to_pi_aloha"]),
        "add_image_special_tokens": bool(settings["add_image_special_tokens"]),
        "prefix_length": settings["prefix_length"] > 0,
        "n_obs_steps": settings["n_obs_steps"] != 1,
        "num_expert_layers": expert_layers > 0 and expert_layers != vlm_layers,
        "resize_imgs_with_padding": settings["resize_imgs_with_padding"] is None,
        "use_peft": bool(settings.get("use_peft")),
        "normalization_mapping": settings["normalization_mapping"].get("VISUAL", "IDENTITY")
        != "IDENTITY",
    }
    if unsupported := [name for name, value in is_unsupported.items() if value]:
        name = unsupported[0]
        raise DataError(
            f"model.path: {path}: {name} is {settings[name]}, which model.name=smolvla does not "
            "support"
        )
    return settings


def read_vlm_config(folder: Path, key: str) -> dict[str, Any]:
    """Read the ``config.json`` of a SmolVLM vision-language model.

    Args:
        key: The configuration key, for error messages.

    Raises:
        DataError: The file is missing, or the model has another type.
    """
    settings = read_json_object(folder / "config.json", key)
    check_links(folder)
    if settings.get("model_type") not in ("smolvlm", "idefics3"):
        raise DataError(f"{key}: {folder} is a {settings.get('model_type')!r} model, not 'smolvlm'")
    for name in ("vision_config", "text_config"):
        if not isinstance(settings.get(name), dict):
            raise DataError(f"{key}: {folder}/config.json has no {name}")
    if not (folder / TOKENIZER_FILE).is_file():
        raise DataError(
            f"{key}: {folder} has no {TOKENIZER_FILE}; copy it from that model's folder"
        )
    return settings


def locate_vlm(
    folder: Path, settings: Mapping[str, Any], vlm_path: Path | None
) -> tuple[Path, str]:
    """Return the folder of a policy's vision-language model and its configuration key.

    Raises:
        DataError: There is no such folder.
    """
    if vlm_path is not None:
        return vlm_path.expanduser(), "model.vlm_path"
    if not (folder / VLM_FOLDER).is_dir():
        raise DataError(
            f"model.vlm_path: {folder} has no folder {VLM_FOLDER!r}; give the one that holds "
            f"config.json and tokenizer.json of {settings.get('vlm_model_name')}"
        )
    return folder / VLM_FOLDER, "model.path"


def map_cameras(settings: Mapping[str, Any], camera_map: Mapping[str, str]) -> dict[str, str]:
    """Return the task's camera for each camera of a folder, in the folder's order.

    LeRobot's empty cameras (for absent ones) are omitted, because their tokens are masked.
    """
    names = [
        name.removeprefix(CAMERA_PREFIX)
        for name, feature in settings["input_features"].items()
        if feature["type"] == "VISUAL" and not name.startswith(EMPTY_CAMERA_PREFIX)
    ]
    used = [name for name in names if not camera_map or name in camera_map]
    return {name: camera_map.get(name, name) for name in used}


def feature_size(settings: Mapping[str, Any], feature: str) -> int:
    """Return the dimension of the state or of an action."""
    key = "output_features" if feature == ACTION_FEATURE else "input_features"
    return int(settings[key][feature]["shape"][0])


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
    cameras, images = map_cameras(settings, {}), spec["images"]
    if unknown := sorted(config.camera_map.keys() - cameras.keys()):
        raise ConfigError(
            f"model.camera_map: {unknown[0]} is none of the model's; it sees {', '.join(cameras)}"
        )
    used = map_cameras(settings, config.camera_map)
    if missing := [name for name in used.values() if name not in images]:
        raise ConfigError(
            f"task.images: the model sees {', '.join(cameras)}, the task shows "
            f"{', '.join(images)}; set model.camera_map to which is which "
            f"({{{next(iter(cameras))}: {next(iter(images))}}})"
            if not config.camera_map
            else f"model.camera_map: the task shows no {missing[0]}, only {', '.join(images)}"
        )
    width, height = settings["resize_imgs_with_padding"]
    vision, merge = vlm_settings["vision_config"], int(vlm_settings.get("scale_factor", 2))
    token_side = int(vision.get("patch_size", 32)) * merge
    if width != height or width % token_side or width > int(vision.get("image_size", 224)):
        raise ConfigError(
            f"model.image_size: images are resized to {width} x {height}, and must be squares of "
            f"whole tokens, {merge} x {merge} patches of {token_side // merge} pixels each; change "
            "model.image_size or model.patch_size"
        )
    if (size := feature_size(settings, ACTION_FEATURE)) != spec["action"]["size"]:
        raise ConfigError(
            f"task.action.size: {spec['action']['size']}, and the model's actions have {size} "
            "numbers"
        )
    if (size := feature_size(settings, STATE_FEATURE)) > spec["observation"]:
        raise ConfigError(
            f"model.proprio_dim: {size} numbers, and the state has {spec['observation']}"
        )
    if (config.chunk_size or 0) > settings["chunk_size"]:
        raise ConfigError(
            f"model.chunk_size: {config.chunk_size}, and the model answers with "
            f"{settings['chunk_size']} actions"
        )
