"""MetaSim's tasks: one whose class begins the next episode itself, and one that does not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import numpy as np
import torch

LIMIT = 3


@dataclass
class _Scenario:
    simulator: str = "isaacsim"
    num_envs: int = 1
    headless: bool = False
    robots: list[str] = field(default_factory=lambda: ["franka"])
    cameras: list[Any] = field(default_factory=lambda: ["head"])

    def update(self, **changed: Any) -> _Scenario:
        return replace(self, **changed)


class _Base:
    """As ``BaseTaskEnv``: a reset answers for the environments that it is of."""

    scenario = _Scenario()

    def __init__(self, scenario: _Scenario, device: Any = None) -> None:
        assert (scenario.simulator, scenario.headless, scenario.cameras) == ("mujoco", True, [])
        self.num_envs, self.device, self.robots = scenario.num_envs, device, scenario.robots
        self.action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.sums = torch.full((self.num_envs,), 9.0)
        self._episode_steps = torch.zeros(self.num_envs, dtype=torch.int32)

    def _observation(self) -> torch.Tensor:
        return torch.stack([self.sums, self._episode_steps.float()], 1)

    def reset(self, states: Any = None, env_ids: list[int] | None = None) -> Any:
        self.sums[env_ids], self._episode_steps[env_ids] = 0.0, 0
        return self._observation()[env_ids], {}

    def step(self, actions: torch.Tensor) -> Any:
        assert actions.shape == (self.num_envs, 1)
        self.sums, self._episode_steps = self.sums + actions[:, 0], self._episode_steps + 1
        terminated, late = self.sums >= 2, self._episode_steps >= LIMIT
        return self._observation(), self.sums.clone(), terminated, late, {}

    def close(self) -> None:
        pass


class _Learning(_Base):
    """As ``RLTaskEnv``: a reset answers for all."""

    def reset(self, states: Any = None, env_ids: list[int] | None = None) -> Any:
        super().reset(env_ids=env_ids)
        return self._observation(), {}

    def step(self, actions: torch.Tensor) -> Any:
        seen, reward, terminated, late, info = super().step(actions)
        done = (terminated | late).nonzero().squeeze(-1).tolist()
        seen[done] = self.reset(env_ids=done)[0][done]
        return seen, reward, terminated, late, info


_TASKS = {"sum.base": _Base, "sum.learning": _Learning}


def list_tasks() -> list[str]:
    return sorted(_TASKS)


def get_task_class(name: str) -> type[_Base]:
    return _TASKS[name.strip().lower()]
