"""Lamps that turn on after some steps, or never: what happens does not depend on the actions."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict

PACKAGES = ("gymnasium",)
TASK_SETS = {"LAMPS": ("left", "right")}
LIMIT = 6


def make(id: str, kwargs: dict[str, Any]) -> Any:
    return Lamp(id, **kwargs)


class Lamp:
    """The left lamp turns on in each second initial state, the right one never. With ``chain`` the
    reward is 1 at each of the first steps, as many as the number of the initial state."""

    def __init__(self, id: str, chain: bool = False) -> None:
        self.instruction = f"turn on the {id} lamp"
        self.observation_space = Dict(
            {
                "state": Box(-1, 1, (3,), np.float32),
                "front": Box(0, 255, (16, 24, 3), np.uint8),
            }
        )
        self.action_space = Box(-1, 1, (7,), np.float32)
        self.num_initial_states = 4
        self._id, self._chain = id, chain

    def reset(self, seed: int, initial_state: int = 0) -> Any:
        self._state, self._steps = initial_state, 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        if np.asarray(action)[0] > 1e9:
            raise RuntimeError("broken")
        self._steps += 1
        solved = self._id == "left" and self._state % 2 == 1 and self._steps == 3
        if self._chain:
            reward = float(self._steps <= self._state)
            return self._observation(), reward, False, self._steps >= LIMIT, {"success": False}
        return self._observation(), 0.0, solved, self._steps >= LIMIT, {"success": solved}

    def _observation(self) -> dict[str, np.ndarray]:
        shade = np.uint8(40 * self._state + self._steps)
        return {
            "state": np.full(3, 0.1 * self._state, np.float32),
            "front": np.full((16, 24, 3), shade),
        }

    def close(self) -> None:
        pass
