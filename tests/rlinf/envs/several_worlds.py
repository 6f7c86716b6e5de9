"""Worlds of several tasks, with what each of them may have."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.rlinf.envs.speaking_worlds import Space

SUPPORTS_STATE_SAVING = True
NAMES = ("one", "two", "three")
TASK_SETS = {"ALL": ("one", "two", "three"), "FIRST": ("one", "two")}


class World:
    """Shows ten times its task's number, where it began and how many steps it took; it is solved
    at the second step, which terminates it at the third, and is cut off after five."""

    cameras = ("side",)
    num_initial_states = 2
    action_space = Space(-np.ones(2, np.float32), np.ones(2, np.float32))

    def __init__(self, id: str) -> None:
        if id not in (*NAMES, "wide"):
            raise ValueError(f"there is no {id}")
        self._number = NAMES.index(id) if id in NAMES else 3
        self.instruction = f"do {id}"
        size = 2 if id == "wide" else 1
        self.observation_space = Space(-np.ones(size, np.float32), np.ones(size, np.float32))
        self._steps, self._begun = 0, 0

    def reset(self, seed: int | None = None, initial_state: int = 0) -> Any:
        self._steps, self._begun = 0, initial_state
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        ends = (self._steps >= 3, self._steps == 5)
        return self._seen(), 1.0, *ends, {"success": self._steps == 2}

    def save(self) -> dict[str, np.ndarray]:
        return {"steps": np.array(self._steps)}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        self._steps = int(state["steps"])

    def expert_action(self) -> np.ndarray:
        return np.zeros(2, np.float32)

    def render_camera(self, camera: str, height: int, width: int) -> np.ndarray:
        return np.full((height, width, 3), self._number, np.uint8)

    def close(self) -> None:
        pass

    def _seen(self) -> np.ndarray:
        shown = 10 * self._number + self._begun + 0.1 * self._steps
        return np.full(self.observation_space.shape, shown, np.float32)


def make(id: str, kwargs: dict[str, Any]) -> World:
    return World(id)
