"""What a driver says from its first second, with a terminal or without."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pipeline import callbacks, job_executor
from pipeline.callbacks import ProgressCallback
from pipeline.commands.experiment import prepare_run
from pipeline.commands.status import read_status, status_view
from pipeline.console import create_console, format_number
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
        console.on_stage_progress("sft", 1, 3, "steps", "loss 0.5")
    output = capsys.readouterr().err
    assert "algorithm grpo, task arithmetic, model causal_lm, 2 iterations; stages run in" in output
    assert "supervised fine-tuning until the held-out score reaches 0.41, at most 3 steps" in output
    assert "sft: 1/3 steps, loss 0.5\n" in output


ROW = {
    "iteration": 3,
    "reward/mean": 0.5,
    "reward/score": 0.25,
    "train/loss": -0.0123456,
    "train/kl": 0.002,
    "train/approx_kl": 1e-05,
    "train/entropy": 1.5,
    "train/grad_norm": 2.0,
    "rollout/completion_length": 7.25,
    "rollout/steps": 5000.0,
}


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(callbacks, "time", found)
    monkeypatch.setattr(callbacks, "PROGRESS_INTERVAL_S", -1.0)
    return found


def manifest(stage: str, start: float, end: float, **metrics: float) -> Any:
    return SimpleNamespace(stage=stage, timing={"start": start, "end": end}, metrics=metrics)


def lines_of(text: str) -> list[str]:
    """Log lines without their times."""
    return [line.partition(" ")[2] for line in text.splitlines()]


@pytest.mark.parametrize("terminal", [False, True])
def test_an_iteration_has_a_line_with_what_is_trained(
    compose: Compose,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    terminal: bool,
) -> None:
    def console(*, stderr: bool) -> Console:
        return Console(file=sys.stderr, force_terminal=terminal, width=400, markup=False)

    monkeypatch.setattr(callbacks, "create_console", console)
    run = prepare_run(compose("iterations=10"))
    with ProgressCallback(run) as progress:
        progress.on_node_end(StageNode("evaluate", 2), manifest("evaluate", 0, 1, score=0.75))
        progress.on_node_start(StageNode("rollout", 3))
        progress.on_node_end(StageNode("rollout", 3), manifest("rollout", 100.0, 110.0))
        progress.on_node_end(StageNode("sync", 3), manifest("sync", 120.0, 125.0))
        clock.now += 30
        progress.on_iteration_end(3, ROW)
        clock.now += 10
        progress.on_iteration_end(4, {**ROW, "reward/score": 0.5})
    output = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert (
        "iteration 4/10: reward 0.5, score 0.25, loss -0.01235, kl 0.002, approx_kl 1e-05, "
        "entropy 1.5, completion_length 7.25, 200 tokens/s, held-out score 0.75 (iteration 2), "
        "3 min 0 s left"
    ) in output
    # The score is the reward, this iteration's rollout is unknown, and the pace is the mean.
    assert (
        "iteration 5/10: reward 0.5, loss -0.01235, kl 0.002, approx_kl 1e-05, entropy 1.5, "
        "completion_length 7.25, held-out score 0.75 (iteration 2), 100 s left"
    ) in output


def test_an_iteration_of_episodes_has_returns_and_steps(
    compose: Compose, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    run = prepare_run(compose("iterations=4", experiment="cartpole_ppo"))
    with ProgressCallback(run) as progress:
        found = manifest("evaluate", 0, 1, score=99.5, episode_length=80.25, completion_length=9.0)
        progress.on_node_end(StageNode("evaluate", 0), found)
        progress.on_node_end(StageNode("rollout", 3), manifest("rollout", 100.0, 101.0))
        progress.on_node_end(StageNode("sync", 3), manifest("sync", 103.0, 104.0))
        progress.on_iteration_end(3, ROW)
    lines = lines_of(capsys.readouterr().err)
    assert "algorithm ppo, task CartPole-v1, model mlp, 4 iterations" in lines[1]
    assert lines[2] == "held-out score before iteration 1: 99.5, episode_length 80.25"
    assert lines[3] == (
        "iteration 4/4: reward 0.5, return 0.25, loss -0.01235, kl 0.002, approx_kl 1e-05, "
        "entropy 1.5, 1,250 steps/s, held-out score 99.5 (iteration 0)"
    )


def test_a_stage_shows_its_rate_and_the_time_left(
    compose: Compose, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    run = prepare_run(compose())
    with ProgressCallback(run) as progress:
        for now, done in ((0, 10), (0.5, 20), (20, 50), (40, 130), (50, 5), (60, 15)):
            clock.now = 1000.0 + now
            progress.on_stage_progress("rollout", done, 130, "held-out samples")
    lines = lines_of(capsys.readouterr().err)[2:]
    assert lines == [
        "rollout: 10/130 held-out samples",
        "rollout: 20/130 held-out samples",  # too early for a rate
        "rollout: 50/130 held-out samples, 2 samples/s, 40 s left",
        "rollout: 130/130 held-out samples, 3 samples/s",
        "rollout: 5/130 held-out samples",  # the next one begins anew
        "rollout: 15/130 held-out samples, 1 samples/s, 115 s left",
    ]


def test_a_warning_is_marked_as_one(compose: Compose, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressCallback(prepare_run(compose())):
        logging.getLogger("rlinf").warning("the gradient is %s", "zero")
    assert lines_of(capsys.readouterr().err)[-1] == "warning: the gradient is zero"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (-0.0123456, "-0.01235"), (3e-07, "3e-07"), (9999.4, "9999"), (12345.6, "12,346")],
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert format_number(value) == text


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
    assert "the run is finished" in output
    assert "resume" not in output


def test_the_status_has_the_metrics_of_the_newest_iteration(
    tiny_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_console().print(status_view(read_status(tiny_run)))
    rows = [line.split("│")[1:3] for line in capsys.readouterr().out.splitlines() if "│" in line]
    shown = {name.strip(): value.strip() for name, value in rows}
    newest = json.loads((tiny_run / "metrics.jsonl").read_text().splitlines()[-1])
    assert shown["finished iterations"] == "2 of 2"
    assert shown["reward"] == format_number(newest["reward/mean"])
    assert shown["entropy"] == format_number(newest["train/entropy"])
    assert shown["completion_length"] == format_number(newest["rollout/completion_length"])
    assert shown["throughput"].endswith(" tokens/s")
    assert shown["weights on disk"] == "versions 0, 1, 2"


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
    assert f"Continue with: rlinf resume {tmp_path / 'tiny'}" in output
    assert "Traceback" not in output
