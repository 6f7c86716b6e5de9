"""What a driver says from its first second, with a terminal or without."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import callbacks, job_executor
from pipeline.callbacks import ProgressCallback
from pipeline.commands.experiment import prepare_run
from pipeline.commands.status import read_status, status_view
from pipeline.console import create_console
from pipeline.graph import StageNode
from pipeline.job_executor import QueueLog
from rlinf import package_paths
from slurm.jobs import JobState, JobStatus
from tests.conftest import QUIET, TINY

Compose = Callable[..., dict[str, Any]]


def test_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    create_console().print("rlinf-slurm[wandb] [red]x[/red] :smile:")
    assert "rlinf-slurm[wandb] [red]x[/red] :smile:" in capsys.readouterr().out


def test_sft_reports_its_task_and_its_progress(
    compose: Compose, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "PROGRESS_INTERVAL_S", -1.0)
    run = prepare_run(compose())
    with ProgressCallback(run) as console:
        console.on_node_start(StageNode("sft", 0))
        console.on_stage_progress("sft", 1, 3, "fine-tuning steps, held-out score 0.250")
    output = capsys.readouterr().err
    assert "grpo on task arithmetic, 2 iterations; stages run in this process" in output
    assert "sft: fine-tuning until the held-out score is 0.41, 3 steps at most" in output
    assert "sft: 1 of 3 fine-tuning steps, held-out score 0.250" in output


def test_a_job_that_waits_says_why_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_executor, "QUEUE_NOTICE_S", -1.0)
    queue = QueueLog()
    with caplog.at_level(logging.INFO, "rlinf"):
        queue.on_submit("train/3", "12", "h100")
        for _ in range(3):
            queue.on_status("train/3", "12", JobStatus(JobState.PENDING, reason="Resources"))
        queue.on_status("train/3", "12", JobStatus(JobState.RUNNING, node="h100-1"))
        queue.on_status("train/3", "12", JobStatus(JobState.RUNNING, node="h100-1"))
    assert caplog.messages == [
        "train/3: job 12, partition h100",
        "train/3: job 12 waits: Resources",
        "train/3: job 12 runs on h100-1",
    ]


def test_the_status_of_a_finished_run_offers_no_resume(
    tiny_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_console().print(status_view(read_status(tiny_run)))
    output = capsys.readouterr().out
    assert "finished" in output
    assert "resume" not in output


def test_a_command_logs_within_its_first_second_and_says_how_to_resume(tmp_path: Path) -> None:
    """Interrupted in SFT, it says where to go on and leaves no traceback."""
    words = ["experiment=arithmetic_grpo", f"run.root={tmp_path}", *QUIET, *TINY]
    # What a shell starts in the background ignores interrupts, and so do its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    driver = subprocess.Popen(
        [sys.executable, "-m", "rlinf.launch", *words, "sft.max_steps=100000"],
        cwd=package_paths.ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    signal.signal(signal.SIGINT, before)
    assert driver.stderr is not None
    assert "reading the configuration" in driver.stderr.readline()
    while "sft: " not in driver.stderr.readline():
        assert driver.poll() is None
    time.sleep(1)
    driver.send_signal(signal.SIGINT)
    output = driver.stderr.read()
    assert driver.wait() == 130
    assert f"Go on with: rlinf resume {tmp_path / 'tiny'}" in output
    assert "Traceback" not in output
