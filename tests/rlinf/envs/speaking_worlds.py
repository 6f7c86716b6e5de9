"""A world that asks for another thing after every third step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Space(NamedTuple):
    low: np.ndarray
    high: np.ndarray
    dtype: Any = np.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.low.shape


class World:
    action_space = Space(-np.ones(2, np.float32), np.ones(2, np.float32))
    observation_space = Space(-np.ones(1, np.float32), np.ones(1, np.float32))

    def __init__(self) -> None:
        self._steps = 0

    @property
    def instruction(self) -> str:
        return f"öffne {self._steps // 3}"

    def reset(self, seed: int | None = None) -> Any:
        self._steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return np.full(1, self._steps, np.float32), 1.0, False, False, {}

    def close(self) -> None:
        pass


def make(id: str, kwargs: dict[str, Any]) -> World:
    return World()
