"""Time from the restart of a driver job until the driver controls its pools again."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.row import BenchmarkRow, median_row
from benchmarks.slurm_jobs import start_dev_cluster
from pipeline.pools.pool_status import read_pools_status
from pipeline.run import Run
from pipeline.run_control import last_driver_job_id
from rlinf import package_paths

REPEATS = 6
PATIENCE_S = 180.0
PLAN = {
    "defaults": {"mem_mb": 2000, "time_limit_min": 60},
    "pools": [
        {"stages": ["rollout"], "devices": {"a100": 1}},
        {"stages": ["reward", "inference", "train"], "devices": {"h100": 1}},
    ],
}
WORDS = [
    "experiment=arithmetic_grpo",
    "run.name=restarts",
    "iterations=5000",
    "sft.max_steps=0",
    "evaluate.every=0",
    "evaluate.samples=8",
    "algorithm.filter_zero_variance_groups=false",
    # Groups whose samples all fail have no gradient.
    "algorithm.entropy_coeff=0.01",
    "log.trackers=[]",
    "cluster=slurm",
]


def measure() -> list[BenchmarkRow]:
    """Measure a run with two pools whose driver is alternately killed and requeued."""
    start_dev_cluster()
    with tempfile.TemporaryDirectory() as root:
        plan = Path(root) / "plan.yaml"
        plan.write_text(yaml.safe_dump(PLAN))
        _rlinf("submit", *WORDS, f"run.root={root}", f"plan={plan}", "--partition", "cpu")
        run = Run.open(Path(root) / "restarts")
        try:
            job = str(last_driver_job_id(run))
            seconds = [_restart(run.folder, job, number) for number in range(REPEATS)]
        finally:
            _rlinf("stop", str(run.folder))
            time.sleep(10)  # workers still finish their writes
    return [median_row("driver_restart_s", seconds, "s", 15.0, "lower")]


def _restart(run: Path, job: str, number: int) -> float:
    """Return the seconds from the start of the job until all workers are connected to it."""
    _wait_until(lambda: _controls_pools(run, time.time() - 5))
    state = _job_state(job)
    if number % 2:
        subprocess.run(["scontrol", "requeue", job], check=True)
    else:
        subprocess.run(["scancel", "-s", "KILL", f"{job}.0"], check=True)
    _wait_until(lambda: _job_state(job) == ("RUNNING", state[1] + 1))
    started_at = time.time()
    _wait_until(lambda: _controls_pools(run, started_at))
    return time.time() - started_at


def _job_state(job: str) -> tuple[str, int]:
    text = subprocess.run(
        ["scontrol", "show", "job", "-o", job], check=True, capture_output=True, text=True
    ).stdout
    fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
    return fields["JobState"], int(fields["Restarts"])


def _controls_pools(run: Path, since: float) -> bool:
    """Return whether the driver reported after ``since`` that its workers are connected."""
    status = read_pools_status(run)
    return (
        status is not None
        and status.written_at > since
        and all(any(worker.is_connected for worker in pool.workers) for pool in status.pools)
    )


def _wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the driver does not come back")
        time.sleep(0.02)


def _rlinf(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "rlinf", *words], cwd=package_paths.ROOT, check=True)
