"""Meta-World (https://arxiv.org/abs/1910.10897, version 3): a Sawyer arm and 50 manipulation tasks.

An episode has 500 steps; ``info["success"]`` of each step is whether the task is solved. Unlike
in Meta-World's own wrapper, the seed of a reset selects the goal, so equal seeds begin equal
episodes, whatever happened before. Meta-World has no instructions; the instruction is the name of
the task in words, such as ``button press topdown``. With ``benchmark_images``, images are those of
published policies (:class:`BenchmarkMetaWorldEnv`).
"""

from __future__ import annotations

import difflib
import importlib
import warnings
from typing import Any

import numpy as np

from .episode_state import (
    restore_attributes,
    restore_physics,
    save_attributes,
    save_physics,
    wrapper_chain,
)

PACKAGES = ("metaworld", "packaging")
_MT10 = (
    *("reach-v3", "push-v3", "pick-place-v3", "door-open-v3", "drawer-open-v3", "drawer-close-v3"),
    *("button-press-topdown-v3", "peg-insert-side-v3", "window-open-v3", "window-close-v3"),
)
_MT50 = (
    *("assembly", "basketball", "bin-picking", "box-close", "button-press-topdown"),
    *("button-press-topdown-wall", "button-press", "button-press-wall", "coffee-button"),
    *("coffee-pull", "coffee-push", "dial-turn", "disassemble", "door-close", "door-lock"),
    *("door-open", "door-unlock", "hand-insert", "drawer-close", "drawer-open", "faucet-open"),
    *("faucet-close", "hammer", "handle-press-side", "handle-press", "handle-pull-side"),
    *("handle-pull", "lever-pull", "pick-place-wall", "pick-out-of-hole", "pick-place"),
    *("plate-slide", "plate-slide-side", "plate-slide-back", "plate-slide-back-side"),
    *("peg-insert-side", "peg-unplug-side", "soccer", "stick-push", "stick-pull", "push"),
    *("push-wall", "push-back", "reach", "reach-wall", "shelf-place", "sweep-into", "sweep"),
    *("window-open", "window-close"),
)
TASK_SETS = {"MT10": _MT10, "MT50": tuple(f"{name}-v3" for name in _MT50)}
"""Meta-World's own task sets, in its order."""
SUPPORTS_STATE_SAVING = True
GOALS_SEED = 42
"""Seed of the 50 goals of a task, equal in every process."""


def make(id: str, kwargs: dict[str, Any]) -> Any:
    """``id`` is a task's name (``reach-v3``).

    ``kwargs``: ``benchmark_images``, whether images are those of :class:`BenchmarkMetaWorldEnv`;
    others are arguments of Meta-World's environment.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
    """
    import metaworld
    from metaworld.policies import ENV_POLICY_MAP

    tasks = sorted(metaworld.ALL_V3_ENVIRONMENTS)
    if id not in tasks:
        near = difflib.get_close_matches(id, tasks, 3, 0.3)
        raise ValueError(f"Meta-World has no task {id!r}; near it: {', '.join(near) or tasks[0]}")
    try:
        benchmark = metaworld.MT1(id, seed=GOALS_SEED)
        arguments = {name: value for name, value in kwargs.items() if name != "benchmark_images"}
        env = benchmark.train_classes[id](**arguments)
        instruction = id.rpartition("-")[0].replace("-", " ")
        cls = BenchmarkMetaWorldEnv if kwargs.get("benchmark_images") else MetaWorldEnv
        return cls(env, benchmark.train_tasks, instruction, ENV_POLICY_MAP[id]())
    except TypeError as error:
        raise ValueError(f"cannot make {id!r}: {error}") from None


class MetaWorldEnv:
    """One Meta-World task; the seed of a reset selects its goal."""

    def __init__(self, env: Any, goals: Any, instruction: str, expert: Any) -> None:
        self._env, self._goals, self.instruction, self._expert = env, goals, instruction, expert
        self._observation: Any = None
        self.unwrapped = env.unwrapped
        env.set_task(goals[0])  # Meta-World calls a goal a task
        self.action_space = env.action_space
        self.observation_space = env.observation_space
        self._steps = self._seed = 0

    def reset(self, seed: int) -> Any:
        self._seed = seed
        index = np.random.default_rng(seed).integers(len(self._goals))
        self._env.set_task(self._goals[int(index)])
        self._steps = 0
        self._observation, info = self._env.reset(seed=seed)
        return self._observation, info

    def step(self, action: Any) -> Any:
        self._observation, reward, _, _, info = self._env.step(np.asarray(action, np.float64))
        self._steps += 1
        # Meta-World itself does not truncate: it raises at the first step beyond the limit.
        return self._observation, reward, False, self._steps >= self._env.max_path_length, info

    def save(self) -> dict[str, np.ndarray]:
        return {
            **save_attributes(wrapper_chain(self._env)),
            **save_physics(self.unwrapped.model, self.unwrapped.data),
            "seed": np.array(self._seed),
            "steps": np.array(self._steps),
            "seen": self._observation,
        }

    def restore(self, state: dict[str, np.ndarray]) -> None:
        self.reset(int(state["seed"]))
        self._steps, self._observation = int(state["steps"]), state["seen"]
        restore_attributes(wrapper_chain(self._env), state)
        restore_physics(self.unwrapped.model, self.unwrapped.data, state)

    def expert_action(self) -> np.ndarray:
        """Return the action of Meta-World's scripted policy for the task. It may be outside the
        action space; the warning about that is suppressed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.asarray(self._expert.get_action(self._observation), np.float32)

    def close(self) -> None:
        self._env.close()


class BenchmarkMetaWorldEnv(MetaWorldEnv):
    """One Meta-World task with the images that published policies observe.

    LeRobot's evaluation moves the camera ``corner2`` nearer, draws shadows, and rotates the image
    by 180 degrees, because that camera is upside down.
    """

    cameras = ("corner2",)
    camera_position = (0.75, 0.075, 0.7)
    """Position of the camera, meters."""

    def __init__(self, env: Any, goals: Any, instruction: str, expert: Any) -> None:
        super().__init__(env, goals, instruction, expert)
        self.unwrapped.model.camera("corner2").pos[:] = self.camera_position
        self._renderers: dict[tuple[int, int], Any] = {}

    def render_camera(self, camera: str, height: int, width: int) -> np.ndarray:
        """Return the image of a camera, uint8 ``[H, W, 3]``."""
        mujoco: Any = importlib.import_module("mujoco")
        if (height, width) not in self._renderers:
            self._renderers[height, width] = mujoco.Renderer(self.unwrapped.model, height, width)
        renderer = self._renderers[height, width]
        renderer.update_scene(self.unwrapped.data, camera)
        return np.ascontiguousarray(renderer.render()[::-1, ::-1])

    def close(self) -> None:
        for renderer in self._renderers.values():
            renderer.close()
        super().close()
