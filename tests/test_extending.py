"""The examples of the pages on extending: shown as they are, and run as users of the wheel do."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlinf import package_paths
from rlinf.errors import EXIT_BAD_INPUT
from tests.conftest import TINY
from tests.pipeline.helpers import contents
from tests.wheel import Installed, call

EXAMPLES = package_paths.ROOT / "docs" / "examples"
NAMES = ("reward", "algorithm", "environment", "own-parts")
PAGES = [package_paths.ROOT / "docs" / "howto" / f"{name}.md" for name in NAMES]
PAGE = "".join(page.read_text() for page in PAGES)
FILES = sorted(
    path
    for path in EXAMPLES.rglob("*")
    # The files for lm-eval extend no part of rlinf.
    if path.suffix in (".py", ".yaml") and "lm_eval" not in path.parts
)
COMMANDS = [
    shlex.split(line)
    for shown in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in shown.splitlines()
    if "mylab." in line or "--config-dir" in line
]
HERE = [words for words in COMMANDS if "cluster=slurm" not in words]
JOBS = [words for words in COMMANDS if "cluster=slurm" in words]
BRIEF = next(words for words in HERE if "reward.name=mylab.reward:Brief" in words)
ACTING = ["rollout.batch_size=4", "rollout.horizon=16", "evaluate.samples=2"]
WRITING = [
    word.removeprefix("++")
    for word in TINY
    if not word.startswith(("++run.name", "iterations", "++algorithm."))
]
MOST_LINES = 66


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_page_shows_the_files_as_they_are(path: Path) -> None:
    name = path.relative_to(EXAMPLES).as_posix()
    kind = "python" if path.suffix == ".py" else "yaml"
    assert f"`{name}`\n\n```{kind}\n{path.read_text()}```\n" in PAGE
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_the_page_names_every_kind_and_every_grain() -> None:
    assert len(HERE) == 10
    assert len(JOBS) == 2


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder of the user's own."""
    return Path(shutil.copytree(EXAMPLES, tmp_path / "mine"))


def shortened(words: list[str]) -> list[str]:
    """The arguments of a command of the page, for a run of seconds."""
    acts = "experiment=cartpole_ppo" in words
    return [*words[1:], "iterations=1", "log.trackers=[]", *(ACTING if acts else WRITING)]


def clean() -> dict[str, str]:
    """An environment that leads to nothing of the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _cases() -> list[Any]:
    """One of them, the quickest, in the usual suite."""
    slow = {True: [pytest.mark.slow], False: []}
    return [pytest.param(w, marks=slow[w is not BRIEF], id=" ".join(w)) for w in HERE]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", _cases())
def test_a_command_of_the_page_runs_with_the_wheel(
    installed: Installed, mine: Path, words: list[str]
) -> None:
    call(installed.rlinf, *shortened(words), cwd=mine, env=clean())
    (run,) = (mine / "runs").iterdir()
    assert (run / "it/0000/sync/manifest.json").exists()
    named = [word.partition("=")[2] for word in words if ":" in word]
    kept = (run / "config.yaml").read_text()
    assert all(name in kept for name in named)


@pytest.mark.slow
def test_the_example_of_a_notebook_runs_with_the_wheel(installed: Installed, mine: Path) -> None:
    script, experiment = mine / "notebook.py", mine / "configs/experiment/reversal.yaml"
    experiment.write_text(
        experiment.read_text().replace("run:\n", "iterations: 1\nsft: {max_steps: 3}\nrun:\n")
    )
    printed = call(installed.python, script, cwd=mine, env=clean())
    assert "(1, " in printed


@pytest.mark.slow
def test_an_edited_class_does_not_go_on_with_stale_results(
    installed: Installed, mine: Path
) -> None:
    words = BRIEF
    call(installed.rlinf, *shortened(words), cwd=mine, env=clean())
    reward = mine / "mylab/reward.py"
    reward.write_text(reward.read_text().replace("s - self", "s - 2 * self"))

    def again(*more: str) -> subprocess.CompletedProcess[str]:
        call_ = [str(installed.rlinf), *shortened(words), *more]
        return subprocess.run(
            call_, cwd=mine, env=clean(), capture_output=True, text=True, check=False
        )

    refused = again()
    assert refused.returncode == EXIT_BAD_INPUT
    assert "mylab.reward" in refused.stderr
    before = contents(mine / "runs/brief")
    assert not again("--redo").returncode
    after = contents(mine / "runs/brief")
    assert before["it/0000/rollout"] == after["it/0000/rollout"]
    assert before["it/0000/reward"] != after["it/0000/reward"]
