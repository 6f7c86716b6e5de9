"""A world in which a person turns the second of every three actions round, and that is late at
every fourth step; an episode has five."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from tests.rlinf.envs.speaking_worlds import Space

STEPS = 5


class World:
    action_space = Space(-np.ones(2, np.float32), np.ones(2, np.float32))
    observation_space = Space(-np.ones(1, np.float32), np.ones(1, np.float32))

    step_info_keys = ("intervened", "performed", "late")

    def __init__(self, falls: str) -> None:
        self._falls = falls
        self._steps = 0
        self._helps = True

    def reset(self, seed: int | None = None) -> Any:
        self._steps = 0
        # Who helps in an episode is drawn with it.
        self._helps = bool((seed or 0) % 2)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if self._falls and not Path(self._falls).exists():
            Path(self._falls).touch()
            os._exit(1)
        person = self._helps and self._steps % 3 == 1
        info = {
            "intervened": person,
            "performed": -np.asarray(action) if person else action,
            "late": self._steps % 4 == 3,
        }
        self._steps += 1
        return np.full(1, self._steps, np.float32), 1.0, False, self._steps == STEPS, info

    def close(self) -> None:
        pass


def make(id: str, kwargs: dict[str, Any]) -> World:
    """``kwargs.falls``: a file; the first step while it is not there makes it, and ends the
    process."""
    return World(kwargs.get("falls", ""))
