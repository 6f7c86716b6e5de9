"""A simulator with one camera: a white square that is solved at the right edge."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

SIDE, SQUARE = 40, 8
SOLVED_AT = SIDE - SQUARE
PACKAGES = ("numpy",)


def box(low: np.ndarray, high: np.ndarray) -> Any:
    return SimpleNamespace(low=low, high=high, shape=low.shape, dtype=low.dtype)


def frame(position: float) -> np.ndarray:
    """Return the image of a square at a position, uint8 ``[40, 40, 3]``."""
    image = np.zeros((SIDE, SIDE, 3), np.uint8)
    left = round(position)
    image[16 : 16 + SQUARE, left : left + SQUARE] = 255
    return image


class MovingSquare:
    cameras = ("front",)
    action_space = box(-np.ones(1, np.float32), np.ones(1, np.float32))
    observation_space = box(np.zeros(2, np.float32), np.ones(2, np.float32))

    def reset(self, seed: int) -> Any:
        self._position = float(np.random.default_rng(seed).integers(8, 21))
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self._position = moved(self._position, float(action[0]))
        solved = self._position >= SOLVED_AT
        return np.zeros(2, np.float32), float(solved), False, False, {"success": solved}

    def render_camera(self, camera: str, height: int, width: int) -> np.ndarray:
        return frame(self._position)

    def close(self) -> None:
        pass


def moved(position: float, action: float) -> float:
    return float(np.clip(position + 4 * action, 0, SOLVED_AT))


def make(id: str, kwargs: dict[str, Any]) -> MovingSquare:
    return MovingSquare()
