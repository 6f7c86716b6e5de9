"""Overhead of Slurm per stage, on the dev cluster: submission, imports and Snakemake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.row import BenchmarkRow, median_row
from rlinf import package_paths

REPEATS = 12
ITERATIONS = 3


def measure() -> list[BenchmarkRow]:
    """Start the dev cluster and measure the three rows."""
    start_dev_cluster()
    overhead, imports = stage_overhead()
    return [
        median_row("stage_overhead_s", overhead, "s", 1.0, "lower"),
        median_row("stage_imports_s", imports, "s", None, "lower"),
        median_row("snakemake_job_s", snakemake_jobs(), "s", 6.0, "lower"),
    ]


def start_dev_cluster() -> None:
    """Start the dev cluster if needed, and set its environment variables in this process."""
    subprocess.run([package_paths.ROOT / "slurm/devcluster/up.sh"], check=True, capture_output=True)
    state = Path(os.environ.get("RLINF_DEVCLUSTER_DIR", "/tmp/rlinf-devcluster"))
    for name, value in re.findall(r"export (\w+)=(\S+)", (state / "env.sh").read_text()):
        os.environ[name] = value


def stage_overhead() -> tuple[list[float], list[float]]:
    """Return seconds from submission to the first line of a stage job, and of its imports."""
    from launchers.launcher import JobSpec
    from launchers.slurm_launcher import SlurmLauncher
    from slurm.client import SlurmClient
    from slurm.jobs import JobResources

    launcher = SlurmLauncher(SlurmClient(poll_interval_s=0.1))
    overhead, import_s = [], []
    for repeat in range(REPEATS):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            out = folder / "out"
            needs = JobResources(partition="cpu", mem_mb=500, time_limit_min=5)
            job = JobSpec(
                f"bench/{repeat}",
                (str(out),),
                out,
                folder / "logs",
                needs,
                "benchmarks.stage_probe",
            )
            start = time.time()
            job_id = launcher.submit(job)
            while launcher.poll([job_id])[job_id].state.is_active:
                time.sleep(0.05)
            times = json.loads((out / "manifest.json").read_text())
            overhead.append(times["first_line"] - start)
            import_s.append(times["imported"] - times["first_line"])
            while launcher.client.queue()[job_id].state.is_active:
                time.sleep(0.05)
    return overhead, import_s


def snakemake_jobs() -> list[float]:
    """Return seconds per job of CartPole workflows with the Snakemake profile ``slurm``."""
    seconds = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as root:
            words = [
                "experiment=cartpole_ppo",
                f"iterations={ITERATIONS}",
                f"run__root={root}",
                "rollout__batch_size=2",
                "algorithm__minibatches=1",
                "rollout__horizon=32",
                "evaluate__samples=2",
                f"plan={package_paths.ROOT}/configs/plans/devcluster.yaml",
            ]
            start = time.monotonic()
            subprocess.run(
                [sys.executable, "-m", "snakemake", "--profile", "slurm", "--config", *words],
                cwd=package_paths.ROOT,
                check=True,
                capture_output=True,
            )
            jobs = len(list(Path(root).rglob("manifest.json")))
            seconds.append((time.monotonic() - start) / jobs)
    return seconds
