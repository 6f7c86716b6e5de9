"""ManiSkill 3 (arXiv 2410.00425): manipulation in SAPIEN, with physics on a CPU.

The task determines the length of an episode. ``info["success"]`` of each step is whether the
task is solved; success does not end the episode. The state is ManiSkill's own state of the task. By
default, actions are those of the controller ``pd_joint_delta_pos``, and the reward is
``normalized_dense``. Cameras are the task's (``base_camera``, ...). Rendering and the simulator
itself need a Vulkan device: a GPU, or Mesa's lavapipe from 24.3 on.
"""

from __future__ import annotations

import difflib
from typing import Any

import numpy as np

PACKAGES = ("mani_skill", "sapien", "torch", "gymnasium")
DEFAULT_OPTIONS = {
    "obs_mode": "state",
    "reward_mode": "normalized_dense",
    "control_mode": "pd_joint_delta_pos",
    "sim_backend": "physx_cpu",
    "render_backend": "cpu",
}


def make(id: str, kwargs: dict[str, Any]) -> Any:
    """``id`` is a registered task (``PickCube-v1``); ``kwargs`` are its further arguments.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
    """
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    return ManiSkillEnv(CPUGymWrapper(create_task(id, kwargs)))


def create_task(id: str, kwargs: dict[str, Any]) -> Any:
    """Create one of ManiSkill's environments by its name and arguments.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
    """
    import gymnasium
    from mani_skill.utils.registration import REGISTERED_ENVS

    if id not in REGISTERED_ENVS:
        near = difflib.get_close_matches(id, REGISTERED_ENVS, 3, 0.3)
        raise ValueError(
            f"ManiSkill has no task {id!r}; near it: {', '.join(near) or 'PickCube-v1'}"
        )
    try:
        return gymnasium.make(id, **{**DEFAULT_OPTIONS, **kwargs})
    except EOFError:
        raise ValueError(
            f"the assets of {id} are not there; fetch them with python -m "
            f"mani_skill.utils.download_asset {id}, into MS_ASSET_DIR"
        ) from None
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in ("vk::", "vulkan", "rendering device")):
            raise
        raise ValueError(
            f"SAPIEN finds no Vulkan device ({error}): it needs a GPU with its driver, or Mesa's "
            "lavapipe of 24.3 or newer, which make vulkan unpacks, in VK_ICD_FILENAMES"
        ) from None


class ManiSkillEnv:
    """One ManiSkill task on the CPU."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.action_space, self.observation_space = env.action_space, env.observation_space
        self.cameras = tuple(env.unwrapped.scene.sensors)

    def reset(self, seed: int | None = None) -> Any:
        return self._env.reset(seed=seed)

    def step(self, action: Any) -> Any:
        observation, reward, _, truncated, info = self._env.step(np.asarray(action, np.float32))
        # Pure control tasks do not define success.
        step_info = {"success": bool(info["success"])} if "success" in info else {}
        return observation, float(reward), False, bool(truncated), step_info

    def render_camera(self, camera: str, height: int, width: int) -> np.ndarray:
        """Return the image of a camera, uint8 ``[H, W, 3]``."""
        return render_camera(self._env.unwrapped, camera, height, width)[0]

    def close(self) -> None:
        self._env.close()


def render_camera(env: Any, camera: str, height: int, width: int) -> np.ndarray:
    """Return a camera's image in each environment of an unwrapped task, uint8 ``[n, H, W, 3]``.

    Raises:
        ValueError: the camera's images have another size.
    """
    env.scene.update_render()
    sensor = env.scene.sensors[camera]
    sensor.capture()
    images = sensor.get_obs(rgb=True, depth=False, position=False, segmentation=False)["rgb"]
    array = np.asarray(images.cpu().numpy(), np.uint8)
    if array.shape[1:] != (height, width, 3):
        raise ValueError(
            f"images of {camera} are {array.shape[1:3]}; set task.kwargs.sensor_configs: "
            f"{{height: {height}, width: {width}}}"
        )
    return array
