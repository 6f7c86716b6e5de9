"""Spaces of worlds: what they take, and what they are.

Loaded by :mod:`rlinf.envs.simulator`, also in its process: the standard library and numpy alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .seen import Refused, instruction

UNBOUNDED = 1e18
"""A bound of this magnitude is none: some simulators write the largest number of a type."""


class Box(NamedTuple):
    """A space of vectors within bounds."""

    low: np.ndarray
    high: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.low.shape

    @property
    def dtype(self) -> Any:
        return self.low.dtype


class Choices(NamedTuple):
    """A space of numbered choices, from 0."""

    n: int


def is_box(space: Any) -> bool:
    """Whether a space is of arrays within bounds."""
    return hasattr(space, "low") and hasattr(space, "high")


def is_choice(space: Any) -> bool:
    """Whether a space is of one choice among ``n``."""
    return not is_box(space) and hasattr(space, "n") and not getattr(space, "shape", ())


def performed(space: Any, actions: np.ndarray) -> Any:
    """Actions ``[n, ...]`` as worlds take them: vectors within the space and of its type, rounded
    where it is of integers; choices as integers (nested lists of them, where rows are chunks),
    counted from its start.

    Raises:
        Refused: they are of another size than the space, or one is none of its choices.
    """
    if hasattr(space, "low"):
        if actions.shape[actions.ndim - len(space.shape) :] != space.shape or actions.ndim < 2:
            shape = list(actions.shape[1:])
            raise Refused(f"task.action: an action {shape} is not of {space}")
        # As rlinf.data.transitions.within has it, which a simulator process cannot import.
        found = np.minimum(np.maximum(actions, space.low), space.high)
        if np.issubdtype(space.dtype, np.integer):
            found = np.rint(found)
        return found.astype(space.dtype)
    for action in actions[(actions < 0) | (actions >= space.n)].tolist():
        raise Refused(f"task.action: {action} is not one of the {space.n} actions of {space}")
    return (actions + int(getattr(space, "start", 0))).tolist()


def spaces_of(world: Any) -> dict[str, Any]:
    """What a world shows and takes, as plain values."""
    return {
        "observation": described(world.observation_space),
        "action": described(world.action_space),
        "instruction": instruction(world),
    }


def described(space: Any) -> dict[str, Any]:
    """A space: ``kind`` (box, discrete, dict of others, or its class), its size, and as text; of a
    box of vectors also ``low`` and ``high``, with None where it has no bound, and ``dtype``."""
    if isinstance(getattr(space, "spaces", None), dict):
        parts = {name: described(part) for name, part in space.spaces.items()}
        return {"kind": "dict", "parts": parts, "text": str(space)}
    if is_box(space):
        kind = np.dtype(space.dtype).name
        found = {"kind": "box", "shape": list(space.shape), "dtype": kind, "text": str(space)}
        if len(space.shape) == 1:
            found.update(low=_plain(space.low), high=_plain(space.high))
        return found
    if is_choice(space):
        return {"kind": "discrete", "size": int(space.n), "text": str(space)}
    return {"kind": type(space).__name__, "text": str(space)}


def _plain(bounds: np.ndarray) -> list[float | int | None]:
    """Bounds of a box as plain values; None: there is none."""
    unbounded = abs(bounds.astype(np.float64)) >= UNBOUNDED
    return [None if none else b for b, none in zip(bounds.tolist(), unbounded)]  # noqa: B905
