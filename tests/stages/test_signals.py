"""A warning signal makes a stage end with 75 at a safe point, and nothing is lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import prepare_run
from rlinf import package_paths
from rlinf.artifacts import read_manifest
from rlinf.errors import EXIT_REQUEUE, RequeueRequested
from stages.layout import CONFIG_FILE, setup_stage_folder
from stages.runner import StageCall, run_stage
from stages.worker_state import WorkerState

Compose = Callable[..., dict[str, Any]]


def test_a_warned_stage_asks_to_be_started_again(compose: Compose, tmp_path: Path) -> None:
    run = prepare_run(compose("sft.max_steps=100000", "sft.target_score=1.0"))
    out = setup_stage_folder(run.folder, "sft")
    command = [
        sys.executable,
        "-m",
        "stages",
        "sft",
        "--config",
        str(run.folder / CONFIG_FILE),
    ]
    log = (tmp_path / "log").open("w")
    stage = subprocess.Popen([*command, "--out", str(out)], cwd=package_paths.ROOT, stderr=log)
    deadline = time.monotonic() + 60
    while not list(out.glob("data-*/start")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(2)
    stage.send_signal(signal.SIGUSR2)
    assert stage.wait(timeout=30) == EXIT_REQUEUE
    assert "stopping " in (tmp_path / "log").read_text()
    assert read_manifest(out) is None
    assert not list(out.glob("data-*")), "a stopped attempt leaves no partial output"


def stopped_fine_tuning(compose: Compose) -> tuple[StageCall, int]:
    """A fine-tuning of eight steps that was asked to stop, and how many it finished."""
    run = prepare_run(compose("sft.max_steps=8", "sft.eval_every=2"))
    out = setup_stage_folder(run.folder, "sft")
    call = StageCall("sft", run.folder / CONFIG_FILE, out)
    looks = iter(range(100))
    with pytest.raises(RequeueRequested):
        # Each step looks once, each evaluation once per held-out sample.
        run_stage(call, should_stop=lambda: next(looks) > 24)
    done = len(json.loads((out / "progress" / "curve.json").read_text())["curve"])
    assert 0 < done < 8
    return call, done


def undisturbed(call: StageCall) -> str:
    """Content of the same stage when nothing stops it."""
    return run_stage(
        replace(call, output_folder=call.output_folder.with_name("undisturbed"))
    ).content


def test_a_fine_tuning_that_was_stopped_goes_on_where_it_was(compose: Compose) -> None:
    call, done = stopped_fine_tuning(compose)
    seen: list[int] = []

    def progress(stage: str, done: int, total: int, unit: str, note: str) -> None:
        if unit == "steps":
            seen.append(done)

    resumed = run_stage(call, worker_state=WorkerState(on_progress=progress))
    assert min(seen) == done + 1, "finished steps are not done again"
    assert not (call.output_folder / "progress").exists()
    assert undisturbed(call) == resumed.content


@pytest.mark.parametrize("damage", ["bit", "missing", "curve"])
def test_a_damaged_state_of_a_fine_tuning_is_not_gone_on_from(
    compose: Compose, damage: str
) -> None:
    call, done = stopped_fine_tuning(compose)
    step = call.output_folder / "progress" / f"step-{done}"
    shards = sorted(step.glob("*.safetensors"))
    if damage == "bit":
        data = bytearray(shards[0].read_bytes())
        data[len(data) // 2] ^= 1
        shards[0].write_bytes(data)
    elif damage == "missing":
        shards[0].unlink()
    else:
        (call.output_folder / "progress" / "curve.json").write_bytes(b"{")
    assert run_stage(call).content == undisturbed(call)
