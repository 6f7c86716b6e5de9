"""Environments that keep what Gymnasium's own do not, for processes that import them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box


class Engine:
    """A state that is no plain attribute."""

    def __init__(self) -> None:
        self.value = 0.0


class Foreign(gymnasium.Env):
    """A sum of actions and noise, kept in an object of its own, which nobody can save."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = Box(-9, 9, (1,)), Box(-1, 1, (1,))
        self.engine = Engine()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.engine.value = float(self.np_random.uniform())
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.engine.value += 0.1 * float(action[0]) + float(self.np_random.normal(scale=0.1))
        return self._seen(), self.engine.value, False, False, {}

    def _seen(self) -> np.ndarray:
        return np.array([self.engine.value], np.float32)


class Own(Foreign):
    """Says itself what it keeps."""

    def save(self) -> dict[str, np.ndarray]:
        words = self.np_random.bit_generator.state["state"].values()
        # Of 128 bits each.
        halves = [part for word in words for part in divmod(word, 1 << 64)]
        return {"value": np.array(self.engine.value), "random": np.array(halves, np.uint64)}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        self.engine.value = float(state["value"])
        high, low, higher, lower = map(int, state["random"])
        whole = self.np_random.bit_generator.state
        whole["state"] = {"state": high << 64 | low, "inc": higher << 64 | lower}
        self.np_random.bit_generator.state = whole


class Forgetful(Own):
    """Fails to say its state, or to take one.

    Args:
        fails: ``save`` or ``restore``.
        once: a file that the first to fail makes; the others then do not.
    """

    def __init__(self, fails: str, once: str | None = None) -> None:
        super().__init__()
        self._fails, self._once = fails, once

    def save(self) -> dict[str, np.ndarray]:
        self._may_fail("save")
        return super().save()

    def restore(self, state: dict[str, np.ndarray]) -> None:
        self._may_fail("restore")
        super().restore(state)

    def _may_fail(self, how: str) -> None:
        if how != self._fails:
            return
        if self._once is not None:
            try:
                Path(self._once).touch(exist_ok=False)
            except FileExistsError:
                return
        raise ZeroDivisionError(f"no {how} in this version")


gymnasium.register("Forgetful-v0", Forgetful)
gymnasium.register("Foreign-v0", Foreign)
gymnasium.register("Own-v0", Own, max_episode_steps=20)
