"""A simulation as a picture: what each pool did, and when."""

from __future__ import annotations

import html
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pipeline.report.style import COLOURS, inline
from pipeline.simulator.show import rows
from pipeline.simulator.trace import Trace
from rlinf.artifacts import write_atomic

OTHER_COLOURS = {
    "switch": "#b8bfc7",
    "sync": COLOURS["sync"],
    "redone": "#1c1c1c",
    "queue": "#efe3c2",
    "down": "#d8a0a0",
}
SPARE_COLOURS = ("#4aa3a2", "#8c6d46", "#7d7abc", "#b07aa1")
"""Of stages that are not those of a language task."""


def gantt(trace: Trace, newest: int = 3) -> Figure:
    """Spans of the last iterations, a lane for each pool, and the idle share of each below."""
    pools = len(trace.placement.pools)
    since = trace.begins[max(0, len(trace.begins) - 1 - newest)]
    colours = _stage_colours(trace)
    height = 0.55 * pools + 1.3
    figure, axis = plt.subplots(figsize=(10, height))
    shown: set[str] = set()
    for pool in range(pools):
        bars: dict[str, list[tuple[float, float]]] = {}
        for span in trace.spans:
            if span.pool == pool and span.end > since and span.kind != "transfer":
                name = span.stage if span.kind == "work" else span.kind
                start = max(span.start, since)
                bars.setdefault(name, []).append((start - since, span.end - start))
        for name, spans in bars.items():
            shown.add(name)
            # Weights move beside what else the pool does.
            y, thick = (pool + 0.26, 0.14) if name == "sync" else (pool - 0.36, 0.6)
            edge = "white" if len(spans) <= 120 else "none"
            axis.broken_barh(spans, (y, thick), facecolors=colours[name], edgecolor=edge, lw=0.3)
    for begin in trace.begins:
        if begin >= since:
            axis.axvline(begin - since, color="#9aa4af", lw=0.8, ls=":")
    axis.set_yticks(range(pools), [_label(trace, pool) for pool in range(pools)], fontsize=8)
    axis.set(
        xlim=(0, trace.begins[-1] - since),
        ylim=(pools - 0.45, -0.55),
        xlabel="seconds",
    )
    axis.grid(axis="y", visible=False)
    names = [name for name in colours if name in shown]
    handles = [Patch(color=colours[name], label=name) for name in names]
    axis.legend(
        handles=handles, ncols=len(names), loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=8
    )
    figure.tight_layout()
    return figure


def write_png(trace: Trace, path: Path) -> None:
    """The chart as a picture."""
    figure = gantt(trace)
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def write_html(trace: Trace, path: Path, title: str) -> None:
    """The chart and the table in one file."""
    head, *body = rows(trace)
    table = "".join(
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in (("th", head), *(("td", row) for row in body))
    )
    style = (
        "body{font:15px system-ui,sans-serif;max-width:1100px;margin:2rem auto;color:#24292f}"
        "td,th{text-align:left;padding:.2rem 1rem .2rem 0}"
    )
    seconds = trace.iteration_s
    low, high = np.quantile(seconds, [0.1, 0.9])
    write_atomic(
        path,
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style><h1>{html.escape(title)}</h1>"
        f"<p>{len(seconds)} iterations of {seconds.mean():.1f} s (q10 {low:.1f}, q90 {high:.1f})"
        f"</p>{inline(gantt(trace), 'gantt')}<table>{table}</table></html>\n",
    )


def _label(trace: Trace, pool: int) -> str:
    stages, gpus = trace.label(pool)
    return f"{stages}\n{gpus}"


def _stage_colours(trace: Trace) -> dict[str, str]:
    spare = iter(SPARE_COLOURS * len(trace.problem.stages))
    names = [stage.name for stage in trace.problem.stages]
    stages = {name: COLOURS.get(name) or next(spare) for name in names}
    return {**stages, **OTHER_COLOURS}
