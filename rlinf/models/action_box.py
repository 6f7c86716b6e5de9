"""The coordinates that policies of vectors act in: the box of actions as the interval [-1, 1].

A simulator bounds each component of an action (``low``, ``high``). Inside of a policy, in its
losses and in what critics see, -1 is ``low`` and 1 is ``high``, as in Stable-Baselines3; outside of
it, in trajectories, data sets and demonstrations, actions are in the simulator's own units. A
component without both bounds has the simulator's units on both sides, as do all components where a
task says nothing of bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rlinf.data.transitions import within
from rlinf.errors import ConfigError

ActionScale = Annotated[float, Field(gt=0)] | None
"""``model.action_scale``: null fills the bounds that the task names; a number ``s`` fills
[-s, s] in every component instead."""


@dataclass(frozen=True)
class ActionBox:
    """How actions of ``[A]`` components are scaled."""

    center: np.ndarray
    """Float64 ``[A]``: the simulator's units of 0."""
    half: np.ndarray
    """Float64 ``[A]``: the simulator's units of 1, from the center."""
    low: np.ndarray
    """The simulator's bounds, infinite where there are none; of an integer type where actions are
    rounded."""
    high: np.ndarray

    @classmethod
    def of(cls, action: Mapping[str, Any], scale: float | None) -> ActionBox:
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
        return bool((self.center == 0).all() and (self.half == 1).all())

    def normalised(self, actions: np.ndarray) -> np.ndarray:
        """Actions ``[..., A]`` of the simulator's units in the policy's, of the same type."""
        if self.is_identity:
            return actions
        return ((actions - self.center) / self.half).astype(actions.dtype)

    def carried_out(self, actions: np.ndarray) -> np.ndarray:
        """Actions ``[..., A]`` as the simulator would carry them out, in its units."""
        return within(actions, self.low, self.high).astype(actions.dtype)

    def restored(self, actions: Tensor) -> Tensor:
        """Actions ``[..., A]`` of the policy in the simulator's units; in double precision where
        they differ, so that the policy's own can be had back."""
        if self.is_identity:
            return actions
        center, half = (
            torch.as_tensor(side, dtype=torch.float64, device=actions.device)
            for side in (self.center, self.half)
        )
        return center + half * actions.double()


def check_scale(action: Mapping[str, Any], scale: float | None, *, squashed: bool) -> None:
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
