"""Meta-World (https://arxiv.org/abs/1910.10897, version 3): a Sawyer arm and 50 manipulation tasks.

An episode is 500 steps; ``info["success"]`` says of each step whether the task is solved. The seed
of a reset chooses the goal, as Meta-World's own wrapper does not: the same seed begins the same
episode, whatever was played before.
"""

from __future__ import annotations

import difflib
from typing import Any

import numpy as np

PACKAGES = ("metaworld", "packaging")

GOALS_SEED = 42
"""Of the 50 goals of a task, which are the same in every process."""


def make(id: str, kwargs: dict[str, Any]) -> Any:
    """``id`` is a task's name (``reach-v3``).

    Raises:
        ImportError, ValueError: see the package.
    """
    import metaworld

    known = sorted(metaworld.ALL_V3_ENVIRONMENTS)
    if id not in known:
        near = difflib.get_close_matches(id, known, 3, 0.3)
        raise ValueError(f"Meta-World has no task {id!r}; near it: {', '.join(near) or known[0]}")
    try:
        benchmark = metaworld.MT1(id, seed=GOALS_SEED)
        return World(benchmark.train_classes[id](**kwargs), benchmark.train_tasks)
    except TypeError as error:
        raise ValueError(f"cannot make {id!r}: {error}") from None


class World:
    """One task with a goal for each seed."""

    def __init__(self, env: Any, tasks: Any) -> None:
        self._env, self._tasks = env, tasks
        self.unwrapped = env.unwrapped
        env.set_task(tasks[0])
        self.action_space = env.action_space
        self.observation_space = env.observation_space
        self._steps = 0

    def reset(self, seed: int | None = None) -> Any:
        goal = np.random.default_rng(seed).integers(len(self._tasks))
        self._env.set_task(self._tasks[int(goal)])
        self._steps = 0
        return self._env.reset(seed=seed)

    def step(self, action: Any) -> Any:
        seen, reward, _, _, info = self._env.step(np.asarray(action, np.float64))
        self._steps += 1
        # Its own limit raises at the step after the last.
        return seen, reward, False, self._steps >= self._env.max_path_length, info

    def close(self) -> None:
        self._env.close()
