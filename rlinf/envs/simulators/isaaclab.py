"""Isaac Lab 2.3 (https://isaac-sim.github.io/IsaacLab): robots simulated and rendered on a GPU.

A process has one simulation of many environments. The step that ends an episode also begins the
next one and returns the new episode's observation; so the last observation of an episode is
replaced by the one before its last action. If all environments begin together, they are seeded by
the first one's seed; otherwise seeds have no effect. So a seed determines neither the initial state
nor the rest of an episode. If an episode was lost, some environments begin while others continue;
only the former are reset. Observation terms with a history then contain the current time step twice
in the environments that continue.

The state is the observation group ``policy``. If the terms of the group are not concatenated, the
state is the concatenation of its vectors, in their order, and the images are the terms with the
names of ``task.images``. Success is the termination term ``success``, for tasks that have one.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

BATCHED = NONDETERMINISTIC = True
PACKAGES = ("isaacsim", "isaaclab", "isaaclab_tasks", "torch", "gymnasium")
INSTALL = (
    "pip install 'isaaclab[isaacsim,all]==2.3.2.post1' --extra-index-url https://pypi.nvidia.com, "
    "with Python 3.11, and OMNI_KIT_ACCEPT_EULA=YES in the environment once its license is read"
)
GPU = "an NVIDIA RTX GPU (with RT cores) of 16 GB and a driver that Isaac Sim 5.1 supports"
STATE = "state"
_simulations: list[Any] = []
"""The simulation of this process, if there is one already."""


def make(
    id: str, kwargs: dict[str, Any], count: int, images: Mapping[str, Sequence[int]]
) -> IsaacLabEnv:
    """``id`` is a registered task (``Isaac-Lift-Cube-Franka-v0``).

    ``kwargs``: ``num_envs``, the minimum number of environments; ``device``; ``group``, the
    observation group; ``success``, the name of the termination term.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
        RuntimeError: there is a simulation in this process already.
    """
    valid_keys = ("num_envs", "device", "group", "success")
    if unknown := sorted(kwargs.keys() - set(valid_keys)):
        raise ValueError(f"kwargs.{unknown[0]}: there are {', '.join(valid_keys)}")
    if _simulations:
        raise RuntimeError(
            "Isaac Lab makes its environments once in a process, and there are "
            f"{_simulations[0].count}; set task.kwargs.num_envs to the most that are collected at "
            "once"
        )
    # The application reads the command-line arguments of the process.
    del sys.argv[1:]
    try:
        launcher = importlib.import_module("isaaclab.app").AppLauncher
        # Other modules of Isaac Lab can be imported only after this.
        app = launcher(headless=True, enable_cameras=bool(images)).app
    except EOFError:
        raise ValueError(
            "Isaac Sim asks whether its license is accepted; set OMNI_KIT_ACCEPT_EULA=YES"
        ) from None
    import gymnasium

    importlib.import_module("isaaclab_tasks")
    tasks = [n for n, s in gymnasium.registry.items() if "env_cfg_entry_point" in s.kwargs]
    if id not in tasks:
        near = difflib.get_close_matches(id, tasks, 3, 0.3)
        raise ValueError(f"Isaac Lab has no task {id!r}; near it: {', '.join(near) or tasks[0]}")
    parse_config = importlib.import_module("isaaclab_tasks.utils").parse_env_cfg
    count = max(count, int(kwargs.get("num_envs", 1)))
    config = parse_config(id, device=kwargs.get("device", "cuda:0"), num_envs=count)
    env = gymnasium.make(id, cfg=config).unwrapped
    group, success = kwargs.get("group", "policy"), kwargs.get("success", "success")
    _simulations.append(IsaacLabEnv(app, env, count, group, success, images))
    return _simulations[0]


class IsaacLabEnv:
    """All environments of a simulation."""

    def __init__(
        self, app: Any, env: Any, count: int, group: str, success: str, images: Any
    ) -> None:
        from gymnasium.spaces import Box

        self.count = count
        self._app, self._env, self._group, self._images = app, env, group, images
        manager = getattr(env, "termination_manager", None)
        names = () if manager is None else manager.active_terms
        self._success_term = success if success in names else None
        self._last_observations = self._observe(env.reset()[0])
        self._is_fresh, self._is_open = np.zeros((2, count), bool)
        """By environment: whether the last step has already begun its next episode, and whether
        it is within an episode that was requested."""
        self.action_space = env.single_action_space
        shape = self._last_observations[STATE].shape[1:]
        self.observation_space = Box(-np.inf, np.inf, shape, np.float32)

    def reset(self, numbers: list[int], seeds: list[int]) -> dict[str, np.ndarray]:
        to_reset = [number for number in numbers if not self._is_fresh[number]]
        others = np.isin(np.arange(self.count), numbers, invert=True)
        if to_reset and self._is_open[others].any():
            self._last_observations = self._observe(self._reset_some(to_reset))
        elif to_reset:
            self._last_observations = self._observe(self._env.reset(seed=seeds[0])[0])
        self._is_fresh[numbers], self._is_open[numbers] = False, True
        return {name: column[numbers] for name, column in self._last_observations.items()}

    def _reset_some(self, numbers: list[int]) -> Any:
        """Reset these environments only, and return the observations of all."""
        import torch

        env_ids = torch.as_tensor(numbers, dtype=torch.int64, device=self._env.device)
        if "env_ids" in inspect.signature(self._env.reset).parameters:
            return self._env.reset(env_ids=env_ids)[0]
        # reset() of a direct task resets all environments. The following calls are those with
        # which its step() resets the environments whose episode ended.
        self._env._reset_idx(env_ids)
        self._env.scene.write_data_to_sim()
        self._env.sim.forward()
        if self._images:
            self._env.sim.render()
        return self._env._get_observations()

    def step(self, actions: np.ndarray) -> Any:
        import torch

        previous = self._last_observations
        action_tensor = torch.as_tensor(actions, dtype=torch.float32, device=self._env.device)
        observation, reward, *ends, _ = self._env.step(action_tensor)
        terminated, truncated = map(_to_numpy, ends)
        solved = np.zeros(self.count, bool)
        if self._success_term is not None:
            solved = _to_numpy(self._env.termination_manager.get_term(self._success_term))
        self._last_observations, self._is_fresh = self._observe(observation), terminated | truncated
        self._is_open &= ~self._is_fresh
        observations = {
            name: np.where(
                self._is_fresh.reshape(-1, *[1] * (column.ndim - 1)), previous[name], column
            )
            for name, column in self._last_observations.items()
        }
        return observations, _to_numpy(reward), terminated, truncated, solved

    def close(self) -> None:
        self._env.close()
        self._app.close()

    def _observe(self, observation: Any) -> dict[str, np.ndarray]:
        """Return the state ``[n, D]`` and images ``[n, H, W, 3]`` of all environments."""
        terms = observation[self._group]
        if not isinstance(terms, Mapping):
            return {STATE: _to_numpy(terms)}
        arrays = {name: _to_numpy(term) for name, term in terms.items()}
        images = {name: a for name, a in arrays.items() if a.ndim == 4}
        for name in images:
            if name not in self._images:
                raise ValueError(
                    f"the observation term {name!r} has images, which are not used; name them "
                    "in task.images, or take another group (task.kwargs.group)"
                )
        vectors = [a.reshape(len(a), -1) for name, a in arrays.items() if name not in images]
        return {STATE: np.concatenate(vectors, 1), **images}


def _to_numpy(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.detach().cpu().numpy())
