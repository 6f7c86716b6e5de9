"""Time of a Snakemake dry run of 1,000 iterations with five stages."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

from benchmarks.row import BenchmarkRow, median_row
from rlinf import package_paths


def measure() -> list[BenchmarkRow]:
    """Measure the seconds of ``snakemake -n``."""
    values = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as root:
            start = time.monotonic()
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "snakemake",
                    "-n",
                    "-c2",
                    "--quiet",
                    "rules",
                    "--config",
                    "iterations=1000",
                    f"run__root={root}",
                ],
                cwd=package_paths.ROOT,
                check=True,
                capture_output=True,
            )
            values.append(time.monotonic() - start)
    return [median_row("dag_1000_s", values, "s", 60.0, "lower")]
