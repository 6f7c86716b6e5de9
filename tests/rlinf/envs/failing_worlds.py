"""Environments that fail, for processes that import them by name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

SHOWN = {
    "nan": (np.array([0, np.nan], np.float32), 0.0),
    "too large": (np.array([0, 1e300]), 0.0),
    "reward": (np.zeros(2, np.float32), float("nan")),
    "shape": (np.zeros(3, np.float32), 0.0),
    "name": ({"other": np.zeros(2, np.float32)}, 0.0),
}
"""Observations and rewards that no step may bring."""


class Falling(gymnasium.Env):
    """Fails at its third step in the way it is told to, or at its first reset.

    Args:
        how: ``raise``, ``hang``, ``die``, or what it shows (:data:`SHOWN`), or ``reset``.
        once: a file that the first to fail makes; the others then do not.
    """

    def __init__(self, how: str, once: str | None = None) -> None:
        self.observation_space, self.action_space = Box(-1, 1, (2,)), Discrete(2)
        self.how, self.once, self.steps = how, once, 0
        self.shown = np.zeros(2, np.float64 if how == "too large" else np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self.how == "reset" and self._falls():
            raise ZeroDivisionError("the reset")
        return self.shown, {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 3 and self.how != "reset" and self._falls():
            if self.how in SHOWN:
                return (*SHOWN[self.how], False, False, {})
            if self.how == "raise":
                raise ZeroDivisionError("the third step")
            if self.how == "hang":
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.shown, 0.0, False, False, {}

    def _falls(self) -> bool:
        if self.once is None:
            return True
        try:
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


gymnasium.register("Falling-v0", Falling)
