"""A run's keys are made once and belong to its owner."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlinf.channels.curve_sockets import KEYS_FILE, run_keys
from rlinf.errors import InputError


def test_all_processes_of_a_run_have_the_same_keys(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(run_keys, [tmp_path / "run"] * 16))
    assert len(found) == 1
    assert len(set(found.pop())) == 4
    assert [path.name for path in (tmp_path / "run").iterdir()] == [KEYS_FILE]


def test_nobody_else_can_read_them(tmp_path: Path) -> None:
    run_keys(tmp_path / "run")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "run" / KEYS_FILE).stat().st_mode) == 0o600


def test_keys_that_others_can_read_are_refused(tmp_path: Path) -> None:
    run_keys(tmp_path)
    (tmp_path / KEYS_FILE).chmod(0o640)
    with pytest.raises(InputError, match="belong to you alone"):
        run_keys(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"host_public": 1}'])
def test_damaged_keys_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / KEYS_FILE).write_text(text)
    (tmp_path / KEYS_FILE).chmod(0o600)
    with pytest.raises(InputError, match="damaged"):
        run_keys(tmp_path)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_change_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    with pytest.raises(InputError, match="others may put files there"):
        run_keys(tmp_path / "run")
    assert not (tmp_path / "run" / KEYS_FILE).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", 12345, 12345)
    with pytest.raises(InputError, match="owner 12345"):
        run_keys(tmp_path / "run")


def test_a_link_in_place_of_the_keys_is_refused(tmp_path: Path) -> None:
    run_keys(tmp_path / "other")
    run_keys(tmp_path / "run")
    (tmp_path / "run" / KEYS_FILE).unlink()
    (tmp_path / "run" / KEYS_FILE).symlink_to(tmp_path / "other" / KEYS_FILE)
    with pytest.raises(InputError, match="is a link"):
        run_keys(tmp_path / "run")
