"""Environments that parts run in of their own, as ``make envs`` makes them."""

from __future__ import annotations

import os

import pytest

from rlinf.errors import ConfigError
from rlinf.interpreters import interpreter


def need_environment(name: str) -> str:
    """The interpreter of an environment of ``configs/environments``; skips the test that needs one
    that was not made.

    ``make test`` makes them all, and none may lack there (``RLINF_REQUIRE_ENVS``).
    """
    try:
        return interpreter(name, "this test")
    except ConfigError as error:
        if os.environ.get("RLINF_REQUIRE_ENVS"):
            raise
        pytest.skip(str(error))
