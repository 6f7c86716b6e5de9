"""A robot of the user's own: there is one."""

from __future__ import annotations

from typing import Any

from tests.rlinf.envs.breaking_worlds import World

SINGLE_INSTANCE = True
ASSETS = {"file": "the robot's description"}
PACKAGES = tuple("numpy")  # no literal, so it is not read


def make(id: str, kwargs: dict[str, Any]) -> World:
    return World([], reports=False)
