"""Environments that parts run in of their own, made the way a person makes them."""

from __future__ import annotations

import subprocess

import pytest

from rlinf import tree
from rlinf.errors import ConfigError
from rlinf.interpreters import interpreter


def make_environment(name: str) -> None:
    """Have an environment of ``configs/environments``; minutes, the first time.

    Where its packages cannot be had, what needs it is skipped.
    """
    try:
        interpreter(name, "engine.server_python")
    except ConfigError:
        command = ["make", "-s", "env", f"NAME={name}"]
        done = subprocess.run(command, check=False, cwd=tree.ROOT, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"make env NAME={name}: {done.stderr.strip()[-300:]}")
