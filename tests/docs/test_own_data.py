"""The commands of the tutorial on own data run one after the other, on a small model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import commands_of
from tests.docs.figures import DOCS, ROOT
from tests.pipeline.helpers import language_model

PAGE = DOCS / "start" / "own-data.md"
MOST_COMMANDS = 6
"""Commands from a clone to the first trained iteration."""
CONVERT = "rlinf convert"


def test_the_first_iteration_needs_few_commands() -> None:
    commands = commands_of(PAGE.read_text())
    first = next(i for i, command in enumerate(commands) if command.startswith("rlinf run"))
    assert commands[0].startswith("git clone")
    assert first + 1 <= MOST_COMMANDS


@pytest.mark.timeout(400)
def test_the_commands_of_the_page_run_in_order(tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="the extra 'math' is not installed")
    language_model(tmp_path / "models" / "smollm2-135m", max_position_embeddings=1024)
    (tmp_path / "docs").symlink_to(DOCS)
    (function,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "rewards.py").write_text(function)
    path = os.pathsep.join([str(ROOT), str(ROOT / "launchers" / "plugins")])
    outputs = {}
    for command in commands_of(PAGE.read_text()):
        if not command.startswith("rlinf ") or command.startswith(CONVERT):
            continue
        done = subprocess.run(
            [sys.executable, "-m", "rlinf", *shlex.split(command)[1:]],
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        outputs[command.split()[1]] = done.stdout + done.stderr
    assert "held-out score" in outputs["run"]
    assert "iteration 10/10" in outputs["resume"]
    assert "Ada has 2 apples" in outputs["data"]
    assert "avg@k" in outputs["evaluate"]
    assert (tmp_path / "runs/first/report/report.html").exists()
    card = (tmp_path / "first-model/README.md").read_text()
    assert "| `task.train` | docs/examples/problems/train.jsonl |" in card
    assert "## Held-out scores" in card
    assert (tmp_path / "runs/short/it/0000/sync/manifest.json").exists()
