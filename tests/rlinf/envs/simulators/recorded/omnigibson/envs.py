"""Scenes of one simulation, each reset by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch


class _Scene:
    def __init__(self) -> None:
        self.robots = [SimpleNamespace(action_space=gymnasium.spaces.Box(-1, 1, (2,)))]
        self.sum, self.steps = 0.0, 0

    def reset(self, get_obs: bool = True, **kwargs: Any) -> Any:
        self.sum, self.steps = 0.0, 0
        return self.observed(), {}

    def observed(self) -> dict[str, Any]:
        picture = torch.full((4, 5, 4), int(self.sum), dtype=torch.uint8)
        camera = {"robot_r1:zed_link:Camera:0": {"rgb": picture}}
        return {"robot_r1": {**camera, "proprio": torch.tensor([self.sum, self.steps])}}


class VectorEnvironment:
    def __init__(self, num_envs: int, config: dict[str, Any]) -> None:
        assert config["task"]["type"] == "BehaviorTask"
        assert config["task"]["activity_name"] == "turning_on_radio"
        assert config["robots"] == [{"type": "R1Pro", "name": "robot_r1"}]
        self.num_envs, self.envs = num_envs, [_Scene() for _ in range(num_envs)]

    def reset(self, get_obs: bool = True, **kwargs: Any) -> Any:
        seen, infos = zip(*(scene.reset() for scene in self.envs), strict=True)
        return list(seen), list(infos)

    def step(self, actions: torch.Tensor) -> Any:
        assert actions.shape == (self.num_envs, 2)
        columns: tuple[list[Any], ...] = ([], [], [], [], [])
        for scene, action in zip(self.envs, actions, strict=True):
            scene.sum, scene.steps = scene.sum + float(action.sum()), scene.steps + 1
            solved, late = scene.sum >= 4, scene.steps >= 3
            info = {"done": {"success": solved, "termination_conditions": {}}}
            came = (scene.observed(), float(solved), solved, late, info)
            for column, value in zip(columns, came, strict=True):
                column.append(value)
        return columns

    def close(self) -> None:
        raise np.exceptions.AxisError("nothing is closed so")
