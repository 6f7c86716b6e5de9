"""A run's keys are made once and belong to its owner."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlinf.channels.keys import FILE, run_keys
from rlinf.errors import InputError


def test_all_processes_of_a_run_have_the_same_keys(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(run_keys, [tmp_path / "run"] * 16))
    assert len(found) == 1
    assert len(set(found.pop())) == 4
    assert [path.name for path in (tmp_path / "run").iterdir()] == [FILE]


def test_nobody_else_can_read_them(tmp_path: Path) -> None:
    run_keys(tmp_path / "run")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "run" / FILE).stat().st_mode) == 0o600


def test_keys_that_others_can_read_are_refused(tmp_path: Path) -> None:
    run_keys(tmp_path)
    (tmp_path / FILE).chmod(0o640)
    with pytest.raises(InputError, match="belong to you alone"):
        run_keys(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"host_public": 1}'])
def test_damaged_keys_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    (tmp_path / FILE).chmod(0o600)
    with pytest.raises(InputError, match="damaged"):
        run_keys(tmp_path)
