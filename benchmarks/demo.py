"""The main job and the embodied job from a user's command to the end."""

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
    """Held-out score and wall time of both jobs (another seed each time it is repeated)."""
    match, wall = run("arithmetic_grpo", (0,))
    reached, cartpole = run("cartpole_ppo", (0, 1, 2))
    return [
        median_row("demo_exact_match", match, "share", 0.9, "higher"),
        median_row("demo_wall_s", wall, "s", 600.0, "lower"),
        median_row("cartpole_return", reached, "return", 475.0, "higher"),
        median_row("cartpole_wall_s", cartpole, "s", 180.0, "lower"),
    ]


def run(experiment: str, seeds: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Final held-out scores and wall times."""
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
