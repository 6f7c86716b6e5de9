"""Parts whose packages stand in an environment of their own keep their contract there."""

from __future__ import annotations

import importlib.util
import subprocess

import pytest

from rlinf import tree
from rlinf.trainers import trainers
from tests.environments import need_environment

ELSEWHERE = [
    name
    for name in trainers.names()
    for cls in [trainers.get(name)]
    if not all(importlib.util.find_spec(package) for package in cls.packages(cls.Config()))
]


def keeps_contract(name: str, tests: str) -> None:
    """Run those tests of the contract that are of this name, where its packages are."""
    program = [need_environment(name), "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [*program, "tests/contracts/test_trainer.py", "-k", f"{name} and ({tests})"],
        cwd=tree.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_trainer_works_in_its_environment(name: str) -> None:
    keeps_contract(name, "depend_on_the_cut or whole_state")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_trainer_keeps_the_whole_contract_in_its_environment(name: str) -> None:
    keeps_contract(name, "test")
