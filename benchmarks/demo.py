"""The text demo and the CartPole run, from the command to the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.row import BenchmarkRow, median_row
from rlinf import package_paths

THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def measure() -> list[BenchmarkRow]:
    """Measure held-out score and wall time of both runs; each repetition has another seed."""
    scores, seconds = run("arithmetic_grpo", (0,))
    returns, cartpole_seconds = run("cartpole_ppo", (0, 1, 2))
    return [
        median_row("demo_exact_match", scores, "share", 0.9, "higher"),
        median_row("demo_wall_s", seconds, "s", 600.0, "lower"),
        median_row("cartpole_return", returns, "return", 475.0, "higher"),
        median_row("cartpole_wall_s", cartpole_seconds, "s", 180.0, "lower"),
    ]


def run(experiment: str, seeds: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Return the final held-out score and the wall time of a run per seed."""
    scores, walls = [], []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as root:
            start = time.monotonic()
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "rlinf.launch",
                    f"experiment={experiment}",
                    f"run.root={root}",
                    f"seed={seed}",
                ],
                cwd=package_paths.ROOT,
                check=True,
                capture_output=True,
                env={**os.environ, **THREADS},
            )
            walls.append(time.monotonic() - start)
            last = sorted(Path(root).glob("*/evaluate/*/manifest.json"))[-1]
            scores.append(json.loads(last.read_text())["metrics"]["score"])
    return scores, walls
