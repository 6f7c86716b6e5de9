"""Bad command lines: groups and keys for Hydra, and commands on the wrong kind of path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands import cli
from rlinf.errors import EXIT_BAD_INPUT
from rlinf.launch import main as launch
from tests.bad_input.door import assert_mentions, tree

Words = list[str]
LINES: list[tuple[str, Words, Words]] = [
    ("experiment", ["experiment=nope"], ["experiment=nope", "arithmetic_grpo"]),
    ("near", ["experiment=arithmetic_grop"], ["did you mean 'arithmetic_grpo'"]),
    ("algorithm", ["algorithm=trpo"], ["algorithm=trpo", "grpo"]),
    ("task", ["task=arithmetics"], ["task=arithmetics", "did you mean 'arithmetic'"]),
    ("model", ["model=smal"], ["model=smal", "did you mean 'small'"]),
    ("engine", ["engine=tgi"], ["engine=tgi", "transformers"]),
    ("reward", ["reward=scores"], ["reward=scores", "did you mean 'score'"]),
    ("trainer", ["trainer=zero"], ["trainer=zero", "fsdp"]),
    ("cluster", ["cluster=slrum"], ["cluster=slrum", "did you mean 'slurm'"]),
    ("cluster-list", ["cluster=[]"], ["cluster"]),
    ("key", ["experiment=arithmetic_grpo", "sede=1"], ["sede: unknown key", "'seed'"]),
    ("misspelt-group", ["experimnt=arithmetic_grpo"], ["experimnt: unknown key"]),
    ("flag", ["rollout.batch_size=true"], ["rollout.batch_size", "integer"]),
    ("quoted", ["rollout.batch_size='8'"], ["rollout.batch_size", "integer"]),
    ("clip", ["algorithm.clip_ratio_low=5"], ["algorithm.clip_ratio_low"]),
    ("bracket", ["task.digits=[1,2"], ["task.digits"]),
    ("interpolation", ["seed=${nothing.here}"], ["nothing"]),
    ("deletion", ["~nothing"], ["nothing"]),
    ("launcher", ["hydra/launcher=submitit_slurm"], ["hydra/launcher", "-m"]),
    ("missing", ["experiment=jsonl_grpo"], ["must be given"]),
    ("both", ["--redo", "--keep"], ["--redo", "--keep"]),
    ("sweep", ["-m", "algorithm=grpo,trpo"], ["algorithm=trpo"]),
    ("sweep-value", ["-m", "rollout.batch_size=4,0"], ["rollout.batch_size"]),
]
SHOWN = 8
"""So many of these, and of those below, are given to a process as a user would."""


@pytest.mark.parametrize(
    ("words", "expected"), [pytest.param(*entry[1:], id=entry[0]) for entry in LINES]
)
def test_a_bad_command_line(
    words: Words, expected: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = f"run.root={tmp_path / 'runs'}"
    assert launch([*words, root]) == EXIT_BAD_INPUT
    assert_mentions(error_of(capsys.readouterr().err), *expected)
    assert tree(tmp_path) == []


def error_of(printed: str) -> str:
    """The error in what a command printed."""
    _, separator, message = printed.partition("error: ")
    assert separator, printed
    return message


COMMANDS: list[tuple[str, Words, Words]] = [
    ("resume-folder", ["resume", "{empty}"], ["{empty}", "run directory"]),
    ("resume-file", ["resume", "{file}"], ["{file}"]),
    ("resume-nothing", ["resume", "{none}"], ["{none}"]),
    ("resume-model", ["resume", "{model}"], ["{model}"]),
    ("status-folder", ["status", "{empty}"], ["{empty}", "run directory"]),
    ("status-file", ["status", "{file}"], ["{file}"]),
    ("status-nothing", ["status", "{none}"], ["{none}"]),
    ("report-folder", ["report", "{empty}"], ["{empty}", "run directory"]),
    ("report-file", ["report", "{file}"], ["{file}"]),
    ("export-folder", ["export", "{empty}", "{none}"], ["{empty}"]),
    ("export-file", ["export", "{file}", "{none}"], ["{file}"]),
    ("scale-folder", ["scale", "{empty}", "rollout+1"], ["{empty}", "run directory"]),
    ("stop-folder", ["stop", "{empty}"], ["{empty}", "run directory"]),
    ("replan-folder", ["replan", "{empty}"], ["{empty}", "run directory"]),
    ("replan-file", ["replan", "{file}"], ["{file}"]),
    ("plan-folder", ["plan", "{empty}"], ["{empty}", "run directory"]),
    ("plan-profile", ["plan", "experiment=arithmetic_grpo", "--profile", "{none}"], ["{none}"]),
    ("plan-binary", ["plan", "experiment=arithmetic_grpo", "--profile", "{file}"], ["{file}"]),
    ("plan-experiment", ["plan", "experiment=nope"], ["experiment=nope"]),
    ("profile-folder", ["profile", "{empty}"], ["{empty}", "run directory"]),
    ("simulate-nothing", ["simulate", "nothing"], ["nothing"]),
    ("simulate-folder", ["simulate", "{empty}"], ["{empty}"]),
    ("simulate-binary", ["simulate", "{file}"], ["{file}"]),
    ("inventory-nothing", ["inventory", "--from", "{none}"], ["{none}"]),
    ("inventory-binary", ["inventory", "--from", "{file}"], ["{file}"]),
    ("inventory-folder", ["inventory", "--from", "{empty}"], ["{empty}"]),
]


@pytest.fixture
def places(tmp_path: Path, checkpoint: Path) -> Callable[[Words], Words]:
    """Puts paths into words: an empty folder, a binary file, a model, and nothing."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    known = {
        "empty": tmp_path / "empty",
        "file": tmp_path / "binary.yaml",
        "none": tmp_path / "none",
        "model": checkpoint,
    }
    return lambda words: [word.format(**known) for word in words]


@pytest.mark.parametrize(
    ("words", "expected"), [pytest.param(*entry[1:], id=entry[0]) for entry in COMMANDS]
)
def test_a_command_on_the_wrong_kind_of_path(
    words: Words,
    expected: Words,
    places: Callable[[Words], Words],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = tree(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(places(words))
    assert ended.value.code == EXIT_BAD_INPUT
    assert_mentions(error_of(capsys.readouterr().err), *places(expected))
    assert tree(tmp_path) == before


PROCESSES: list[Any] = [
    *(pytest.param("rlinf.launch", *entry[1:], id=entry[0]) for entry in LINES[:SHOWN]),
    *(pytest.param("rlinf", *entry[1:], id=entry[0]) for entry in COMMANDS[::2][:12]),
]


@pytest.mark.parametrize(("module", "words", "expected"), PROCESSES)
def test_as_a_command(
    module: str, words: Words, expected: Words, places: Callable[[Words], Words], tmp_path: Path
) -> None:
    before = tree(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", module, *places(words)],
        capture_output=True,
        text=True,
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert ended.returncode == EXIT_BAD_INPUT, ended.stderr
    assert_mentions(error_of(ended.stderr), *places(expected))
    assert tree(tmp_path) == before
