"""Every command of README and docs is run, here or by another test, or named with a reason."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline.commands.cli import app
from pipeline.commands.experiment import compose, run_experiment
from pipeline.run import effective_settings
from rlinf.config import RunConfig, validate
from rlinf.hydra_config import force_add
from tests.conftest import QUIET, TINY
from tests.docs.commands import known, shown
from tests.docs.figures import DOCS, ROOT

KNOWN = known()
RUN, SLOW, FINISHED = KNOWN["run"], KNOWN["slow"], KNOWN["finished"]
ELSEWHERE: dict[str, str] = KNOWN["elsewhere"]
NOT_RUN: dict[str, list[str]] = KNOWN["not_run"]
ONLY_COMPOSED = [
    command
    for commands in NOT_RUN.values()
    for command in commands
    if command.startswith("rlinf run")
]
SHORT_TEXT = [
    word.removeprefix("++")
    for word in TINY
    if not word.startswith(("++run.name", "iterations", "++algorithm."))
]
SHORT_STEPS = [
    "rollout.batch_size=4",
    "rollout.horizon=16",
    "evaluate.samples=2",
    "++evaluate.horizon=16",
]
ACTING = ("cartpole", "cheetah", "pendulum", "metaworld", "libero", "franka")
"""Parts of the names of experiments with simulators."""


def words_of(command: str) -> list[str]:
    """Return the overrides of a command, with the first value of what a sweep varies."""
    command = command.replace("$ARM", KNOWN["arm"])
    words = shlex.split(command)[2:]
    words = [word for word in words if word not in ("-m", "--redo", "--keep", "--cfg", "job")]
    if "--config-dir" in words:
        place = words.index("--config-dir")
        del words[place : place + 2]
    swept = re.compile(r"(optimizer\.lr|seed)=[^\[{]*,")
    return [
        word.split(",")[0] if swept.match(word) else word
        for word in words
        if not word.startswith("hydra/")
    ]


def composed(command: str, *further: str) -> dict[str, Any]:
    """Return the configuration of a ``rlinf run`` of the pages."""
    folders = [str(DOCS / "examples" / "configs")] if "--config-dir" in command else []
    return compose([force_add(word) for word in [*words_of(command), *further]], folders)


def short(command: str) -> list[str]:
    """Return overrides that make a run of seconds of a command."""
    acts = any(name in command for name in ACTING)
    steps = [word for word in SHORT_STEPS if not ("_sac" in command and "rollout" in word)]
    if "cheetah" in command or "pendulum_flow" in command:
        steps.append("algorithm.minibatches=2")
    return ["iterations=1", *QUIET, *(steps if acts else SHORT_TEXT)]


def test_every_command_is_run_or_named_with_a_reason() -> None:
    listed = [*RUN, *SLOW, *FINISHED, *ELSEWHERE]
    listed += [command for commands in NOT_RUN.values() for command in commands]
    assert sorted(set(shown()) - set(listed)) == []
    assert sorted(set(listed) - set(shown())) == []
    assert len(listed) == len(set(listed))


def test_commands_that_other_tests_run_are_in_them() -> None:
    assert {test for test in ELSEWHERE.values() if not (ROOT / test).exists()} == set()


@pytest.mark.parametrize("command", ONLY_COMPOSED)
def test_the_configuration_of_what_is_not_run_is_valid(command: str) -> None:
    effective_settings(validate(RunConfig, composed(command)))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "command", [*RUN, *(pytest.param(command, marks=pytest.mark.slow) for command in SLOW)]
)
def test_a_run_of_the_pages_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    values = composed(command, *short(command), f"run.root={tmp_path}")
    run_experiment(values)
    (run,) = (path for path in tmp_path.iterdir() if (path / "run.json").exists())
    assert (run / "it/0000/sync/manifest.json").exists()


@pytest.mark.parametrize("command", FINISHED)
def test_a_command_on_a_finished_run_works(
    command: str, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_run, tmp_path / "runs" / "tiny")
    monkeypatch.chdir(tmp_path)
    words = [re.sub(r"^runs/\w+$", "runs/tiny", word) for word in shlex.split(command)[1:]]
    done = CliRunner().invoke(app, [word for word in words if word != "--watch"])
    assert done.exit_code == 0, done.output


def test_a_configuration_is_printed() -> None:
    call = [sys.executable, "-m", "rlinf.launch", "experiment=cartpole_ppo", "--cfg", "job"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "rollout:" in done.stdout
