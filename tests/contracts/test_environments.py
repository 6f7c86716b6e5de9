"""Parts whose packages stand in an environment of their own keep their contract there."""

from __future__ import annotations

import importlib.util
import subprocess
from typing import Any

import pytest
import yaml

from rlinf import package_paths
from rlinf.engines import engines
from rlinf.trainers import trainers
from tests.environments import need_environment


def elsewhere(registry: Any) -> list[str]:
    """Parts of a registry whose packages are not in this environment."""
    return [
        name
        for name in registry.names()
        for cls in [registry.get(name)]
        if not all(
            importlib.util.find_spec(package) for package in cls.required_packages(cls.Config())
        )
    ]


def passes(environment: str, files: list[str], which: str) -> None:
    """Run some tests of these files in an environment; all must pass."""
    program = [need_environment(environment), "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [*program, *(f"tests/{file}" for file in files), "-k", which],
        cwd=package_paths.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("name", elsewhere(trainers))
def test_a_trainer_works_in_its_environment(name: str) -> None:
    which = f"{name} and (depend_on_the_cut or whole_state)"
    passes(name, ["contracts/test_trainer.py"], which)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", elsewhere(trainers))
def test_a_trainer_keeps_the_whole_contract_in_its_environment(name: str) -> None:
    passes(name, ["contracts/test_trainer.py"], name)


def environment_of(engine: str) -> str:
    """The one that the engine's YAML names."""
    settings = yaml.safe_load(
        (package_paths.ROOT / "configs" / "engine" / f"{engine}.yaml").read_text()
    )
    return str(settings["python"])


@pytest.mark.parametrize("name", elsewhere(engines))
def test_an_engine_works_in_its_environment(name: str) -> None:
    which = f"{name} and (log_probs_are_those or taken_one_at_a_time or given_up or arrive_late)"
    passes(environment_of(name), ["contracts/test_engine.py"], which)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", elsewhere(engines))
def test_an_engine_keeps_the_whole_contract_in_its_environment(name: str) -> None:
    files = ["test_external.py", "test_in_process.py"]
    files = ["contracts/test_engine.py", *(f"rlinf/engines/{file}" for file in files)]
    passes(environment_of(name), files, name)
