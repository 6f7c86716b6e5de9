"""Isaac Lab 2.3 (https://isaac-sim.github.io/IsaacLab): robots simulated and rendered on a GPU.

One process has one simulation of many environments. It begins the next episode of an environment in
the step that ends one, and shows that: of an episode that ended, what its last action was chosen by
stands for what was seen after it. The seed of the first environment is that of all of them, and
only where all begin together: a seed says neither where an episode begins nor the rest of it. Where
some begin while others are within an episode (one was lost), these are reset alone; terms with a
history then have the moment twice in those of the others.

The state is the observation group ``policy``; of a group whose terms are apart, the vectors among
them in their order, and pictures are the terms with the names of ``task.images``. Success is the
termination term ``success``, of tasks that have one.
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
"""The simulation of this process."""


def make(
    id: str, kwargs: dict[str, Any], count: int, images: Mapping[str, Sequence[int]]
) -> IsaacLabEnv:
    """``id`` is a registered task (``Isaac-Lift-Cube-Franka-v0``).

    ``kwargs``: ``num_envs``, environments at least; ``device``; ``group`` of observations;
    ``success``, the name of the termination term.

    Raises:
        ImportError, ValueError: see the package.
        RuntimeError: there is a simulation in this process already.
    """
    known = ("num_envs", "device", "group", "success")
    if unknown := sorted(kwargs.keys() - set(known)):
        raise ValueError(f"kwargs.{unknown[0]}: there are {', '.join(known)}")
    if _simulations:
        raise RuntimeError(
            "Isaac Lab makes its environments once in a process, and there are "
            f"{_simulations[0].count}; set task.kwargs.num_envs to the most that are collected at "
            "once"
        )
    # The application reads the arguments of its process.
    del sys.argv[1:]
    try:
        launcher = importlib.import_module("isaaclab.app").AppLauncher
        # Nothing else of it can be imported before.
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
    parse = importlib.import_module("isaaclab_tasks.utils").parse_env_cfg
    count = max(count, int(kwargs.get("num_envs", 1)))
    config = parse(id, device=kwargs.get("device", "cuda:0"), num_envs=count)
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
        self._solved = success if success in names else None
        self._shown = self._observe(env.reset()[0])
        self._begun, self._open = np.zeros((2, count), bool)
        """Environments at the first step of an episode that the last step began; and those within a
        requested episode."""
        self.action_space = env.single_action_space
        shape = self._shown[STATE].shape[1:]
        self.observation_space = Box(-np.inf, np.inf, shape, np.float32)

    def reset(self, numbers: list[int], seeds: list[int]) -> dict[str, np.ndarray]:
        old = [number for number in numbers if not self._begun[number]]
        if old and self._open[np.isin(np.arange(self.count), numbers, invert=True)].any():
            self._shown = self._observe(self._reset_some(old))
        elif old:
            self._shown = self._observe(self._env.reset(seed=seeds[0])[0])
        self._begun[numbers], self._open[numbers] = False, True
        return {name: column[numbers] for name, column in self._shown.items()}

    def _reset_some(self, numbers: list[int]) -> Any:
        import torch

        which = torch.as_tensor(numbers, dtype=torch.int64, device=self._env.device)
        if "env_ids" in inspect.signature(self._env.reset).parameters:
            return self._env.reset(env_ids=which)[0]
        # Tasks of the direct kind reset all or, in a step, those that ended, as follows.
        self._env._reset_idx(which)
        self._env.scene.write_data_to_sim()
        self._env.sim.forward()
        if self._images:
            self._env.sim.render()
        return self._env._get_observations()

    def step(self, actions: np.ndarray) -> Any:
        import torch

        before = self._shown
        action_tensor = torch.as_tensor(actions, dtype=torch.float32, device=self._env.device)
        observations, reward, *ends, _ = self._env.step(action_tensor)
        terminated, truncated = map(_array, ends)
        solved = np.zeros(self.count, bool)
        if self._solved is not None:
            solved = _array(self._env.termination_manager.get_term(self._solved))
        self._shown, self._begun = self._observe(observations), terminated | truncated
        self._open &= ~self._begun
        last = {
            name: np.where(self._begun.reshape(-1, *[1] * (column.ndim - 1)), before[name], column)
            for name, column in self._shown.items()
        }
        return last, _array(reward), terminated, truncated, solved

    def close(self) -> None:
        self._env.close()
        self._app.close()

    def _observe(self, observation: Any) -> dict[str, np.ndarray]:
        """The state ``[n, D]`` and pictures ``[n, H, W, 3]`` of all environments."""
        terms = observation[self._group]
        if not isinstance(terms, Mapping):
            return {STATE: _array(terms)}
        arrays = {name: _array(term) for name, term in terms.items()}
        pictures = {name: a for name, a in arrays.items() if a.ndim == 4}
        for name in pictures:
            if name not in self._images:
                raise ValueError(
                    f"the observation term {name!r} is of pictures, which nothing uses; name them "
                    "in task.images, or take another group (task.kwargs.group)"
                )
        vectors = [a.reshape(len(a), -1) for name, a in arrays.items() if name not in pictures]
        return {STATE: np.concatenate(vectors, 1), **pictures}


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.detach().cpu().numpy())
