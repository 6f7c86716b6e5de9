"""The simulator robosuite 1.5 (arXiv 2009.12293): manipulation in MuJoCo, RoboCasa included.

An episode has ``steps`` steps; ``info["success"]`` of each step is whether the task is solved.
The state is the robot's proprioception (``robot0_proprio-state``) and the objects' positions
(``object-state``); ``state`` selects other observations. Actions are inputs of the robot's own
controller. Cameras are those of the model, such as ``agentview``, ``frontview`` and
``robot0_eye_in_hand``.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import numpy as np

PACKAGES = ("robosuite", "mujoco", "gymnasium")
DEFAULT_STATE = ("robot0_proprio-state", "object-state")
DEFAULT_STEPS = 200


def make(id: str, kwargs: dict[str, Any]) -> Any:
    """``id`` is an environment's name (``Lift``), or ``MODULE:NAME`` to first import the module
    that registers it, such as ``robocasa:NAME``.

    ``kwargs``: ``robots`` (Panda), ``controller`` (name or file of a robosuite controller; by
    default that of the robot), ``steps``, ``state``. All others are passed to ``robosuite.make``,
    such as ``reward_shaping``, or ``hard_reset: true`` if a reset creates another scene (kitchens).

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
    """
    import robosuite
    from robosuite.environments.base import REGISTERED_ENVS

    module, _, name = id.rpartition(":")
    if module:
        importlib.import_module(module)
    if name not in REGISTERED_ENVS:
        near = difflib.get_close_matches(name, REGISTERED_ENVS, 3, 0.3)
        raise ValueError(
            f"robosuite has no environment {name!r}; near it: {', '.join(near) or 'Lift'}"
        )
    # The seed fixes what is drawn once when the model is created, such as the size of a cube.
    options = {"robots": "Panda", "hard_reset": False, "seed": 0, **kwargs}
    steps = int(options.pop("steps", DEFAULT_STEPS))
    state = tuple(options.pop("state", DEFAULT_STATE))
    try:
        controller = robosuite.load_composite_controller_config(
            controller=options.pop("controller", None), robot=options["robots"]
        )
        env = robosuite.make(
            name,
            controller_configs=controller,
            has_renderer=False,
            # The simulator process renders images, without shadows.
            has_offscreen_renderer=False,
            use_camera_obs=False,
            ignore_done=True,
            **options,
        )
    except (AssertionError, FileNotFoundError, KeyError, TypeError) as error:
        raise ValueError(f"cannot make {id!r}: {error!r}") from None
    return RobosuiteEnv(env, state, steps)


class RobosuiteEnv:
    """One robosuite environment."""

    def __init__(self, env: Any, state: tuple[str, ...], steps: int) -> None:
        from gymnasium.spaces import Box

        self._env, self._state_names, self._max_steps, self._steps = env, state, steps, 0
        observation = env.reset()
        for name in state:
            if name not in observation:
                near = difflib.get_close_matches(name, observation, 3, 0.3)
                raise ValueError(f"kwargs.state: no observation {name!r}; near it: {near}")
        low, high = env.action_spec
        self.action_space = Box(low.astype(np.float32), high.astype(np.float32))
        self.observation_space = Box(-np.inf, np.inf, self._state(observation).shape, np.float32)

    @property
    def unwrapped(self) -> RobosuiteEnv:
        return self

    @property
    def model(self) -> Any:
        return self._env.sim.model._model

    @property
    def data(self) -> Any:
        return self._env.sim.data._data

    @property
    def instruction(self) -> str:
        """The instruction of a kitchen's episode; empty elsewhere."""
        return str(self._env.get_ep_meta().get("lang", ""))

    def reset(self, seed: int | None = None) -> Any:
        # Seed the generator in place, because robosuite's objects have references to it.
        self._env.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        observation = self._env.reset()
        self._steps = 0
        return self._state(observation), {}

    def step(self, action: Any) -> Any:
        observation, reward, *_ = self._env.step(np.asarray(action, np.float64))
        self._steps += 1
        solved = bool(self._env._check_success())
        return (
            self._state(observation),
            reward,
            False,
            self._steps >= self._max_steps,
            {"success": solved},
        )

    def close(self) -> None:
        self._env.close()

    def _state(self, observation: Any) -> np.ndarray:
        return np.concatenate([np.ravel(observation[name]) for name in self._state_names]).astype(
            np.float32
        )
