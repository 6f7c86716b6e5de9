"""The comparison of a policy folder with the protocol of a suite of robot tasks.

Nearly all policies that score 0 % although their weights are good fail for one of six reasons: the
form of the prompt, the statistics of states and actions, the rotation of images, the range of the
gripper, the number of actions that are executed without a new observation, or the size of actions.
:func:`check_policy` compares them one by one, with the folder's own files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.config import RunConfig
from rlinf.errors import ConfigError, DataError
from rlinf.models.action_encoding import STATISTICS_FILE
from rlinf.models.base import ModelSpec
from rlinf.models.character_tokenizer import read_tokenizer
from rlinf.models.checkpoint_tensors import stored_shapes
from rlinf.models.hf_folder import read_json_object
from rlinf.models.lerobot_folder import (
    ACTION_FEATURE,
    MEAN_STD,
    NORMALIZER_STEP,
    POSTPROCESSOR,
    PREPROCESSOR,
    RANGE_MODES,
    STATE_FEATURE,
    UNNORMALIZER_STEP,
    FeatureNormalizer,
    action_normalizer,
    feature_size,
    read_statistics,
    state_normalizer,
)
from rlinf.models.pi0_folder import (
    NEWLINE_STEP,
    STATE_STEP,
    is_openpi,
    locate_tokenizer,
    openpi_statistics_file,
    prompt_step,
    read_openpi_statistics,
    read_source_config,
    read_source_statistics,
)
from rlinf.models.smolvla_folder import locate_vlm, read_policy_config, read_vlm_config
from rlinf.models.vla_folder import (
    MODEL_TYPE,
    missing_settings,
    read_folder_statistics,
    read_vla_config,
)
from stages.factory import environment_class, policy_class

MAX_OPEN_LOOP = 10
"""Largest number of actions of a chunk that published evaluations execute before they observe
again: 5 to 10 in LIBERO and Meta-World."""
MAX_RANGE, MIN_RANGE = 1.5, 0.05
"""Statistics of actions that exceed the bounds by the first factor, or whose positions stay within
the second share of the bounds, belong to another robot or to other units."""
SMOLVLA_NEWLINE_STEP = "smolvla_new_line_processor"
APPLIED_STEPS = frozenset(
    {
        *("rename_observations_processor", "to_batch_processor", "tokenizer_processor"),
        *("device_processor", NORMALIZER_STEP, UNNORMALIZER_STEP),
        *(NEWLINE_STEP, STATE_STEP, SMOLVLA_NEWLINE_STEP),
    }
)
"""Steps of LeRobot's processors that policies here apply."""
IMAGES_KEY = "benchmark_images"
"""Key of ``task.kwargs``: whether images are those of the published evaluations."""


@dataclass(frozen=True)
class CheckedAspect:
    """One aspect in which a policy fits a suite."""

    name: str
    folder: str
    """What the folder says."""
    source: str
    """The file that says it, and the key in it."""
    suite: str
    """What the suite needs."""


@dataclass(frozen=True)
class ValueRange:
    """The range of a feature in the data that a policy was trained on."""

    low: np.ndarray
    """Quantile, minimum, or mean minus standard deviation, ``[D]``; -1 without scaling."""
    high: np.ndarray
    mode: str
    source: str

    @classmethod
    def from_normalizer(cls, normalizer: FeatureNormalizer, source: str) -> ValueRange:
        low, high = normalizer.low.numpy(), normalizer.high.numpy()
        if normalizer.mode == "IDENTITY":
            low, high = -np.ones_like(low), np.ones_like(high)
        elif normalizer.mode == MEAN_STD:
            low, high = low - high, low + high
        return cls(low, high, normalizer.mode, source)

    def __str__(self) -> str:
        low, high = self.low.min(), self.high.max()
        return f"{len(self.low)} dimensions, {self.mode}, {low:.3g} to {high:.3g}"


class PolicyFolder:
    """The facts about inputs and actions in the files of a policy folder."""

    is_scaled: np.ndarray | None = None
    """Whether an action component is scaled, bool ``[A]``; None: all are."""

    def __init__(self, folder: Path, options: Any, spec: ModelSpec) -> None:
        """
        Raises:
            DataError: ``config.json`` is missing, or of another policy.
        """
        self.folder, self.options, self.spec = folder, options, spec
        self.config_file = folder / "config.json"

    def prompt(self) -> tuple[str, str]:
        """Return the form of the prompt and its source.

        Raises:
            ConfigError, DataError: it is unknown, or the tokenizer is missing.
        """
        raise NotImplementedError

    def ranges(self) -> dict[str, ValueRange]:
        """Return the range of the action, and of the state if it is scaled.

        Raises:
            DataError: statistics are missing or have another size.
        """
        raise NotImplementedError

    def steps(self) -> Iterator[tuple[str, str]]:
        """Yield name and source of each step that prepares observations or actions."""
        return iter(())

    def chunk(self) -> tuple[int, int, str]:
        """Return the numbers of predicted and of executed actions of a chunk, and the source."""
        raise NotImplementedError

    def action_size(self) -> tuple[int, str]:
        """Return the number of components of an action, and the source."""
        raise NotImplementedError


class FlowPolicyFolder(PolicyFolder):
    """A folder of SmolVLA, pi-0 or pi-0.5."""

    def __init__(self, folder: Path, options: Any, spec: ModelSpec, kind: str) -> None:
        super().__init__(folder, options, spec)
        self.kind = kind
        if kind == "smolvla":
            changes = {"n_action_steps": options.chunk_size}
            changes = {name: value for name, value in changes.items() if value is not None}
            self.settings = {**read_policy_config(folder), **changes}
        else:
            self.settings = read_source_config(folder, options, spec, kind)
        self.is_openpi = kind != "smolvla" and is_openpi(folder)

    def prompt(self) -> tuple[str, str]:
        file = self.folder / f"{PREPROCESSOR}.json"
        if self.kind == "smolvla":
            read_vlm_config(*locate_vlm(self.folder, self.settings, self.options.vlm_path))
            if SMOLVLA_NEWLINE_STEP not in (names := [name for name, _ in self.steps()]):
                raise DataError(
                    f"{file}: steps: there is no {SMOLVLA_NEWLINE_STEP}, only {', '.join(names)}; "
                    "model.name=smolvla ends each prompt with a newline"
                )
            return "instruction and newline", f"{file}: {SMOLVLA_NEWLINE_STEP}"
        step = prompt_step(self.settings, self.options, self.folder)["registry_name"]
        locate_tokenizer(self.folder, self.options)
        source = "model.state_in_prompt" if self.is_openpi else f"{file}: {step}"
        if step != STATE_STEP:
            return "instruction and newline", source
        if self.settings["normalization_mapping"].get("STATE") not in RANGE_MODES:
            raise DataError(
                f"{self.config_file}: normalization_mapping.STATE: "
                f"{self.settings['normalization_mapping'].get('STATE')}, but the prompt contains "
                "the state in bins from -1 to 1; it needs QUANTILES or MIN_MAX"
            )
        return "instruction and state in 256 bins", source

    def ranges(self) -> dict[str, ValueRange]:
        settings, statistics, path = self.settings, None, self.options.norm_stats
        if self.kind == "smolvla":
            statistics = None if path is None else read_statistics(path, settings)
        else:
            statistics = read_source_statistics(settings, self.options, self.folder)
            path = openpi_statistics_file(self.folder, self.options) if self.is_openpi else path
        found = {}
        for feature, kind, read, processor in (
            (STATE_FEATURE, "STATE", state_normalizer, PREPROCESSOR),
            (ACTION_FEATURE, "ACTION", action_normalizer, POSTPROCESSOR),
        ):
            if statistics is None:
                source = f"{self.folder / f'{processor}.json'}: {feature}"
                normalizer = read(self.folder, settings)
            else:
                mode = settings["normalization_mapping"].get(kind, "IDENTITY")
                source, size = f"{path}: {feature}", feature_size(settings, feature)
                rows = statistics[feature]
                normalizer = FeatureNormalizer.from_statistics(mode, rows, size, source)
            found[feature] = ValueRange.from_normalizer(normalizer, source)
        return found

    def steps(self) -> Iterator[tuple[str, str]]:
        for processor in () if self.is_openpi else (PREPROCESSOR, POSTPROCESSOR):
            file = self.folder / f"{processor}.json"
            for number, step in enumerate(read_json_object(file).get("steps") or ()):
                yield str(step.get("registry_name")), f"{file}: steps.{number}"

    def chunk(self) -> tuple[int, int, str]:
        predicted, executed = self.settings["chunk_size"], self.settings["n_action_steps"]
        key = "action_horizon" if self.is_openpi else "n_action_steps"
        is_changed = self.options.chunk_size is not None
        source = "model.chunk_size" if is_changed else f"{self.config_file}: {key}"
        return int(predicted), int(executed), source

    def action_size(self) -> tuple[int, str]:
        size = feature_size(self.settings, ACTION_FEATURE)
        if not self.is_openpi:
            return size, f"{self.config_file}: output_features.{ACTION_FEATURE}.shape"
        path = openpi_statistics_file(self.folder, self.options)
        stored = len(read_openpi_statistics(path)[ACTION_FEATURE]["mean"])
        is_padded = stored == self.settings["max_action_dim"]
        return size if is_padded else stored, f"{path}: norm_stats.actions.mean"


class TokenPolicyFolder(PolicyFolder):
    """A folder of OpenVLA or OpenVLA-OFT."""

    def __init__(self, folder: Path, options: Any, spec: ModelSpec) -> None:
        super().__init__(folder, options, spec)
        self.settings = read_vla_config(folder, missing_settings(folder, options, spec))
        self.dataset, statistics = read_folder_statistics(folder, self.settings, options)
        self._statistics = statistics["action"]
        if (mask := self._statistics.get("mask")) is not None:
            self.is_scaled = np.asarray(mask, bool)

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
        source = f"{self.folder / file}: {self.dataset}.action"
        return {ACTION_FEATURE: ValueRange(low, high, "QUANTILES", source)}

    def chunk(self) -> tuple[int, int, str]:
        length = int(self.settings["num_actions_chunk"])
        return length, length, f"{self.config_file}: num_actions_chunk"

    def action_size(self) -> tuple[int, str]:
        return int(self.settings["action_dim"]), f"{self.config_file}: action_dim"


def policy_name(folder: Path) -> str:
    """Return the ``model.name`` that reads a policy folder.

    Raises:
        DataError: there is no ``config.json``, or it is of no robot policy.
    """
    path = folder / "config.json"
    settings = read_json_object(path)
    if (kind := settings.get("type")) in ("pi0", "pi05", "smolvla"):
        return str(kind)
    if settings.get("model_type") == MODEL_TYPE:
        return "vla"
    if is_openpi(folder):
        # Only pi-0.5 has a network of the time alone.
        names = stored_shapes(folder)
        return "pi05" if any("time_mlp_in" in name.split(".") for name in names) else "pi0"
    raise DataError(
        f"{path}: type {kind!r} and model_type {settings.get('model_type')!r} are of no robot "
        "policy; choose one (model=pi05), or name a folder of one"
    )


def check_policy(
    config: RunConfig, suite: str, trained_task: Mapping[str, Any] | None = None
) -> Iterator[CheckedAspect]:
    """Compare a policy folder with a suite, aspect by aspect.

    Args:
        config: configuration of the evaluation; ``model.path`` is the folder.
        suite: name of the suite, for messages.
        trained_task: the ``task`` section of the run that trained the policy, if it is known.

    Raises:
        ConfigError, DataError: the first aspect that does not fit. The message names file and key,
            and the cure.
    """
    environment, task = environment_class(config)
    policy, options = policy_class(config)
    name, spec = config.model.name, environment.model_spec(task)
    source = options.path.expanduser()
    folder: PolicyFolder = (
        FlowPolicyFolder(source, options, spec, name)
        if name != "vla"
        else TokenPolicyFolder(source, options, spec)
    )
    text, where = folder.prompt()
    yield CheckedAspect("prompt", text, where, "an instruction of each task")
    ranges = folder.ranges()
    for feature, values in ranges.items():
        _check_range(feature, values, folder.is_scaled, spec, suite)
        yield CheckedAspect(f"statistics of {feature}", str(values), values.source, "finite")
    yield _check_images(folder, task, suite, trained_task)
    yield _check_gripper(ranges[ACTION_FEATURE], folder, spec, suite)
    predicted, executed, where = folder.chunk()
    if executed > MAX_OPEN_LOOP:
        raise ConfigError(
            f"{where}: {executed} of {predicted} actions are executed before the policy observes "
            f"again; published evaluations execute up to {MAX_OPEN_LOOP}. Set "
            f"model.chunk_size={MAX_OPEN_LOOP} or less, as the policy's authors do"
        )
    text = f"{executed} of {predicted} actions are executed"
    yield CheckedAspect("chunk", text, where, f"at most {MAX_OPEN_LOOP}")
    size, where = folder.action_size()
    if size != (needed := spec["action"]["size"]):
        raise ConfigError(
            f"{where}: {size} numbers, and actions of {suite} have {needed}; the policy is of "
            "another robot"
        )
    yield CheckedAspect("action", f"{size} numbers", where, f"{needed} numbers")
    policy.check_spec(options, spec)
    cameras = ", ".join(spec["images"])
    yield CheckedAspect("files", "names and shapes of all tensors", str(source), cameras)


def _check_range(
    feature: str,
    values: ValueRange,
    is_scaled: np.ndarray | None,
    spec: ModelSpec,
    suite: str,
) -> None:
    """Check that statistics are usable, and that those of actions are of the suite's robot."""
    if not (np.isfinite(values.low).all() and np.isfinite(values.high).all()):
        raise DataError(f"{values.source}: some statistics are not finite; copy the folder again")
    if feature != ACTION_FEATURE:
        return
    scaled = np.ones(len(values.low), bool) if is_scaled is None else is_scaled
    if (constant := np.flatnonzero(scaled & (values.high <= values.low))).size:
        raise DataError(
            f"{values.source}: component {constant[0]} has the range {values.low[constant[0]]:g} "
            f"to {values.high[constant[0]]:g}, so the policy cannot choose it; the statistics are "
            "of other data (model.norm_stats)"
        )
    if (raw := np.flatnonzero(~scaled[:-1])).size:
        raise DataError(
            f"{values.source}.mask: component {raw[0]} is not scaled; only the gripper, the last "
            "component, may be"
        )
    bound = _bound(spec)
    if bound is None or values.mode == "IDENTITY":
        return
    largest = np.maximum(abs(values.low), abs(values.high))[:-1]
    if len(largest) and largest.max() > MAX_RANGE * bound:
        raise DataError(
            f"{values.source}: component {largest.argmax()} reaches {largest.max():.3g}, and "
            f"actions of {suite} are between -{bound:g} and {bound:g}; the statistics are of "
            "another robot or in other units (model.norm_stats, model.unnorm_key)"
        )
    if len(largest) >= 3 and largest[:3].max() < MIN_RANGE * bound:
        raise DataError(
            f"{values.source}: changes of position stay below {largest[:3].max():.3g}, and "
            f"actions of {suite} reach {bound:g}; the statistics are of another robot or in other "
            "units (model.norm_stats, model.unnorm_key)"
        )


def _bound(spec: ModelSpec) -> float | None:
    """Return the largest magnitude of an action of the suite; None: unknown."""
    high = spec["action"].get("high")
    if high is None or None in high:
        return None
    return float(max(high))


def _check_images(
    folder: PolicyFolder, task: Any, suite: str, trained_task: Mapping[str, Any] | None
) -> CheckedAspect:
    is_rotated = bool(task.kwargs.get(IMAGES_KEY))
    for name, where in folder.steps():
        if is_rotated and any(word in name for word in ("rotate", "rotation", "flip", "libero")):
            raise DataError(
                f"{where}: {name} would rotate images again; {suite} shows them rotated by 180 "
                "degrees. Take the step out"
            )
        if name not in APPLIED_STEPS:
            raise DataError(
                f"{where}: the step {name} is unknown here and would be left out, so the policy "
                "would observe other values than in its training; take it out if it has no effect"
            )
    shown = "rotated by 180 degrees" if is_rotated else "as the simulator renders them"
    if trained_task is None:
        return CheckedAspect("images", "not stated", str(folder.folder), shown)
    kwargs = trained_task.get("kwargs") or {}
    key = f"task.kwargs.{IMAGES_KEY}"
    if is_rotated and not kwargs.get(IMAGES_KEY):
        raise ConfigError(
            f"config.yaml of the run: {key} is not true, so the policy was trained on upright "
            f"images, and {suite} shows images that are rotated as published ones; train with "
            f"{key}=true"
        )
    return CheckedAspect("images", shown, f"config.yaml of the run: {key}", shown)


def _check_gripper(
    values: ValueRange, folder: PolicyFolder, spec: ModelSpec, suite: str
) -> CheckedAspect:
    low, high = float(values.low[-1]), float(values.high[-1])
    text, where = f"{low:.3g} to {high:.3g}", f"{values.source}: component {len(values.low) - 1}"
    if getattr(folder.options, "gripper", None) == "openvla":
        text = f"{text}, inverted to 1 to -1 (model.gripper)"
    elif _bound(spec) is not None and values.mode != "IDENTITY" and low > -0.25:
        raise DataError(
            f"{where}: the gripper is between {low:.3g} and {high:.3g}, and {suite} expects "
            "-1 to 1; the policy would never move it to one side. Its actions need the "
            "conversion of its authors"
        )
    return CheckedAspect("gripper", text, where, "-1 to 1")
