"""The coordinates that policies of vectors act in: the box of actions as the interval [-1, 1].

A simulator bounds each component of an action (``low``, ``high``). Inside of a policy, in its
losses and in what critics see, -1 is ``low`` and 1 is ``high``, as in Stable-Baselines3; outside of
it, in trajectories, data sets and demonstrations, actions are in the simulator's own units. A
component without both bounds has the simulator's units on both sides, as do all components where a
task says nothing of bounds.
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

ActionScale = Annotated[float, Field(gt=0)] | None
"""``model.action_scale``: null fills the bounds that the task names; a number ``s`` fills
[-s, s] in every component instead."""


@dataclass(frozen=True)
class ActionBox:
    """How actions of ``[A]`` components are scaled."""

    center: np.ndarray
    """Float64 ``[A]``: the simulator's units of 0."""
    half_range: np.ndarray
    """Float64 ``[A]``: the simulator's units of 1, from the center."""
    low: np.ndarray
    """The simulator's bounds, infinite where there are none; of an integer type where actions are
    rounded."""
    high: np.ndarray

    @classmethod
    def from_spec(cls, action: Mapping[str, Any], scale: float | None) -> ActionBox:
        """
        Args:
            action: what an environment says of actions: ``size``, and, where they are known,
                ``low``, ``high`` (None: no bound) and ``dtype``.
            scale: as of :data:`ActionScale`.
        """
        size = int(action["size"])
        low = _side(action.get("low"), size, -np.inf)
        high = _side(action.get("high"), size, np.inf)
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
                np.clip(side, -(2.0**62), 2.0**62).astype(np.int64) for side in (low, high)
            )
        return cls(center, half, low, high)

    @property
    def is_identity(self) -> bool:
        """Whether both sides have the same units."""
        return bool((self.center == 0).all() and (self.half_range == 1).all())

    def normalize(self, actions: np.ndarray) -> np.ndarray:
        """Actions ``[..., A]`` of the simulator's units in the policy's, of the same type."""
        if self.is_identity:
            return actions
        return ((actions - self.center) / self.half_range).astype(actions.dtype)

    def clip_to_bounds(self, actions: np.ndarray) -> np.ndarray:
        """Actions ``[..., A]`` as the simulator would carry them out, in its units."""
        return clip_actions(actions, self.low, self.high).astype(actions.dtype)

    def unnormalize(self, actions: Tensor) -> Tensor:
        """Actions ``[..., A]`` of the policy in the simulator's units; in double precision where
        they differ, so that the policy's own can be had back."""
        if self.is_identity:
            return actions
        center, half = (
            torch.as_tensor(side, dtype=torch.float64, device=actions.device)
            for side in (self.center, self.half_range)
        )
        return center + half * actions.double()


def check_action_scale(action: Mapping[str, Any], scale: float | None, *, squashed: bool) -> None:
    """See that a policy's interval is within the bounds of actions, where a task names them.

    Args:
        action: as of :meth:`ActionBox.of`.
        squashed: the policy fills an interval in every component, so there must be one.

    Raises:
        ConfigError: it is not; names the key.
    """
    if action.get("low") is None or action.get("high") is None:
        return
    size = int(action["size"])
    low, high = _side(action["low"], size, -np.inf), _side(action["high"], size, np.inf)
    if scale is not None:
        for least, most in zip(low.tolist(), high.tolist(), strict=True):
            if -scale < least - 1e-6 * scale or scale > most + 1e-6 * scale:
                raise ConfigError(
                    f"model.action_scale: actions between {-scale:g} and {scale:g} do not lie "
                    f"within the task's bounds, {least:g} to {most:g}, to which they would be "
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


def _side(bounds: float | Sequence[float | None] | None, size: int, none: float) -> np.ndarray:
    """One side's bounds, float64 ``[size]``."""
    if bounds is None or isinstance(bounds, (int, float)):
        bounds = [bounds] * size
    return np.array([none if bound is None else bound for bound in bounds], np.float64)


STATISTICS_FILE = "dataset_statistics.json"
BIN_EPS = 1e-8
"""What OpenVLA-OFT adds to the width of an interval."""


@dataclass(frozen=True)
class ActionBins:
    """Tokens of action vectors of ``D`` numbers."""

    low: np.ndarray
    """``[D]``, of a number where its bins begin."""
    high: np.ndarray
    """``[D]``, where they end."""
    is_scaled: np.ndarray
    """bool ``[D]``; others are in [-1, 1] as they are (a gripper, say)."""
    first_token_id: int
    """Id of the first of the tokens."""
    num_bins: int = 256
    """How many tokens there are."""

    @classmethod
    def from_statistics(cls, statistics: Mapping[str, Any], first: int, count: int) -> ActionBins:
        """Those of one data set's ``action`` in a :data:`STATISTICS_FILE` file.

        Raises:
            KeyError, ValueError: it is malformed.
        """
        low, high = (np.asarray(statistics[name], np.float64) for name in ("q01", "q99"))
        scaled = np.asarray(statistics.get("mask", [True] * len(low)), bool)
        if not (low.ndim == 1 and low.shape == high.shape == scaled.shape and (low <= high).all()):
            raise ValueError("q01, q99 and mask are not of one length, or q01 is above q99")
        return cls(low, high, scaled, first, count)

    @property
    def _edges(self) -> np.ndarray:
        return np.linspace(-1, 1, self.num_bins)

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Ids int64 ``[..., D]`` of actions ``[..., D]``; those beyond the bins get the outermost
        ones'."""
        width = self.high - self.low + BIN_EPS
        within = np.where(self.is_scaled, 2 * (actions - self.low) / width - 1, actions)
        bins = np.digitize(np.clip(within, -1, 1), self._edges)
        found: np.ndarray = (self.first_token_id + self.num_bins - bins).astype(np.int64)
        return found

    def decode(self, tokens: Tensor) -> Tensor:
        """Middles of the bins that ids ``[..., D]`` stand for, float32."""
        edges = self._edges
        centers = torch.tensor((edges[1:] + edges[:-1]) / 2, device=tokens.device)
        last = self.first_token_id + self.num_bins - 1
        within = centers[(last - tokens).clamp(0, self.num_bins - 2)]
        low, width, scaled = (
            torch.tensor(column, device=tokens.device)
            for column in (self.low, self.high - self.low + BIN_EPS, self.is_scaled)
        )
        return torch.where(scaled, (within + 1) / 2 * width + low, within).float()


def compute_statistics(actions: np.ndarray) -> dict[str, list[Any]]:
    """The ``action`` of a :data:`STATISTICS_FILE` file, of the actions ``[N, D]`` of a data set.

    A number that is always the same is not scaled.
    """
    low, high = np.quantile(actions, [0.01, 0.99], axis=0)
    columns = {
        "q01": low,
        "q99": high,
        "min": actions.min(0),
        "max": actions.max(0),
        "mean": actions.mean(0),
        "std": actions.std(0),
        "mask": high > low,
    }
    return {name: column.tolist() for name, column in columns.items()}


def read_action_statistics(
    path: Path, dataset: str | None, where: str
) -> tuple[str, dict[str, Any]]:
    """The name of a data set in a :data:`STATISTICS_FILE` file, and its statistics.

    Args:
        dataset: which one; None: the only one.
        where: the key that errors name.

    Raises:
        DataError: it cannot be read, or has not this one.
    """
    try:
        known = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise _malformed(where, str(path), error) from None
    return select_action_statistics(known, dataset, where, str(path))


def select_action_statistics(
    known: Any, dataset: str | None, where: str, place: str
) -> tuple[str, dict[str, Any]]:
    """The same of what such a file holds; ``place``: where it stood.

    Raises:
        DataError: it is malformed, or has not this one.
    """
    try:
        names = sorted(known)
        name = names[0] if dataset is None and len(names) == 1 else dataset
        if name not in known:
            raise DataError(
                f"model.unnorm_key: {place} has the data sets {', '.join(names)}; choose one"
            )
        ActionBins.from_statistics(known[name]["action"], 0, 2)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _malformed(where, place, error) from None
    return str(name), known[name]


def _malformed(where: str, place: str, error: Exception) -> DataError:
    return DataError(
        f"{where}: {place} is no {STATISTICS_FILE} ({error}); for each data set it must have the "
        "quantiles q01 and q99 of the action, a list each"
    )


log = logging.getLogger(__name__)
ValueLevel = Literal["chunk", "action"]
"""What a policy values of a chunk: the state that it begins in, or what is still to come at each of
its actions, all of which see that state."""
VALUE_HEAD_OUTPUT = "value_head.fc2."
"""The last layer of a head that says them."""


def reset_unlike_value_head(
    stored: Mapping[str, Tensor], own: Mapping[str, Tensor], folder: Path
) -> dict[str, Tensor]:
    """Tensors that a folder stores, with a network's own :data:`VALUES` where those stored are of
    the other level, or of chunks of another length: that layer begins anew, and a warning says so.
    """
    unlike = [
        n for n, t in stored.items() if n.startswith(VALUE_HEAD_OUTPUT) and t.shape != own[n].shape
    ]
    if unlike:
        count, there = len(own[unlike[0]]), len(stored[unlike[0]])
        log.warning(
            "model.path: %s values %d at each step, and %d are to be valued (model.value_level, "
            "model.chunk_size): the last layer of its value head begins anew",
            folder,
            there,
            count,
        )
    return {**stored, **{name: own[name] for name in unlike}}


def action_chunks(actions: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each step of actions ``[T]`` or ``[T, D]`` the chunk that begins there, ``[T, C, ...]``,
    and which of its choices count (``submask`` of a trajectory), uint8 ``[T, C, 1]`` or
    ``[T, C, D]``: places behind the end have the last action again, which does not."""
    follows = np.arange(len(actions))[:, None] + np.arange(length)
    inside = follows < len(actions)
    chunks = actions[np.minimum(follows, len(actions) - 1)]
    choices = actions.shape[1] if actions.ndim > 1 else 1
    counts = np.broadcast_to(inside[..., None], (*inside.shape, choices))
    return chunks, counts.astype(np.uint8)
