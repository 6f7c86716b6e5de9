"""A stage that lives but makes no progress is ended, and one that makes progress is not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import stages.progress_watchdog
import stages.rank_reports
from rlinf import package_paths
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.errors import EXIT_NO_PROGRESS, NoProgressError
from rlinf.progress import PROGRESS
from stages.progress_watchdog import TIMEOUT_VARIABLE, timeout_from_environment, watch_progress
from stages.rank_reports import AttemptRanks

TIMEOUT_S = 0.4


def endless_loop_of_the_user(seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.01)


def test_an_endless_loop_is_ended_and_its_line_is_in_the_log(
    capfd: pytest.CaptureFixture[str],
) -> None:
    start = time.monotonic()
    with (
        pytest.raises(NoProgressError, match=r"reward/3: no progress for .* min \(cluster\.pro"),
        watch_progress("reward/3", TIMEOUT_S, lambda: False),
    ):
        endless_loop_of_the_user()
    assert TIMEOUT_S < time.monotonic() - start < 10
    written = capfd.readouterr().err
    assert "in endless_loop_of_the_user" in written
    assert "test_progress_watchdog.py" in written


def test_a_stage_of_another_thread_is_ended_too() -> None:
    errors = []

    def run() -> None:
        try:
            with watch_progress("reward/3", TIMEOUT_S, lambda: False):
                endless_loop_of_the_user()
        except NoProgressError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(15)
    assert len(errors) == 1


def test_steps_and_waiting_keep_a_stage_alive() -> None:
    with watch_progress("reward/3", TIMEOUT_S, lambda: False):
        for _ in range(10):
            PROGRESS.mark()
            time.sleep(TIMEOUT_S / 4)
    with watch_progress("reward/3", TIMEOUT_S, lambda: True):
        time.sleep(3 * TIMEOUT_S)
    with watch_progress("reward/3", 0, lambda: False):  # no deadline
        time.sleep(3 * TIMEOUT_S)


def test_an_error_of_the_stage_stays_its_own() -> None:
    with (
        pytest.raises(ValueError, match="own"),
        watch_progress("reward/3", TIMEOUT_S, lambda: False),
    ):
        raise ValueError("own")


def test_no_interrupt_leaves_the_scope() -> None:
    """Stages that end in the moment of their deadline either pass or fail, and later code runs."""
    ended = 0
    for number in range(60):
        try:
            with watch_progress("reward/3", 0.004, lambda: False):
                endless_loop_of_the_user(0.001 * (number % 12))
        except NoProgressError:
            ended += 1
        for _ in range(50):
            pass
    assert ended < 60


BLOCKED = """
import sys, threading
import stages.progress_watchdog as watchdog
watchdog.INTERRUPT_TIMEOUT_S = 0.5
def blocked_by_the_user():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
with watchdog.watch_progress("train/0", 0.5, lambda: False, report=lambda text: print(text)):
    blocked_by_the_user()
"""


def test_a_blocked_thread_ends_its_process_with_the_reason() -> None:
    """A lock is waited for outside Python, where no error can be raised."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        cwd=package_paths.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == EXIT_NO_PROGRESS, done.stderr
    assert "in blocked_by_the_user" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: train/0: no progress for ")


def two_ranks(folder: Path) -> list[AttemptRanks]:
    return [AttemptRanks(folder / "data-a", ProcessGroupInfo(rank, 2)) for rank in (0, 1)]


def test_a_rank_is_stalled_only_if_no_rank_makes_progress(tmp_path: Path) -> None:
    first, second = two_ranks(tmp_path)
    with first.attempt_scope(), second.attempt_scope():
        first.report_progress()
        assert first.has_progressed(60), "the other one does not compute yet"
        second.report_progress()
        long_ago = time.time() - 100
        for rank in (0, 1):
            os.utime(first.ranks_folder / f"{rank}.progress", (long_ago, long_ago))
        assert not first.has_progressed(60)
        assert first.has_progressed(95), "progress is reported a heartbeat late"
        second.report_progress()
        assert first.has_progressed(60)


def test_a_stalled_attempt_writes_the_stacks_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages.rank_reports, "HEARTBEAT_S", 0.02)
    first, second = two_ranks(tmp_path)
    with first.attempt_scope(), second.attempt_scope():
        assert not second.is_stalled()
        first.mark_stalled()
        assert second.is_stalled()
        endless_loop_of_the_user(0.5)
    # Each rank is a process, and writes the stacks of its threads once.
    assert capfd.readouterr().err.count("in endless_loop_of_the_user") == 2


def test_the_deadline_of_a_process_is_that_of_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert timeout_from_environment() == 3600
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0")
    assert timeout_from_environment() == 0
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.5")
    assert timeout_from_environment() == 30


@pytest.mark.timeout(60)
def test_a_rank_that_hangs_from_its_start_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.rank_reports, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(stages.progress_watchdog, "CHECK_INTERVAL_S", 0.05)
    first, _ = two_ranks(tmp_path)
    with (
        first.attempt_scope(),
        pytest.raises(NoProgressError),
        watch_progress("train/0", TIMEOUT_S, lambda: False, first),
    ):
        endless_loop_of_the_user()


PROFILED = """
import cProfile, time
from stages.progress_watchdog import watch_progress
for case in range(2):
    try:
        with watch_progress("reward/3", 0.4, lambda: False):
            while case:
                time.sleep(0.01)
    except Exception as error:
        assert "no progress" in str(error)
profile = cProfile.Profile()
profile.runcall(lambda: [time.monotonic() for _ in range(1000)])
print("ok")
"""


def test_a_watched_stage_leaves_the_interpreter_as_it_was() -> None:
    """A flag that stays set would let a profiler hang in CPython 3.11."""
    command = [sys.executable, "-c", PROFILED]
    done = subprocess.run(
        command, cwd=package_paths.ROOT, timeout=60, capture_output=True, text=True, check=False
    )
    assert done.stdout == "ok\n", done.stderr
