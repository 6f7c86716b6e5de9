"""Draws ``pools.svg``: a plan, and the jobs, processes and channels it becomes.

python docs/images/pools.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, SOFT, PAPER = "#24292f", "#6b7785", "#ffffff"
ROLLOUT, TRAIN, DISK = "#2f7fb5", "#c8553d", "#57a773"
PLAN = """num_chunks: 4
stages:
  rollout:
    partition: a100
    processes: 2
    gpus: 2
  train:
    partition: h100
    gpus: 1
pools:
  - stages: [rollout]
    devices: {a100: 2}
  - stages: [reward,
      inference, train]
    devices: {h100: 1}"""


def box(axes: Axes, x: float, y: float, w: float, h: float, colour: str, fill: str) -> None:
    shape = FancyBboxPatch(
        (x, y), w, h, boxstyle="round,pad=0,rounding_size=0.1", ec=colour, fc=fill, lw=1.3
    )
    axes.add_patch(shape)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, **look: object
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle=str(look.pop("style", "-|>")), mutation_scale=12, color=colour,
            lw=1.5, shrinkA=0, shrinkB=0, **look,
        )
    )  # fmt: skip


def worker(
    axes: Axes, x: float, y: float, w: float, name: str, lines: list[str], colour: str
) -> None:
    box(axes, x, y, w, 1.6, colour, PAPER)
    axes.text(x + 0.12, y + 1.32, name, weight="bold", va="center", fontsize=8.5)
    for row, line in enumerate(lines):
        axes.text(x + 0.12, y + 0.97 - 0.32 * row, line, va="center", fontsize=8.3)


def draw() -> plt.Figure:
    figure = plt.figure(figsize=(11, 5.9), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 11), ylim=(0, 5.9))
    axes.axis("off")
    axes.text(0.25, 5.6, "Plan", weight="bold", fontsize=12, va="center")
    box(axes, 0.25, 1.65, 2.45, 3.7, SOFT, "#f6f8fa")
    axes.text(0.4, 5.2, PLAN, family="monospace", fontsize=9.2, va="top", linespacing=1.5)
    arrow(axes, (2.8, 3.5), (3.25, 3.5), SOFT)

    axes.text(3.4, 5.6, "Processes", weight="bold", fontsize=12, va="center")
    box(axes, 5.0, 4.65, 3.9, 0.75, SOFT, "#f6f8fa")
    axes.text(6.95, 5.14, "driver", weight="bold", ha="center", va="center", fontsize=9)
    axes.text(6.95, 4.88, "login node, or a job", ha="center", va="center", fontsize=8)

    box(axes, 3.4, 1.65, 3.05, 2.45, ROLLOUT, "#eaf3f9")
    axes.text(
        3.55, 3.9, "pool 0: one job on a100", weight="bold", color=ROLLOUT, fontsize=9, va="center"
    )
    for rank in range(2):
        lines = ["rollout", "engine, weights", "records in memory"]
        worker(axes, 3.55 + 1.45 * rank, 1.85, 1.3, f"rank {rank}", lines, ROLLOUT)

    box(axes, 7.75, 1.65, 3.0, 2.45, TRAIN, "#fbeeeb")
    axes.text(
        7.9, 3.9, "pool 1: one job on h100", weight="bold", color=TRAIN, fontsize=9, va="center"
    )
    lines = ["reward, inference, train in turns", "trainer, optimizer", "records in memory"]
    worker(axes, 7.9, 1.85, 2.7, "rank 0", lines, TRAIN)

    arrow(axes, (5.9, 4.65), (5.3, 4.1), SOFT, style="<|-|>", linestyle=(0, (4, 3)))
    arrow(axes, (8.0, 4.65), (8.6, 4.1), SOFT, style="<|-|>", linestyle=(0, (4, 3)))
    axes.text(6.95, 4.38, "commands and reports", color=SOFT, fontsize=8, ha="center", va="center")

    arrow(axes, (6.45, 2.62), (7.75, 2.62), ROLLOUT)
    axes.text(
        7.1, 2.97, "trajectories\nin 4 chunks", color=ROLLOUT, fontsize=8, ha="center", va="center"
    )
    axes.text(7.1, 2.43, "socket", color=ROLLOUT, fontsize=8, ha="center", va="center")

    box(axes, 3.4, 0.3, 7.35, 0.7, DISK, "#eef7f1")
    axes.text(
        7.07,
        0.78,
        "run directory on the shared filesystem",
        weight="bold",
        ha="center",
        va="center",
        fontsize=9,
    )
    axes.text(
        7.07, 0.5, "every stage's output, committed by its manifest while the next stage computes",
        ha="center", va="center", fontsize=8,
    )  # fmt: skip
    arrow(axes, (4.3, 1.65), (4.3, 1.0), DISK)
    axes.text(4.2, 1.33, "trajectories", color=DISK, fontsize=8, ha="right", va="center")
    arrow(axes, (5.5, 1.0), (5.5, 1.65), DISK)
    axes.text(5.6, 1.33, "weights", color=DISK, fontsize=8, va="center")
    arrow(axes, (8.9, 1.65), (8.9, 1.0), DISK)
    axes.text(9.0, 1.33, "checkpoints, weights", color=DISK, fontsize=8, va="center")
    return figure


if __name__ == "__main__":
    mpl.rcParams.update({"svg.hashsalt": "rlinf", "text.color": INK})
    target = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_suffix(".svg")
    draw().savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
