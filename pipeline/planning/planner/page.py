"""``plan.html``: the predicted Gantt chart, what-if bars, and the reasons, in one file."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pipeline.planning.planner.proposal import Proposal, Row
from pipeline.report.colours import COLOURS, colours
from pipeline.report.style import GRID, finish, inline
from pipeline.report.template import render

PART_SHADES = (0.3, 0.42, 0.54, 0.66, 1.0)
"""Opacity of the parts of a stage, the last of which is its work."""


def page(proposal: Proposal, title: str) -> str:
    """The page as text."""
    forecast = proposal.forecast
    sections = [("gantt", "Predicted iteration", gantt(proposal))]
    if proposal.what_ifs:
        sections.append(("what-if", "What if", what_if(proposal)))
    return render(
        "plan.html.jinja",
        name=f"{title}: plan",
        tiles=[
            ("predicted iteration", f"{forecast.iteration_s:.3g} s"),
            ("80 % of iterations", f"{forecast.low_s:.3g} - {forecast.high_s:.3g} s"),
            ("device-hours an iteration", f"{forecast.gpu_hours:.3g}"),
            ("mode", proposal.mode),
            ("objective", proposal.objective),
        ],
        sections=[
            {"name": name, "title": heading, "svg": inline(figure, name)}
            for name, heading, figure in sections
        ],
        rows=proposal.rows,
        alternatives=[
            {"other": other, "more": other.cost / forecast.cost - 1 if forecast.cost else 0.0}
            for other in proposal.alternatives
        ],
        choices=proposal.forecast.choices,
        notes=proposal.notes,
    )


def gantt(proposal: Proposal) -> Figure:
    """Each stage on its lane, its parts in shades; the whisker is the 10 % to 90 % interval."""
    lanes, shown = lanes_of(proposal.rows), colours(row.stage for row in proposal.rows)
    figure, axis = plt.subplots(figsize=(10, 0.55 * len(lanes) + 1.4))
    for at, row in ((at, row) for at, lane in enumerate(lanes) for row in lane):
        start = row.start_s
        opacity = [*PART_SHADES[: len(row.parts_s) - 1], PART_SHADES[-1]]
        for (name, length), shade in zip(row.parts_s.items(), opacity, strict=False):
            axis.barh(at, length, 0.6, start, color=shown[row.stage], alpha=shade, label=name)
            start += length
        axis.errorbar(
            row.start_s + row.seconds,
            at,
            xerr=[[row.seconds - row.low_s], [row.high_s - row.seconds]],
            color="#24292f",
            lw=1,
            capsize=3,
        )
    axis.set_yticks(range(len(lanes)), [f"{lane[0].place}  {lane[0].size}" for lane in lanes])
    axis.set(xlabel="seconds", xlim=(0, None), ylim=(len(lanes) - 0.4, -0.6))
    axis.grid(axis="y", visible=False)
    handles = [Patch(color=shown[row.stage], label=row.stage) for row in proposal.rows]
    names = max((list(row.parts_s) for row in proposal.rows), key=len)
    shades = [
        Patch(color="#24292f", alpha=shade, label=name)
        for name, shade in zip(names, [*PART_SHADES[: len(names) - 1], 1.0], strict=True)
    ]
    axis.legend(
        handles=[*handles, *(shades if len(names) > 1 else [])],
        ncols=len(handles) + len(shades),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        fontsize=8,
        columnspacing=1.0,
        handlelength=1.2,
    )
    return finish(figure)


def lanes_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by place and size; those that run side by side are on lanes of their own."""
    lanes: list[list[Row]] = []
    for row in rows:
        for lane in lanes:
            last = lane[-1]
            free = last.start_s + last.seconds <= row.start_s + 1e-9
            if (last.place, last.size) == (row.place, row.size) and free:
                lane.append(row)
                break
        else:
            lanes.append([row])
    return lanes


def what_if(proposal: Proposal) -> Figure:
    """Iteration times of the best plans of clusters that differ."""
    cases = [case for case in proposal.what_ifs if math.isfinite(case.seconds)]
    names = ["as it is", *(case.what for case in cases)]
    values = np.array([proposal.forecast.iteration_s, *(case.seconds for case in cases)])
    figure, axis = plt.subplots(figsize=(10, 0.34 * len(names) + 0.9))
    colours = ["#24292f" if i == 0 else COLOURS["rollout"] for i in range(len(names))]
    axis.barh(range(len(names)), values, 0.62, color=colours)
    for i, value in enumerate(values):
        change = "" if i == 0 else f"  {value / values[0] - 1:+.0%}"
        axis.annotate(
            f"{value:.3g} s{change}",
            (value, i),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axis.axvline(values[0], color=GRID, zorder=0)
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel="seconds of an iteration", xlim=(0, 1.15 * values.max()))
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    return finish(figure)
