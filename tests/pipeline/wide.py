"""A simulator whose observations are as wide as a small image."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

WIDTH = 400


class Wide(CartPoleEnv):
    """The state of a pole, seen by many fixed mixtures of it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._mix = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)
        bound = np.full(WIDTH, np.inf, np.float32)
        self.observation_space = gymnasium.spaces.Box(-bound, bound, dtype=np.float32)

    def reset(self, **options: Any) -> Any:
        seen, info = super().reset(**options)
        return seen @ self._mix, info

    def step(self, action: Any) -> Any:
        seen, *rest = super().step(action)
        return seen @ self._mix, *rest


gymnasium.register("Wide-v0", entry_point=Wide, max_episode_steps=200)
