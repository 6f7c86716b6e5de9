"""Environments that are registered with Gymnasium, MuJoCo's among them."""

from __future__ import annotations

from typing import Any

PACKAGES = ("gymnasium",)


def make(id: str, kwargs: dict[str, Any]) -> Any:
    """``id`` as for ``gymnasium.make``, and its arguments.

    Raises:
        ImportError, ValueError: see the package.
    """
    import gymnasium

    try:
        # The checker repeats assertions at every step.
        return gymnasium.make(id, disable_env_checker=True, **kwargs)
    except (gymnasium.error.Error, TypeError) as error:
        raise ValueError(f"cannot make {id!r}: {error}") from None
