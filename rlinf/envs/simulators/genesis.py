"""Genesis (https://genesis-world.readthedocs.io): many robots in one scene, on a CPU or a GPU.

The package has robots and no tasks, so this module defines one, ``reach``: the hand of a Panda arm
must come within 5 cm of a goal, which the seed of a reset draws. The reward is the decrease of the
distance to the goal in decimeters, plus 1 at the goal, which ends the episode with success.

The state is the position and velocity of nine joints (18), the hand's position (3) and the goal's
position (3). An action changes the target positions of the arm's seven joints, in units of 0.05
rad. Images are not supported.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

BATCHED = True
PACKAGES = ("genesis", "torch", "gymnasium")
TASKS = ("reach",)
DEFAULT_STEPS = 100
PHYSICS_STEPS = 5
"""Number of physics steps of 10 ms per action."""
GOAL_TOLERANCE_M, ACTION_SCALE_RAD = 0.05, 0.05
HOME_JOINTS = (0.0, -0.5, 0.0, -2.2, 0.0, 1.8, 0.8, 0.04, 0.04)
"""Initial positions of the joints: seven of the arm, radians; two of the fingers, meters."""
GOAL_LOW, GOAL_HIGH = (0.35, -0.3, 0.2), (0.65, 0.3, 0.6)
"""Corners of the box in which goals are drawn, meters."""


def make(
    id: str, kwargs: dict[str, Any], count: int, images: Mapping[str, Sequence[int]]
) -> GenesisEnv:
    """``id`` is one of :data:`TASKS`.

    ``kwargs``: ``backend`` (cpu, gpu); ``steps``, the maximum of an episode.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
    """
    if id not in TASKS:
        near = difflib.get_close_matches(id, TASKS, 3, 0.3)
        raise ValueError(f"Genesis has no task {id!r}; near it: {', '.join(near) or TASKS[0]}")
    if unknown := sorted(kwargs.keys() - {"backend", "steps"}):
        raise ValueError(f"kwargs.{unknown[0]}: there are backend and steps")
    if (backend := kwargs.get("backend", "cpu")) not in ("cpu", "gpu"):
        raise ValueError(f"kwargs.backend: {backend!r}; expected cpu or gpu")
    return GenesisEnv(count, backend, int(kwargs.get("steps", DEFAULT_STEPS)))


class GenesisEnv:
    """All arms of a scene."""

    def __init__(self, count: int, backend: str, steps: int) -> None:
        import genesis
        from gymnasium.spaces import Box

        if not getattr(genesis, "_initialized", False):
            genesis.init(backend=getattr(genesis, backend), logging_level="warning")
        self.count, self._max_steps = count, steps
        self._scene = genesis.Scene(show_viewer=False)
        self._scene.add_entity(genesis.morphs.Plane())
        panda = genesis.morphs.MJCF(file="xml/franka_emika_panda/panda.xml")
        self._arm = self._scene.add_entity(panda)
        self._scene.build(n_envs=count)
        self._hand = self._arm.get_link("hand")
        self._target_joints = np.tile(np.array(HOME_JOINTS, np.float32), (count, 1))
        self._goals = np.zeros((count, 3), np.float32)
        self._steps = np.zeros(count, np.int64)
        self._distances = np.zeros(count)  # from hand to goal at the last step, meters
        self.action_space = Box(-1, 1, (7,), np.float32)
        self.observation_space = Box(-np.inf, np.inf, (24,), np.float32)

    def reset(self, numbers: list[int], seeds: list[int]) -> np.ndarray:
        self._scene.reset(envs_idx=numbers)
        for number, seed in zip(numbers, seeds):  # noqa: B905 - Python 3.9
            self._goals[number] = np.random.default_rng(seed).uniform(GOAL_LOW, GOAL_HIGH)
        self._target_joints[numbers], self._steps[numbers] = HOME_JOINTS, 0
        self._arm.set_dofs_position(
            self._target_joints[numbers], envs_idx=numbers, zero_velocity=True
        )
        self._arm.control_dofs_position(self._target_joints[numbers], envs_idx=numbers)
        observations = self._observe()
        self._distances[numbers] = self._goal_distances(observations)[numbers]
        return observations[numbers]

    def step(self, actions: np.ndarray) -> Any:
        low, high = map(_to_numpy, self._arm.get_dofs_limit())
        self._target_joints[:, :7] += ACTION_SCALE_RAD * actions
        self._target_joints = np.clip(self._target_joints, low, high)
        self._arm.control_dofs_position(self._target_joints)
        for _ in range(PHYSICS_STEPS):
            self._scene.step()
        self._steps += 1
        observations = self._observe()
        distances = self._goal_distances(observations)
        solved = distances <= GOAL_TOLERANCE_M
        reward = 10 * (self._distances - distances) + solved
        self._distances = distances
        return observations, reward, solved, ~solved & (self._steps >= self._max_steps), solved

    def close(self) -> None:
        self._scene.destroy()

    def _observe(self) -> np.ndarray:
        parts = (self._arm.get_dofs_position(), self._arm.get_dofs_velocity(), self._hand.get_pos())
        return np.concatenate([*map(_to_numpy, parts), self._goals], 1).astype(np.float32)

    def _goal_distances(self, observations: np.ndarray) -> np.ndarray:
        """Return the distances from hand to goal, meters, float64 ``[count]``."""
        return np.linalg.norm(observations[:, 18:21].astype(np.float64) - self._goals, axis=1)


def _to_numpy(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.detach().cpu().numpy())
