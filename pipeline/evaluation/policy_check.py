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
from rlinf.data.lerobot import ACTION_FEATURE
from rlinf.errors import ConfigError, DataError
from rlinf.models import policies
from rlinf.models.base import ModelSpec
from rlinf.models.hf_folder import read_json_object
from rlinf.models.policy_folder import PolicyFolder, ValueRange
from stages.factory import environment_class, policy_class

MAX_OPEN_LOOP = 10
"""Largest number of actions of a chunk that published evaluations execute before they observe
again: 5 to 10 in LIBERO and Meta-World."""
MAX_RANGE, MIN_RANGE = 1.5, 0.05
"""Statistics of actions that exceed the bounds by the first factor, or whose positions stay within
the second share of the bounds, belong to another robot or to other units."""
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


def policy_name(folder: Path) -> str:
    """Return the ``model.name`` that reads a policy folder.

    Raises:
        ConfigError: ``config.json`` does not state which robot policy it is of.
        DataError: There is no ``config.json``.
    """
    path = folder / "config.json"
    settings = read_json_object(path)
    readers = {name: policies.get(name).folder_class for name in policies.names()}
    found = {name: reader for name, reader in readers.items() if reader is not None}
    for name, reader in found.items():
        if reader.recognizes(name, folder, settings):
            return name
    stated = {key: settings[key] for key in ("type", "model_type") if key in settings}
    raise ConfigError(
        f"{path}: {stated or 'its content'} does not determine the robot policy; choose one of "
        f"{', '.join(f'model={name}' for name in found)}, or name the folder of a policy"
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
    spec = environment.model_spec(task)
    if policy.folder_class is None:
        raise ConfigError(
            f"model.name: {config.model.name} has no folders that can be compared with a suite "
            "(Policy.folder_class); leave --check out"
        )
    source = options.path.expanduser()
    folder = policy.folder_class(config.model.name, source, options, spec)
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
        if name not in folder.applied_steps:
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
