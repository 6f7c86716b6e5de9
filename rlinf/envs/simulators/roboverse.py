"""RoboVerse (arXiv 2504.18904): tasks of MetaSim, in one of several simulators.

Environments are those of one task class. The state is the task's own observation, a vector; there
are no pictures. What the class calls termination counts as success too, as MetaSim has it; where it
means a fall, leave ``task.score_by_success`` false. A class may begin the next episode in the step
that ends one, and show the new episode: the observation before that step then counts as the last
one of the episode. Seeds do not reach the simulator.
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
        ImportError, ValueError: see the package.
    """
    known = ("simulator", "robots", "device")
    if unknown := sorted(kwargs.keys() - set(known)):
        raise ValueError(f"kwargs.{unknown[0]}: there are {', '.join(known)}")
    registry = importlib.import_module("metasim.task.registry")
    tasks = registry.list_tasks()
    if id not in tasks:
        near = difflib.get_close_matches(id, tasks, 3, 0.3)
        raise ValueError(f"RoboVerse has no task {id!r}; near it: {', '.join(near) or tasks[:1]}")
    kind = registry.get_task_class(id)
    robots = {"robots": list(kwargs["robots"])} if "robots" in kwargs else {}
    scenario = kind.scenario.update(
        simulator=kwargs.get("simulator", "mujoco"),
        num_envs=count,
        headless=True,
        cameras=[],
        **robots,
    )
    return RoboVerseEnv(kind(scenario, device=kwargs.get("device", "cpu")), count)


class RoboVerseEnv:
    """All environments of a RoboVerse task."""

    def __init__(self, env: Any, count: int) -> None:
        self.count = count
        self._env = env
        self.action_space, self.observation_space = env.action_space, env.observation_space
        self._shown = np.zeros((count, *env.observation_space.shape), np.float32)
        self._begun = np.zeros(count, bool)
        """Environments at the first step of an episode that the last step began."""

    def reset(self, numbers: list[int], seeds: list[int]) -> np.ndarray:
        if old := [number for number in numbers if not self._begun[number]]:
            observations = _array(self._env.reset(env_ids=old)[0])
            # Some classes answer for all, some for those alone.
            self._shown[old] = observations if len(observations) == len(old) else observations[old]
        self._begun[numbers] = False
        return self._shown[numbers]

    def step(self, actions: np.ndarray) -> Any:
        import torch

        action_tensor = torch.as_tensor(actions, dtype=torch.float32, device=self._env.device)
        observations, reward, *ends, _ = self._env.step(action_tensor)
        terminated, truncated = (_array(ended).astype(bool) for ended in ends)
        before, now = self._shown, _array(observations).astype(np.float32)
        self._begun = (terminated | truncated) & (_array(self._env._episode_steps) == 0)
        self._shown = now.copy()
        last = np.where(self._begun[:, None], before, now)
        return last, _array(reward), terminated, truncated & ~terminated, terminated

    def close(self) -> None:
        self._env.close()


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.detach().cpu().numpy())
