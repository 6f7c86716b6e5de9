"""The facts about inputs and actions that the files of a robot policy's folder state.

A policy that has such folders sets :attr:`rlinf.models.base.Policy.folder_class`. Then
``rlinf evaluate FOLDER --suite SUITE`` recognizes its folders, and ``--check`` compares them with
the suite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rlinf.data.lerobot import ACTION_FEATURE, STATE_FEATURE
from rlinf.models.base import ModelSpec
from rlinf.models.hf_folder import read_json_object
from rlinf.models.lerobot_folder import (
    MEAN_STD,
    POSTPROCESSOR,
    PREPROCESSOR,
    FeatureNormalizer,
    FeatureStatistics,
    action_normalizer,
    feature_size,
    read_statistics,
    state_normalizer,
)


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


class PolicyFolder(ABC):
    """The facts about inputs and actions in the files of a policy folder."""

    is_scaled: np.ndarray | None = None
    """Whether an action component is scaled, bool ``[A]``; None: all are."""
    applied_steps: ClassVar[frozenset[str]] = frozenset()
    """Names of :meth:`steps` that the policy applies."""

    def __init__(self, name: str, folder: Path, options: Any, spec: ModelSpec) -> None:
        """
        Args:
            name: ``model.name``.
            folder: The policy folder.
            options: The options of the policy.
            spec: The task.

        Raises:
            ConfigError, DataError: ``config.json`` is missing, or of another policy.
        """
        self.name, self.folder, self.options, self.spec = name, folder, options, spec
        self.config_file = folder / "config.json"

    @classmethod
    @abstractmethod
    def recognizes(cls, name: str, folder: Path, settings: Mapping[str, Any]) -> bool:
        """Return whether a folder is one of the policy ``name``.

        Args:
            settings: Its ``config.json``.
        """

    @abstractmethod
    def prompt(self) -> tuple[str, str]:
        """Return the form of the prompt and its source.

        Raises:
            ConfigError, DataError: It is unknown, or the tokenizer is missing.
        """

    @abstractmethod
    def ranges(self) -> dict[str, ValueRange]:
        """Return the range of the action, and of the state if it is scaled.

        Raises:
            DataError: Statistics are missing or have another size.
        """

    @abstractmethod
    def chunk(self) -> tuple[int, int, str]:
        """Return the numbers of predicted and of executed actions of a chunk, and the source."""

    @abstractmethod
    def action_size(self) -> tuple[int, str]:
        """Return the number of components of an action, and the source."""

    def steps(self) -> Iterator[tuple[str, str]]:
        """Yield name and source of each step that prepares observations or actions."""
        return iter(())


class FlowPolicyFolder(PolicyFolder):
    """A folder of a flow-matching policy, whose settings have the form of LeRobot's."""

    settings: Mapping[str, Any]
    has_processors = True
    """Whether the folder has LeRobot's processors, with steps and statistics."""

    def replaced_statistics(self) -> tuple[FeatureStatistics | None, str]:
        """Return the statistics that are used in place of those of the processors, and their
        source. None: those of the processors are used.

        Raises:
            DataError: Statistics are missing or malformed.
        """
        path = self.options.norm_stats
        return (None if path is None else read_statistics(path, self.settings)), str(path)

    def ranges(self) -> dict[str, ValueRange]:
        statistics, path = self.replaced_statistics()
        ranges = {}
        for feature, kind, read, processor in (
            (STATE_FEATURE, "STATE", state_normalizer, PREPROCESSOR),
            (ACTION_FEATURE, "ACTION", action_normalizer, POSTPROCESSOR),
        ):
            if statistics is None:
                source = f"{self.folder / f'{processor}.json'}: {feature}"
                normalizer = read(self.folder, self.settings)
            else:
                mode = self.settings["normalization_mapping"].get(kind, "IDENTITY")
                source, size = f"{path}: {feature}", feature_size(self.settings, feature)
                rows = statistics[feature]
                normalizer = FeatureNormalizer.from_statistics(mode, rows, size, source)
            ranges[feature] = ValueRange.from_normalizer(normalizer, source)
        return ranges

    def steps(self) -> Iterator[tuple[str, str]]:
        for processor in (PREPROCESSOR, POSTPROCESSOR) if self.has_processors else ():
            file = self.folder / f"{processor}.json"
            for number, step in enumerate(read_json_object(file).get("steps") or ()):
                yield str(step.get("registry_name")), f"{file}: steps.{number}"

    def chunk(self) -> tuple[int, int, str]:
        executed, source = int(self.settings["n_action_steps"]), "model.chunk_size"
        if self.options.chunk_size is None:
            source = f"{self.config_file}: n_action_steps"
        return self.num_predicted(), executed, source

    def num_predicted(self) -> int:
        """Return the number of predicted actions of a chunk."""
        return int(self.settings["chunk_size"])

    def action_size(self) -> tuple[int, str]:
        size = feature_size(self.settings, ACTION_FEATURE)
        return size, f"{self.config_file}: output_features.{ACTION_FEATURE}.shape"
