"""Environments that parts run in of their own, made the way a person makes them."""

from __future__ import annotations

import os
import subprocess

import pytest

from rlinf import tree
from rlinf.errors import ConfigError
from rlinf.interpreters import interpreter


def need_environment(name: str) -> None:
    """Have an environment of ``configs/environments``, or skip the test that needs it.

    ``make test`` has it made (``RLINF_REQUIRE_ENVS``), which takes minutes the first time.
    """
    if os.environ.get("RLINF_REQUIRE_ENVS"):
        subprocess.run(["make", "-s", "env", f"NAME={name}"], check=True, cwd=tree.ROOT)
    try:
        interpreter(name, "this test")
    except ConfigError as error:
        pytest.skip(str(error))
