"""ManiSkill 3 that simulates many environments together on a GPU (``physx_cuda``).

Tasks, state, actions, reward, success and cameras are those of
:mod:`rlinf.envs.simulators.maniskill`. ManiSkill seeds all environments of a reset with the first
one's seed. Here they are reset one after another, so that the seed of each determines its initial
state. The rest of the episode is not reproduced exactly, because physics on a GPU are not
deterministic.
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
    """``id`` is a registered task (``PickCube-v1``); ``kwargs`` are the task's further arguments.
    ``num_envs`` among them is the minimum number of environments.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
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
        self.count, self._env, self._images = count, env, images
        self._unwrapped = env.unwrapped
        for camera in images:
            if camera not in self._unwrapped.scene.sensors:
                cameras = ", ".join(self._unwrapped.scene.sensors) or "none"
                raise ValueError(f"there is no camera {camera}, but {cameras}")
        self.action_space = self._unwrapped.single_action_space
        self.observation_space = self._unwrapped.single_observation_space

    def reset(self, numbers: list[int], seeds: list[int]) -> dict[str, np.ndarray]:
        import torch

        observations: Any = None
        for number, seed in zip(numbers, seeds):  # noqa: B905 - on Python 3.9 zip is never strict
            env_ids = torch.tensor([number], device=self._unwrapped.device)
            options = {"env_idx": env_ids}
            observations, _ = self._env.reset(seed=[seed] * self.count, options=options)
        return {name: column[numbers] for name, column in self._observe(observations).items()}

    def step(self, actions: np.ndarray) -> Any:
        observations, reward, _, truncated, info = self._env.step(np.asarray(actions, np.float32))
        terminated = np.zeros(self.count, bool)
        # Pure control tasks do not define success.
        solved = _to_numpy(info["success"]).astype(bool) if "success" in info else terminated
        return (
            self._observe(observations),
            _to_numpy(reward),
            terminated,
            _to_numpy(truncated).astype(bool),
            solved,
        )

    def close(self) -> None:
        self._env.close()

    def _observe(self, observations: Any) -> dict[str, np.ndarray]:
        arrays = {STATE: _to_numpy(observations).astype(np.float32)}
        for camera, size in self._images.items():
            arrays[camera] = render_camera(self._unwrapped, camera, *size)
        return arrays


def _to_numpy(tensor: Any) -> np.ndarray:
    return np.array(tensor.detach().cpu().numpy())
