"""A stage that runs into its wall-time limit on a real Slurm stops in time and goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launchers.launcher import JobSpec
from launchers.slurm_launcher import SlurmLauncher
from pipeline.commands.experiment import prepare_run
from slurm.client import SlurmClient
from slurm.jobs import JobResources
from stages.layout import CONFIG_FILE

pytestmark = pytest.mark.cluster
Compose = Callable[..., dict[str, Any]]
LOST = {"signal": "CONT@15"}
"""A signal that does nothing, in the place of the warning."""


def test_a_stage_at_its_wall_time_limit_is_requeued_and_goes_on(
    launcher: SlurmLauncher, compose: Compose, tmp_path: Path
) -> None:
    """Side by side: one job is warned by Slurm, the other has only the clock."""
    run = prepare_run(compose("sft.max_steps=1000000", "sft.target_score=1.0"))
    config = run.folder / CONFIG_FILE

    def fine_tuning(name: str, **sbatch: str) -> JobSpec:
        out = tmp_path / name
        argv = ("sft", "--config", str(config), "--out", str(out))
        needs = JobResources("cpu", mem_mb=1000, time_limit_min=1, sbatch=sbatch)
        return JobSpec(f"test/{name}", argv, out, tmp_path / f"logs-{name}", needs)

    jobs = {"warned": fine_tuning("warned"), "unwarned": fine_tuning("unwarned", **LOST)}
    ids = {name: launcher.submit(job) for name, job in jobs.items()}
    try:
        before = {name: curve_at_the_stop(jobs[name], ids[name]) for name in jobs}
        for name, job in jobs.items():
            after = longer(job, before[name])
            assert after[: len(before[name])] == before[name], "finished steps are not done again"
            state = SlurmClient().accounting([ids[name]])[ids[name]].state
            assert state.is_active, "the same job goes on"
        assert "no signal came yet" not in log(jobs["warned"])
        assert "no signal came yet" in log(jobs["unwarned"])
        for job in jobs.values():
            assert "TIME LIMIT" not in log(job), "it stopped before Slurm ended it"
    finally:
        launcher.cancel(list(ids.values()))


def curve_at_the_stop(job: JobSpec, identity: str, timeout_s: float = 75) -> list[Any]:
    """The fine-tuning's curve when the stage has asked to be started again."""
    deadline = time.monotonic() + timeout_s
    while "stopping " not in log(job):
        assert time.monotonic() < deadline, log(job)
        time.sleep(0.1)
    return curve(job)


def longer(job: JobSpec, before: list[Any], timeout_s: float = 40) -> list[Any]:
    """The curve as soon as it has grown."""
    deadline = time.monotonic() + timeout_s
    while len(found := curve(job)) <= len(before):
        assert time.monotonic() < deadline, log(job)
        time.sleep(0.1)
    return found


def curve(job: JobSpec) -> list[Any]:
    found: list[Any] = json.loads((job.output_dir / "progress" / "curve.json").read_text())["curve"]
    return found


def log(job: JobSpec) -> str:
    return "".join(path.read_text() for path in job.log_dir.glob("*_log.err"))
