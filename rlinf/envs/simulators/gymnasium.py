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
    """``id`` as for ``gymnasium.make``, and its arguments.

    Raises:
        ImportError, ValueError: see the package.
    """
    import gymnasium

    try:
        # The checker repeats assertions at every step.
        return GymnasiumEnv(gymnasium.make(id, disable_env_checker=True, **kwargs))
    except (gymnasium.error.Error, TypeError) as error:
        raise ValueError(f"cannot make {id!r}: {error}") from None


class GymnasiumEnv:
    """An environment that can save and restore its episode.

    An environment whose state is more than plain attributes and MuJoCo's data has its own ``save``
    and ``restore`` (see :mod:`rlinf.envs.simulators`), or none.
    """

    def __init__(self, env: Any) -> None:
        self._env, self._bare = env, env.unwrapped
        self._own = hasattr(self._bare, "save") and hasattr(self._bare, "restore")
        self._layers = [one for one in wrapper_chain(env) if not (self._own and one is self._bare)]
        self._seed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, seed: int, **where: int) -> Any:
        self._seed = seed
        return self._env.reset(seed=seed, **where)

    def save(self) -> dict[str, np.ndarray]:
        """
        Raises:
            ValueError: an attribute cannot be saved; names it.
        """
        state = {**save_attributes(self._layers, [self._bare]), "seed": np.array(self._seed)}
        if self._own:
            state.update({f"own.{name}": array for name, array in self._bare.save().items()})
        elif _of_mujoco(self._bare):
            state.update(save_physics(self._bare.model, self._bare.data))
        return state

    def restore(self, state: dict[str, np.ndarray]) -> None:
        self.reset(int(state["seed"]))
        restore_attributes(self._layers, state)
        if self._own:
            own = {name[4:]: array for name, array in state.items() if name.startswith("own.")}
            self._bare.restore(own)
        elif _of_mujoco(self._bare):
            restore_physics(self._bare.model, self._bare.data, state)


def _of_mujoco(env: Any) -> bool:
    return all(
        type(getattr(env, n, None)).__module__.startswith("mujoco") for n in ("model", "data")
    )
