"""BEHAVIOR-1K (arXiv 2403.09227): household activities in OmniGibson, on Isaac Sim.

A process has one simulation of several scenes. The state is the robot's proprioception
(``proprio``), and the rewards are those of the configured task. Success is the goal of the
activity, which ends an episode. A name in ``task.images`` selects the camera whose name contains
it: ``zed``, ``left_realsense``. Seeds have no effect on the simulator.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

BATCHED = NONDETERMINISTIC = True
PACKAGES = ("isaacsim", "omnigibson", "bddl", "torch", "gymnasium", "yaml")
INSTALL = (
    "setup.sh --omnigibson --bddl --dataset of github.com/StanfordVL/BEHAVIOR-1K, and "
    "OMNI_KIT_ACCEPT_EULA=YES in the environment once the license of Isaac Sim is read"
)
GPU = "an NVIDIA RTX GPU (with RT cores) of 8 GB at least"
ASSETS = {
    "data": "the folder of BEHAVIOR-1K's datasets (setup.sh --dataset fetches it)",
    "config": "an environment configuration of OmniGibson (YAML) with a robot and a BehaviorTask",
}
STATE, NAME_SEPARATOR = "state", "::"
_simulations: list[Any] = []
"""The simulation of this process, if there is one already."""


def make(
    id: str, kwargs: dict[str, Any], count: int, images: Mapping[str, Sequence[int]]
) -> BehaviorEnv:
    """``id`` is an activity (``turning_on_radio``).

    ``kwargs``: see :data:`ASSETS`; ``num_envs``, the minimum number of environments.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
        RuntimeError: there is a simulation in this process already.
    """
    valid_keys = (*ASSETS, "num_envs")
    if unknown := sorted(kwargs.keys() - set(valid_keys)):
        raise ValueError(f"kwargs.{unknown[0]}: there are {', '.join(valid_keys)}")
    if _simulations:
        raise RuntimeError(
            "OmniGibson makes its scenes once in a process, and there are "
            f"{_simulations[0].count}; set task.kwargs.num_envs to the most that are collected at "
            "once"
        )
    paths = {key: Path(str(kwargs.get(key))).expanduser() for key in ASSETS}
    for key, path in paths.items():
        if not path.exists():
            raise ValueError(f"kwargs.{key}: there is no {path}; give {ASSETS[key]}")
    import yaml

    config = yaml.safe_load(paths["config"].read_text())
    # OmniGibson reads these variables, and the command-line arguments, when it is imported.
    os.environ.update(OMNIGIBSON_DATA_PATH=str(paths["data"].resolve()), OMNIGIBSON_HEADLESS="1")
    del sys.argv[1:]
    activities = importlib.import_module("omnigibson.utils.bddl_utils").BEHAVIOR_ACTIVITIES
    if id not in activities:
        near = difflib.get_close_matches(id, activities, 3, 0.3)
        raise ValueError(
            f"BEHAVIOR has no activity {id!r}; near it: {', '.join(near) or activities[0]}"
        )
    config["task"] = {"type": "BehaviorTask", **config.get("task", {}), "activity_name": id}
    count = max(count, int(kwargs.get("num_envs", 1)))
    env = importlib.import_module("omnigibson.envs").VectorEnvironment(count, config)
    _simulations.append(BehaviorEnv(env, count, tuple(images)))
    return _simulations[0]


class BehaviorEnv:
    """All scenes of a simulation."""

    def __init__(self, env: Any, count: int, images: tuple[str, ...]) -> None:
        from gymnasium.spaces import Box

        self.count = count
        self._env, self._images = env, images
        observations, _ = env.reset()
        shape = self._observe(observations)[STATE].shape[1:]
        self.observation_space = Box(-np.inf, np.inf, shape, np.float32)
        space = env.envs[0].robots[0].action_space
        self.action_space = Box(space.low, space.high, dtype=np.float32)

    def reset(self, numbers: list[int], seeds: list[int]) -> dict[str, np.ndarray]:
        return self._observe([self._env.envs[number].reset()[0] for number in numbers])

    def step(self, actions: np.ndarray) -> Any:
        import torch

        observations, rewards, *ends, infos = self._env.step(
            torch.as_tensor(actions, dtype=torch.float32)
        )
        solved = [bool(info.get("done", {}).get("success", False)) for info in infos]
        terminated, truncated = (np.array([bool(flag) for flag in flags]) for flags in ends)
        return (
            self._observe(observations),
            np.array([float(reward) for reward in rewards]),
            terminated,
            truncated & ~terminated,
            np.array(solved),
        )

    def close(self) -> None:
        importlib.import_module("omnigibson").shutdown()

    def _observe(self, observations: Sequence[Any]) -> dict[str, np.ndarray]:
        """Return the state ``[n, D]`` and the configured images ``[n, H, W, 3]``."""
        rows = [dict(_flatten(observation)) for observation in observations]
        names = [name for name in rows[0] if name.split(NAME_SEPARATOR)[-1] == "proprio"]
        states = [np.concatenate([_to_numpy(row[name]) for name in names]) for row in rows]
        arrays = {STATE: np.stack(states).astype(np.float32)}
        for image in self._images:
            cameras = [n for n in rows[0] if image in n and n.split(NAME_SEPARATOR)[-1] == "rgb"]
            if cameras:
                arrays[image] = np.stack([_to_numpy(row[cameras[0]])[..., :3] for row in rows])
        return arrays


def _flatten(observations: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested observations with their full names."""
    for name, value in observations.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}{NAME_SEPARATOR}")
        else:
            yield f"{prefix}{name}", value


def _to_numpy(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.detach().cpu().numpy())
