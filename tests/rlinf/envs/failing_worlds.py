"""Environments that fail, for processes that import them by name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Falling(gymnasium.Env):
    """Fails at its third step in the way it is told to.

    Args:
        once: a file that the first to fail makes; the others then do not.
    """

    def __init__(self, how: str, once: str | None = None) -> None:
        self.observation_space, self.action_space = Box(-1, 1, (2,)), Discrete(2)
        self.how, self.once, self.steps = how, once, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 3 and self._falls():
            if self.how == "raise":
                raise ZeroDivisionError("the third step")
            if self.how == "hang":
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros(2, np.float32), 0.0, False, False, {}

    def _falls(self) -> bool:
        if self.once is None:
            return True
        try:
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


gymnasium.register("Falling-v0", Falling)
