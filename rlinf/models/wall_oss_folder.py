"""Policy folders of :mod:`rlinf.models.wall_oss`: create, read, and check.

Original folders of WALL-OSS and policy folders of LeRobot can be read. An original folder has one
``config.json`` of a Qwen2.5-VL with two experts, the tokenizer, and the normalizers of several data
sets among its weights. A policy folder of this package has LeRobot's format
(:mod:`rlinf.models.lerobot_folder`), with the network's ``config.json``, image preprocessing and
tokenizer in the subfolder ``vlm``; LeRobot loads them by name from the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from tokenizers import Tokenizer
from torch import Tensor

from rlinf.data.lerobot import ACTION_FEATURE, STATE_FEATURE
from rlinf.errors import ConfigError, DataError
from rlinf.models.base import ModelSpec
from rlinf.models.character_tokenizer import TOKENIZER_FILE, read_tokenizer
from rlinf.models.hf_folder import check_checkpoint, check_links, read_json_object, tensor_files
from rlinf.models.images import PREPROCESSOR_FILE
from rlinf.models.lerobot_folder import (
    CAMERA_PREFIX,
    LEROBOT_STEPS,
    VLM_FOLDER,
    FeatureStatistics,
    FlowVLAConfig,
    check_sections,
    check_supported,
    check_task,
    feature_size,
    locate_vlm,
    map_cameras,
    new_features,
    write_processors,
)
from rlinf.models.policy_folder import FlowPolicyFolder
from rlinf.safetensors_io import load_tensors

WALL_TYPE = "wall_x"
"""The type in LeRobot's ``config.json``."""
PROMPT_STEP = "wall_x_task_processor"
"""LeRobot's name of the step that makes the prompt."""
PUBLISHED = "x-square-robot/wall-oss-flow"
"""Name of the published network and tokenizer."""
STATE_TOKEN, ACTION_TOKEN, IMAGE_TOKEN = "<|propri|>", "<|action|>", "<|image_pad|>"
SPECIAL_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    IMAGE_TOKEN,
    "<|video_pad|>",
    STATE_TOKEN,
    ACTION_TOKEN,
)
LEROBOT_DEFAULTS: dict[str, Any] = {
    "n_obs_steps": 1,
    "chunk_size": 32,
    "n_action_steps": 32,
    "max_action_dim": 20,
    "max_state_dim": 20,
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    "prediction_mode": "diffusion",
}
"""LeRobot's defaults for values that a ``config.json`` omits."""
NETWORK_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "attention_moe": False,
    "mlp_moe": False,
    "resolution": 256,
}
"""Values that a network's ``config.json`` may omit."""
PUBLISHED_NETWORK: dict[str, Any] = {
    **NETWORK_DEFAULTS,
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 153_715,
    "tie_word_embeddings": True,
    "mrope_section": [16, 24, 24],
    "image_token_id": 151_655,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "num_heads": 16,
        "intermediate_size": 3420,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "mlp_moe": True,
    "experts": [
        {"hidden_size": 2048, "intermediate_size": size, "hidden_act": "silu"}
        for size in (11_008, 2048)
    ],
    "dim_inputs": [2048, 2048],
    "dof_config": {"action": 20},
    "agent_pos_config": {"state": 20},
}
"""Sizes of the published network of 4.22 billion parameters, for tables of memory. A folder's own
``config.json`` has them in a run."""
DENOISING_STEPS = 10
NORMALIZER_PREFIX = "action_preprocessor.normalizer_"
"""Prefix of the tensors with statistics in original folders:
``action_preprocessor.normalizer_{action,propri}.{min,delta}.NAME``."""
CAMERA_TEXTS = {"face_view": "front view", "move1_view": "move view", "move2_view": "move view"}
"""Names of cameras in the prompt that do not follow from those of the folder."""


class WallOSSConfig(FlowVLAConfig):
    """Options of WALL-OSS: a folder of wall-x or LeRobot, or the sizes of a new network."""

    path: Path | None = None
    """An original folder of WALL-OSS or a policy folder of LeRobot, which defines all sizes."""
    vlm_path: Path | None = None
    """A folder with ``config.json``, ``preprocessor_config.json`` and ``tokenizer.json`` of
    WALL-OSS, if the policy folder of LeRobot has no ``vlm``."""
    normalizer: str | None = None
    """Name of the data set whose normalizer in an original folder is used; null: its only one."""
    expert_intermediate: int = Field(default=128, gt=0)
    """Size of the feed-forward layers of action tokens."""

    @model_validator(mode="after")
    def _check_width(self) -> WallOSSConfig:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"heads: {self.hidden} / {self.heads} heads is not an even number")
        if self.vision_hidden % (4 * self.vision_heads):
            raise ValueError(
                f"vision_heads: vision_hidden {self.vision_hidden} / {self.vision_heads} heads "
                "must be a multiple of 4: rotary positions of two axes"
            )
        return self


def new_policy_config(config: WallOSSConfig, spec: ModelSpec) -> dict[str, Any]:
    """Return LeRobot's ``config.json`` of a new network."""
    return {
        "type": WALL_TYPE,
        **LEROBOT_DEFAULTS,
        **new_features(config, spec),
        "pretrained_name_or_path": VLM_FOLDER,
    }


def new_network_config(
    config: WallOSSConfig, settings: Mapping[str, Any], spec: ModelSpec, vocabulary: dict[str, int]
) -> dict[str, Any]:
    """Return the network's ``config.json`` of a new network.

    Args:
        config: The sizes.
        settings: The ``config.json`` of :func:`new_policy_config`.
        spec: The task.
        vocabulary: Ids of :data:`SPECIAL_TOKENS` and of the further tokens.
    """
    num_frequencies = config.hidden // config.heads // 2
    num_spatial = 3 * num_frequencies // 8
    side = config.image_size or max(max(size) for size in spec["images"].values())
    sizes = {"hidden_size": config.hidden, "hidden_act": "silu"}
    return {
        "model_type": "qwen2_5_vl",
        **sizes,
        **NETWORK_DEFAULTS,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "vocab_size": len(vocabulary),
        "tie_word_embeddings": True,
        "rope_scaling": {
            "type": "mrope",
            "mrope_section": [num_frequencies - 2 * num_spatial, num_spatial, num_spatial],
        },
        "image_token_id": vocabulary[IMAGE_TOKEN],
        "video_token_id": vocabulary["<|video_pad|>"],
        "vision_start_token_id": vocabulary["<|vision_start|>"],
        "vision_config": {
            "depth": config.vision_layers,
            "hidden_size": config.vision_hidden,
            "num_heads": config.vision_heads,
            "intermediate_size": 2 * config.vision_hidden,
            "out_hidden_size": config.hidden,
            "patch_size": config.patch_size,
            "window_size": 4 * config.patch_size,
            # Windows save nothing for images of a few tokens.
            "fullatt_block_indexes": list(range(config.vision_layers)),
        },
        "mlp_moe": True,
        "num_experts": 2,
        "experts": [
            {**sizes, "intermediate_size": size}
            for size in (config.intermediate, config.expert_intermediate)
        ],
        "dim_inputs": [config.hidden, config.hidden],
        "dof_config": {"action": settings["max_action_dim"]},
        "agent_pos_config": {"state": settings["max_state_dim"]},
        "noise_scheduler": {"num_inference_timesteps": config.denoising_steps or 4},
        "resolution": side,
    }


def is_original(source: Path) -> bool:
    """Return whether a folder is an original one, without LeRobot's ``config.json``.

    Raises:
        DataError: Its ``config.json`` cannot be read.
    """
    return "type" not in read_json_object(source / "config.json")


def read_policy_config(folder: Path) -> dict[str, Any]:
    """Read LeRobot's ``config.json`` of a folder, completed by :data:`LEROBOT_DEFAULTS`.

    Raises:
        DataError: The file is missing, of another policy, or uses unsupported options.
    """
    check_checkpoint(folder, True)  # the folder's own code is never run
    path = folder / "config.json"
    settings = {**LEROBOT_DEFAULTS, **read_json_object(path)}
    if (kind := settings.get("type")) != WALL_TYPE:
        raise DataError(
            f"model.path: {folder} is of the type {kind!r}; model.name=wall_oss takes original "
            f"folders of WALL-OSS, and LeRobot's of the type {WALL_TYPE!r}"
        )
    check_sections(settings, path)
    is_unsupported = {
        "prediction_mode": settings["prediction_mode"] != "diffusion",
        "n_obs_steps": settings["n_obs_steps"] != 1,
    }
    check_supported(settings, is_unsupported, path, "wall_oss")
    return settings


def original_policy_config(
    network: Mapping[str, Any], config: WallOSSConfig, spec: ModelSpec
) -> dict[str, Any]:
    """Return LeRobot's ``config.json`` for an original folder.

    Cameras are those of ``model.camera_map`` or of the task. The first components of the network's
    states and actions are those of the task, as in LeRobot.
    """
    cameras = config.camera_map or {name: name for name in spec["images"]}
    images = {
        CAMERA_PREFIX + name: {"type": "VISUAL", "shape": [3, *spec["images"].get(camera, (0, 0))]}
        for name, camera in cameras.items()
    }
    state_size = config.proprio_dim or int(spec["observation"])
    mode = "MEAN_STD" if config.norm_stats is not None else "MIN_MAX"
    return {
        "type": WALL_TYPE,
        **LEROBOT_DEFAULTS,
        "input_features": {**images, STATE_FEATURE: {"type": "STATE", "shape": [state_size]}},
        "output_features": {
            ACTION_FEATURE: {"type": "ACTION", "shape": [int(spec["action"]["size"])]}
        },
        "max_action_dim": sum(network["dof_config"].values()),
        "max_state_dim": sum(network["agent_pos_config"].values()),
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
        "pretrained_name_or_path": VLM_FOLDER,
    }


def read_network_config(folder: Path, key: str) -> dict[str, Any]:
    """Read the network's ``config.json``, flat or with a ``text_config``.

    Args:
        folder: An original folder, or the ``vlm`` of a policy folder.
        key: The configuration key, for error messages.

    Raises:
        DataError: The file is missing, of another network, or has unsupported values.
    """
    path = folder / "config.json"
    stored = read_json_object(path, key)
    check_links(folder)
    settings = {**NETWORK_DEFAULTS, **(stored.get("text_config") or {}), **stored}
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    settings |= {name: rope[name] for name in ("mrope_section", "rope_theta") if name in rope}
    required = (
        *("experts", "dim_inputs", "dof_config", "agent_pos_config", "vision_config"),
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("vocab_size", "image_token_id", "mrope_section"),
    )
    if missing := [name for name in required if not settings.get(name)]:
        kind = stored.get("type") or stored.get("model_type")
        raise DataError(
            f"{key}: {path} ({kind!r}) has no {', '.join(missing)}, which the network of WALL-OSS "
            f"has; take config.json of {PUBLISHED}"
        )
    _check_network_config(settings, f"{key}: {path}")
    for name in (TOKENIZER_FILE, PREPROCESSOR_FILE):
        if not (folder / name).is_file():
            raise DataError(f"{key}: {folder} has no {name}; copy it from {PUBLISHED}")
    return settings


def _check_network_config(settings: Mapping[str, Any], source: str) -> None:
    """Check the parts of a network's ``config.json`` that only WALL-OSS has."""
    for name in ("dof_config", "agent_pos_config"):
        sizes = settings[name].values() if isinstance(settings[name], dict) else ["?"]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise DataError(
                f"{source}: {name} must map names to numbers of components, such as "
                f"{{follow_right_gripper: 1}}, and is {settings[name]}"
            )
    widths = [each.get("hidden_size") for each in settings["experts"]]
    if len(widths) != 2 or widths != list(settings["dim_inputs"]):
        raise DataError(
            f"{source}: experts have the widths {widths}, and dim_inputs are "
            f"{list(settings['dim_inputs'])}; both must have two equal entries, for other tokens "
            "and for actions"
        )
    for name, supported in (("mlp_moe", True), ("attention_moe", False)):
        if settings[name] is not supported:
            raise DataError(
                f"{source}: {name} is {settings[name]}; model.name=wall_oss supports {supported}"
            )


def check_wall_task(
    settings: Mapping[str, Any],
    network: Mapping[str, Any],
    config: WallOSSConfig,
    spec: ModelSpec,
    source: str,
) -> None:
    """Check that images, state and actions of a task fit a network.

    Args:
        settings: LeRobot's ``config.json``.
        network: The network's ``config.json``.
        source: The key and the file of the network's configuration, for error messages.

    Raises:
        ConfigError: The task does not fit.
        DataError: Both configurations contradict each other.
    """
    for name, limit in (("dof_config", "max_action_dim"), ("agent_pos_config", "max_state_dim")):
        if (total := sum(network[name].values())) != settings[limit]:
            raise DataError(
                f"{source}: {name} has {total} components, and {limit} in the policy's config.json "
                f"is {settings[limit]}; take both files from one checkpoint"
            )
    check_task(settings, config, spec)
    for feature, limit in ((ACTION_FEATURE, "max_action_dim"), (STATE_FEATURE, "max_state_dim")):
        if (size := feature_size(settings, feature)) > settings[limit]:
            key = "task.action.size" if feature == ACTION_FEATURE else "model.proprio_dim"
            raise ConfigError(f"{key}: {size}, and the model has at most {settings[limit]}")


def network_tensors(tensors: Mapping[str, Any], *, is_tied: bool) -> dict[str, Any]:
    """Return the network's tensors by LeRobot's names, without normalizers and a tied head.

    Original names lack the first ``model.``. Of two tied tensors, one suffices.
    """
    is_lerobot = any(name.startswith("model.model.") for name in tensors)
    prefix = "" if is_lerobot else "model."
    result = {
        f"{prefix}{name}": tensor
        for name, tensor in tensors.items()
        if NORMALIZER_PREFIX not in name
    }
    if is_tied and (head := result.pop(LM_HEAD, None)) is not None:
        result.setdefault(TOKEN_EMBEDDINGS, head)
    return result


LM_HEAD, TOKEN_EMBEDDINGS = "model.lm_head.weight", "model.model.embed_tokens.weight"
"""Names of two tensors that may be tied."""


def choose_normalizer(
    names: Iterable[str], config: WallOSSConfig, source: Path
) -> dict[str, tuple[str, str]]:
    """Return the names of the tensors with minimum and range of states and actions.

    Args:
        names: All tensor names of an original folder.

    Raises:
        DataError: The folder has no such statistics.
        ConfigError: The data set is not chosen, or unknown.
    """
    prefix = f"{NORMALIZER_PREFIX}action.min."
    stored = set(names)
    data_sets = sorted(n.removeprefix(prefix) for n in stored if n.startswith(prefix))
    if not data_sets:
        raise DataError(
            f"model.path: {source} has no tensors {prefix}NAME, which normalize actions; set "
            "model.norm_stats to the meta/stats.json of a LeRobot data set"
        )
    name = config.normalizer or (data_sets[0] if len(data_sets) == 1 else None)
    if name not in data_sets:
        given = "is not set" if name is None else f"{name!r} is unknown"
        raise ConfigError(
            f"model.normalizer: {given}; {source} has those of {', '.join(data_sets)}; or set "
            "model.norm_stats"
        )
    chosen = {
        feature: (
            f"{NORMALIZER_PREFIX}{kind}.min.{name}",
            f"{NORMALIZER_PREFIX}{kind}.delta.{name}",
        )
        for feature, kind in ((STATE_FEATURE, "propri"), (ACTION_FEATURE, "action"))
    }
    missing = sorted({each for pair in chosen.values() for each in pair} - stored)
    if missing:
        raise DataError(f"model.path: {source} has no tensor {missing[0]}")
    return chosen


def original_statistics(
    tensors: Mapping[str, Tensor], chosen: Mapping[str, tuple[str, str]], settings: Any
) -> dict[str, dict[str, list[float]]]:
    """Return the statistics ``min`` and ``max`` of the normalizer of an original folder."""
    statistics = {}
    for feature, (low, delta) in chosen.items():
        size = feature_size(settings, feature)
        start, width = tensors[low].double()[:size], tensors[delta].double()[:size]
        statistics[feature] = {"min": start.tolist(), "max": (start + width).tolist()}
    return statistics


def write_wall_processors(
    folder: Path, settings: Mapping[str, Any], statistics: FeatureStatistics
) -> None:
    """Write the processors of a new policy in LeRobot's format."""
    prompt = {"registry_name": PROMPT_STEP, "config": {}}
    write_processors(folder, settings, statistics, prompt)


def read_wall_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a network's folder.

    Raises:
        DataError: It cannot be read, or lacks special tokens.
    """
    tokenizer = read_tokenizer(folder)
    missing = [token for token in SPECIAL_TOKENS if tokenizer.token_to_id(token) is None]
    if missing:
        raise DataError(
            f"model.path: {folder / TOKENIZER_FILE} has no token {', '.join(missing)}; take the "
            f"tokenizer of {PUBLISHED}, not that of Qwen2.5-VL"
        )
    return tokenizer


def prompt_text(instruction: str, settings: Mapping[str, Any], camera_map: Any) -> str:
    """Return the prompt of an instruction, with one token per image.

    The actions follow it. The form is that of wall-x.
    """
    views = "".join(
        f" {camera_text(name)}: <|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
        for name in map_cameras(settings, camera_map)
    )
    task = instruction or "Execute the robot action."
    task = task if task.endswith(".") else f"{task}."
    return (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\nObservation:{views}\nInstruction: {task}\n"
        f"Predict the next action in robot action.\nProprioception: {STATE_TOKEN}\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def camera_text(name: str) -> str:
    """Return the name of a camera in the prompt."""
    default = name.replace("_", " ") if "view" in name else f"{name} view"
    return CAMERA_TEXTS.get(name, default)


class WallOSSFolder(FlowPolicyFolder):
    """An original folder of WALL-OSS, or a policy folder of LeRobot."""

    applied_steps = frozenset({*LEROBOT_STEPS, PROMPT_STEP})

    def __init__(self, name: str, folder: Path, options: Any, spec: ModelSpec) -> None:
        super().__init__(name, folder, options, spec)
        self.has_processors = not is_original(folder)
        if self.has_processors:
            self.settings = read_policy_config(folder)
        else:
            network = read_network_config(folder, "model.path")
            self.settings = original_policy_config(network, options, spec)
        if options.chunk_size is not None:
            self.settings["n_action_steps"] = options.chunk_size

    @classmethod
    def recognizes(cls, name: str, folder: Path, settings: Mapping[str, Any]) -> bool:
        return settings.get("type") == WALL_TYPE or "dof_config" in settings

    def prompt(self) -> tuple[str, str]:
        folder = self.folder
        if self.has_processors:
            folder, key = locate_vlm(self.folder, self.settings, self.options.vlm_path)
            read_network_config(folder, key)
        read_wall_tokenizer(folder)
        cameras = ", ".join(map(camera_text, map_cameras(self.settings, self.options.camera_map)))
        return f"system message, {cameras}, instruction and state token", str(folder)

    def replaced_statistics(self) -> tuple[FeatureStatistics | None, str]:
        if self.options.norm_stats is not None or self.has_processors:
            return super().replaced_statistics()
        tensors: dict[str, Tensor] = {}
        for path in tensor_files(self.folder):
            stored = load_tensors(path)
            tensors |= {n: t for n, t in stored.items() if n.startswith(NORMALIZER_PREFIX)}
        chosen = choose_normalizer(tensors, self.options, self.folder)
        statistics = original_statistics(tensors, chosen, self.settings)
        return statistics, f"{self.folder}: {chosen[ACTION_FEATURE][0]}"
