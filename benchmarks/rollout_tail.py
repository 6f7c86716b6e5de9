"""Trainers that generate until the long tail of a rollout: what it gains, how soon they switch.

The main job without SFT, so that samples end by chance and some are much longer than
most. One generator and one trainer, on two cores; runs with and without help take turns.
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
from pipeline.pools.rollout_scheduler import WORK_LOG
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
    """All rows."""
    gains, to_train, to_generate = [], [], []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number in range(ROUNDS):
            alone = run(root, f"alone-{number}", "local", plan(helps=False), ITERATIONS, TAILED)
            helped = run(root, f"helped-{number}", "local", plan(helps=True), ITERATIONS, TAILED)
            gains.append(median_s(alone) / median_s(helped))
            for iteration in range(WARM, ITERATIONS):
                to_train += trains_again(helped, iteration)
                to_generate += generates_again(helped, iteration)
    return [
        median_row("helped_rollout_speedup", gains, "x", None, "higher"),
        median_row("switch_to_train_s", to_train, "s", 1.0, "lower"),
        median_row("switch_to_generate_s", to_generate, "s", 1.0, "lower"),
    ]


def plan(*, helps: bool) -> dict[str, Any]:
    """A generator and a trainer, which helps or not."""
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
    """Seconds of an iteration."""
    return statistics.median(seconds(folder, ITERATIONS))


def trains_again(folder: Path, iteration: int) -> list[float]:
    """Seconds from the last sample the trainer generated to its next work of another stage.

    None of an iteration in which it left no tail to the generator.
    """
    rows = [row for row in work_items(folder, iteration) if row["worker"].startswith(TRAINER)]
    if not any(row["unfinished_starts"] for row in rows):
        return []
    ended = max(end for row in rows for name, _, end in row["spans"] if name == "generate")
    later = [start for start in others(folder, iteration) if start >= ended]
    return [min(later) - ended] if later else []


def generates_again(folder: Path, iteration: int) -> list[float]:
    """Seconds from the end of the sync before a rollout to what the trainer generates of it.

    It does not wait for the commit.
    """
    starts = [
        start
        for row in work_items(folder, iteration)
        for name, start, _ in row["spans"]
        if name == "generate" and row["worker"].startswith(TRAINER)
    ]
    before = stage_manifest(folder, "sync", iteration - 1)
    assert before is not None
    made = max(span["end"] for span in before.timing["spans"] if span["name"] == "sync")
    return [min(starts) - made] if starts else []


def work_items(folder: Path, iteration: int) -> list[dict[str, Any]]:
    """Return the generated parts of an iteration, by work item."""
    lines = (folder / POOLS_FOLDER / WORK_LOG).read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [row for row in rows if row["node"] == f"rollout/{iteration}"]


def others(folder: Path, iteration: int) -> list[float]:
    """When the trainer began with pieces of its own stages."""
    starts = []
    for stage in list(on_policy.stages)[1:]:
        manifest = stage_manifest(folder, stage, iteration)
        assert manifest is not None
        starts += [s["start"] for s in manifest.timing["spans"] if s["name"] in COMPUTE]
    return starts
