"""Environments that fail, for processes that import them by name."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Falling(gymnasium.Env):
    """Fails at its third step in the way it is told to."""

    def __init__(self, how: str) -> None:
        self.observation_space, self.action_space = Box(-1, 1, (2,)), Discrete(2)
        self.how, self.steps = how, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 3:
            if self.how == "raise":
                raise ZeroDivisionError("the third step")
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros(2, np.float32), 0.0, False, False, {}


gymnasium.register("Falling-v0", Falling)
