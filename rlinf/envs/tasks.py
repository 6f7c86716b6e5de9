"""Several tasks of a simulator as one world.

Loaded by :mod:`rlinf.envs.simulator`, also in its process: the standard library and numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .seen import NO_STATE, STATE, Arrays, Refused
from .spaces import Box, described

NUMBER = "tasks.number"
"""Which one a saved state is of."""


class Tasks:
    """Worlds of several tasks, of which one is there at a time: that of the last reset. Another one
    takes its place where the task changes, which takes as long as it takes to make it.

    All have the same spaces. With ``one_hot`` the state ends with which task it is: as many numbers
    as there are tasks, 1 at its place and 0 elsewhere (as benchmarks of several tasks have it,
    arXiv 1910.10897). What else a world may have is that of the one that is there.
    """

    def __init__(
        self, makes: Sequence[Callable[[], Any]], ids: Sequence[str], one_hot: bool
    ) -> None:
        self._makes, self._ids, self._one_hot = makes, ids, one_hot
        self._number, self._world = 0, makes[0]()
        self._spaces = self._described()
        self.action_space = self._world.action_space
        self.observation_space = self._widened(self._world.observation_space)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._world, name)

    @property
    def tasks(self) -> int:
        """How many there are."""
        return len(self._makes)

    def reset(
        self, seed: int | None = None, turn: int | None = None, start: int | None = None
    ) -> Any:
        """
        Args:
            turn: a running number, by which the tasks take turns; by default the seed chooses.
            start: that of a held-out start: of a task whose states are numbered, it is the next one
                each time that all tasks had their turn.
        """
        if turn is None:
            turn = int(np.random.default_rng(seed).integers(self.tasks))
        self._have(turn % self.tasks)
        there = getattr(self._world, "starts", 0)
        where = {} if start is None or not there else {"start": start // self.tasks % there}
        observation, info = self._world.reset(seed=seed, **where)
        return self._told(observation), info

    def step(self, action: Any) -> Any:
        observation, *rest = self._world.step(action)
        return (self._told(observation), *rest)

    def save(self) -> Arrays:
        if not hasattr(self._world, "save"):
            raise Refused(NO_STATE)
        return {**self._world.save(), NUMBER: np.array(self._number)}

    def restore(self, state: Arrays) -> None:
        self._have(int(state[NUMBER]))
        self._world.restore({name: array for name, array in state.items() if name != NUMBER})

    def close(self) -> None:
        self._world.close()

    def _have(self, number: int) -> None:
        if number == self._number:
            return
        self._world.close()
        self._world, self._number = self._makes[number](), number
        if self._described() != self._spaces:
            raise Refused(
                f"task.id: {self._ids[number]} shows or takes something else than {self._ids[0]}: "
                f"{self._described()}, not {self._spaces}; leave one of them out"
            )

    def _described(self) -> list[Any]:
        action = described(self._world.action_space)
        bounds = {name: action[name] for name in ("low", "high") if name in action}
        return [_sizes(described(self._world.observation_space)), {**_sizes(action), **bounds}]

    def _widened(self, space: Any) -> Any:
        if not self._one_hot:
            return space
        if isinstance(getattr(space, "spaces", None), dict):
            parts = {**space.spaces, STATE: self._widened(space.spaces[STATE])}
            return SimpleNamespace(spaces=parts)
        if not hasattr(space, "low") or len(space.shape) != 1:
            raise Refused(f"task.one_hot: {self._ids[0]} has no vector observations ({space})")
        none, one = np.zeros(self.tasks, space.dtype), np.ones(self.tasks, space.dtype)
        return Box(np.append(space.low, none), np.append(space.high, one))

    def _told(self, observation: Any) -> Any:
        if not self._one_hot:
            return observation
        seen = dict(observation) if isinstance(observation, dict) else {STATE: observation}
        state = np.asarray(seen[STATE])
        which = np.zeros(self.tasks, state.dtype)
        which[self._number] = 1
        return {**seen, STATE: np.append(state, which)}


def _sizes(space: dict[str, Any]) -> Any:
    """What has to be equal of observations: not their bounds."""
    if space["kind"] == "dict":
        return {name: _sizes(part) for name, part in space["parts"].items()}
    return {name: said for name, said in space.items() if name not in ("text", "low", "high")}
