"""Encodings of actions: scaling to [-1, 1], bins for action tokens, and chunks.

:class:`ActionBox` scales action vectors. Inside a policy, its losses and its critics, -1 is the
simulator's ``low`` and 1 is ``high``, as in Stable-Baselines3. In trajectories, data sets and
demonstrations, actions have the simulator's units. A component without both bounds is not scaled.

:class:`ActionBins` maps numbers to tokens as OpenVLA does. The 1 % and 99 % quantiles of a data set
scale a number to [-1, 1], and 256 edges divide this interval into 255 bins. The last ids of the
vocabulary represent the bins in reverse order (arXiv 2406.09246, section 3.2). Two of the 256
tokens represent the last bin, so a sampled token cannot be recovered from its action.

A policy with chunks chooses several actions at once, which the simulator executes in turn.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rlinf.data.transitions import clip_actions
from rlinf.errors import ConfigError, DataError
from rlinf.verified_io import read_text

log = logging.getLogger(__name__)
ActionScale = Annotated[float, Field(gt=0)] | None
"""``model.action_scale``: null spans the bounds of the task; a number ``s`` spans [-s, s] in each
component."""


@dataclass(frozen=True)
class ActionBox:
    """The scaling of action vectors with ``A`` components."""

    center: np.ndarray
    """The action in the simulator's units that the policy's 0 represents, float64 ``[A]``."""
    half_range: np.ndarray
    """The difference between the policy's 0 and 1 in the simulator's units, float64 ``[A]``."""
    low: np.ndarray
    """The simulator's lower bounds, infinite if there are none; integers for integer actions."""
    high: np.ndarray
    """The simulator's upper bounds, like ``low``."""

    @classmethod
    def from_spec(cls, action: Mapping[str, Any], scale: float | None) -> ActionBox:
        """
        Args:
            action: The action part of the model spec: ``size`` and, if known, ``low``, ``high``
                (None: no bound) and ``dtype``.
            scale: See :data:`ActionScale`.
        """
        size = int(action["size"])
        low = _bounds(action.get("low"), size, -np.inf)
        high = _bounds(action.get("high"), size, np.inf)
        bounded = np.isfinite(low) & np.isfinite(high) & (low < high)
        center, half = np.zeros(size), np.ones(size)
        if scale is not None:
            half[:] = scale
        else:
            center[bounded] = 0.5 * (low[bounded] + high[bounded])
            half[bounded] = 0.5 * (high[bounded] - low[bounded])
            fixed = low == high
            center[fixed] = low[fixed]
        if np.issubdtype(np.dtype(action.get("dtype") or "float32"), np.integer):
            low, high = (
                np.clip(bounds, -(2.0**62), 2.0**62).astype(np.int64) for bounds in (low, high)
            )
        return cls(center, half, low, high)

    @property
    def is_identity(self) -> bool:
        """Whether the policy's units equal those of the simulator."""
        return bool((self.center == 0).all() and (self.half_range == 1).all())

    def normalize(self, actions: np.ndarray) -> np.ndarray:
        """Convert actions ``[..., A]`` from the simulator's to the policy's units, same type."""
        if self.is_identity:
            return actions
        return ((actions - self.center) / self.half_range).astype(actions.dtype)

    def clip_to_bounds(self, actions: np.ndarray) -> np.ndarray:
        """Clip actions ``[..., A]`` as the simulator does, in its units."""
        return clip_actions(actions, self.low, self.high).astype(actions.dtype)

    def unnormalize(self, actions: Tensor) -> Tensor:
        """Convert actions ``[..., A]`` from the policy's to the simulator's units. The result is in
        double precision if the units differ, so that it can be inverted."""
        if self.is_identity:
            return actions
        center, half = (
            torch.as_tensor(column, dtype=torch.float64, device=actions.device)
            for column in (self.center, self.half_range)
        )
        return center + half * actions.double()


def check_action_scale(action: Mapping[str, Any], scale: float | None, *, squashed: bool) -> None:
    """Check that the interval of a policy's actions lies within the bounds of the task.

    Args:
        action: As for :meth:`ActionBox.from_spec`.
        scale: See :data:`ActionScale`.
        squashed: Whether the policy squashes actions into an interval (tanh), and so needs both
            bounds of each component.

    Raises:
        ConfigError: The interval exceeds the bounds, or a needed bound is missing.
    """
    if action.get("low") is None or action.get("high") is None:
        return
    size = int(action["size"])
    low, high = _bounds(action["low"], size, -np.inf), _bounds(action["high"], size, np.inf)
    if scale is not None:
        for lower, upper in zip(low.tolist(), high.tolist(), strict=True):
            if -scale < lower - 1e-6 * scale or scale > upper + 1e-6 * scale:
                raise ConfigError(
                    f"model.action_scale: actions between {-scale:g} and {scale:g} do not lie "
                    f"within the task's bounds, {lower:g} to {upper:g}, to which they would be "
                    "clipped; leave it out to fill the bounds"
                )
    elif squashed:
        open_ended = np.flatnonzero(~(np.isfinite(low) & np.isfinite(high))).tolist()
        if open_ended:
            raise ConfigError(
                f"model.action_scale: this policy fills an interval, and component {open_ended[0]} "
                f"of the task's actions has no two bounds (task.action.low, task.action.high); set "
                "it to the largest magnitude of an action"
            )


def _bounds(bounds: float | Sequence[float | None] | None, size: int, none: float) -> np.ndarray:
    """Return bounds as float64 ``[size]``, with ``none`` for a missing bound."""
    if bounds is None or isinstance(bounds, (int, float)):
        bounds = [bounds] * size
    return np.array([none if bound is None else bound for bound in bounds], np.float64)


STATISTICS_FILE = "dataset_statistics.json"
"""The file with action statistics by data set, as OpenVLA writes it."""
BIN_EPS = 1e-8
"""Constant that OpenVLA-OFT adds to the width of an interval."""


@dataclass(frozen=True)
class ActionBins:
    """The token encoding of action vectors with ``D`` numbers."""

    low: np.ndarray
    """Lower end of the bins in the simulator's units, ``[D]``."""
    high: np.ndarray
    """Upper end of the bins, like ``low``."""
    is_scaled: np.ndarray
    """Whether a number is scaled, bool ``[D]``; unscaled ones (a gripper) are in [-1, 1]."""
    first_token_id: int
    """Id of the first action token."""
    num_bins: int = 256
    """Number of action tokens; there is one bin less."""

    @classmethod
    def from_statistics(cls, statistics: Mapping[str, Any], first: int, count: int) -> ActionBins:
        """Create the bins for the ``action`` statistics of a data set.

        Args:
            statistics: An ``action`` entry of a :data:`STATISTICS_FILE` file.
            first: Id of the first action token.
            count: Number of action tokens.

        Raises:
            KeyError, ValueError: The statistics are malformed.
        """
        low, high = (np.asarray(statistics[name], np.float64) for name in ("q01", "q99"))
        is_scaled = np.asarray(statistics.get("mask", [True] * len(low)), bool)
        shapes_match = low.ndim == 1 and low.shape == high.shape == is_scaled.shape
        if not (shapes_match and (low <= high).all()):
            raise ValueError("q01, q99 and mask have different lengths, or q01 is above q99")
        return cls(low, high, is_scaled, first, count)

    @property
    def _edges(self) -> np.ndarray:
        return np.linspace(-1, 1, self.num_bins)

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Return token ids int64 ``[..., D]`` of actions ``[..., D]``, clipped to the bins."""
        width = self.high - self.low + BIN_EPS
        normalized = np.where(self.is_scaled, 2 * (actions - self.low) / width - 1, actions)
        bins = np.digitize(np.clip(normalized, -1, 1), self._edges)
        ids: np.ndarray = (self.first_token_id + self.num_bins - bins).astype(np.int64)
        return ids

    def decode(self, tokens: Tensor) -> Tensor:
        """Return the centers of the bins of token ids ``[..., D]``, float32."""
        edges = self._edges
        centers = torch.tensor((edges[1:] + edges[:-1]) / 2, device=tokens.device)
        last = self.first_token_id + self.num_bins - 1
        normalized = centers[(last - tokens).clamp(0, self.num_bins - 2)]
        low, width, is_scaled = (
            torch.tensor(column, device=tokens.device)
            for column in (self.low, self.high - self.low + BIN_EPS, self.is_scaled)
        )
        return torch.where(is_scaled, (normalized + 1) / 2 * width + low, normalized).float()


def compute_statistics(actions: np.ndarray) -> dict[str, list[Any]]:
    """Return the ``action`` statistics of a data set for a :data:`STATISTICS_FILE` file.

    Constant numbers are not scaled (``mask``).

    Args:
        actions: All actions (or states) of the data set, ``[N, D]``.
    """
    low, q10, q90, high = np.quantile(actions, [0.01, 0.1, 0.9, 0.99], axis=0)
    columns = {
        "q01": low,
        "q10": q10,
        "q90": q90,
        "q99": high,
        "min": actions.min(0),
        "max": actions.max(0),
        "mean": actions.mean(0),
        "std": actions.std(0),
        "mask": high > low,
    }
    return {name: column.tolist() for name, column in columns.items()}


def read_action_statistics(path: Path, dataset: str | None, key: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the statistics of a data set in a :data:`STATISTICS_FILE` file.

    Args:
        dataset: Name of the data set; None: the only one in the file.
        key: The configuration key, for error messages.

    Raises:
        DataError: The file cannot be read or lacks the data set.
    """
    try:
        datasets = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise _statistics_error(key, str(path), error) from None
    return select_action_statistics(datasets, dataset, key, str(path))


def select_action_statistics(
    datasets: Any, dataset: str | None, key: str, source: str
) -> tuple[str, dict[str, Any]]:
    """Return the name and the statistics of a data set.

    Args:
        datasets: The content of a :data:`STATISTICS_FILE` file.
        dataset: Name of the data set; None: the only one.
        key: The configuration key, for error messages.
        source: The file of the content, for error messages.

    Raises:
        DataError: The content is malformed or lacks the data set.
    """
    try:
        names = sorted(datasets)
        name = names[0] if dataset is None and len(names) == 1 else dataset
        if name not in datasets:
            raise DataError(
                f"model.unnorm_key: {source} has the data sets {', '.join(names)}; choose one"
            )
        ActionBins.from_statistics(datasets[name]["action"], 0, 2)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _statistics_error(key, source, error) from None
    return str(name), datasets[name]


def _statistics_error(key: str, source: str, error: Exception) -> DataError:
    return DataError(
        f"{key}: {source} is no {STATISTICS_FILE} ({error}); for each data set it must have the "
        "quantiles q01 and q99 of the action, a list each"
    )


ValueLevel = Literal["chunk", "action"]
"""Whether a policy has one value per chunk or one per action. Both depend only on the state at the
start of the chunk."""
VALUE_HEAD_OUTPUT = "value_head.fc2."
"""Prefix of the tensor names of a value head's last layer."""


def reset_mismatched_value_head(
    stored: Mapping[str, Tensor], initial: Mapping[str, Tensor], folder: Path
) -> dict[str, Tensor]:
    """Replace the last layer of a stored value head by the initial one if its shape differs.

    The shape depends on value level and chunk length. A warning is logged.
    """
    heads = [name for name in stored if name.startswith(VALUE_HEAD_OUTPUT)]
    mismatched = [name for name in heads if stored[name].shape != initial[name].shape]
    if mismatched:
        log.warning(
            "model.path: the value head of %s has %d outputs, and %d are needed "
            "(model.value_level, model.chunk_size): its last layer is initialized again",
            folder,
            len(stored[mismatched[0]]),
            len(initial[mismatched[0]]),
        )
    return {**stored, **{name: initial[name] for name in mismatched}}


def action_chunks(actions: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the chunk ``[T, C, ...]`` of actions that starts at each step, and its mask.

    The mask (``choice_mask`` of a trajectory) is uint8 ``[T, C, 1]`` or ``[T, C, D]``. Masked
    actions after the end repeat the last action.

    Args:
        actions: ``[T]`` or ``[T, D]``.
        length: Number of actions per chunk ``C``.
    """
    steps = np.arange(len(actions))[:, None] + np.arange(length)
    is_inside = steps < len(actions)
    chunks = actions[np.minimum(steps, len(actions) - 1)]
    num_parts = actions.shape[1] if actions.ndim > 1 else 1
    mask = np.broadcast_to(is_inside[..., None], (*is_inside.shape, num_parts))
    return chunks, mask.astype(np.uint8)
