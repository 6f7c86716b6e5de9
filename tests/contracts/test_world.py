"""What holds of every module of worlds, without its simulator."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from pipeline.commands.experiment import compose_words
from rlinf.envs.gym import GymConfig
from rlinf.envs.simulators import simulators
from rlinf.envs.simulators.requirements import get_requirements

OF_GYMNASIUM = "cartpole"
GIVEN = {"franka": ["task.kwargs.host=127.0.0.1", "task.kwargs.box=[[0,0,0],[1,1,1]]"]}
"""What a person has to say."""


def file_of(world: str) -> Path:
    module = importlib.import_module(simulators.target(world).partition(":")[0])
    assert module.__file__ is not None
    return Path(module.__file__)


def imported(file: Path) -> set[str]:
    """Packages that a file imports when it is imported, by files beside it too."""
    tree = ast.parse(file.read_text(), feature_version=(3, 9))
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level < 2, "files beside it alone"
            if node.level:
                assert node.module is not None
                names |= imported(file.with_name(f"{node.module}.py"))
            else:
                names.add((node.module or "").split(".")[0])
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [c for c in calls if any(k.arg == "strict" for k in c.keywords)], "zip of 3.10"
    return names


@pytest.mark.parametrize("world", simulators.names())
def test_it_imports_only_numpy_and_the_standard_library_and_is_python_3_9(world: str) -> None:
    assert imported(file_of(world)) <= {"numpy", *sys.stdlib_module_names}


@pytest.mark.parametrize("world", simulators.names())
def test_it_says_what_it_needs_and_has_a_configuration(world: str) -> None:
    needs = get_requirements(world)
    assert needs.packages
    task = OF_GYMNASIUM if world == "gymnasium" else world
    values = compose_words([f"task={task}", *GIVEN.get(world, [])])["task"]
    config = GymConfig.model_validate({k: v for k, v in values.items() if k != "name"})
    assert config.simulator == world
    assert needs.assets.keys() <= config.kwargs.keys(), "keys to fill in are there to be seen"
    assert len(needs.missing_assets(config.kwargs)) == len(needs.assets)
    if needs.batched:
        assert not config.double_buffer
