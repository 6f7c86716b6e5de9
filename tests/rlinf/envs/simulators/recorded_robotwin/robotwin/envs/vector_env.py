"""RoboTwin's batch of environments, as far as the adapter calls it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np


class VectorEnv:
    def __init__(self, task_config: dict[str, Any], n_envs: int, env_seeds: Any = None) -> None:
        assert task_config["task_name"] == "beat_block_hammer"
        assert Path(os.environ["ASSETS_PATH"], task_config["task_name"]).parent == Path.cwd()
        assert len(env_seeds) == n_envs
        self._count, self._limit = n_envs, task_config["step_lim"]
        self._joints = np.zeros((n_envs, 14))
        self._steps = np.zeros(n_envs, int)

    def reset(self, env_idx: list[int] | None = None, env_seeds: Any = None) -> None:
        assert env_idx is not None
        assert len(env_idx) == len(env_seeds)
        self._joints[env_idx], self._steps[env_idx] = np.array(env_seeds)[:, None] % 5, 0

    def get_obs(self) -> list[dict[str, Any]]:
        return [
            {
                "full_image": np.full((4, 5, 3), joints[0], np.uint8),
                "left_wrist_image": None,
                "state": joints.copy(),
                "instruction": "hit the block",
            }
            for joints in self._joints
        ]

    def step(self, actions: np.ndarray) -> Any:
        assert actions.shape == (self._count, 1, 14)
        self._joints, self._steps = actions[:, -1].astype(float), self._steps + 1
        solved = [bool(joints[0] >= 3) for joints in self._joints]
        late = [bool(steps >= self._limit) for steps in self._steps]
        rewards = [[float(s)] for s in solved]
        return self.get_obs(), rewards, solved, late, [{"success": s} for s in solved]

    def close(self, clear_cache: bool = True) -> None:
        pass
