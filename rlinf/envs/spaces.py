"""Spaces of worlds: what they take, and what they are.

Loaded by :mod:`rlinf.envs.simulator`, also in its process: the standard library and numpy alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .seen import Refused, instruction


def performed(space: Any, actions: np.ndarray) -> Any:
    """Actions ``[n, ...]`` as worlds take them: vectors within the space, choices as integers
    (nested lists of them, where rows are chunks), counted from its start.

    Raises:
        Refused: they are of another size than the space, or one is none of its choices.
    """
    if hasattr(space, "low"):
        if actions.shape[actions.ndim - len(space.shape) :] != space.shape or actions.ndim < 2:
            shape = list(actions.shape[1:])
            raise Refused(f"task.action: an action {shape} is not of {space}")
        return np.minimum(np.maximum(actions, space.low), space.high)
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
    """A space: ``kind`` (box, discrete, dict of others, or its class), its size, and as text."""
    if isinstance(getattr(space, "spaces", None), dict):
        parts = {name: described(part) for name, part in space.spaces.items()}
        return {"kind": "dict", "parts": parts, "text": str(space)}
    if hasattr(space, "low"):
        kind = np.dtype(space.dtype).name
        return {"kind": "box", "shape": list(space.shape), "dtype": kind, "text": str(space)}
    if hasattr(space, "n") and not getattr(space, "shape", ()):
        return {"kind": "discrete", "size": int(space.n), "text": str(space)}
    return {"kind": type(space).__name__, "text": str(space)}
