"""A stage that is longer than its job may be is not begun for ever."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import prepare_run
from rlinf.errors import EXIT_BAD_INPUT, EXIT_REQUEUE
from slurm.stop_signals import StopFlag
from stages.__main__ import main
from stages.layout import CONFIG_FILE
from stages.timeout_retries import MAX_TIMEOUTS, PROGRESS_FOLDER, TIMEOUTS_FILE

Compose = Callable[..., dict[str, Any]]


def begin(
    monkeypatch: pytest.MonkeyPatch, run: Path, stage: str, attempt: int, left_s: float
) -> int:
    """One life of a job whose time ends in so many seconds."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_START_TIME", str(int(time.time()) - 3600))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + left_s)))
    monkeypatch.setenv("RLINF_ATTEMPT", f"7-{attempt}")
    return main([stage, "--config", str(run / CONFIG_FILE), "--out", str(run / stage)])


def test_a_stage_that_keeps_nothing_is_given_up(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It evaluates once in a thousand steps, which is never."""
    run = prepare_run(compose("sft.max_steps=100000", "sft.eval_every=100000")).folder
    codes = [begin(monkeypatch, run, "sft", n, 3) for n in range(MAX_TIMEOUTS)]
    assert codes == [EXIT_REQUEUE] * (MAX_TIMEOUTS - 1) + [EXIT_BAD_INPUT]
    assert "stages.sft.time_limit_min" in capsys.readouterr().err
    assert begin(monkeypatch, run, "sft", MAX_TIMEOUTS, 3) == EXIT_REQUEUE, "with more time, say"


def test_a_stage_that_goes_on_is_not(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time ends as soon as it has saved something, however busy the machine is."""
    words = ["sft.max_steps=100000", "sft.target_score=1.0"]
    run = prepare_run(compose(*words, "sft.eval_every=1", "evaluate.samples=2")).folder
    saved = run / "sft" / PROGRESS_FOLDER

    def times() -> list[int]:
        return sorted(file.stat().st_mtime_ns for file in saved.glob("*"))

    for attempt in range(MAX_TIMEOUTS + 1):
        before = times()
        with monkeypatch.context() as patch:
            patch.setattr(StopFlag, "is_set", lambda self, before=before: times() != before)
            patch.setattr(StopFlag, "is_time_limit", StopFlag.is_set)
            assert begin(monkeypatch, run, "sft", attempt, 600) == EXIT_REQUEUE
    assert not (run / "sft" / TIMEOUTS_FILE).exists()
    shutil.rmtree(run)


def test_a_preemption_does_not_count(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals come until the attempt has ended; those that come too early or late do nothing."""
    ended = threading.Event()

    def warn() -> None:
        while not ended.wait(0.5):
            os.kill(os.getpid(), signal.SIGTERM)

    run = prepare_run(compose("sft.max_steps=100000", "sft.eval_every=100000")).folder
    usual = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        for attempt in range(MAX_TIMEOUTS + 1):
            ended.clear()
            warning = threading.Thread(target=warn, daemon=True)
            warning.start()
            assert begin(monkeypatch, run, "sft", attempt, 600) == EXIT_REQUEUE
            ended.set()
            warning.join()
    finally:
        ended.set()
        signal.signal(signal.SIGTERM, usual)
    assert not (run / "sft" / TIMEOUTS_FILE).exists()
