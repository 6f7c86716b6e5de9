"""Functions that create environments of one or several tasks from modules of
:mod:`rlinf.envs.simulators`.

The simulator process (:mod:`rlinf.envs.vector_env`) loads this module too, so it imports only the
standard library and numpy.
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
    """An environment of several tasks. Only the environment of the current task exists.

    A reset with another task closes the environment and creates the other task's. All tasks have
    the same spaces. With ``one_hot`` the state ends with a one-hot vector of the task (as in
    multi-task benchmarks, arXiv 1910.10897). Other attributes come from the current task's
    environment.
    """

    def __init__(
        self, factories: Sequence[Callable[[], Any]], ids: Sequence[str], one_hot: bool
    ) -> None:
        self._factories, self._ids, self._one_hot = factories, ids, one_hot
        self._task_index, self._env = 0, factories[0]()
        self._spaces = self._describe_spaces()
        self.action_space = self._env.action_space
        self.observation_space = self._extend_space(self._env.observation_space)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    @property
    def num_tasks(self) -> int:
        return len(self._factories)

    def reset(
        self,
        seed: int | None = None,
        ordinal: int | None = None,
        initial_state: int | None = None,
    ) -> Any:
        """
        Args:
            ordinal: running number of the group (:meth:`RolloutRequest.group_ordinals`), which
                selects the task in rotation; by default the seed selects the task.
            initial_state: running index of the episode in evaluation. A task with a list of
                initial states uses the next one after each round of all tasks.
        """
        if ordinal is None:
            ordinal = int(np.random.default_rng(seed).integers(self.num_tasks))
        self._switch_to(ordinal % self.num_tasks)
        count = getattr(self._env, "num_initial_states", 0)
        options = {}
        if initial_state is not None and count:
            options = {"initial_state": initial_state // self.num_tasks % count}
        observation, info = self._env.reset(seed=seed, **options)
        return self._append_one_hot(observation), info

    def step(self, action: Any) -> Any:
        observation, *rest = self._env.step(action)
        return (self._append_one_hot(observation), *rest)

    def save(self) -> Arrays:
        if not hasattr(self._env, "save"):
            raise InvalidEnvConfig(NO_STATE_MESSAGE)
        return {**self._env.save(), TASK_INDEX_KEY: np.array(self._task_index)}

    def restore(self, state: Arrays) -> None:
        self._switch_to(int(state[TASK_INDEX_KEY]))
        self._env.restore({name: array for name, array in state.items() if name != TASK_INDEX_KEY})

    def close(self) -> None:
        self._env.close()

    def _switch_to(self, task_index: int) -> None:
        if task_index == self._task_index:
            return
        self._env.close()
        self._env, self._task_index = self._factories[task_index](), task_index
        spaces = self._describe_spaces()
        if spaces != self._spaces:
            raise InvalidEnvConfig(
                f"task.id: {self._ids[task_index]} has other spaces than {self._ids[0]}: "
                f"{spaces}, not {self._spaces}; leave one of them out"
            )

    def _describe_spaces(self) -> list[Any]:
        """Return the part of the spaces' descriptions that must be equal in all tasks."""
        observation = describe_space(self._env.observation_space)
        action = describe_space(self._env.action_space)
        bounds = {name: action[name] for name in ("low", "high") if name in action}
        return [_without_bounds(observation), {**_without_bounds(action), **bounds}]

    def _extend_space(self, space: Any) -> Any:
        """Return an observation space with the one-hot vector, if it is enabled."""
        if not self._one_hot:
            return space
        if isinstance(getattr(space, "spaces", None), dict):
            parts = {**space.spaces, STATE: self._extend_space(space.spaces[STATE])}
            return SimpleNamespace(spaces=parts)
        if not hasattr(space, "low") or len(space.shape) != 1:
            raise InvalidEnvConfig(
                f"task.append_task_one_hot: {self._ids[0]} has no vector observations ({space})"
            )
        zeros, ones = np.zeros(self.num_tasks, space.dtype), np.ones(self.num_tasks, space.dtype)
        return Box(np.append(space.low, zeros), np.append(space.high, ones))

    def _append_one_hot(self, observation: Any) -> Any:
        if not self._one_hot:
            return observation
        observations = dict(observation) if isinstance(observation, dict) else {STATE: observation}
        state = np.asarray(observations[STATE])
        one_hot = np.zeros(self.num_tasks, state.dtype)
        one_hot[self._task_index] = 1
        return {**observations, STATE: np.append(state, one_hot)}


def _without_bounds(space: dict[str, Any]) -> Any:
    """Return a space's description without text and bounds."""
    if space["kind"] == "dict":
        return {name: _without_bounds(part) for name, part in space["parts"].items()}
    return {name: value for name, value in space.items() if name not in ("text", "low", "high")}


def resolve_factory(target: str) -> Callable[..., Any]:
    """Return the factory ``FILE:attribute`` or ``module:attribute``; raise InvalidEnvConfig if it
    does not exist."""
    module_name, _, name = target.rpartition(":")
    try:
        module = _import_module(module_name)
    except (ImportError, OSError, SyntaxError) as error:
        raise InvalidEnvConfig(
            f"task.simulator: {module_name}: {error} ({sys.executable})"
        ) from None
    if not hasattr(module, name):
        raise InvalidEnvConfig(f"task.simulator: {module_name} has no {name!r}")
    factory: Callable[..., Any] = getattr(module, name)
    return factory


def _import_module(name_or_file: str) -> Any:
    """Import a module by its name or its file."""
    if not name_or_file.endswith(".py"):
        return importlib.import_module(name_or_file)
    # The file's relative imports use a stand-in package, because importing rlinf itself would
    # import modules that this interpreter lacks.
    folder, file = os.path.split(os.path.abspath(name_or_file))  # noqa: PTH100
    package: Any = types.ModuleType("rlinf_simulators")
    package.__path__ = [folder]
    sys.modules[package.__name__] = package
    name = f"{package.__name__}.{file[: -len('.py')]}"
    spec = importlib.util.spec_from_file_location(name, name_or_file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def module_flag(factory: Callable[..., Any], name: str) -> bool:
    """Return a flag of the factory's module: ``BATCHED`` or ``SINGLE_INSTANCE``."""
    return bool(getattr(factory, "__globals__", {}).get(name))


def create_env(
    factory: Callable[[], Any], selection: ObservationSelection, *, batched: bool = False
) -> Any:
    """Create an environment with flattened spaces.

    Args:
        batched: the environment is a batch that steps together and renders its own images.

    Raises:
        InvalidEnvConfig: the factory rejects the configuration, or a part of its spaces cannot be
            used.
    """
    log_mujoco_warnings()
    try:
        env = factory()
    except (ImportError, ValueError) as error:
        raise InvalidEnvConfig(f"{_factory_error(error)} ({sys.executable})") from None
    observed_names = {"_".join(path) or "pixels" for path, _ in leaf_spaces(env.observation_space)}
    env = flatten_env(env, selection, batched=batched)
    to_render = {n: size for n, size in selection.images.items() if n not in observed_names}
    return CameraWrapper(env, to_render) if to_render and not batched else env


def create_task_env(
    factory: Callable[..., Any], factory_kwargs: dict[str, Any], selection: ObservationSelection
) -> Any:
    """Create an environment; raises as :func:`create_env`.

    Args:
        factory_kwargs: the arguments ``id`` and ``kwargs`` of ``factory``. If ``id`` is a list, the
            environment has several tasks, and there is also ``one_hot`` of :class:`MultiTaskEnv`.
    """
    if isinstance(factory_kwargs["id"], str):
        return create_env(functools.partial(factory, **factory_kwargs), selection)
    ids, kwargs = factory_kwargs["id"], factory_kwargs["kwargs"]
    task_factories = [functools.partial(factory, id=id, kwargs=kwargs) for id in ids]
    factories = [functools.partial(create_env, make, selection) for make in task_factories]
    return MultiTaskEnv(factories, ids, factory_kwargs["one_hot"])


def _factory_error(error: Exception) -> str:
    """Return the factory's error, with the configuration key that it is about."""
    return f"task.{error}" if str(error).startswith("kwargs.") else f"task.id: {error}"
