"""Policy folders of :mod:`rlinf.models.pi0`: create, read, and check.

Folders of LeRobot and PyTorch folders of openpi can be read. A policy folder of this package has
LeRobot's format (:mod:`rlinf.models.lerobot_folder`), with the tokenizer in the subfolder
``tokenizer``; LeRobot loads it by its name on the Hugging Face hub. The names of both formats
differ in the prefix ``model.``, and older folders lack ``model.`` before the parts of PaliGemma.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from rlinf.data.lerobot import ACTION_FEATURE, STATE_FEATURE
from rlinf.errors import ConfigError, DataError
from rlinf.models.base import ModelSpec
from rlinf.models.character_tokenizer import TOKENIZER_FILE
from rlinf.models.checkpoint_tensors import stored_shapes
from rlinf.models.hf_folder import check_checkpoint, non_weight_files, read_json_object
from rlinf.models.lerobot_folder import (
    CAMERA_PREFIX,
    LEROBOT_STEPS,
    NORMALIZER_STEP,
    PREPROCESSOR,
    RANGE_MODES,
    FeatureNormalizer,
    FeatureStatistics,
    FlowVLAConfig,
    check_sections,
    check_supported,
    check_task,
    feature_size,
    new_features,
    read_statistics,
    write_processors,
)
from rlinf.models.policy_folder import FlowPolicyFolder
from rlinf.models.sentencepiece_model import SENTENCEPIECE_FILE, read_sentencepiece
from rlinf.verified_io import copy_file

TOKENIZER_FOLDER = "tokenizer"
"""Subfolder with the tokenizer."""
PALIGEMMA = "google/paligemma-3b-pt-224"
"""Name of the published tokenizer."""
NEWLINE_STEP = "pi0_new_line_processor"
STATE_STEP = "pi05_prepare_state_tokenizer_processor_step"
"""LeRobot's steps that make a prompt: of the instruction alone, or of instruction and state."""
OPENPI_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
OPENPI_EPS = 1e-6
"""Constant that openpi adds to standard deviations and to the widths of quantiles."""
SMALL_VARIANT = "small"
"""Variant of new networks, whose sizes are in ``config.json``; LeRobot does not have it."""
GEMMA_SIZES: dict[str, dict[str, Any]] = {
    name: {
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
    }
    for name, width, intermediate in (("gemma_2b", 2048, 16_384), ("gemma_300m", 1024, 4096))
}
SIGLIP_SIZES = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}
VOCABULARY_SIZE = 257_152
DEFAULTS: dict[str, Any] = {
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "dtype": "float32",
    "n_obs_steps": 1,
    "chunk_size": 50,
    "n_action_steps": 50,
    "max_state_dim": 32,
    "max_action_dim": 32,
    "num_inference_steps": 10,
    "time_sampling_beta_alpha": 1.5,
    "time_sampling_beta_beta": 1.0,
    "time_sampling_scale": 0.999,
    "time_sampling_offset": 0.001,
    "min_period": 4e-3,
    "max_period": 4.0,
    "image_resolution": [224, 224],
    "empty_cameras": 0,
}
"""LeRobot's defaults for values that a ``config.json`` omits."""
KIND_DEFAULTS: dict[str, dict[str, Any]] = {
    kind: {
        "tokenizer_max_length": length,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
    }
    for kind, length, mode in (("pi0", 48, "MEAN_STD"), ("pi05", 200, "QUANTILES"))
}
"""Further defaults by type of the policy."""


class PiConfig(FlowVLAConfig):
    """Options of pi-0 and pi-0.5: a folder of LeRobot or openpi, or the sizes of a new network."""

    path: Path | None = None
    """A policy folder of LeRobot or openpi (converted to PyTorch), which defines all sizes."""
    tokenizer_path: Path | None = None
    """A folder with ``tokenizer.json`` or ``tokenizer.model`` of PaliGemma, if the policy folder
    has none."""
    norm_stats: Path | None = None
    """The folder of a LeRobot data set, its ``meta/stats.json``, or a ``norm_stats.json`` of
    openpi; null: that of the folder, and no scaling of the states of a new network."""
    state_in_prompt: bool | None = None
    """Whether the prompt of pi-0.5 contains the state; null: as the folder of LeRobot says, true
    for a new network. Folders of openpi do not say (``pi05_libero``: false)."""
    relative_action_dims: tuple[int, ...] | None = None
    """Action components that are relative to the same component of the state at the start of the
    chunk; null: as the folder says, or none. In openpi's ``pi0_libero``: 0 to 5."""
    heads: int = Field(default=8, gt=0)
    kv_heads: int = Field(default=1, gt=0)
    head_dim: int = Field(default=16, gt=0, multiple_of=2)
    """Size of an attention head."""
    expert_hidden: int = Field(default=64, gt=0, multiple_of=2)
    """Width of the action expert."""
    expert_intermediate: int = Field(default=192, gt=0)
    """Size of the feed-forward layers of the action expert."""


def network_sizes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a ``config.json``: ``vision``, ``language`` and ``expert`` with the keys
    of transformers, and ``vocab_size``."""
    if settings["paligemma_variant"] == SMALL_VARIANT:
        sizes: dict[str, Any] = dict(settings["sizes"])
    else:
        sizes = {
            "vision": SIGLIP_SIZES,
            "language": GEMMA_SIZES[settings["paligemma_variant"]],
            "expert": GEMMA_SIZES[settings["action_expert_variant"]],
            "vocab_size": VOCABULARY_SIZE,
        }
    return {**sizes, "vision": {**sizes["vision"], "image_size": settings["image_resolution"][0]}}


def new_pi_config(
    config: PiConfig, spec: ModelSpec, kind: str, vocabulary_size: int
) -> dict[str, Any]:
    """Return the ``config.json`` of a new network."""
    side = config.image_size or max(max(size) for size in spec["images"].values())
    attention = {
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
    }
    sizes = {
        "vision": {
            "hidden_size": config.vision_hidden,
            "intermediate_size": 4 * config.vision_hidden,
            "num_hidden_layers": config.vision_layers,
            "num_attention_heads": config.vision_heads,
            "patch_size": config.patch_size,
        },
        "language": {
            "hidden_size": config.hidden,
            "intermediate_size": config.intermediate,
            **attention,
        },
        "expert": {
            "hidden_size": config.expert_hidden,
            "intermediate_size": config.expert_intermediate,
            **attention,
        },
        "vocab_size": vocabulary_size,
    }
    return {
        "type": kind,
        **DEFAULTS,
        **KIND_DEFAULTS[kind],
        **new_features(config, spec),
        "paligemma_variant": SMALL_VARIANT,
        "action_expert_variant": SMALL_VARIANT,
        "sizes": sizes,
        "image_resolution": [side, side],
        "num_inference_steps": config.denoising_steps or 4,
        # Tokens of new networks are characters.
        "tokenizer_max_length": 512,
        **_stored_options(config),
    }


def _stored_options(config: PiConfig) -> dict[str, Any]:
    """Return the entries of ``config.json`` that options change."""
    changes: dict[str, Any] = {
        "num_inference_steps": config.denoising_steps,
        "n_action_steps": config.chunk_size,
        "relative_action_dims": config.relative_action_dims,
    }
    return {name: value for name, value in changes.items() if value is not None}


def is_openpi(source: Path) -> bool:
    """Return whether a folder has the format of openpi.

    Raises:
        DataError: Its ``config.json`` cannot be read.
    """
    settings = read_json_object(source / "config.json")
    return "action_horizon" in settings and "type" not in settings


def read_source_config(
    source: Path, config: PiConfig, spec: ModelSpec, kind: str
) -> dict[str, Any]:
    """Return the ``config.json`` of a policy that starts from a folder, in LeRobot's format.

    Raises:
        DataError: As :func:`read_pi_config`; or the statistics of openpi are missing.
    """
    if not is_openpi(source):
        return read_pi_config(source, kind, config.relative_action_dims) | _stored_options(config)
    check_checkpoint(source, True)
    stored, path = read_json_object(source / "config.json"), source / "config.json"
    statistics = read_openpi_statistics(openpi_statistics_file(source, config))
    state_size = config.proprio_dim or len(statistics[STATE_FEATURE]["mean"])
    shape = [3, *DEFAULTS["image_resolution"]]
    images = {CAMERA_PREFIX + name: {"type": "VISUAL", "shape": shape} for name in OPENPI_CAMERAS}
    try:
        settings = {
            "type": kind,
            **DEFAULTS,
            **KIND_DEFAULTS[kind],
            "input_features": {**images, STATE_FEATURE: {"type": "STATE", "shape": [state_size]}},
            "output_features": {
                ACTION_FEATURE: {"type": "ACTION", "shape": [int(spec["action"]["size"])]}
            },
            "chunk_size": int(stored["action_horizon"]),
            "n_action_steps": int(stored["action_horizon"]),
            "max_state_dim": int(stored["action_dim"]),
            "max_action_dim": int(stored["action_dim"]),
            "paligemma_variant": stored["paligemma_variant"],
            "action_expert_variant": stored["action_expert_variant"],
        }
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"model.path: {path} is not as openpi writes it ({error!r})") from None
    _check_variants(settings, path)
    return settings | _stored_options(config)


def read_pi_config(
    folder: Path, kind: str, relative_action_dims: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Read the ``config.json`` of a folder of LeRobot, completed by its defaults.

    Args:
        folder: The policy folder.
        kind: ``pi0`` or ``pi05``.
        relative_action_dims: The option of that name.

    Raises:
        DataError: The file is missing, of another policy, or uses unsupported options.
    """
    check_checkpoint(folder, True)  # the folder's own code is never run
    path = folder / "config.json"
    stored = read_json_object(path)
    if stored.get("type") != kind:
        raise DataError(
            f"model.path: {folder} is of the type {stored.get('type')!r}; model.name={kind} takes "
            f"folders of LeRobot of the type {kind!r}, and PyTorch folders of openpi"
        )
    settings = {**DEFAULTS, **KIND_DEFAULTS[kind], **stored}
    check_sections(settings, path)
    _check_variants(settings, path)
    sampling = [name for name in DEFAULTS if name.startswith("time_sampling")]
    relative = settings.get("relative_action_dims") or relative_action_dims
    width, height = settings["image_resolution"]
    is_unsupported = {
        **{name: settings[name] != DEFAULTS[name] for name in sampling},
        "n_obs_steps": settings["n_obs_steps"] != 1,
        "use_relative_actions": bool(settings.get("use_relative_actions")) and not relative,
        "image_resolution": width != height,
    }
    cures = {"use_relative_actions": "; name them in model.relative_action_dims"}
    check_supported(settings, is_unsupported, path, kind, cures)
    return settings


def _check_variants(settings: Mapping[str, Any], path: Path) -> None:
    for key in ("paligemma_variant", "action_expert_variant"):
        if settings[key] not in (*GEMMA_SIZES, SMALL_VARIANT):
            raise DataError(
                f"model.path: {path}: {key} is {settings[key]!r}; known are "
                f"{', '.join(GEMMA_SIZES)}"
            )


def check_pi_task(settings: Mapping[str, Any], config: PiConfig, spec: ModelSpec) -> None:
    """Check that images, state and actions of a task fit a network.

    Raises:
        ConfigError: The task does not fit.
    """
    check_task(settings, config, spec)
    side, patch = settings["image_resolution"][0], network_sizes(settings)["vision"]["patch_size"]
    if side % patch:
        raise ConfigError(
            f"model.image_size: images are resized to {side} x {side}, which is no multiple of "
            f"patches of {patch} pixels; change model.image_size or model.patch_size"
        )
    limit = min(feature_size(settings, STATE_FEATURE), feature_size(settings, ACTION_FEATURE))
    for index in settings.get("relative_action_dims") or ():
        if not 0 <= index < limit:
            raise ConfigError(
                f"model.relative_action_dims: {index}, and state and action share the components "
                f"0 to {limit - 1}"
            )


def prompt_step(settings: Mapping[str, Any], config: PiConfig, source: Path | None) -> Any:
    """Return LeRobot's step that makes the prompts of a new policy.

    Args:
        settings: The policy's ``config.json``.
        config: The options.
        source: The folder that the policy starts from; None: a new network.

    Raises:
        ConfigError: Whether the prompt contains the state is not known, or cannot be chosen.
        DataError: The folder has no such step.
    """
    in_prompt, is_pi05 = config.state_in_prompt, settings["type"] == "pi05"
    stored = None if source is None or is_openpi(source) else read_prompt_step(source)
    if in_prompt and not is_pi05:
        raise ConfigError(
            "model.state_in_prompt: model.name=pi0 reads the state as a vector; set it to null"
        )
    if stored is not None and in_prompt in (None, stored["registry_name"] == STATE_STEP):
        return stored
    if is_pi05 and in_prompt is None and source is not None:
        raise ConfigError(
            f"model.state_in_prompt: {source} does not say whether the prompt contains the state; "
            "set it as in openpi's training configuration (discrete_state_input; pi05_libero: "
            "false)"
        )
    if not is_pi05 or in_prompt is False:
        return {"registry_name": NEWLINE_STEP, "config": {}}
    # openpi's prompt has no padding, LeRobot's has.
    size = settings["max_state_dim"] if stored else feature_size(settings, STATE_FEATURE)
    return {"registry_name": STATE_STEP, "config": {"max_state_dim": size, "task_key": "task"}}


def read_prompt_step(folder: Path) -> dict[str, Any]:
    """Read the step that makes the prompts from a folder's preprocessor.

    Raises:
        DataError: The file is missing, malformed, or has no such step.
    """
    path = folder / f"{PREPROCESSOR}.json"
    steps = read_json_object(path).get("steps")
    for step in steps if isinstance(steps, list) else ():
        if isinstance(step, dict) and step.get("registry_name") in (NEWLINE_STEP, STATE_STEP):
            return dict(step)
    raise DataError(
        f"model.path: {path} has neither the step {NEWLINE_STEP} nor {STATE_STEP}, which make the "
        "prompt; copy the folder again"
    )


def replace_prompt_step(folder: Path, step: Mapping[str, Any]) -> None:
    """Replace the step that makes the prompts in a folder's preprocessor.

    The normalization precedes it, because the prompt may contain the normalized state.
    """
    path = folder / f"{PREPROCESSOR}.json"
    values = read_json_object(path)
    names = [entry.get("registry_name") for entry in values["steps"]]
    named = list(zip(names, values["steps"], strict=True))
    normalize = [entry for name, entry in named if name == NORMALIZER_STEP]
    moved = (NORMALIZER_STEP, NEWLINE_STEP, STATE_STEP)
    rest = [entry for name, entry in named if name not in moved]
    is_tokenizer = [entry.get("registry_name") == "tokenizer_processor" for entry in rest]
    index = [*is_tokenizer, True].index(True)
    values["steps"] = [*rest[:index], *normalize, dict(step), *rest[index:]]
    path.write_text(json.dumps(values, indent=2))


def write_pi_processors(
    folder: Path, settings: Mapping[str, Any], statistics: FeatureStatistics, step: Any
) -> None:
    """Write the processors of a new policy in LeRobot's format."""
    tokenizer = {"padding": "max_length", "tokenizer_name": TOKENIZER_FOLDER}
    write_processors(folder, settings, statistics, step, tokenizer)


def locate_tokenizer(source: Path, config: PiConfig) -> Path:
    """Return the ``tokenizer.json`` of a policy; if there is none, its SentencePiece model.

    Raises:
        DataError: There is neither.
    """
    if config.tokenizer_path is not None:
        candidates = [config.tokenizer_path.expanduser()]
    else:
        candidates = [source / TOKENIZER_FOLDER, source]
    for name in (TOKENIZER_FILE, SENTENCEPIECE_FILE):
        for folder in candidates:
            if (folder / name).is_file():
                return folder / name
    raise DataError(
        f"model.tokenizer_path: {candidates[-1]} has neither {TOKENIZER_FILE} nor "
        f"{SENTENCEPIECE_FILE}, which are not part of the folder; copy one from {PALIGEMMA}"
    )


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a tokenizer into the subfolder of a policy folder.

    Args:
        source: Its ``tokenizer.json``, or its SentencePiece model, which is converted.
        folder: The policy folder.

    Raises:
        DataError: The SentencePiece model is damaged or not supported.
    """
    target = folder / TOKENIZER_FOLDER
    target.mkdir(exist_ok=True)
    if source.name == SENTENCEPIECE_FILE:
        read_sentencepiece(source).save(str(target / TOKENIZER_FILE))
        return
    for name in non_weight_files(source.parent):
        if name.startswith(("tokenizer", "special_tokens_map", "added_tokens")):
            copy_file(source.parent / name, target / name)


def openpi_statistics_file(source: Path, config: PiConfig) -> Path:
    """Return the file with the statistics of a folder of openpi.

    Raises:
        DataError: There is none, or there are several.
    """
    if config.norm_stats is not None:
        return config.norm_stats.expanduser()
    found = sorted((source / "assets").glob("**/norm_stats.json"))
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(path.relative_to(source)) for path in found) or "none"
    raise DataError(
        f"model.norm_stats: {source}/assets/ASSET/norm_stats.json has the statistics of openpi; "
        f"found: {names}; name one"
    )


def read_openpi_statistics(path: Path) -> dict[str, dict[str, list[float]]]:
    """Read a ``norm_stats.json`` of openpi as statistics of LeRobot.

    The constant :data:`OPENPI_EPS` is added here, because LeRobot's processors do not add it.

    Raises:
        DataError: The file is missing or malformed.
    """
    content = read_json_object(path, "model.norm_stats")
    try:
        statistics = {
            feature: {
                name: [float(number) for number in content["norm_stats"][stored][name]]
                for name in ("mean", "std", "q01", "q99")
                if content["norm_stats"][stored].get(name) is not None
            }
            for feature, stored in ((STATE_FEATURE, "state"), (ACTION_FEATURE, "actions"))
        }
        for rows in statistics.values():
            for name in {"std", "q99"} & rows.keys():
                rows[name] = [number + OPENPI_EPS for number in rows[name]]
            if "mean" not in rows:
                raise KeyError("mean")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"model.norm_stats: {path} is no norm_stats.json of openpi ({error!r})"
        ) from None
    return statistics


def read_source_statistics(
    settings: Mapping[str, Any], config: PiConfig, source: Path | None
) -> dict[str, dict[str, list[float]]] | None:
    """Return the statistics that replace those of a folder; None: those of the folder stay.

    Raises:
        DataError: Statistics are missing or have fewer dimensions than states and actions.
    """
    path = config.norm_stats
    if source is not None and is_openpi(source):
        path = openpi_statistics_file(source, config)
    if path is None:
        return None
    if path.expanduser().is_dir() and settings.get("relative_action_dims"):
        raise DataError(
            f"model.norm_stats: {path} is a data set, which has no statistics of relative actions "
            "(model.relative_action_dims); give a norm_stats.json of openpi"
        )
    is_openpi_file = path.expanduser().is_file() and "norm_stats" in read_json_object(
        path.expanduser(), "model.norm_stats"
    )
    if not is_openpi_file:
        return read_statistics(path, settings)
    statistics = {}
    for feature, rows in read_openpi_statistics(path.expanduser()).items():
        size = feature_size(settings, feature)
        statistics[feature] = {name: numbers[:size] for name, numbers in rows.items()}
        kind = "ACTION" if feature == ACTION_FEATURE else "STATE"
        mode = settings["normalization_mapping"][kind]
        FeatureNormalizer.from_statistics(
            mode, statistics[feature], size, f"model.norm_stats: {path}: {feature}"
        )
    return statistics


PREFIX = "model.paligemma_with_expert.paligemma."
TOKEN_EMBEDDINGS = PREFIX + "model.language_model.embed_tokens.weight"
LM_HEAD = PREFIX + "lm_head.weight"
"""Names of one tensor, of which folders have one copy or both."""
EXPERT_HEAD = "model.paligemma_with_expert.gemma_expert.lm_head.weight"
"""Name of a tensor that is not used."""


def network_names(stored: Iterable[str]) -> dict[str, str]:
    """Return the name in the network of each stored tensor; the tied head is left out."""
    names = {}
    for name in stored:
        target = name if name.startswith("model.") else f"model.{name}"
        if target.startswith(PREFIX):
            part = target.removeprefix(PREFIX).removeprefix("model.")
            part = re.sub(r"^language_model\.model\.", "language_model.", part)
            is_head = part in ("lm_head.weight", "language_model.lm_head.weight")
            target = LM_HEAD if is_head else f"{PREFIX}model.{part}"
        names[name] = target
    has_embeddings = TOKEN_EMBEDDINGS in names.values()
    heads = {name for name, target in names.items() if target == LM_HEAD}
    for name in heads:
        if has_embeddings:
            del names[name]
        else:
            names[name] = TOKEN_EMBEDDINGS
    return names


class PiFolder(FlowPolicyFolder):
    """A folder of pi-0 or pi-0.5, of LeRobot or of openpi."""

    applied_steps = frozenset({*LEROBOT_STEPS, NEWLINE_STEP, STATE_STEP})

    def __init__(self, name: str, folder: Path, options: Any, spec: ModelSpec) -> None:
        super().__init__(name, folder, options, spec)
        self.settings = read_source_config(folder, options, spec, name)
        self.has_processors = not is_openpi(folder)

    @classmethod
    def recognizes(cls, name: str, folder: Path, settings: Mapping[str, Any]) -> bool:
        if not is_openpi(folder):
            return settings.get("type") == name
        # Only pi-0.5 has a network of the time alone.
        has_time_network = any("time_mlp_in" in key.split(".") for key in stored_shapes(folder))
        return has_time_network == (name == "pi05")

    def prompt(self) -> tuple[str, str]:
        step = prompt_step(self.settings, self.options, self.folder)["registry_name"]
        locate_tokenizer(self.folder, self.options)
        source = "model.state_in_prompt"
        if self.has_processors:
            source = f"{self.folder / f'{PREPROCESSOR}.json'}: {step}"
        if step != STATE_STEP:
            return "instruction and newline", source
        if (mode := self.settings["normalization_mapping"].get("STATE")) not in RANGE_MODES:
            raise DataError(
                f"{self.config_file}: normalization_mapping.STATE: {mode}, but the prompt contains "
                "the state in bins from -1 to 1; it needs QUANTILES or MIN_MAX"
            )
        return "instruction and state in 256 bins", source

    def replaced_statistics(self) -> tuple[FeatureStatistics | None, str]:
        path = self.options.norm_stats
        if not self.has_processors:
            path = openpi_statistics_file(self.folder, self.options)
        return read_source_statistics(self.settings, self.options, self.folder), str(path)

    def chunk(self) -> tuple[int, int, str]:
        predicted, executed, source = super().chunk()
        if not self.has_processors:
            source = source.replace("n_action_steps", "action_horizon")
        return predicted, executed, source

    def action_size(self) -> tuple[int, str]:
        size, source = super().action_size()
        if self.has_processors:
            return size, source
        path = openpi_statistics_file(self.folder, self.options)
        stored = len(read_openpi_statistics(path)[ACTION_FEATURE]["mean"])
        is_padded = stored == self.settings["max_action_dim"]
        return size if is_padded else stored, f"{path}: norm_stats.actions.mean"
