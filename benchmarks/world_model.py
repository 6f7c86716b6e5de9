"""GRPO inside a learned world model: ``experiment=metaworld_world_model``.

A weak policy is trained by a few iterations of PPO in the real simulator. A world model is fitted
to the episodes of these iterations, and GRPO continues inside it. The gain is measured inside the
model, on recorded starts that were held out, and in the real simulator. All policies are evaluated
on the same starts with the same randomness, so gains are means of paired differences. Runs stay in
``runs``: an interrupted one resumes, and a finished one is only read.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from benchmarks.row import BenchmarkRow
from benchmarks.score_gain import RUNS, run_rlinf
from pipeline.commands.results import RunResults
from pipeline.commands.world_model import check

ROOT = RUNS / "world_model"
REAL = "experiment=metaworld_pixels"
RECORDED_ITERATIONS = 5
REAL_SAMPLES = 200


def measure() -> list[BenchmarkRow]:
    """Return the gains inside and outside the model in percentage points, and the share of real
    unsolved frames of the trained policy's episodes that the model calls solved."""
    recorded, inside = ROOT / "recorded", ROOT / "inside"
    file, root = ROOT / "handle-press.safetensors", f"run.root={ROOT}"
    short = (f"iterations={RECORDED_ITERATIONS}", "evaluate.every=0", "evaluate.samples=10")
    run_rlinf("run", REAL, *short, root, "run.name=recorded")
    if not file.exists():
        run_rlinf("world-model", recorded, file)
    policies = [ROOT / name for name in ("before", "after")]
    _export(recorded, policies[0])
    words = (f"model.path={policies[0]}", f"task.kwargs.model={file}", root, "run.name=inside")
    run_rlinf("run", "experiment=metaworld_world_model", *words)
    _export(inside, policies[1])
    results = RunResults.open(inside)
    versions = [int(row["version"]) for row in results.evaluations()]
    first, last = (_scores(results, version) for version in (versions[0], versions[-1]))
    before, after = (_real_scores(policy.name) for policy in policies)
    real_frames = check(ROOT / "real_after", file)
    return [
        BenchmarkRow(
            "world_model_start", float(before.mean()), "share", None, "higher", len(before), 0.0
        ),
        _gain_row("world_model_gain_inside", last - first, None),
        _gain_row("world_model_gain_real", after - before, 10),
        BenchmarkRow(
            "world_model_false_positive_share",
            round(real_frames["false_positive_share"], 4),
            "share",
            0.02,
            "lower",
            len(after),
            0.0,
        ),
    ]


def _export(run: Path, policy: Path) -> None:
    if not policy.exists():
        run_rlinf("export", run, policy)


def _real_scores(name: str) -> np.ndarray:
    """Evaluate a policy folder in the real simulator; returns the score of each start."""
    settings = ("iterations=0", "evaluate.temperature=1.0", f"evaluate.samples={REAL_SAMPLES}")
    words = (*settings, f"model.path={ROOT / name}", f"run.root={ROOT}", f"run.name=real_{name}")
    run_rlinf("run", REAL, *words)
    return _scores(RunResults.open(ROOT / f"real_{name}"), 0)


def _scores(run: RunResults, version: int) -> np.ndarray:
    """Return the score of each held-out start, in order."""
    trajectories = sorted(run.evaluation_trajectories(version), key=lambda t: t.identity)
    return np.array([trajectory.score for trajectory in trajectories], np.float64)


def _gain_row(name: str, differences: np.ndarray, points: float | None) -> BenchmarkRow:
    """Return a row with the mean of differences in percentage points, and its standard error.

    Args:
        points: goal of the gain.
    """
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    mean = 100 * float(differences.mean())
    return BenchmarkRow(name, mean, "points", points, "higher", len(differences), 100 * error)
