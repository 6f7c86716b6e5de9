"""Environments that parts run in of their own, as ``make envs`` makes them."""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path

import pytest

from rlinf.errors import ConfigError
from rlinf.interpreters import ENVIRONMENTS_VARIABLE, resolve_interpreter
from rlinf.package_paths import ROOT

NEEDS = frozenset({"need_environment", "need_vulkan"})
"""Functions that skip a test whose environment was not made."""
marked: set[str] = set()
"""Names of the collected tests that have the marker ``backends``."""


def need_environment(name: str) -> str:
    """The interpreter of an environment of ``configs/environments``; skips the test that needs one
    that was not made.

    ``make test`` leaves these tests out. ``make test-backends`` makes all environments, and none
    may lack there (``RLINF_REQUIRE_ENVS``).
    """
    _refuse_in_core()
    try:
        return resolve_interpreter(name, "this test")
    except ConfigError as error:
        if os.environ.get("RLINF_REQUIRE_ENVS"):
            raise
        pytest.skip(str(error))


def need_vulkan(patch: pytest.MonkeyPatch) -> None:
    """Have simulators find Mesa's Vulkan in software, where ``make vulkan`` has unpacked it; skips
    the test otherwise."""
    _refuse_in_core()
    folder = _environments_folder() / "vulkan"
    if not (folder / "lvp.json").is_file():
        if os.environ.get("RLINF_REQUIRE_ENVS"):
            raise FileNotFoundError(f"{folder}/lvp.json; make vulkan unpacks it")
        pytest.skip(f"there is no {folder}; make vulkan unpacks it")
    patch.setenv("VK_ICD_FILENAMES", str(folder / "lvp.json"))
    patch.setenv("LD_LIBRARY_PATH", str(folder / "usr" / "lib" / "x86_64-linux-gnu"))


def need_apptainer() -> Path:
    """Return the folder where ``make apptainer`` has unpacked Apptainer and an image; skips the
    test otherwise."""
    folder = _environments_folder() / "apptainer"
    if not (folder / "image.sif").is_file():
        pytest.skip(f"there is no {folder}; make apptainer unpacks it")
    return folder


def _environments_folder() -> Path:
    return Path(os.environ.get(ENVIRONMENTS_VARIABLE, "~/.cache/rlinf/envs")).expanduser()


def _refuse_in_core() -> None:
    """Skip a marked test in the core suite; fail an unmarked one, or no target would run it."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if os.environ.get("RLINF_CORE_TESTS"):
        if test and test not in marked:
            raise AssertionError(f"{test} needs an environment: mark it with pytest.mark.backends")
        pytest.skip("make test-backends runs it")


def mark_backends(items: list[pytest.Item]) -> None:
    """Mark the tests that need an environment, themselves or by a fixture or helper."""
    for item in items:
        needing = _functions_that_need(item.path)
        names = {getattr(item, "originalname", item.name), *getattr(item, "fixturenames", ())}
        if names & needing:
            item.add_marker(pytest.mark.backends)
        if item.get_closest_marker("backends"):
            marked.add(item.nodeid)


@cache
def _functions_that_need(path: Path) -> frozenset[str]:
    """The functions of a file that call one of ``NEEDS``, also through other functions."""
    tree = ast.parse(path.read_text())
    found = set(NEEDS)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            helper = ROOT.joinpath(*(node.module or "").split(".")).with_suffix(".py")
            if helper.is_file() and helper != Path(__file__):
                found |= {alias.name for alias in node.names} & _functions_that_need(helper)
    uses = {
        node.name: {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        | {argument.arg for argument in node.args.args}
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    while new := {name for name, used in uses.items() if name not in found and used & found}:
        found |= new
    return frozenset(found)
