"""Readers of the world ``franka``, scripted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


class Takes:
    """Takes over at some steps of each three, with an action of its own."""

    def __init__(self, steps: list[int], action: list[float]) -> None:
        self._steps, self._action, self._calls = steps, np.array(action), 0

    def read(self, state: np.ndarray) -> Any:
        assert state.shape == (12,)
        self._calls += 1
        return self._action if (self._calls - 1) % 3 in self._steps else None


class Button:
    """A stop button that is pressed while there is a file."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def read(self, state: np.ndarray) -> None:
        return None

    def stopped(self) -> bool:
        return self._file.exists()


class Broken:
    """Answers no number at its second step; writes down that it was closed."""

    def __init__(self, file: str) -> None:
        self._file, self._calls = Path(file), 0

    def read(self, state: np.ndarray) -> Any:
        self._calls += 1
        return np.full(3, np.nan) if self._calls == 2 else None

    def close(self) -> None:
        with self._file.open("a") as file:
            file.write("closed\n")
