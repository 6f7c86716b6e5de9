"""Why a process failed, as its log tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.launcher import failure_reason
from rlinf.errors import EXIT_BAD_INPUT

MESSAGE = "\n".join(["own:Own raised KeyError: 'x'", *(f"  line {n}" for n in range(30)), "end"])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "0.log"
    lines = [f"12:00:00 step {n}" for n in range(30)]
    lines += [f"error: {MESSAGE}", "srun: error: node1: task 0: Exited with exit code 65"]
    path.write_text("\n".join(lines))
    return path


def test_bad_input_is_told_whole_and_without_the_log_around_it(log: Path) -> None:
    assert failure_reason(log, EXIT_BAD_INPUT) == MESSAGE


@pytest.mark.parametrize("code", [1, -9, None])
def test_a_crash_is_told_by_the_end_of_its_log(log: Path, code: int | None) -> None:
    assert failure_reason(log, code).splitlines()[-1].startswith("srun: ")
    assert len(failure_reason(log, code).splitlines()) == 15


def test_bad_input_without_a_message_is_told_by_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("one\ntwo")
    assert failure_reason(tmp_path / "log", EXIT_BAD_INPUT) == "one\ntwo"
    assert failure_reason(tmp_path / "none", EXIT_BAD_INPUT) == ""
