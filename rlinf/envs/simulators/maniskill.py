"""ManiSkill 3 (arXiv 2410.00425): manipulation in SAPIEN, with physics on a CPU.

The task determines the length of an episode. ``info["success"]`` of each step is whether the
task is solved; success does not end the episode. The state is ManiSkill's own state of the task. By
default, actions are those of the controller ``pd_joint_delta_pos``, and the reward is
``normalized_dense``. Cameras are the task's (``base_camera``, ...). Rendering and the simulator
itself need a Vulkan device: a GPU, or Mesa's lavapipe from 24.3 on.

The tasks ``PutOnPlateInScene25*`` of RL4VLA (arXiv 2505.19789) are not part of ManiSkill, so
``kwargs.module`` must name a file that registers them (:class:`PutOnPlateEnv`).
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("mani_skill", "sapien", "torch", "gymnasium")
OPTIONAL = {
    "module": "a Python file that registers further tasks when it is imported, such as one that "
    "imports the tasks PutOnPlateInScene25 of github.com/gen-robot/RL4VLA; their assets belong "
    "into MS_ASSET_DIR",
}
PUT_ON_PLATE = "PutOnPlateInScene25"
_VARIANTS = (
    *("VisionImage", "VisionTexture03", "VisionTexture05", "VisionWhole03", "VisionWhole05"),
    *("Carrot", "Plate", "Instruct", "MultiCarrot", "MultiPlate"),
    *("Position", "EEPose", "PositionChangeTo"),
)
TASK_SETS = {f"{PUT_ON_PLATE}-OOD": tuple(f"{PUT_ON_PLATE}{name}-v1" for name in _VARIANTS)}
"""RL4VLA's variants outside the training distribution: of vision, semantics and execution."""
DEFAULT_OPTIONS = {
    "obs_mode": "state",
    "reward_mode": "normalized_dense",
    "control_mode": "pd_joint_delta_pos",
    "sim_backend": "physx_cpu",
    "render_backend": "cpu",
}


def make(id: str, kwargs: dict[str, Any]) -> Any:
    """``id`` is a registered task (``PickCube-v1``).

    ``kwargs``: ``module``, see :data:`OPTIONAL`; ``objects`` for :class:`PutOnPlateEnv`; others are
    arguments of the task.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
    """
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    arguments = dict(kwargs)
    if (module := arguments.pop("module", None)) is not None:
        _import_file(Path(str(module)).expanduser())
    if not id.startswith(PUT_ON_PLATE):
        return ManiSkillEnv(CPUGymWrapper(create_task(id, arguments)))
    objects = arguments.pop("objects", "train")
    return PutOnPlateEnv(CPUGymWrapper(create_task(id, arguments)), objects)


def _import_file(path: Path) -> None:
    """Import a Python file; the modules beside it can be imported too."""
    if not path.is_file():
        raise ValueError(f"kwargs.module: there is no {path}; give {OPTIONAL['module']}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"registers_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    if spec.name not in sys.modules:
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def create_task(id: str, kwargs: dict[str, Any]) -> Any:
    """Create one of ManiSkill's environments by its name and arguments.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
    """
    import gymnasium
    from mani_skill.utils.registration import REGISTERED_ENVS

    if id not in REGISTERED_ENVS and id.startswith(PUT_ON_PLATE):
        raise ValueError(
            f"kwargs.module: does not register {id}, and ManiSkill does not have it; give "
            f"{OPTIONAL['module']}"
        )
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


class PutOnPlateEnv(ManiSkillEnv):
    """One of RL4VLA's tasks, in which the arm puts an object on a plate.

    The seed of a reset draws the number of the initial state (``episode_id``), which determines
    objects, background and poses. The images are those of the task's observations, because the task
    replaces their background. The state has the positions of the arm's joints.
    """

    def __init__(self, env: Any, objects: str) -> None:
        """``objects`` selects objects and backgrounds: train, test or all."""
        import gymnasium

        super().__init__(env)
        self._task, self._objects = env.unwrapped, objects
        self.reset(seed=0)
        bound = np.full(len(self._state()), np.inf, np.float32)
        self.observation_space = gymnasium.spaces.Box(-bound, bound)

    @property
    def instruction(self) -> str:
        return str(self._task.get_language_instruction()[0])

    def reset(self, seed: int | None = None) -> Any:
        import torch

        self._task.obj_set = self._objects
        episode = np.random.default_rng(seed).integers(self._task.total_num_trials)
        options = {"obj_set": self._objects, "episode_id": torch.tensor([int(episode)])}
        self._observation, info = self._env.reset(seed=seed, options=options)
        return self._state(), info

    def step(self, action: Any) -> Any:
        self._observation, *rest = super().step(action)
        return (self._state(), *rest)

    def render_camera(self, camera: str, height: int, width: int) -> np.ndarray:
        image = np.asarray(self._observation["sensor_data"][camera]["rgb"], np.uint8)
        if image.shape != (height, width, 3):
            raise ValueError(f"images of {camera} are {image.shape[:2]}; set task.images.{camera}")
        return image

    def _state(self) -> np.ndarray:
        return self._task.agent.robot.get_qpos()[0].cpu().numpy().astype(np.float32)
