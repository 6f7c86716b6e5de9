"""A simulator with one camera: a white square that is solved at the right edge."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

SIDE = 40
PACKAGES = ("numpy",)


def box(low: np.ndarray, high: np.ndarray) -> Any:
    return SimpleNamespace(low=low, high=high, shape=low.shape, dtype=low.dtype)


def frame(position: float, side: int = SIDE) -> np.ndarray:
    """Return the image of a square, a quarter as wide, at a position, uint8 ``[side, side, 3]``."""
    image = np.zeros((side, side, 3), np.uint8)
    left, size = round(position), side // 4
    image[size : 2 * size, left : left + size] = 255
    return image


def start(random: np.random.Generator, side: int = SIDE) -> float:
    return float(random.integers(side // 4, side // 2))


def moved(position: float, action: float, side: int = SIDE) -> float:
    return float(np.clip(position + side / 8 * action, 0, side - side // 4))


def is_solved(position: float, side: int = SIDE) -> bool:
    return position >= side - side // 4


class MovingSquare:
    cameras = ("corner",)
    action_space = box(-np.ones(1, np.float32), np.ones(1, np.float32))
    observation_space = box(np.zeros(2, np.float32), np.ones(2, np.float32))

    def reset(self, seed: int) -> Any:
        self._position = start(np.random.default_rng(seed))
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self._position = moved(self._position, float(action[0]))
        solved = is_solved(self._position)
        return np.zeros(2, np.float32), float(solved), False, False, {"success": solved}

    def render_camera(self, camera: str, height: int, width: int) -> np.ndarray:
        return frame(self._position)

    def close(self) -> None:
        pass


def make(id: str, kwargs: dict[str, Any]) -> MovingSquare:
    return MovingSquare()
