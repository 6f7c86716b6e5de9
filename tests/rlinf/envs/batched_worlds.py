"""A world that steps many environments together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box

BATCHED = True
_made: list[str] = []


class Counters:
    """Each environment adds up what is done in it from its seed modulo 7; it ends at 10 or above,
    which is success, or after five steps.

    Args:
        raises_at: a sum at which the simulator fails, for all of them.
        nan_at: one in whose place it shows no number.
        fails_at: one at which no episode can begin: the reset fails, for all of them.
    """

    def __init__(
        self,
        count: int,
        images: Mapping[str, Sequence[int]],
        raises_at: float,
        nan_at: float,
        fails_at: float,
    ) -> None:
        self._fails_at = fails_at
        self.observation_space, self.action_space = Box(-99, 99, (2,)), Box(-1, 2, (1,))
        self.count, self._images, self._raises_at, self._nan_at = count, images, raises_at, nan_at
        self._sums, self._steps = np.zeros(count, np.float32), np.zeros(count, np.int64)

    def reset(self, numbers: list[int], seeds: list[int]) -> Any:
        self._sums[numbers], self._steps[numbers] = np.array(seeds) % 7, 0
        if (self._sums[numbers] == self._fails_at).any():
            raise ZeroDivisionError("a sum that it cannot begin with")
        return {name: column[numbers] for name, column in self._shown().items()}

    def step(self, actions: np.ndarray) -> Any:
        assert actions.shape == (self.count, 1)
        self._sums, self._steps = self._sums + actions[:, 0], self._steps + 1
        if (self._sums == self._raises_at).any():
            raise ZeroDivisionError("a sum that it cannot bear")
        solved = self._sums >= 10
        return self._shown(), self._sums, solved, ~solved & (self._steps >= 5), solved

    def close(self) -> None:
        pass

    def _shown(self) -> dict[str, np.ndarray]:
        sums = np.where(self._sums == self._nan_at, np.nan, self._sums)
        state = np.stack([sums, np.full(self.count, self.count)], 1).astype(np.float32)
        pictures = {
            "top": np.full((self.count, 2, 3, 3), self._sums[:, None, None, None], np.uint8)
        }
        return {"state": state, **(pictures if self._images else {})}


def make(id: str, kwargs: dict[str, Any], count: int, images: Any) -> Counters:
    if kwargs.get("once"):
        if _made:
            raise RuntimeError("there is a simulation in this process")
        _made.append(id)
    bad = [kwargs.get(name, 1e9) for name in ("raises_at", "nan_at", "fails_at")]
    return Counters(count, images, *bad)
