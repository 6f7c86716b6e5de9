"""Policy folders of :mod:`rlinf.models.openvla`: create, read, and check against a task.

There are two kinds of ``config.json``. In folders of this project, it has all sizes. In *published*
folders (of OpenVLA and OpenVLA-OFT), it names the two vision towers (``timm_model_ids``) and has
the action statistics (``norm_stats``), unless a ``dataset_statistics.json`` has them. OpenVLA's
code defines chunk, cameras, prompt, crop and gripper; :func:`missing_settings` adds them to a new
policy folder. :mod:`rlinf.models.openvla_conversion` converts folders with pickled weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from rlinf.config import Section
from rlinf.data.lerobot import ACTION_FEATURE
from rlinf.errors import ConfigError, DataError
from rlinf.models.action_encoding import (
    STATISTICS_FILE,
    VALUE_HEAD_OUTPUT,
    GripperConvention,
    ValueLevel,
    read_action_statistics,
    select_action_statistics,
)
from rlinf.models.base import ModelSpec
from rlinf.models.character_tokenizer import read_tokenizer
from rlinf.models.checkpoint_tensors import TensorShapes, check_tensors
from rlinf.models.hf_folder import (
    check_checkpoint,
    read_config_json,
    read_json_object,
    tensor_files,
)
from rlinf.models.images import PREPROCESSOR_FILE
from rlinf.models.openvla_network import AUTOREGRESSIVE, L1, TOWERS, OpenVLANetwork
from rlinf.models.policy_folder import PolicyFolder, ValueRange

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
PART_TENSORS = {
    "proprio_dim": r"proprio_projector\.",
    "action_head": r"action_head\.",
    "use_film": r"vision_backbone\..*\.blocks\.\d+\.(scale|shift)\.",
}
"""Patterns of the tensor names of parts that options add to published weights, by setting."""
COMPONENT_FILES = "*_checkpoint.pt"
"""Pattern of OpenVLA-OFT's pickled files with parts of the network."""
PUBLISHED_OPTIONS = {
    "center_crop": "set true for weights that were trained with random crops, as the published "
    "ones for LIBERO, or false",
    "gripper": "set openvla for weights that were trained on data of OpenVLA, as the published "
    "ones for LIBERO, or simulator",
}
"""Options that published folders do not have, and what to set."""


class OpenVLAConfig(Section):
    """Options of OpenVLA policies: a folder, or the sizes of a new network."""

    path: Path | None = None
    """A policy folder. It defines all sizes; published folders lack prompt, crop and gripper, which
    these options then define."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights in memory. OpenVLA's own evaluation uses bfloat16."""
    center_crop: bool | None = None
    """Whether the network reads the center of an image, 90 % of its area, in full size, as
    OpenVLA's evaluation. Right for weights that were trained with random crops. Needed for
    published folders, which do not have it; null: as the folder says, or false."""
    gripper: GripperConvention | None = None
    """Meaning of the last action component. ``openvla``: 0 closes and 1 opens the gripper, which is
    binarized and converted to 1 and -1 for LIBERO; ``simulator``: that of the simulator. Needed
    for published folders, which do not have it; null: as the folder says, or ``simulator``."""
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
    prompt: str | None = None
    """Prompt template with ``{instruction}`` (inserted in lower case); null: that of OpenVLA."""
    n_action_bins: int = Field(default=256, ge=2)
    """Number of tokens per action dimension."""
    norm_stats: Path | None = None
    """A ``dataset_statistics.json``, or the folder of a LeRobot data set, whose quantiles define
    the bins of a new network; null: the action bounds of the task, or -1 and 1 without bounds."""
    unnorm_key: str | None = None
    """Name of the data set in the statistics; null: the only one."""


class OpenVLAOFTConfig(OpenVLAConfig):
    """Options of OpenVLA-OFT policies: a folder, or the sizes of a new network."""

    chunk_size: int = Field(default=8, gt=0)
    """Number of actions that the policy chooses at once and the simulator executes in turn."""
    value_level: ValueLevel = "chunk"
    """Whether there is one value (and advantage) per chunk or per action. If the value head of a
    folder has another shape, its last layer is initialized again."""
    proprio_dim: int = Field(default=0, ge=0)
    """Number of leading state dimensions that form an input token; 0: no state input. They are
    scaled by the quantiles of ``proprio`` if the action statistics have them."""
    action_head: Literal["tokens", "l1"] = "tokens"
    """``tokens``: probabilities of action tokens, which RL needs; ``l1``: a regression head of the
    L1 loss, only for SFT and evaluation. Converted folders say which one they have."""
    use_film: bool = False
    """Whether the mean embedding of the prompt scales and shifts the image features (FiLM)."""


def value_level(config: OpenVLAConfig) -> ValueLevel:
    """Return the level of values; an autoregressive policy has chunks of one action."""
    return config.value_level if isinstance(config, OpenVLAOFTConfig) else "chunk"


def _chunk_settings(config: OpenVLAConfig) -> dict[str, int]:
    if not isinstance(config, OpenVLAOFTConfig):
        return {"num_actions_chunk": 1, "proprio_dim": 0}
    return {"num_actions_chunk": config.chunk_size, "proprio_dim": config.proprio_dim}


def _optional_settings(config: OpenVLAConfig) -> dict[str, Any]:
    """Return the settings that ``config.json`` has only if they differ from their defaults."""
    values: dict[str, Any] = {
        "center_crop": config.center_crop,
        "gripper": config.gripper if config.gripper == "openvla" else None,
    }
    if isinstance(config, OpenVLAOFTConfig):
        values["action_head"] = L1 if config.action_head == L1 else None
        values["use_film"] = config.use_film
    else:
        values["decoding"] = AUTOREGRESSIVE
    return {key: value for key, value in values.items() if value}


def new_openvla_config(
    config: OpenVLAConfig,
    spec: ModelSpec,
    vocabulary: int,
    dataset: str,
    statistics: Mapping[str, Any],
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
    chunk = _chunk_settings(config)
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
        "num_actions_chunk": chunk["num_actions_chunk"],
        "action_dim": spec["action"]["size"],
        "proprio_dim": chunk["proprio_dim"],
        "cameras": list(spec["images"]),
        "prompt": DEFAULT_PROMPT if config.prompt is None else config.prompt,
        **(fused if config.use_fused_vision_backbone else {}),
        "unnorm_key": dataset,
        **_optional_settings(config),
    }


def new_preprocessor_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``preprocessor_config.json`` of a new network with two towers."""
    sizes = [settings["vision_config"][tower]["image_size"] for tower in TOWERS]
    return {
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, *size] for size in sizes],
        "tvf_normalize_params": [TOWER_NORMALIZATION[tower] for tower in TOWERS],
    }


def read_openvla_config(
    folder: Path, name: str, missing: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read ``config.json``, and add sizes and normalization of the towers that it only names.

    Args:
        folder: The policy folder.
        name: ``openvla`` or ``openvla_oft``.
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
            f"model.path: {folder} is a {settings['model_type']!r} model; model.name={name} "
            f"takes folders of the type {MODEL_TYPE!r}"
        )
    trained = "openvla" if settings.get("decoding") == AUTOREGRESSIVE else "openvla_oft"
    if trained != name:
        raise DataError(
            f"{source}: its actions are decoded as in model.name={trained}, not as in {name}; set "
            f"model.name={trained}"
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
            f"{source} has no {', '.join(absent)}; model.name={name} reads folders that it "
            "wrote, and published ones with two vision towers (use_fused_vision_backbone)"
        )
    if has_named_towers:
        settings["vision_config"] = _known_towers(source, settings)
    if is_fused:
        settings["vision_config"] = _add_normalization(folder, settings["vision_config"])
    if (kind := settings["text_config"].get("model_type", "llama")) != "llama":
        raise DataError(
            f"{source}: text_config.model_type: {kind!r}; model.name={name} has a Llama"
        )
    if parts := sorted(path.name for path in folder.glob(COMPONENT_FILES)):
        raise DataError(
            f"model.path: {folder} has {', '.join(parts)}, pickled parts of the network; convert "
            f"the folder once: rlinf convert {folder} NEW_FOLDER"
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
            f"{source}: timm_model_ids: {ids}; the towers that OpenVLA policies know are "
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


def missing_settings(folder: Path, config: OpenVLAConfig, spec: ModelSpec) -> dict[str, Any]:
    """Return the values that a published ``config.json`` omits, for this task.

    Folders of this project omit nothing; only crop and gripper can be changed.

    Raises:
        DataError: The folder is unreadable, or lacks the statistics of the data set.
        ConfigError: An option of :data:`PUBLISHED_OPTIONS` is not set.
    """
    check_checkpoint(folder, True)
    settings = read_config_json(folder)
    if not settings.get("use_fused_vision_backbone") or "cameras" in settings:
        chosen = {key: getattr(config, key) for key in PUBLISHED_OPTIONS}
        return {key: value for key, value in chosen.items() if value is not None}
    for key, advice in PUBLISHED_OPTIONS.items():
        if getattr(config, key) is None:
            raise ConfigError(f"model.{key}: {folder} does not have it; {advice}")
    name, statistics = read_folder_statistics(folder, settings, config)
    # In OpenVLA's training an empty token precedes the action tokens: hence the space at the end.
    values = {
        **_chunk_settings(config),
        "action_dim": len(statistics["action"]["q01"]),
        "cameras": list(spec["images"]),
        "prompt": f"{DEFAULT_PROMPT} " if config.prompt is None else config.prompt,
        "unnorm_key": name,
        **_optional_settings(config),
    }
    # A converted folder has some of them: they describe its weights.
    return {key: value for key, value in values.items() if key not in settings}


def read_folder_statistics(
    folder: Path, settings: Mapping[str, Any], config: OpenVLAConfig
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


def proprio_statistics(
    statistics: Mapping[str, Any], settings: Mapping[str, Any], source: str, *, required: bool
) -> tuple[list[float], list[float]] | None:
    """Return the 1 % and 99 % quantiles of the state; None: the state is not scaled.

    Args:
        statistics: Those of a data set.
        settings: The result of :func:`read_openvla_config`.
        source: The folder, for error messages.
        required: Whether the network needs them.

    Raises:
        DataError: They are missing, or of another length than the state.
    """
    size, values = settings.get("proprio_dim", 0), statistics.get("proprio")
    if not size or (values is None and not required):
        return None
    low, high = ((values or {}).get(name, []) for name in ("q01", "q99"))
    if len(low) != size or len(high) != size:
        raise DataError(
            f"model.proprio_dim: {source}: the data set {settings['unnorm_key']} has no quantiles "
            f"q01 and q99 of {size} numbers for proprio; give those of the training data in "
            f"{STATISTICS_FILE}, or set model.proprio_dim=0"
        )
    return low, high


def check_openvla_tensors(
    folder: Path,
    shapes: TensorShapes,
    module: nn.Module,
    new_parts: Collection[str] = tuple(PART_TENSORS),
) -> None:
    """Check that stored tensors fit a network, except for optional ones.

    Args:
        folder: The policy folder.
        shapes: Shapes of the tensors in the folder.
        module: The network; may be on the meta device.
        new_parts: Keys of :data:`PART_TENSORS` whose tensors the folder may lack, like those of the
            value head.

    Raises:
        DataError: Tensors do not fit; the message names files and tensors.
    """
    patterns = [r"value_head\.", "places$", *(PART_TENSORS[key] for key in new_parts)]
    is_optional = re.compile("|".join(patterns))
    optional = {
        name: tensor.shape
        for name, tensor in module.state_dict().items()
        if is_optional.match(name)
    }
    # The last layer of the value head may have any shape: a wrong one is initialized again.
    resettable = {n: shape for n, shape in optional.items() if n.startswith(VALUE_HEAD_OUTPUT)}
    files = ", ".join(path.name for path in tensor_files(folder))
    check_tensors(f"model.path: {folder}: {files}", {**optional, **shapes, **resettable}, module)


def new_meta_network(
    folder: Path, settings: Mapping[str, Any], value_level: ValueLevel = "chunk"
) -> OpenVLANetwork:
    """Create the network of a folder on the meta device.

    Raises:
        DataError: The configuration is invalid.
    """
    from huggingface_hub.errors import StrictDataclassError

    malformed = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)
    try:
        with torch.device("meta"):
            return OpenVLANetwork(settings, value_level)
    except (*malformed, StrictDataclassError) as error:
        raise DataError(
            f"model.path: {folder}/config.json describes no network ({error!r}); fetch it again"
        ) from None


def check_openvla_task(settings: Mapping[str, Any], spec: ModelSpec) -> None:
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


class OpenVLAFolder(PolicyFolder):
    """A folder of OpenVLA or OpenVLA-OFT."""

    def __init__(self, name: str, folder: Path, options: Any, spec: ModelSpec) -> None:
        super().__init__(name, folder, options, spec)
        missing = missing_settings(folder, options, spec)
        self.settings = read_openvla_config(folder, name, missing)
        self._dataset, statistics = read_folder_statistics(folder, self.settings, options)
        self._statistics = statistics["action"]
        if (mask := self._statistics.get("mask")) is not None:
            self.is_scaled = np.asarray(mask, bool)

    @classmethod
    def recognizes(cls, name: str, folder: Path, settings: Mapping[str, Any]) -> bool:
        # A published folder does not state how its actions are decoded.
        if settings.get("model_type") != MODEL_TYPE or "cameras" not in settings:
            return False
        return (settings.get("decoding") == AUTOREGRESSIVE) == (name == "openvla")

    def prompt(self) -> tuple[str, str]:
        prompt, source = str(self.settings["prompt"]), f"{self.config_file}: prompt"
        if "{instruction}" not in prompt:
            raise DataError(
                f"{source}: {prompt!r} has no {{instruction}}, so the policy cannot tell tasks "
                "apart; set model.prompt"
            )
        read_tokenizer(self.folder)
        return repr(prompt), source

    def ranges(self) -> dict[str, ValueRange]:
        low, high = (np.asarray(self._statistics[name], np.float64) for name in ("q01", "q99"))
        has_file = (self.folder / STATISTICS_FILE).is_file()
        file = STATISTICS_FILE if has_file else "config.json: norm_stats"
        source = f"{self.folder / file}: {self._dataset}.action"
        return {ACTION_FEATURE: ValueRange(low, high, "QUANTILES", source)}

    def chunk(self) -> tuple[int, int, str]:
        length = int(self.settings["num_actions_chunk"])
        return length, length, f"{self.config_file}: num_actions_chunk"

    def action_size(self) -> tuple[int, str]:
        return int(self.settings["action_dim"]), f"{self.config_file}: action_dim"
