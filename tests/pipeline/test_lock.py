"""One driver has a run, whoever starts at once and however the last one ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from pipeline import lock
from pipeline.lock import LOCK_FILE, LockOwner, RunLock, find_live_owner, orphaned_lock_files
from rlinf.errors import RunLockedError

STARTS, ROUNDS = 8, 30


def note(folder: Path, owner: LockOwner, age_s: float = 0) -> Path:
    path = folder / LOCK_FILE
    path.write_text(json.dumps(asdict(owner)))
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def elsewhere(owner: LockOwner) -> LockOwner:
    return replace(owner, host="another", boot_id="of another machine")


def start(folder: Path, number: int, together: Barrier) -> None:
    for turn in range(ROUNDS):
        path = folder / str(turn) / LOCK_FILE
        together.wait(60)
        held = None
        try:
            held = RunLock(path)
            (path.parent / f"has-{number}").touch()
        except RunLockedError:
            pass
        together.wait(60)
        if held is not None:
            held.release()


@pytest.mark.parametrize("before", ["nothing", "a dead one's", "a dead claim"])
def test_of_eight_that_start_at_once_one_is_the_driver(tmp_path: Path, before: str) -> None:
    dead = replace(LockOwner.current(), start_ticks=1, token="dead")
    for turn in range(ROUNDS):
        folder = tmp_path / str(turn)
        folder.mkdir()
        if before != "nothing":
            note(folder, dead, age_s=1000)
        if before == "a dead claim":
            (folder / f".{LOCK_FILE}.dead").write_text(json.dumps(asdict(replace(dead, token="x"))))
    context = multiprocessing.get_context("fork")
    together = context.Barrier(STARTS)
    processes = [
        context.Process(target=start, args=(tmp_path, number, together)) for number in range(STARTS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * STARTS
    owners = [len(list((tmp_path / str(turn)).glob("has-*"))) for turn in range(ROUNDS)]
    assert owners == [1] * ROUNDS
    left = {path.name for path in tmp_path.glob("*/*") if not path.name.startswith("has-")}
    assert not left


def test_a_process_that_has_the_number_of_a_dead_driver_is_none(tmp_path: Path) -> None:
    path = note(
        tmp_path, replace(LockOwner.current(), start_ticks=LockOwner.current().start_ticks - 1)
    )
    assert find_live_owner(path) is None
    RunLock(path).release()
    assert not path.exists()


def test_a_driver_of_another_machine_lives_while_it_touches_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the filesystem's clock: this machine's may be wrong."""
    monkeypatch.setattr(time, "time", lambda: 1e12)
    path = note(tmp_path, elsewhere(LockOwner.current()))
    os.utime(path)
    with pytest.raises(RunLockedError, match="on another"):
        RunLock(path)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    os.utime(path, ns=(0, path.stat().st_mtime_ns - int(lock.STALE_S * 1e9 + 1e9)))
    RunLock(path).release()


def test_the_same_number_in_another_space_of_numbers_is_another_process(tmp_path: Path) -> None:
    path = note(tmp_path, replace(LockOwner.current(), pid_namespace=1, start_ticks=5))
    assert find_live_owner(path) is not None, "its file was just touched"


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff\xfe", b'{"host": 1, "pid": "x", "token": 3}']
)
def test_a_damaged_lock_is_named(
    tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / LOCK_FILE
    path.write_bytes(text)
    assert find_live_owner(path) is None
    assert "driver.json: damaged" in caplog.text
    with pytest.raises(RunLockedError, match=r"driver\.json: damaged .* if no driver runs, remove"):
        RunLock(path)
    assert path.read_bytes() == text


def test_who_was_replaced_leaves_the_others_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.01)
    mine = RunLock(tmp_path / LOCK_FILE)
    path = note(tmp_path, elsewhere(replace(LockOwner.current(), token="of another")))
    time.sleep(0.2)
    with pytest.raises(RunLockedError, match="took over"):
        mine.check()
    mine.release()
    assert LockOwner.read(path).token == "of another"


def test_what_dead_drivers_left_is_found_and_what_living_ones_have_is_not(tmp_path: Path) -> None:
    dead = asdict(replace(LockOwner.current(), start_ticks=1))
    for name in (f".{LOCK_FILE}.new-1", f".{LOCK_FILE}.token"):
        (tmp_path / name).write_text(json.dumps(dead))
    (tmp_path / f".{LOCK_FILE}.new-2").write_text(json.dumps(asdict(LockOwner.current())))
    assert len(orphaned_lock_files(tmp_path)) == 2


def test_a_killed_driver_leaves_a_lock_that_does_not_hold(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from pipeline.lock import RunLock
RunLock(Path({str(tmp_path / LOCK_FILE)!r}))
print("has it", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"has it\n"
    with pytest.raises(RunLockedError, match=f"process {child.pid}"):
        RunLock(tmp_path / LOCK_FILE)
    child.send_signal(signal.SIGKILL)
    child.wait()
    RunLock(tmp_path / LOCK_FILE).release()
