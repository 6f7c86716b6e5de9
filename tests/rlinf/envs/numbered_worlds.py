"""A world with numbered states to begin in and a camera of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete


class Numbered:
    """Shows where its episode began; an episode is two steps.

    Args:
        starts: states that it can begin in; a seed chooses the last.
    """

    cameras = ("side",)

    def __init__(self, starts: int) -> None:
        if starts < 0:
            raise ValueError(f"kwargs.starts: {starts} is below 0")
        self.observation_space, self.action_space = Box(-1, 9, (1,)), Discrete(2)
        self.num_initial_states, self._begun, self._steps = starts, -1, 0

    def reset(self, seed: int | None = None, **where: int) -> Any:
        self._begun, self._steps = where.get("initial_state", self.num_initial_states - 1), 0
        return np.array([self._begun], np.float32), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return np.array([self._begun], np.float32), 1.0, self._steps == 2, False, {}

    def render_camera(self, camera: str, height: int, width: int) -> np.ndarray:
        return np.full((height, width, 3), 10 * self._begun + self._steps, np.uint8)

    def close(self) -> None:
        pass


def make(id: str, kwargs: dict[str, Any]) -> Numbered:
    return Numbered(**kwargs)
