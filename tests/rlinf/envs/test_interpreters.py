"""A simulator under an interpreter of its own: its packages, and nothing of ours but one file."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.envs.gym import GymConfig, GymEnvironment
from rlinf.errors import ConfigError, InputError
from rlinf.interpreters import (
    ENVIRONMENTS_VARIABLE,
    INTERPRETERS_VARIABLE,
    check_interpreter,
    resolve_interpreter,
)
from tests.rlinf.envs.test_subprocess_env import CARTPOLE, contents, engine_for, run, simulators

WORLD = """
import json, sys, threading
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Telling(CartPoleEnv):
    def __init__(self, told):
        super().__init__()
        self.told = told
    def reset(self, **options):
        names = sorted({name.partition(".")[0] for name in sys.modules})
        ours = [name for name in sys.modules if name.partition(".")[0] == "rlinf"]
        with open(self.told, "w") as file:
            told = {"python": sys.executable, "prefix": sys.prefix, "modules": names, "ours": ours}
            json.dump(told, file)
        return super().reset(**options)

gymnasium.register("Telling-v0", Telling, max_episode_steps=500)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a virtual environment that finds this one's packages, but not the one under test."""
    folder = tmp_path_factory.mktemp("envs") / "small"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    (site / "theirs.pth").write_text(str(Path(numpy.__file__).parents[1]) + "\n")
    return str(folder / "bin" / "python")


def test_a_worker_runs_under_the_interpreter_and_imports_nothing_of_ours(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "telling.py").write_text(textwrap.dedent(WORLD))
    monkeypatch.syspath_prepend(str(tmp_path))
    values = tmp_path / "told.json"
    task = CARTPOLE.model_copy(
        update={"id": "telling:Telling-v0", "kwargs": {"told": str(values)}, "python": python}
    )
    engine = engine_for(CARTPOLE, tmp_path)
    with simulators(task) as environment:
        found = run(environment, engine)
    result = json.loads(values.read_text())
    assert result["python"] == python
    assert result["prefix"] == str(Path(python).parent.parent)
    assert result["ours"] == []
    assert not {"torch", "pydantic", "msgpack", "rlinf", "stages"} & set(result["modules"])
    assert {"numpy", "gymnasium"} <= set(result["modules"])
    with simulators(CARTPOLE) as here:
        expected = run(here, engine)
    assert contents(found) == contents(expected), "which interpreter steps it changes no byte"


def test_spaces_are_looked_at_under_the_interpreter(python: str) -> None:
    task = CARTPOLE.model_copy(update={"python": python})
    assert GymEnvironment.read_spec(task) == GymEnvironment.read_spec(CARTPOLE)
    wrong = GymConfig(id="CartPoel-v1", python=python)
    with pytest.raises(InputError, match=r"task\.id: cannot make"):
        GymEnvironment.read_spec(wrong)


def test_an_interpreter_is_a_path_or_the_name_of_an_environment(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_interpreter(python, "task.python") == python
    monkeypatch.setenv(ENVIRONMENTS_VARIABLE, str(Path(python).parents[2]))
    assert resolve_interpreter("small", "task.python") == python
    monkeypatch.setenv(ENVIRONMENTS_VARIABLE, str(tmp_path))
    monkeypatch.setenv(INTERPRETERS_VARIABLE, json.dumps({"small": python}))
    assert resolve_interpreter("small", "task.python") == python


def test_an_interpreter_that_is_not_there_is_refused_by_its_key(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENTS_VARIABLE, str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"task\.python: there is no interpreter .*make env NAME=x"
    ):
        resolve_interpreter("x", "task.python")
    with pytest.raises(ConfigError, match=r"engine\.python: there is no interpreter /no/python"):
        check_interpreter("/no/python", "engine.python", ["numpy"])
    with pytest.raises(
        ConfigError, match=r"task\.python: .*small/bin/python lacks the package nothere"
    ):
        check_interpreter(python, "task.python", ["numpy", "nothere"])
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match=r"task\.python: .*broken does not run"):
        check_interpreter(str(broken), "task.python", [])
