"""Environments that are registered with Gymnasium, including MuJoCo's."""

from __future__ import annotations

from typing import Any

import numpy as np

from .episode_state import (
    restore_attributes,
    restore_physics,
    save_attributes,
    save_physics,
    wrapper_chain,
)

PACKAGES = ("gymnasium",)
SUPPORTS_STATE_SAVING = True


def make(id: str, kwargs: dict[str, Any]) -> Any:
    """``id`` and ``kwargs`` are those of ``gymnasium.make``.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
    """
    import gymnasium

    try:
        # Gymnasium's checker would repeat rlinf's own checks at every step.
        return GymnasiumEnv(gymnasium.make(id, disable_env_checker=True, **kwargs))
    except (gymnasium.error.Error, TypeError) as error:
        raise ValueError(f"cannot make {id!r}: {error}") from None


class GymnasiumEnv:
    """An environment that can save and restore its episode.

    If the state of an environment is more than plain attributes and MuJoCo's data, the environment
    needs its own ``save`` and ``restore`` (see :mod:`rlinf.envs.simulators`).
    """

    def __init__(self, env: Any) -> None:
        self._env, self._unwrapped = env, env.unwrapped
        self._has_save = hasattr(self._unwrapped, "save") and hasattr(self._unwrapped, "restore")
        self._layers = wrapper_chain(env)
        """The wrappers, and the unwrapped environment unless it has its own ``save``."""
        if self._has_save:
            self._layers = [layer for layer in self._layers if layer is not self._unwrapped]
        self._seed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, seed: int, **kwargs: int) -> Any:
        self._seed = seed
        return self._env.reset(seed=seed, **kwargs)

    def save(self) -> dict[str, np.ndarray]:
        """
        Raises:
            ValueError: an attribute cannot be saved; names it.
        """
        state = {**save_attributes(self._layers, [self._unwrapped]), "seed": np.array(self._seed)}
        if self._has_save:
            state.update({f"own.{name}": array for name, array in self._unwrapped.save().items()})
        elif _is_mujoco(self._unwrapped):
            state.update(save_physics(self._unwrapped.model, self._unwrapped.data))
        return state

    def restore(self, state: dict[str, np.ndarray]) -> None:
        self.reset(int(state["seed"]))
        restore_attributes(self._layers, state)
        if self._has_save:
            self._unwrapped.restore(
                {name[4:]: array for name, array in state.items() if name.startswith("own.")}
            )
        elif _is_mujoco(self._unwrapped):
            restore_physics(self._unwrapped.model, self._unwrapped.data, state)


def _is_mujoco(env: Any) -> bool:
    return all(
        type(getattr(env, n, None)).__module__.startswith("mujoco") for n in ("model", "data")
    )
