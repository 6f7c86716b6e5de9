"""RoboTwin 2 (arXiv 2506.18088): two arms at a table, fifty tasks, in SAPIEN on a GPU.

Environments are those of RoboTwin's ``VectorEnv``. The state is the joint positions of both arms
(14), and an action is their target positions. The reward is that of RoboTwin's success test;
success ends an episode. Cameras: ``full_image`` (head), ``left_wrist_image``,
``right_wrist_image``. If the scene of a seed does not come to rest, RoboTwin uses the next seed
whose scene does.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

BATCHED = True
PACKAGES = ("sapien", "mplib", "torch", "gymnasium", "yaml")
INSTALL = "script/_install.sh of RoboTwin's repository, which compiles curobo and pytorch3d"
GPU = "an NVIDIA RTX GPU (with RT cores) and CUDA 12"
ASSETS = {
    "folder": "a clone of github.com/RoboTwin-Platform/RoboTwin that has robotwin/envs/"
    "vector_env.py (branch RLinf_support), after its script/_download_assets.sh",
    "config": "a task configuration of RoboTwin (YAML, with embodiment, camera and step_lim)",
}
STATE, NUM_JOINTS = "state", 14
SEED_LIMIT = 2**31
"""RoboTwin's seeds must be below this."""


def make(
    id: str, kwargs: dict[str, Any], count: int, images: Mapping[str, Sequence[int]]
) -> RoboTwinEnv:
    """``id`` is a task (``beat_block_hammer``); ``kwargs``: see :data:`ASSETS`.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
    """
    if unknown := sorted(kwargs.keys() - ASSETS.keys()):
        raise ValueError(f"kwargs.{unknown[0]}: there are {', '.join(ASSETS)}")
    paths = {key: Path(str(kwargs.get(key))).expanduser().resolve() for key in ASSETS}
    for key, file in (("folder", "robotwin/envs/vector_env.py"), ("config", "")):
        if not (paths[key] / file).exists():
            raise ValueError(f"kwargs.{key}: there is no {paths[key] / file}; give {ASSETS[key]}")
    tasks = [file.stem for file in (paths["folder"] / "envs").glob("[!_]*.py")]
    if id not in tasks:
        near = difflib.get_close_matches(id, tasks, 3, 0.3)
        raise ValueError(f"RoboTwin has no task {id!r}; near it: {', '.join(near) or tasks[0]}")
    import yaml

    config = yaml.safe_load(paths["config"].read_text())
    os.environ["ASSETS_PATH"] = str(paths["folder"])
    # RoboTwin opens files relative to the working directory.
    os.chdir(paths["folder"])
    sys.path.insert(0, str(paths["folder"]))
    vector_env_class = importlib.import_module("robotwin.envs.vector_env").VectorEnv
    env = vector_env_class({**config, "task_name": id}, n_envs=count, env_seeds=list(range(count)))
    return RoboTwinEnv(env, count, tuple(images))


class RoboTwinEnv:
    """All environments of a ``VectorEnv``."""

    def __init__(self, env: Any, count: int, images: tuple[str, ...]) -> None:
        from gymnasium.spaces import Box

        self.count = count
        self._env, self._images = env, images
        self.action_space = Box(-np.pi, np.pi, (NUM_JOINTS,), np.float32)
        self.observation_space = Box(-np.inf, np.inf, (NUM_JOINTS,), np.float32)

    def reset(self, numbers: list[int], seeds: list[int]) -> dict[str, np.ndarray]:
        self._env.reset(env_idx=numbers, env_seeds=[seed % SEED_LIMIT for seed in seeds])
        return {
            name: column[numbers] for name, column in self._observe(self._env.get_obs()).items()
        }

    def step(self, actions: np.ndarray) -> Any:
        observations, rewards, terminated, truncated, infos = self._env.step(actions[:, None])
        solved = [bool(np.any(info.get("success", False))) for info in infos]
        ends = [np.array([bool(np.any(f)) for f in flags]) for flags in (terminated, truncated)]
        total_rewards = np.array([float(np.sum(reward)) for reward in rewards])
        return self._observe(observations), total_rewards, *ends, np.array(solved)

    def close(self) -> None:
        self._env.close(True)

    def _observe(self, observations: Sequence[Any]) -> dict[str, np.ndarray]:
        """Return the state ``[n, 14]`` and the configured images of all environments."""
        first = observations[0]
        cameras = [name for name in self._images if first.get(name) is not None]
        images = {
            name: np.stack([observation[name] for observation in observations]) for name in cameras
        }
        state = np.stack(
            [np.asarray(observation["state"], np.float32) for observation in observations]
        )
        return {STATE: state, **images}
