"""ManiSkill 3 with physics of many environments together on a GPU (``physx_cuda``).

Tasks, state, actions, reward, success and cameras are those of
:mod:`rlinf.envs.simulators.maniskill`.
ManiSkill seeds all environments of a reset by the first one's seed; here they are reset one after
the other, so that a seed says where an episode begins, whatever the others do. Physics on a GPU do
not go on to the bit from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .maniskill import PACKAGES, create_task, render_camera

__all__ = ["BATCHED", "GPU", "PACKAGES", "make"]
BATCHED = True
GPU = "an NVIDIA GPU with CUDA, which torch sees"
GPU_OPTIONS = {"sim_backend": "physx_cuda", "render_backend": "gpu"}
STATE = "state"


def make(
    id: str, kwargs: dict[str, Any], count: int, images: Mapping[str, Sequence[int]]
) -> ManiSkillGpuEnv:
    """``id`` is a registered task (``PickCube-v1``); ``kwargs`` are further arguments of it, of
    which ``num_envs`` is environments at least.

    Raises:
        ImportError, ValueError: see the package.
    """
    import torch

    options = {**GPU_OPTIONS, **kwargs}
    options["num_envs"] = count = max(count, int(options.get("num_envs", 1)))
    if options["sim_backend"] == GPU_OPTIONS["sim_backend"] and not torch.cuda.is_available():
        raise ValueError(
            "kwargs.sim_backend: physx_cuda needs an NVIDIA GPU, and torch sees none here; ask for "
            "one (gpus in the plan), or take task=maniskill, whose physics are on a CPU"
        )
    return ManiSkillGpuEnv(create_task(id, options), count, images)


class ManiSkillGpuEnv:
    """All environments of a ManiSkill task on a GPU."""

    def __init__(self, env: Any, count: int, images: Mapping[str, Sequence[int]]) -> None:
        self.count, self._env, self._bare, self._images = count, env, env.unwrapped, images
        for camera in images:
            if camera not in self._bare.scene.sensors:
                there = ", ".join(self._bare.scene.sensors) or "none"
                raise ValueError(f"there is no camera {camera}, but {there}")
        self.action_space = self._bare.single_action_space
        self.observation_space = self._bare.single_observation_space

    def reset(self, numbers: list[int], seeds: list[int]) -> dict[str, np.ndarray]:
        import torch

        observations: Any = None
        for number, seed in zip(numbers, seeds):  # noqa: B905 - Python 3.9
            which = torch.tensor([number], device=self._bare.device)
            observations, _ = self._env.reset(seed=[seed] * self.count, options={"env_idx": which})
        return {name: column[numbers] for name, column in self._shown(observations).items()}

    def step(self, actions: np.ndarray) -> Any:
        observations, reward, _, truncated, info = self._env.step(np.asarray(actions, np.float32))
        none = np.zeros(self.count, bool)
        # Tasks of control alone have none.
        solved = _array(info["success"]).astype(bool) if "success" in info else none
        return (
            self._shown(observations),
            _array(reward),
            none,
            _array(truncated).astype(bool),
            solved,
        )

    def close(self) -> None:
        self._env.close()

    def _shown(self, observations: Any) -> dict[str, np.ndarray]:
        shown = {STATE: _array(observations).astype(np.float32)}
        for camera, size in self._images.items():
            shown[camera] = render_camera(self._bare, camera, *size)
        return shown


def _array(tensor: Any) -> np.ndarray:
    return np.array(tensor.detach().cpu().numpy())
