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
from stages.__main__ import main
from stages.layout import CONFIG_FILE
from stages.timeout_retries import MAX_TIMEOUTS, TIMEOUTS_FILE

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
    words = ["sft.max_steps=100000", "sft.target_score=1.0"]
    run = prepare_run(compose(*words, "sft.eval_every=1", "evaluate.samples=2")).folder
    for attempt in range(MAX_TIMEOUTS + 1):
        assert begin(monkeypatch, run, "sft", attempt, 6) == EXIT_REQUEUE
    assert not (run / "sft" / TIMEOUTS_FILE).exists()
    shutil.rmtree(run)


def test_a_preemption_does_not_count(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn() -> None:
        while signal.getsignal(signal.SIGTERM) == before:
            time.sleep(0.02)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    run = prepare_run(compose("sft.max_steps=100000", "sft.eval_every=100000")).folder
    for attempt in range(MAX_TIMEOUTS + 1):
        before = signal.getsignal(signal.SIGTERM)
        warning = threading.Thread(target=warn, daemon=True)
        warning.start()
        assert begin(monkeypatch, run, "sft", attempt, 600) == EXIT_REQUEUE
        warning.join()
    assert not (run / "sft" / TIMEOUTS_FILE).exists()
