"""Trainers that also generate, until the long tail of a rollout: speedup and switching times.

The text demo without SFT, so that samples end at random and some are much longer than most. One
generator and one trainer run on two cores. Runs with and without help of the trainer alternate.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pools import COMPUTE, DEMO, WARM, run, seconds
from benchmarks.row import BenchmarkRow, median_row
from pipeline.metrics import stage_manifest
from pipeline.pools.work_log import WORK_LOG
from stages.flow import on_policy
from stages.layout import POOLS_FOLDER

ROUNDS = 3
ITERATIONS = 7
TAILED = [
    *DEMO,
    "++rollout.batch_size=64",
    "++rollout.horizon=96",
    "++engine.max_num_seqs=4",
    "++trainer.cpu_threads=1",
]
TRAINER = "pool-1-"


def measure() -> list[BenchmarkRow]:
    """Measure all rows."""
    gains, to_train, to_generate = [], [], []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number in range(ROUNDS):
            without_help = run(
                root, f"alone-{number}", "local", plan(helps=False), ITERATIONS, TAILED
            )
            with_help = run(root, f"helped-{number}", "local", plan(helps=True), ITERATIONS, TAILED)
            gains.append(median_s(without_help) / median_s(with_help))
            for iteration in range(WARM, ITERATIONS):
                to_train += train_switch_times(with_help, iteration)
                to_generate += generate_switch_times(with_help, iteration)
    return [
        median_row("helped_rollout_speedup", gains, "x", None, "higher"),
        median_row("switch_to_train_s", to_train, "s", 1.0, "lower"),
        median_row("switch_to_generate_s", to_generate, "s", 1.0, "lower"),
    ]


def plan(*, helps: bool) -> dict[str, Any]:
    """Return a plan with a generator and a trainer, which also generates if ``helps``."""
    return {
        "num_chunks": 4,
        "pools": [
            {"stages": ["rollout"], "workers": 1, "devices": {"cpu": 1}},
            {
                "stages": ["reward", "inference", "train"],
                "devices": {"cpu": 1},
                "also_generates": helps,
            },
        ],
    }


def median_s(folder: Path) -> float:
    """Return the median seconds of an iteration."""
    return statistics.median(seconds(folder, ITERATIONS))


def train_switch_times(folder: Path, iteration: int) -> list[float]:
    """Return the seconds from the trainer's last generated sample to its next other work.

    The list is empty if the trainer left no tail to the generator in this iteration.
    """
    rows = [row for row in work_items(folder, iteration) if row["worker"].startswith(TRAINER)]
    if not any(row["unfinished_starts"] for row in rows):
        return []
    generated_until = max(
        end for row in rows for name, _, end in row["spans"] if name == "generate"
    )
    later_starts = [
        start for start in own_stage_starts(folder, iteration) if start >= generated_until
    ]
    return [min(later_starts) - generated_until] if later_starts else []


def generate_switch_times(folder: Path, iteration: int) -> list[float]:
    """Return the seconds from the end of the previous sync to the trainer's first generation.

    The trainer does not wait for the commit of the weights.
    """
    starts = [
        start
        for row in work_items(folder, iteration)
        for name, start, _ in row["spans"]
        if name == "generate" and row["worker"].startswith(TRAINER)
    ]
    sync_manifest = stage_manifest(folder, "sync", iteration - 1)
    assert sync_manifest is not None
    synced_at = max(span["end"] for span in sync_manifest.timing["spans"] if span["name"] == "sync")
    return [min(starts) - synced_at] if starts else []


def work_items(folder: Path, iteration: int) -> list[dict[str, Any]]:
    """Return the log entries of an iteration's work items."""
    lines = (folder / POOLS_FOLDER / WORK_LOG).read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [row for row in rows if row["node"] == f"rollout/{iteration}"]


def own_stage_starts(folder: Path, iteration: int) -> list[float]:
    """Return the times at which the trainer began work of its own stages."""
    starts = []
    for stage in list(on_policy.stages)[1:]:
        manifest = stage_manifest(folder, stage, iteration)
        assert manifest is not None
        starts += [s["start"] for s in manifest.timing["spans"] if s["name"] in COMPUTE]
    return starts
