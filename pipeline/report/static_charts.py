"""The charts as images. The function of a chart returns a figure, or None if it has no data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from pipeline.report.chart_style import finish_chart
from pipeline.report.data import ReportData, iteration_windows, sort_lanes
from pipeline.report.interactive_charts import BINS, bin_edges, steps_per_s
from pipeline.report.theme import STAGE_COLOURS
from stages.context import IDLE_SPANS, WAIT_SPAN

MIN_RELATIVE_SPREAD = 1e-12
"""Values are drawn as a constant if their spread is at most this share of the largest: float64
would resolve only few steps between them."""
COMPUTING_EXTENT, WAITING_EXTENT = (-0.38, 0.38), (0.1, 0.3)
"""Lower and upper edge of a Gantt bar within its lane, whose height is 1."""


def learning_chart(data: ReportData) -> Figure | None:
    """Draw the score by SFT step and by iteration."""
    sft_points = [(p["step"], p["score"]) for p in data.sft if p.get("score") is not None]
    if not sft_points and not data.scores and not data.rows:
        return None
    panels = 2 if sft_points else 1
    figure, axes = plt.subplots(
        1, panels, figsize=(10, 3.6), sharey=True, width_ratios=[1, 2][-panels:], squeeze=False
    )
    rl_axis = axes[0, -1]
    if sft_points:
        steps, scores = zip(*sft_points, strict=True)
        axes[0, 0].plot(steps, scores, "o-", ms=3.5, color=STAGE_COLOURS["sft"])
        axes[0, 0].set(title="SFT", xlabel="fine-tuning step", ylabel="score")
    x, y = data.column("reward/score")
    if len(x):
        style = {"lw": 0.9, "alpha": 0.55, "color": STAGE_COLOURS["rollout"]}
        draw_line(rl_axis, x, y, label="training samples", **style)
    if data.scores:
        x, y = np.array(data.scores, dtype=float).T
        rl_axis.plot(x, y, "o-", ms=4, color=STAGE_COLOURS["train"], label="held-out")
        rl_axis.annotate(
            f"{y[-1]:.3g}", (x[-1], y[-1]), xytext=(6, 0), textcoords="offset points", va="center"
        )
    rl_axis.set(title="Reinforcement learning", xlabel="iteration")
    rl_axis.margins(x=0.06)
    set_axis_range(rl_axis)
    if not sft_points:
        rl_axis.set_ylabel("score")
    rl_axis.legend(loc="best")
    return finish_chart(figure)


def training_chart(data: ReportData) -> Figure | None:
    """Draw the metrics that show whether training is healthy."""
    metrics = [
        ("reward/mean", "mean reward"),
        ("train/loss", "loss"),
        ("train/entropy", "entropy (nats)"),
        ("train/approx_kl", "KL to the old policy"),
        ("train/clip_ratio", "clipped share"),
        ("train/grad_norm", "gradient norm"),
        ("rollout/completion_length", "mean length (steps)"),
        ("train/explained_variance", "explained variance"),
        ("train/rollout_logprob_diff", "|engine - trainer| log-prob"),
    ]
    present = [(name, title) for name, title in metrics if len(data.column(name)[0])][:9]
    if not present:
        return None
    rows = -(-len(present) // 3)
    figure, axes = plt.subplots(rows, 3, figsize=(10, 2.3 * rows), squeeze=False)
    for axis, (name, title) in zip(axes.flat, present, strict=False):
        draw_line(axis, *data.column(name), lw=1.2, color=STAGE_COLOURS["rollout"])
        set_axis_range(axis)
        axis.set_title(title, fontsize=10)
        axis.ticklabel_format(axis="y", scilimits=(-3, 4))
    for axis in list(axes.flat)[len(present) :]:
        axis.axis("off")
    for axis in axes[-1]:
        axis.set_xlabel("iteration")
    return finish_chart(figure)


def draw_line(axis: Axes, x: np.ndarray, y: np.ndarray, **style: Any) -> None:
    """Draw values by iteration as a line, and a value without finite neighbours as a point."""
    y = np.where(np.isfinite(y), y, np.nan)
    finite = np.pad(np.isfinite(y), 1)
    isolated = np.flatnonzero(finite[1:-1] & ~finite[:-2] & ~finite[2:])
    axis.plot(x, y, marker="o", ms=3.5, markevery=isolated.tolist(), **style)


def set_axis_range(axis: Axes) -> None:
    """Set a readable range of values, and ticks at integer iterations.

    A constant is drawn in the middle, with its value as text. A chart without a finite value gets a
    note instead.
    """
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    x_values = {float(x) for line in axis.lines for x in np.asarray(line.get_xdata())}
    if len(x_values) == 1:
        axis.set_xlim(min(x_values) - 1, max(x_values) + 1)
    y_values = [np.asarray(line.get_ydata(), dtype=float) for line in axis.lines]
    values = np.concatenate([y[np.isfinite(y)] for y in y_values] or [np.zeros(0)])
    if not len(values):
        axis.set(xticks=[], yticks=[])
        axis.text(0.5, 0.5, "no finite value", transform=axis.transAxes, ha="center", va="center")
        return
    low, high = float(values.min()), float(values.max())
    size = max(abs(low), abs(high))
    if high - low <= MIN_RELATIVE_SPREAD * size:
        half = 0.1 * size or 1.0
        axis.set_ylim(low - half, high + half)
        axis.text(0.98, 0.95, f"{low:.6g}", transform=axis.transAxes, ha="right", va="top")


def stage_times_chart(data: ReportData) -> Figure | None:
    """Draw the seconds of each stage, stacked by iteration."""
    if not data.rows:
        return None
    final = max(row["iteration"] for row in data.rows)
    seconds = {stage: np.zeros(final + 1) for stage in data.stage_names}
    for entry in data.stages:
        if entry["stage"] in seconds and entry["iteration"] <= final:
            seconds[entry["stage"]][entry["iteration"]] = entry["seconds"]
    figure, axis = plt.subplots(figsize=(10, 3))
    base = np.zeros(final + 1)
    for stage, values in seconds.items():
        axis.bar(np.arange(1, final + 2), values, 1.0, base, color=data.colours[stage], label=stage)
        base += values
    axis.set(xlabel="iteration", ylabel="seconds", xlim=(0.5, final + 1.5))
    # One slow iteration must not make all others look flat.
    axis.set_ylim(0, max(1e-3, 1.3 * float(np.quantile(base, 0.98))))
    axis.legend(ncols=5, loc="lower left", bbox_to_anchor=(0, 1.0))
    return finish_chart(figure)


def gantt_chart(data: ReportData, *, num_last: int = 4) -> Figure | None:
    """Draw when the stages of every worker computed and waited: the whole run, and its last
    ``num_last`` iterations."""
    segments = data.segments
    if not segments:
        return None
    lanes = sort_lanes(s.lane for s in segments)
    origin = min(s.start for s in segments)
    final = max((s.iteration for s in segments if s.stage in data.stage_names), default=0)
    since, _ = iteration_windows(data.spans).get(final - num_last + 1, (origin, origin))
    until = max(s.end for s in segments)
    height = max(1.2, 0.32 * len(lanes) + 0.9)
    figure, axes = plt.subplots(2, 1, figsize=(10, 2 * height + 0.4), squeeze=False)
    titles = ("Whole run", f"Last {min(num_last, final + 1)} iterations")
    for axis, start, title in zip(axes[:, 0], (origin, since), titles, strict=True):
        for row, lane in enumerate(lanes):
            lane_segments = [s for s in segments if s.lane == lane and s.end >= start]
            for computes, (low, high) in ((False, WAITING_EXTENT), (True, COMPUTING_EXTENT)):
                for stage, colour in data.colours.items():
                    bars = [
                        (s.start - origin, s.seconds)
                        for s in lane_segments
                        if s.stage == stage and s.is_computing == computes
                    ]
                    style = _style(colour, computes)
                    axis.broken_barh(bars, (row + low, high - low), **style)
        axis.set_yticks(range(len(lanes)), lanes)
        axis.set(title=title, xlim=(start - origin, until - origin), ylim=(len(lanes) - 0.5, -0.5))
        axis.grid(axis="y", visible=False)
    axes[1, 0].set_xlabel("seconds since the first stage")
    stages = [stage for stage in data.colours if any(s.stage == stage for s in segments)]
    handles = [Patch(label=stage, **_style(data.colours[stage], True)) for stage in stages]
    if not all(s.is_computing for s in segments):
        moved = any(s.name in IDLE_SPANS - {WAIT_SPAN} for s in data.spans)
        label = "waiting or moving" if moved else "waiting"
        handles.append(Patch(label=label, **_style(STAGE_COLOURS["sync"], False)))
    figure.legend(
        handles=handles,
        ncols=len(handles),
        handlelength=1.3,
        columnspacing=1.2,
        loc="upper right",
        fontsize=9,
    )
    return finish_chart(figure)


def _style(colour: str, computes: bool) -> dict[str, Any]:
    """Return the style of a bar: solid while a stage computes, thin and hatched while it pauses."""
    if computes:
        return {"facecolor": colour}
    return {"facecolor": "white", "edgecolor": colour, "hatch": "//////", "linewidth": 0}


def throughput_chart(data: ReportData) -> Figure | None:
    """Draw the steps per second of the rollout and of the whole iteration."""
    rollout, whole_iteration = steps_per_s(data)
    if not rollout and not whole_iteration:
        return None
    figure, axis = plt.subplots(figsize=(10, 2.8))
    for label, rates, colour in (
        ("rollout", rollout, STAGE_COLOURS["rollout"]),
        ("whole iteration", whole_iteration, STAGE_COLOURS["train"]),
    ):
        x, y = np.array([i + 1 for i in rates]), np.array(list(rates.values()))
        draw_line(axis, x, y, color=colour, label=label)
    axis.set(xlabel="iteration", ylabel="steps per second", ylim=(0, None))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend()
    return finish_chart(figure)


def distributions_chart(data: ReportData) -> Figure | None:
    """Draw histograms of scores and lengths of early and late samples."""
    groups = {label: samples for label, samples in data.first_and_last_samples.items() if samples}
    if not groups:
        return None
    scores = {label: np.array([s.score for s in samples]) for label, samples in groups.items()}
    lengths = {label: np.array([s.length for s in samples]) for label, samples in groups.items()}
    figure, axes = plt.subplots(1, 2, figsize=(10, 2.8))
    for axis, table, title in (
        (axes[0], scores, "score"),
        (axes[1], lengths, "length (steps)"),
    ):
        all_values = np.concatenate(list(table.values()))
        low, high = float(all_values.min()), float(all_values.max())
        bins = bin_edges(low, high, BINS)
        for (label, values), colour in zip(
            table.items(), (STAGE_COLOURS["sync"], STAGE_COLOURS["train"]), strict=False
        ):
            share = np.full(len(values), 1 / max(1, len(values)))
            axis.hist(values, bins, weights=share, alpha=0.6, color=colour, label=label)
        axis.set(title=title, ylabel="share of samples")
        axis.legend()
    return finish_chart(figure)


CHARTS: dict[str, Callable[[ReportData], Figure | None]] = {
    "learning": learning_chart,
    "training": training_chart,
    "stage-times": stage_times_chart,
    "gantt": gantt_chart,
    "throughput": throughput_chart,
    "distributions": distributions_chart,
}


def write_pictures(data: ReportData, folder: Path) -> list[Path]:
    """Write a PNG of each chart that has data; returns their paths."""
    folder.mkdir(exist_ok=True)
    written = []
    for name, draw in CHARTS.items():
        figure = draw(data)
        if figure is not None:
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=120)
            plt.close(figure)
    return written
