"""Creates environments from the modules of :mod:`rlinf.envs.simulators`, one task or several.

Also loaded in the simulator process (:mod:`rlinf.envs.vector_env`): it imports the standard library
and numpy alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .cameras import CameraWrapper, log_mujoco_warnings
from .observations import NO_STATE_MESSAGE, STATE, Arrays, InvalidEnvConfig, ObservationSelection
from .spaces import Box, describe_space, flatten_env, leaf_spaces

TASK_INDEX_KEY = "tasks.number"
"""Key of a saved state that holds the task's index."""


class MultiTaskEnv:
    """One environment of several tasks, of which one exists at a time: that of the last reset.

    A reset with another task closes the environment and creates that of the task. All tasks have
    the same spaces. With ``one_hot`` the state ends with a one-hot vector of the task (as in
    multi-task benchmarks, arXiv 1910.10897). Every other attribute is that of the current task's
    environment.
    """

    def __init__(
        self, makes: Sequence[Callable[[], Any]], ids: Sequence[str], one_hot: bool
    ) -> None:
        self._makes, self._ids, self._one_hot = makes, ids, one_hot
        self._number, self._env = 0, makes[0]()
        self._spaces = self._described()
        self.action_space = self._env.action_space
        self.observation_space = self._widened(self._env.observation_space)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    @property
    def num_tasks(self) -> int:
        """The number of tasks."""
        return len(self._makes)

    def reset(
        self, seed: int | None = None, turn: int | None = None, initial_state: int | None = None
    ) -> Any:
        """
        Args:
            turn: a running number that selects the task in rotation; by default the seed selects
                it.
            initial_state: the number of the initial state in evaluation. If a task has numbered
                initial states, it advances each time that all tasks had their turn.
        """
        if turn is None:
            turn = int(np.random.default_rng(seed).integers(self.num_tasks))
        self._switch_to(turn % self.num_tasks)
        count = getattr(self._env, "num_initial_states", 0)
        where = {}
        if initial_state is not None and count:
            where = {"initial_state": initial_state // self.num_tasks % count}
        observation, info = self._env.reset(seed=seed, **where)
        return self._with_one_hot(observation), info

    def step(self, action: Any) -> Any:
        observation, *rest = self._env.step(action)
        return (self._with_one_hot(observation), *rest)

    def save(self) -> Arrays:
        if not hasattr(self._env, "save"):
            raise InvalidEnvConfig(NO_STATE_MESSAGE)
        return {**self._env.save(), TASK_INDEX_KEY: np.array(self._number)}

    def restore(self, state: Arrays) -> None:
        self._switch_to(int(state[TASK_INDEX_KEY]))
        self._env.restore({name: array for name, array in state.items() if name != TASK_INDEX_KEY})

    def close(self) -> None:
        self._env.close()

    def _switch_to(self, number: int) -> None:
        if number == self._number:
            return
        self._env.close()
        self._env, self._number = self._makes[number](), number
        if self._described() != self._spaces:
            raise InvalidEnvConfig(
                f"task.id: {self._ids[number]} has other spaces than {self._ids[0]}: "
                f"{self._described()}, not {self._spaces}; leave one of them out"
            )

    def _described(self) -> list[Any]:
        action = describe_space(self._env.action_space)
        bounds = {name: action[name] for name in ("low", "high") if name in action}
        return [_sizes(describe_space(self._env.observation_space)), {**_sizes(action), **bounds}]

    def _widened(self, space: Any) -> Any:
        if not self._one_hot:
            return space
        if isinstance(getattr(space, "spaces", None), dict):
            parts = {**space.spaces, STATE: self._widened(space.spaces[STATE])}
            return SimpleNamespace(spaces=parts)
        if not hasattr(space, "low") or len(space.shape) != 1:
            raise InvalidEnvConfig(
                f"task.append_task_one_hot: {self._ids[0]} has no vector observations ({space})"
            )
        none, one = np.zeros(self.num_tasks, space.dtype), np.ones(self.num_tasks, space.dtype)
        return Box(np.append(space.low, none), np.append(space.high, one))

    def _with_one_hot(self, observation: Any) -> Any:
        if not self._one_hot:
            return observation
        observations = dict(observation) if isinstance(observation, dict) else {STATE: observation}
        state = np.asarray(observations[STATE])
        which = np.zeros(self.num_tasks, state.dtype)
        which[self._number] = 1
        return {**observations, STATE: np.append(state, which)}


def _sizes(space: dict[str, Any]) -> Any:
    """Return what must be equal between the observations of tasks: everything but their bounds."""
    if space["kind"] == "dict":
        return {name: _sizes(part) for name, part in space["parts"].items()}
    return {name: value for name, value in space.items() if name not in ("text", "low", "high")}


def resolve_factory(target: str) -> Callable[..., Any]:
    """Return what ``FILE:attribute`` or ``module:attribute`` names; raise InvalidEnvConfig if it
    does not exist."""
    module, _, name = target.rpartition(":")
    try:
        loaded = _module(module)
    except (ImportError, OSError, SyntaxError) as error:
        raise InvalidEnvConfig(f"task.simulator: {module}: {error} ({sys.executable})") from None
    if not hasattr(loaded, name):
        raise InvalidEnvConfig(f"task.simulator: {module} has no {name!r}")
    make: Callable[..., Any] = getattr(loaded, name)
    return make


def _module(module: str) -> Any:
    """Import a module by its name or its file."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    # It may import files beside it, as a part of their package: ours would bring more.
    folder, file = os.path.split(os.path.abspath(module))  # noqa: PTH100
    beside: Any = types.ModuleType("rlinf_simulators")
    beside.__path__ = [folder]
    sys.modules[beside.__name__] = beside
    name_of_file = f"{beside.__name__}.{file[: -len('.py')]}"
    spec = importlib.util.spec_from_file_location(name_of_file, module)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name_of_file] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def module_flag(make: Callable[..., Any], name: str) -> bool:
    """Return a flag of the factory's module: ``BATCHED`` or ``SINGLE_INSTANCE``."""
    return bool(getattr(make, "__globals__", {}).get(name))


def create_env(
    make: Callable[[], Any], shown: ObservationSelection, *, batched: bool = False
) -> Any:
    """Create an environment with plain spaces.

    Args:
        batched: it steps many environments together, and renders its own images.

    Raises:
        InvalidEnvConfig: the factory refuses the configuration, or a part of its spaces cannot be
            used.
    """
    log_mujoco_warnings()
    try:
        env = make()
    except (ImportError, ValueError) as error:
        raise InvalidEnvConfig(f"{_refusal(error)} ({sys.executable})") from None
    own = {"_".join(path) or "pixels" for path, _ in leaf_spaces(env.observation_space)}
    env = flatten_env(env, shown, batched=batched)
    rendered = {name: size for name, size in shown.images.items() if name not in own}
    return CameraWrapper(env, rendered) if rendered and not batched else env


def create_task_env(
    make: Callable[..., Any], values: dict[str, Any], shown: ObservationSelection
) -> Any:
    """Create an environment, of several tasks if ``id`` is a list; raises as :func:`create_env`.

    Args:
        values: the arguments of ``make``; for several tasks also ``one_hot``, see
            :class:`MultiTaskEnv`.
    """
    if isinstance(values["id"], str):
        return create_env(functools.partial(make, **values), shown)
    ids, kwargs = values["id"], values["kwargs"]
    each = [functools.partial(make, id=id, kwargs=kwargs) for id in ids]
    return MultiTaskEnv(
        [functools.partial(create_env, one, shown) for one in each], ids, values["one_hot"]
    )


def _refusal(error: Exception) -> str:
    """Return the factory's error, with the key that it is about."""
    return f"task.{error}" if str(error).startswith("kwargs.") else f"task.id: {error}"
