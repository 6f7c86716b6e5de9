"""Policy folders in LeRobot's format: features, cameras, normalization of states and actions.

A folder of LeRobot 0.4 has a ``config.json``, ``model.safetensors``, and the processors
``policy_preprocessor.json`` and ``policy_postprocessor.json``. A processor is a list of steps.
Safetensors files of its normalization steps have the statistics of states and actions, which belong
to the weights and are never computed again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlinf.data.lerobot import ACTION_FEATURE, STATE_FEATURE, LeRobotDataset
from rlinf.errors import ConfigError, DataError
from rlinf.models.action_encoding import ActionBox, ValueLevel, compute_statistics
from rlinf.models.base import ModelSpec
from rlinf.models.character_tokenizer import TOKENIZER_FILE
from rlinf.models.denoising import DenoisingConfig
from rlinf.models.hf_folder import check_links, copy_non_weight_files, read_json_object
from rlinf.safetensors_io import load_tensors
from rlinf.verified_io import copy_file, read_text

CAMERA_PREFIX, EMPTY_CAMERA_PREFIX = "observation.images.", "observation.images.empty_camera_"
PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"
NORMALIZER_STEP, UNNORMALIZER_STEP = "normalizer_processor", "unnormalizer_processor"
"""LeRobot's names of features, processors and normalization steps."""
LEROBOT_STEPS = frozenset(
    {
        *("rename_observations_processor", "to_batch_processor", "tokenizer_processor"),
        *("device_processor", NORMALIZER_STEP, UNNORMALIZER_STEP),
    }
)
"""Names of the steps of processors that all policies of LeRobot have."""
VLM_FOLDER = "vlm"
"""Subfolder with ``config.json`` and tokenizer of the vision-language model."""
EPS = 1e-8
"""Constant against division by zero."""
MEAN_STD = "MEAN_STD"
RANGE_MODES = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
"""Normalization modes that map the range between two statistics to [-1, 1]."""
FeatureStatistics = Mapping[str, Mapping[str, Sequence[float]]]
"""Statistics by feature and name, as in ``meta/stats.json`` of a data set."""


class FlowVLAConfig(DenoisingConfig):
    """Options of flow-matching VLA policies: a folder of LeRobot, or the sizes of a new network."""

    path: Path | None = None
    """A policy folder of LeRobot, which defines all sizes."""
    camera_map: dict[str, str] = {}
    """Maps cameras of the folder to cameras of the task (``{camera1: corner}``); other cameras of
    the folder are not used. Empty: cameras have equal names."""
    denoising_steps: int | None = Field(default=None, gt=0, le=100)
    """Number of denoising steps ``N``; null: that of the folder, 4 for a new network."""
    chunk_size: int | None = Field(default=None, gt=0)
    """Number of executed actions per chunk (LeRobot's ``n_action_steps``); null: that of the
    folder, 8 for a new network."""
    likelihood: Literal["joint", "single_step"] = "joint"
    """``joint``: all denoising steps are random, and the log-probability of a chunk is their sum.
    ``single_step``: one step of each chunk, drawn at random, is random, and the log-probability is
    that of this step. Then an update computes the action expert once per chunk."""
    freeze_vlm: bool = False
    """Train the action expert, the projections and the added heads only, not the vision-language
    model."""
    value_level: ValueLevel = "chunk"
    """Whether there is one value (and advantage) per chunk or per action. If the value head of a
    folder has another shape, its last layer is initialized again."""
    norm_stats: Path | None = None
    """The folder of a LeRobot data set, or its ``meta/stats.json``, to normalize states and
    actions; null: that of the folder, and mean 0 and standard deviation 1 for the states of a new
    network."""
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
    proprio_dim: int | None = Field(default=None, gt=0)
    """Number of leading state dimensions that are inputs; null: all."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        for key, width, heads in (
            ("kv_heads", self.heads, self.kv_heads),
            ("vision_heads", self.vision_hidden, self.vision_heads),
        ):
            if width % heads:
                raise ValueError(f"{key}: {width} is no multiple of {heads}")
        return self


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


@functools.lru_cache(maxsize=4)
def compute_dataset_statistics(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the statistics of states and actions over all steps of a LeRobot data set.

    They are computed, because data sets of version 2.1 have them by episode, and many without
    quantiles.

    Raises:
        DataError: The folder is no data set, or is damaged.
        MissingPackageError: pyarrow is not installed.
    """
    dataset = LeRobotDataset(folder, all_successful=True)
    features = (STATE_FEATURE, ACTION_FEATURE)
    return {feature: compute_statistics(dataset.read_column(feature)) for feature in features}


def read_feature_statistics(
    path: Path, sizes: Mapping[str, int]
) -> dict[str, dict[str, list[float]]]:
    """Read the statistics of the leading dimensions of features of a data set.

    Args:
        path: A ``stats.json``, or the folder of a LeRobot data set, whose statistics are computed.
        sizes: Number of dimensions to read, by feature.

    Raises:
        DataError: The file cannot be read, or lacks a feature or dimensions.
    """
    try:
        stored = compute_dataset_statistics(path) if path.is_dir() else json.loads(read_text(path))
        statistics = dict[str, dict[str, list[float]]]()
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
    folder: Path,
    settings: Mapping[str, Any],
    statistics: FeatureStatistics,
    prompt: Mapping[str, Any],
    tokenizer: Mapping[str, Any] | None = None,
) -> None:
    """Write both processors of a new policy in LeRobot's format.

    Args:
        folder: The policy folder.
        settings: Its ``config.json``.
        statistics: Statistics of states and actions.
        prompt: The step that makes the prompt of the instruction (and perhaps the state).
        tokenizer: Name and padding of the tokenizer; None: the policy itself tokenizes.
    """
    inputs, outputs = settings["input_features"], settings["output_features"]
    normalization = {"eps": EPS, "norm_map": settings["normalization_mapping"]}
    tokenize: list[dict[str, Any]] = []
    if tokenizer is not None:
        options = {
            "max_length": settings.get("tokenizer_max_length"),
            "task_key": "task",
            "padding_side": "right",
            "truncation": True,
            **tokenizer,
        }
        tokenize = [{"registry_name": "tokenizer_processor", "config": options}]
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    steps: dict[str, list[dict[str, Any]]] = {
        PREPROCESSOR: [
            {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
            {"registry_name": "to_batch_processor", "config": {}},
            {
                "registry_name": NORMALIZER_STEP,
                "config": {**normalization, "features": {**inputs, **outputs}},
            },
            dict(prompt),
            *tokenize,
            device,
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
        name = settings.get("vlm_model_name") or settings.get("pretrained_name_or_path")
        raise DataError(
            f"model.vlm_path: {folder} has no folder {VLM_FOLDER!r}; give the one that holds "
            f"config.json and tokenizer.json of {name}"
        )
    return folder / VLM_FOLDER, "model.path"


def feature_size(settings: Mapping[str, Any], feature: str) -> int:
    """Return the dimension of the state or of an action."""
    key = "output_features" if feature == ACTION_FEATURE else "input_features"
    return int(settings[key][feature]["shape"][0])


def new_features(config: FlowVLAConfig, spec: ModelSpec) -> dict[str, Any]:
    """Return the features of states, images and actions in the ``config.json`` of a new network,
    with its sizes of chunks, states and actions."""
    state_size = config.proprio_dim or int(spec["observation"])
    action_size, chunk_size = int(spec["action"]["size"]), config.chunk_size or 8
    images = {
        CAMERA_PREFIX + name: {"type": "VISUAL", "shape": [3, *shape]}
        for name, shape in spec["images"].items()
    }
    return {
        "input_features": {**images, STATE_FEATURE: {"type": "STATE", "shape": [state_size]}},
        "output_features": {ACTION_FEATURE: {"type": "ACTION", "shape": [action_size]}},
        "chunk_size": chunk_size,
        "n_action_steps": chunk_size,
        "max_state_dim": state_size,
        "max_action_dim": action_size,
    }


def new_statistics(settings: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return the statistics of a new network: states are not scaled, and -1 and 1 are the bounds of
    actions."""
    size = feature_size(settings, STATE_FEATURE)
    box = ActionBox.from_spec(spec["action"], None)
    return {
        feature: {
            "mean": center.tolist(),
            "std": half.tolist(),
            "q01": (center - half).tolist(),
            "q99": (center + half).tolist(),
        }
        for feature, center, half in (
            (STATE_FEATURE, np.zeros(size), np.ones(size)),
            (ACTION_FEATURE, box.center, box.half_range),
        )
    }


def read_statistics(path: Path, settings: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Read the statistics of states and actions of a data set (:func:`read_feature_statistics`).

    Raises:
        DataError: Some statistics are missing.
    """
    sizes = {
        STATE_FEATURE: feature_size(settings, STATE_FEATURE),
        ACTION_FEATURE: feature_size(settings, ACTION_FEATURE),
    }
    result = read_feature_statistics(path.expanduser(), sizes)
    for feature, kind in ((STATE_FEATURE, "STATE"), (ACTION_FEATURE, "ACTION")):
        mode = settings["normalization_mapping"].get(kind, "IDENTITY")
        source = f"model.norm_stats: {path}: {feature}"
        FeatureNormalizer.from_statistics(mode, result[feature], sizes[feature], source)
    return result


def state_normalizer(folder: Path, settings: Mapping[str, Any]) -> FeatureNormalizer:
    """Read the normalization of states; raises like :func:`read_normalizer`."""
    size = feature_size(settings, STATE_FEATURE)
    return read_normalizer(folder, PREPROCESSOR, NORMALIZER_STEP, STATE_FEATURE, size)


def action_normalizer(folder: Path, settings: Mapping[str, Any]) -> FeatureNormalizer:
    """Read the normalization of actions; raises like :func:`read_normalizer`."""
    size = feature_size(settings, ACTION_FEATURE)
    return read_normalizer(folder, POSTPROCESSOR, UNNORMALIZER_STEP, ACTION_FEATURE, size)


def check_task(settings: Mapping[str, Any], config: FlowVLAConfig, spec: ModelSpec) -> None:
    """Check that cameras, state and actions of a task fit a folder.

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


def check_sections(settings: Mapping[str, Any], path: Path) -> None:
    """Check that a ``config.json`` has the features of a policy.

    Raises:
        DataError: A feature is missing.
    """
    missing = [n for n in ("input_features", "output_features") if not settings.get(n)]
    if missing:
        raise DataError(f"model.path: {path} has no {', '.join(missing)}")
    for feature, key in ((STATE_FEATURE, "input_features"), (ACTION_FEATURE, "output_features")):
        if feature not in settings[key]:
            raise DataError(f"model.path: {path}: {key} has no {feature}")


def check_supported(
    settings: Mapping[str, Any],
    is_unsupported: Mapping[str, bool],
    path: Path,
    model: str,
    cures: Mapping[str, str] | None = None,
) -> None:
    """Check that a policy's ``config.json`` has no unsupported option.

    Args:
        settings: The file's values.
        is_unsupported: Whether the value of an option of this policy is unsupported. Options of all
            policies of LeRobot are checked too.
        path: The file.
        model: ``model.name``.
        cures: The ends of error messages, by option.

    Raises:
        DataError: An option is unsupported; names the first one.
    """
    image_mode = settings["normalization_mapping"].get("VISUAL", "IDENTITY")
    checks = {
        **is_unsupported,
        "use_peft": bool(settings.get("use_peft")),
        "normalization_mapping": image_mode != "IDENTITY",
    }
    for name in (name for name, value in checks.items() if value):
        raise DataError(
            f"model.path: {path}: {name} is {settings[name]}, which model.name={model} does not "
            f"support{(cures or {}).get(name, '')}"
        )


def read_vlm_config(folder: Path, key: str, types: Sequence[str]) -> dict[str, Any]:
    """Read the ``config.json`` of a vision-language model.

    Args:
        key: The configuration key, for error messages.
        types: Supported types of the model.

    Raises:
        DataError: The file is missing, or the model has another type.
    """
    settings = read_json_object(folder / "config.json", key)
    check_links(folder)
    if (kind := settings.get("model_type")) not in types:
        raise DataError(f"{key}: {folder} is a {kind!r} model, not {types[0]!r}")
    for name in ("vision_config", "text_config"):
        if not isinstance(settings.get(name), dict):
            raise DataError(f"{key}: {folder}/config.json has no {name}")
    if not (folder / TOKENIZER_FILE).is_file():
        raise DataError(
            f"{key}: {folder} has no {TOKENIZER_FILE}; copy it from that model's folder"
        )
    return settings


def copy_processors(source: Path, folder: Path) -> None:
    """Copy the configuration and the processors with their statistics."""
    copy_non_weight_files(source, folder)
    for path in sorted(source.glob("policy_*processor*.safetensors")):
        copy_file(path, folder / path.name)
