"""How LeRobot scales states and actions: the statistics beside a policy's weights.

A folder of its version 0.4 has them in ``policy_preprocessor.json`` and
``policy_postprocessor.json``, lists of steps, and the safetensors files that these name. They
belong to the weights, and are never computed again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlinf.checked import read_text
from rlinf.errors import DataError
from rlinf.tensors import load_tensors

STATE, ACTION = "observation.state", "action"
PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"
NORMALISER, UNNORMALISER = "normalizer_processor", "unnormalizer_processor"
EPS = 1e-8
CENTRED = "MEAN_STD"
BOUNDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
"""Ways of scaling between two statistics, to [-1, 1]."""
Statistics = Mapping[str, Mapping[str, Sequence[float]]]
"""By feature and name; what ``meta/stats.json`` of a data set holds."""


@dataclass(frozen=True)
class Scaling:
    """Of vectors ``[..., D]``."""

    mode: str
    """``IDENTITY``, :data:`CENTRED`, or one of :data:`BOUNDS`."""
    low: Tensor
    """Mean, or what becomes -1: float32 ``[D]``."""
    high: Tensor
    """Standard deviation, or what becomes 1."""
    eps: float = EPS

    @classmethod
    def of(
        cls, mode: str, found: Mapping[str, Any], size: int, where: str, eps: float = EPS
    ) -> Scaling:
        """
        Args:
            found: statistics by name.
            where: what errors begin with.

        Raises:
            DataError: they lack what the mode needs, or are of another size.
        """
        names = ("mean", "std") if mode == CENTRED else BOUNDS.get(mode)
        if mode == "IDENTITY":
            return cls(mode, torch.zeros(size), torch.ones(size), eps)
        if names is None:
            known = ", ".join(("IDENTITY", CENTRED, *BOUNDS))
            raise DataError(f"{where}: scaled by {mode!r}; known are {known}")
        if lacking := [name for name in names if name not in found]:
            raise DataError(
                f"{where}: no {', '.join(lacking)}, by which it is scaled ({mode}); give "
                "model.statistics, the meta/stats.json of the data set that the policy acts on"
            )
        low, high = (torch.as_tensor(found[name], dtype=torch.float32) for name in names)
        if low.shape != (size,) or high.shape != (size,):
            raise DataError(f"{where}: of {low.numel()} numbers, and there are {size}")
        return cls(mode, low, high, eps)

    def normalised(self, values: Tensor) -> Tensor:
        """As the network takes them, float32."""
        low, high = self.low.to(values.device), self.high.to(values.device)
        if self.mode == "IDENTITY":
            return values.float()
        if self.mode == CENTRED:
            return (values.float() - low) / (high + self.eps)
        return 2 * (values.float() - low) / self._width(low, high) - 1

    def restored(self, values: Tensor) -> Tensor:
        """As the task has them, float32."""
        low, high = self.low.to(values.device), self.high.to(values.device)
        if self.mode == "IDENTITY":
            return values.float()
        if self.mode == CENTRED:
            return values.float() * high + low
        return (values.float() + 1) / 2 * self._width(low, high) + low

    def _width(self, low: Tensor, high: Tensor) -> Tensor:
        return torch.where(high == low, torch.full_like(low, self.eps), high - low)


def read_scaling(folder: Path, processor: str, step: str, feature: str, size: int) -> Scaling:
    """How a folder's processor scales a feature.

    Args:
        processor: :data:`PREPROCESSOR` or :data:`POSTPROCESSOR`.
        step: the name of its step.
        size: numbers of the feature.

    Raises:
        DataError: the folder does not say, or of another size.
    """
    path = folder / f"{processor}.json"
    where = f"model.path: {path}: {feature}"
    try:
        steps = json.loads(read_text(path))["steps"]
        found = next((each for each in steps if each.get("registry_name") == step), None)
        if found is None:
            raise DataError(
                f"model.path: {path}: no step {step}, which says how {feature} is scaled"
            )
        settings = found["config"]
        kind = settings["features"][feature]["type"]
        mode = settings["norm_map"].get(kind, "IDENTITY")
        held: dict[str, Tensor] = {}
        if "state_file" in found:
            held = load_tensors(folder / Path(found["state_file"]).name)
        prefix = f"{feature}."
        own = {n.removeprefix(prefix): t for n, t in held.items() if n.startswith(prefix)}
        return Scaling.of(mode, own, size, where, float(settings.get("eps", EPS)))
    except FileNotFoundError as error:
        raise DataError(
            f"model.path: no {error.filename}, which says how actions are scaled; folders of "
            "LeRobot before 0.4 lack it: bring it up to date with LeRobot's "
            "migrate_policy_normalization"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise DataError(f"{where}: the file is not as LeRobot writes it ({error!r})") from None


def read_statistics(path: Path, sizes: Mapping[str, int]) -> dict[str, dict[str, list[float]]]:
    """Statistics of features, of so many leading numbers each, in a data set's ``stats.json``.

    Raises:
        DataError: it cannot be read, lacks one, or has fewer numbers.
    """
    try:
        known, found = json.loads(read_text(path)), dict[str, dict[str, list[float]]]()
        for feature, size in sizes.items():
            rows = known[feature]
            found[feature] = {
                name: [float(number) for number in rows[name][:size]]
                for name in ("mean", "std", *(n for pair in BOUNDS.values() for n in pair))
                if name in rows
            }
            for name, numbers in found[feature].items():
                if len(numbers) != size:
                    raise DataError(
                        f"model.statistics: {path}: {feature}.{name} has {len(numbers)} numbers; "
                        f"{size} are needed"
                    )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"model.statistics: {path} is no stats.json of a data set of LeRobot ({error!r}); it "
            f"has of {' and '.join(sizes)} mean, std and the like, a list each"
        ) from None
    return found


def write_processors(folder: Path, settings: Mapping[str, Any], statistics: Statistics) -> None:
    """Write both processors of a new policy as LeRobot does.

    Args:
        settings: the folder's ``config.json``.
    """
    inputs, outputs = settings["input_features"], settings["output_features"]
    scaled = {"eps": EPS, "norm_map": settings["normalization_mapping"]}
    words = {
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
            {"registry_name": "tokenizer_processor", "config": words},
            device,
            {"registry_name": NORMALISER, "config": {**scaled, "features": {**inputs, **outputs}}},
        ],
        POSTPROCESSOR: [
            {"registry_name": UNNORMALISER, "config": {**scaled, "features": outputs}},
            device,
        ],
    }
    for processor, own in steps.items():
        for number, step in enumerate(own):
            if step["registry_name"] in (NORMALISER, UNNORMALISER):
                step["state_file"] = (
                    f"{processor}_step_{number}_{step['registry_name']}.safetensors"
                )
        write_statistics(folder, own, statistics)
        (folder / f"{processor}.json").write_text(
            json.dumps({"name": processor, "steps": own}, indent=2)
        )


def replace_statistics(folder: Path, statistics: Statistics) -> None:
    """Give both processors of a folder others.

    Raises:
        DataError: it lacks one.
    """
    for processor in (PREPROCESSOR, POSTPROCESSOR):
        path = folder / f"{processor}.json"
        try:
            known = json.loads(read_text(path))
            for number, step in enumerate(known["steps"]):
                if (name := step.get("registry_name")) in (NORMALISER, UNNORMALISER):
                    step["state_file"] = f"{processor}_step_{number}_{name}.safetensors"
            write_statistics(folder, known["steps"], statistics)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"model.path: {path} is not as LeRobot writes it ({error!r})") from None
        path.write_text(json.dumps(known, indent=2))


def write_statistics(
    folder: Path, steps: Sequence[Mapping[str, Any]], statistics: Statistics
) -> None:
    """The files that steps of scaling name, each with all statistics."""
    flat = {
        f"{feature}.{name}": torch.tensor(numbers, dtype=torch.float32)
        for feature, own in statistics.items()
        for name, numbers in own.items()
    }
    for step in steps:
        if step.get("registry_name") in (NORMALISER, UNNORMALISER) and "state_file" in step:
            save_file(flat, folder / Path(step["state_file"]).name)
