"""Environments that parts run in of their own, as ``make envs`` makes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlinf.errors import ConfigError
from rlinf.interpreters import ENVIRONMENTS_VARIABLE, resolve_interpreter


def need_environment(name: str) -> str:
    """The interpreter of an environment of ``configs/environments``; skips the test that needs one
    that was not made.

    ``make test`` makes them all, and none may lack there (``RLINF_REQUIRE_ENVS``).
    """
    try:
        return resolve_interpreter(name, "this test")
    except ConfigError as error:
        if os.environ.get("RLINF_REQUIRE_ENVS"):
            raise
        pytest.skip(str(error))


def need_vulkan(patch: pytest.MonkeyPatch) -> None:
    """Have simulators find Mesa's Vulkan in software, where ``make vulkan`` has unpacked it; skips
    the test otherwise."""
    folder = (
        Path(os.environ.get(ENVIRONMENTS_VARIABLE, "~/.cache/rlinf/envs")).expanduser() / "vulkan"
    )
    if not (folder / "lvp.json").is_file():
        if os.environ.get("RLINF_REQUIRE_ENVS"):
            raise FileNotFoundError(f"{folder}/lvp.json; make vulkan unpacks it")
        pytest.skip(f"there is no {folder}; make vulkan unpacks it")
    patch.setenv("VK_ICD_FILENAMES", str(folder / "lvp.json"))
    patch.setenv("LD_LIBRARY_PATH", str(folder / "usr" / "lib" / "x86_64-linux-gnu"))
