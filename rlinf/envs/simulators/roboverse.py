"""RoboVerse (arXiv 2504.18904): tasks of MetaSim, in one of several simulators.

One object of a task class steps all environments. The state is the task's own observation, a
vector; images are not supported. As in MetaSim, termination counts as success; leave
``task.score_by_success`` false for tasks that terminate after a failure, such as a fall. In some
classes, the step that ends an episode also begins the next one and returns the new episode's
observation; the last observation of the old episode is then that of the previous step. Seeds have
no effect on the simulator.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

BATCHED = NONDETERMINISTIC = True
PACKAGES = ("metasim", "torch", "gymnasium")
INSTALL = (
    "pip install -e '.[mujoco]' (or isaacsim, sapien3, ...) in a clone of "
    "github.com/RoboVerseOrg/RoboVerse; metasim of PyPI is another package"
)


def make(
    id: str, kwargs: dict[str, Any], count: int, images: Mapping[str, Sequence[int]]
) -> RoboVerseEnv:
    """``id`` is a registered task (``reach_origin``).

    ``kwargs``: ``simulator`` (mujoco, isaacsim, ...), ``robots``, ``device``.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
    """
    valid_keys = ("simulator", "robots", "device")
    if unknown := sorted(kwargs.keys() - set(valid_keys)):
        raise ValueError(f"kwargs.{unknown[0]}: there are {', '.join(valid_keys)}")
    registry = importlib.import_module("metasim.task.registry")
    tasks = registry.list_tasks()
    if id not in tasks:
        near = difflib.get_close_matches(id, tasks, 3, 0.3)
        raise ValueError(f"RoboVerse has no task {id!r}; near it: {', '.join(near) or tasks[:1]}")
    task_class = registry.get_task_class(id)
    robots = {"robots": list(kwargs["robots"])} if "robots" in kwargs else {}
    scenario = task_class.scenario.update(
        simulator=kwargs.get("simulator", "mujoco"),
        num_envs=count,
        headless=True,
        cameras=[],
        **robots,
    )
    return RoboVerseEnv(task_class(scenario, device=kwargs.get("device", "cpu")), count)


class RoboVerseEnv:
    """All environments of a RoboVerse task."""

    def __init__(self, env: Any, count: int) -> None:
        self.count = count
        self._env = env
        self.action_space, self.observation_space = env.action_space, env.observation_space
        self._observations = np.zeros((count, *env.observation_space.shape), np.float32)
        self._is_fresh = np.zeros(count, bool)
        """By environment: whether the last step has already begun its next episode."""

    def reset(self, numbers: list[int], seeds: list[int]) -> np.ndarray:
        if to_reset := [number for number in numbers if not self._is_fresh[number]]:
            observations = _to_numpy(self._env.reset(env_ids=to_reset)[0])
            # Some classes return the observations of all environments.
            if len(observations) != len(to_reset):
                observations = observations[to_reset]
            self._observations[to_reset] = observations
        self._is_fresh[numbers] = False
        return self._observations[numbers]

    def step(self, actions: np.ndarray) -> Any:
        import torch

        action_tensor = torch.as_tensor(actions, dtype=torch.float32, device=self._env.device)
        observation, reward, *ends, _ = self._env.step(action_tensor)
        terminated, truncated = (_to_numpy(flags).astype(bool) for flags in ends)
        previous, current = self._observations, _to_numpy(observation).astype(np.float32)
        self._is_fresh = (terminated | truncated) & (_to_numpy(self._env._episode_steps) == 0)
        self._observations = current.copy()
        observations = np.where(self._is_fresh[:, None], previous, current)
        return observations, _to_numpy(reward), terminated, truncated & ~terminated, terminated

    def close(self) -> None:
        self._env.close()


def _to_numpy(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.detach().cpu().numpy())
