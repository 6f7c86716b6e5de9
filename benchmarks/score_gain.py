"""What a run gained between its first evaluation and its last, start by start.

All versions of the weights play the same held-out starts with the same randomness, so a gain is a
mean of differences, with the interval of that. A run stays in ``runs``: one that was cut off goes
on, one that is finished is read.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.row import BenchmarkRow
from pipeline.commands.results import RunResults
from pipeline.metrics import stage_manifest
from rlinf import package_paths
from rlinf.channels.record_files import RecordFileReader
from stages.flow import EVALUATE
from stages.layout import offline_folder, stage_folder

RUNS = package_paths.ROOT / "runs"
NORMAL_95 = 1.96


def run_rlinf(*words: str | Path) -> None:
    """Run a command of the project's own."""
    command = Path(sys.executable).with_name("rlinf")
    subprocess.run([command, *words], cwd=package_paths.ROOT, check=True)


def gain_rows(prefix: str, run: RunResults, points: float) -> list[BenchmarkRow]:
    """The share of right answers (solved starts) before, the gain in points with the lower end of
    its 95 % interval, and the minutes of all stages.

    Args:
        points: the gain that is wanted.
    """
    scored = [row["version"] for row in run.evaluations()]
    first, last = (start_scores(run, version) for version in (scored[0], scored[-1]))
    gained, count = last - first, len(first)
    mean, spread = float(gained.mean()), float(gained.std(ddof=1)) / math.sqrt(count)
    lower = mean - NORMAL_95 * spread
    return [
        BenchmarkRow(f"{prefix}_start", float(first.mean()), "share", None, "lower", count, 0.0),
        BenchmarkRow(
            f"{prefix}_gain_points", 100 * mean, "points", points, "higher", count, 100 * spread
        ),
        BenchmarkRow(f"{prefix}_gain_lower", 100 * lower, "points", 0, "higher", count, 0.0),
        BenchmarkRow(f"{prefix}_minutes", minutes(run), "min", 90, "lower", 1, 0.0),
    ]


def start_scores(run: RunResults, version: int) -> np.ndarray:
    """Score of each held-out start ``[starts]``, in their order."""
    from stages.factory import WEIGHTS, environment_class, policy_class

    policy, policy_options = policy_class(run.config)
    task, options = environment_class(run.config)
    warm = offline_folder(run.folder, "warm_start")
    manifest = json.loads((warm / "manifest.json").read_text())
    processor = policy.processor(warm / manifest["data"] / WEIGHTS, policy_options)
    out = stage_folder(run.folder, EVALUATE, version)
    evaluated = stage_manifest(run.folder, EVALUATE, version)
    assert evaluated is not None
    records = list(RecordFileReader((out / evaluated.data).glob("trajectories-r*.h5")))
    records.sort(key=lambda record: record.identity)
    return np.array(task(options, processor).score(records, Counter()))


def minutes(run: RunResults) -> float:
    """Of all stages, one after the other in one process, evaluations among them."""
    timings = [json.loads(path.read_text())["timing"] for path in run.folder.rglob("manifest.json")]
    return sum(timing["end"] - timing["start"] for timing in timings) / 60
