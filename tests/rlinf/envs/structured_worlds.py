"""Environments of Gymnasium whose observations and actions are composed of several parts."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

GOALS = spaces.Dict(state=spaces.Box(-9, 9, (2,)), goal=spaces.Box(-9, 9, (3,)))
PICTURES = spaces.Dict(
    state=spaces.Box(-9, 9, (2,)),
    sensor=spaces.Dict(rgb=spaces.Box(0, 255, (4, 5, 3), np.uint8)),
    words=spaces.Text(4),
)
OBSERVATIONS = {"goals": GOALS, "pictures": PICTURES}


class Sampled(gymnasium.Env[Any, Any]):
    """Shows samples of its observation space, and pays the largest component of an action. It takes
    nothing that its action space does not contain."""

    def __init__(self, observation: Any = "goals", action: Any = None) -> None:
        named = OBSERVATIONS[observation] if isinstance(observation, str) else observation
        self.observation_space = named
        box = action if isinstance(action, dict) else {"low": -1.0, "high": 1.0, "shape": [2]}
        box = {**box, "dtype": np.dtype(box.get("dtype", "float32"))}
        self.action_space = action if isinstance(action, spaces.Space) else spaces.Box(**box)
        self.shown: Any = None
        self.done: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.observation_space.seed(seed)
        self.shown = self.observation_space.sample()
        return self.shown, {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.done, self.shown = action, self.observation_space.sample()
        paid = float(np.max(spaces.flatten(self.action_space, action)))
        return self.shown, paid, False, False, {}


BATCHED = True
"""What :func:`make` makes."""


class Many:
    """``count`` environments that are stepped together, each shows its number and its goal."""

    def __init__(self, count: int) -> None:
        self.count, self.observation_space = count, GOALS
        self.action_space = spaces.MultiDiscrete([2, 3])
        self._sums = np.zeros(count, np.float32)

    def reset(self, numbers: list[int], seeds: list[int]) -> Any:
        self._sums[numbers] = 0
        return {name: column[numbers] for name, column in self._shown().items()}

    def step(self, actions: np.ndarray) -> Any:
        assert actions.shape == (self.count, 2)
        self._sums += actions.sum(1)
        none = np.zeros(self.count, bool)
        return self._shown(), self._sums.copy(), none, none, none

    def _shown(self) -> dict[str, np.ndarray]:
        return {
            "state": np.stack([self._sums, np.arange(self.count)], 1).astype(np.float32),
            "goal": np.full((self.count, 3), 7, np.float32),
        }

    def close(self) -> None:
        pass


def make(id: str, kwargs: dict[str, Any], count: int, images: Any) -> Many:
    return Many(count)


gymnasium.register("Sampled-v0", Sampled, max_episode_steps=6)
