"""A stand-in for RL4VLA's tasks, of which the assets are on no registry: their interface only."""

from __future__ import annotations

from typing import Any

import torch
from mani_skill.envs.tasks.tabletop.pick_cube import PickCubeEnv
from mani_skill.utils.registration import register_env
from mani_skill.utils.structs.pose import Pose


@register_env("PutOnPlateInScene25VisionImage-v1", max_episode_steps=80)
class StandIn(PickCubeEnv):
    obj_set = "none"
    total_num_trials = 6

    @property
    def _default_sensor_configs(self) -> Any:
        (camera,) = super()._default_sensor_configs
        camera.uid, camera.width, camera.height = "3rd_view_camera", 64, 48
        return [camera]

    def get_language_instruction(self) -> list[str]:
        return [f"put the {self.obj_set} cube on the plate"]

    def _initialize_episode(self, env_idx: Any, options: dict[str, Any]) -> None:
        super()._initialize_episode(env_idx, options)
        assert options.get("obj_set", self.obj_set) == self.obj_set
        # The first episode, at construction, has no options.
        place = 0.02 * float(options.get("episode_id", [0])[0])
        self.cube.set_pose(Pose.create_from_pq(p=torch.tensor([[place, 0.0, 0.02]])))
