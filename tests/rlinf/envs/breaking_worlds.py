"""A world of which some episodes fail at their third step, with a reward of 1 at every step,
success at the first, and one buffer for all that it shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.rlinf.envs.speaking_worlds import Space

STEPS = 4
resets: list[int] = []


class World:
    action_space = Space(-np.ones(2, np.float32), np.ones(2, np.float32))
    observation_space = Space(-np.ones(1, np.float32), np.ones(1, np.float32))
    cameras = ("side",)

    def __init__(self, fails: Sequence[int], reports: bool, begins_not: Sequence[int] = ()) -> None:
        self._fails, self._reports, self._begins_not = fails, reports, begins_not
        self._episode, self._steps = 0, 0
        self._shown = np.zeros(1, np.float32)
        if reports:
            self.step_info_keys = ("intervened", "performed")

    def reset(self, seed: int | None = None) -> Any:
        self._episode, self._steps, self._shown[0] = self._episode + 1, 0, 0
        resets.append(self._episode)
        if len(resets) in self._begins_not:
            raise ZeroDivisionError("a reset")
        return self._shown, {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._episode in self._fails and self._steps == 3:
            raise ZeroDivisionError("the third step")
        self._shown[0] = self._steps
        step_info = {"intervened": True, "performed": -np.asarray(action)} if self._reports else {}
        return (
            self._shown,
            1.0,
            self._steps == STEPS,
            False,
            {"success": self._steps == 1, **step_info},
        )

    def expert_action(self) -> np.ndarray:
        return np.zeros(2, np.float32)

    def render_camera(self, camera: str, height: int, width: int) -> np.ndarray:
        return np.zeros((height, width, 3), np.uint8)

    def close(self) -> None:
        pass


def make(id: str, kwargs: dict[str, Any]) -> World:
    """Create a world.

    ``kwargs``: ``fails``: numbers of the episodes (from 1) that fail; ``reports``: whether every
    step's info reports an intervention; ``begins_not``: numbers of the resets, of all worlds of the
    process, that fail.
    """
    reports, begins_not = bool(kwargs.get("reports")), kwargs.get("begins_not", [])
    return World(kwargs.get("fails", []), reports, begins_not)
