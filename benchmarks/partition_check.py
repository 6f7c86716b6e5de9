"""Seconds of ``rlinf doctor`` for two partitions of the dev cluster, two nodes each."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

from benchmarks.row import BenchmarkRow, median_row
from benchmarks.slurm_jobs import start_dev_cluster
from rlinf import package_paths

REPEATS = 3


def measure() -> list[BenchmarkRow]:
    """Start the dev cluster and measure the row."""
    start_dev_cluster()
    seconds = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "rlinf", "doctor", "--folder", folder]
            command += ["--partition", "a100", "--partition", "h100"]
            start = time.monotonic()
            done = subprocess.run(
                command, cwd=package_paths.ROOT, capture_output=True, text=True, check=False
            )
            seconds.append(time.monotonic() - start)
            # The GPUs of the dev cluster are fake, so the partitions are not fit.
            assert "link to a100" in done.stdout, done.stdout + done.stderr
    return [median_row("doctor_wall_s", seconds, "s", 120.0, "lower")]
