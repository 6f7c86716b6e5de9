"""Draws ``rooms.svg``: the folders, what is in them, and which imports which.

python docs/images/rooms.py [FILE]
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
LIBRARY, STAGES, PIPELINE, JOBS = "#57a773", "#2f7fb5", "#c8553d", "#7d5fae"
ROOMS = {
    # x, y, width, height, colour, title, lines
    "commands": (
        0.3,
        6.5,
        4.3,
        1.5,
        PIPELINE,
        "pipeline/commands",
        ["cli  experiment  submit  stop  status", "sweep  workflow (Snakemake)  doctor  export"],
    ),
    "planning": (
        4.9,
        6.5,
        3.9,
        1.5,
        PIPELINE,
        "pipeline/planning",
        ["profile → cost → planner", "simulator"],
    ),
    "report": (
        9.1,
        6.5,
        2.6,
        1.5,
        PIPELINE,
        "pipeline/report",
        ["page, charts, Gantt,", "comparison"],
    ),
    "pools": (
        0.3,
        4.5,
        4.3,
        1.5,
        PIPELINE,
        "pipeline/pools",
        ["resident workers: scheduler of", "work items, leases, autoscaler"],
    ),
    "core": (
        4.9,
        4.5,
        6.8,
        1.5,
        PIPELINE,
        "pipeline",
        [
            "driver, graph of stages, plan, run state, resume",
            "validation, health checks, metrics, job executor",
        ],
    ),
    "worker": (
        0.3,
        2.5,
        4.3,
        1.5,
        STAGES,
        "stages/worker",
        ["device schedule, policy server,", "fetching of records, weights"],
    ),
    "stages": (
        4.9,
        2.45,
        4.3,
        1.6,
        STAGES,
        "stages",
        [
            "flow: the table of stages",
            "sft rollout reward inference",
            "train sync evaluate · context, runner",
        ],
    ),
    "launchers": (9.5, 2.5, 2.2, 1.5, JOBS, "launchers", ["local, sbatch", "→ slurm"]),
    "rlinf": (
        0.3,
        0.3,
        11.4,
        1.7,
        LIBRARY,
        "rlinf",
        [
            "algorithms · rewards · envs · engines · models · trainers: what users extend",
            "channels · weights · data · track: how records, tensors and numbers move",
            "config · registry · artifacts · verified I/O · errors",
        ],
    ),
}
ARROWS = [
    ("commands", "pools"),
    ("planning", "core"),
    ("report", "core"),
    ("pools", "worker"),
    ("pools", "core"),
    ("worker", "stages"),
    ("core", "stages"),
    ("core", "launchers"),
    ("worker", "rlinf"),
    ("stages", "rlinf"),
    ("launchers", "rlinf"),
]


def room(axes: Axes, name: str) -> None:
    x, y, w, h, colour, title, lines = ROOMS[name]
    shape = FancyBboxPatch(
        (x, y), w, h, boxstyle="round,pad=0,rounding_size=0.12", ec=colour, fc=PAPER, lw=1.6
    )
    axes.add_patch(shape)
    axes.text(x + 0.15, y + h - 0.3, title, weight="bold", color=colour, va="center", fontsize=10)
    for row, line in enumerate(lines):
        axes.text(x + 0.15, y + h - 0.66 - 0.33 * row, line, va="center", fontsize=8.3, color=INK)


def arrow(axes: Axes, source: str, target: str) -> None:
    x, y, w, h, *_ = ROOMS[source]
    tx, ty, tw, th, *_ = ROOMS[target]
    at = (max(x, tx) + min(x + w, tx + tw)) / 2
    beside = tx >= x + w
    ends = ((x + w, y + h / 2), (tx, y + h / 2)) if beside else ((at, y), (at, ty + th))
    axes.add_patch(
        FancyArrowPatch(
            *ends,
            arrowstyle="-|>",
            mutation_scale=12,
            color=SOFT,
            lw=1.3,
            shrinkA=0,
            shrinkB=1,
        )
    )


def main(out: Path) -> None:
    figure, axes = plt.subplots(figsize=(11, 7.6))
    axes.set(xlim=(0, 12), ylim=(0, 8.3))
    axes.axis("off")
    for source, target in ARROWS:
        arrow(axes, source, target)
    for name in ROOMS:
        room(axes, name)
    mpl.rcParams["svg.hashsalt"] = "rlinf"
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
