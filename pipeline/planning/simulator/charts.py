"""Charts of a simulation: the activity of each pool over time."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import yaml
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pipeline.planning.simulator.scenario import Scenario
from pipeline.planning.simulator.trace import SimulationTrace, pool_table, summary_tiles
from pipeline.report.chart_style import inline_svg
from pipeline.report.theme import STAGE_COLOURS, render_template, stage_colours
from rlinf.artifacts import write_user_file

OTHER_COLOURS = {
    "switch": "#b8bfc7",
    "sync": STAGE_COLOURS["sync"],
    "redone": "#1c1c1c",
    "queue": "#efe3c2",
    "down": "#d8a0a0",
}
"""Colours of activities that are not stages of a language task."""


def gantt_chart(trace: SimulationTrace, newest: int = 3) -> Figure:
    """Draw the spans of the last iterations, on a lane for each pool."""
    pools = len(trace.placement.pools)
    since = trace.iteration_starts[max(0, len(trace.iteration_starts) - 1 - newest)]
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
            # Weights move while the pool does other work.
            y, thick = (pool + 0.26, 0.14) if name == "sync" else (pool - 0.36, 0.6)
            edge = "white" if len(spans) <= 120 else "none"
            axis.broken_barh(spans, (y, thick), facecolors=colours[name], edgecolor=edge, lw=0.3)
    for begin in trace.iteration_starts:
        if begin >= since:
            axis.axvline(begin - since, color="#9aa4af", lw=0.8, ls=":")
    axis.set_yticks(range(pools), [_label(trace, pool) for pool in range(pools)], fontsize=8)
    axis.set(
        xlim=(0, trace.iteration_starts[-1] - since),
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


def write_png(trace: SimulationTrace, path: Path) -> None:
    """Write the chart as a PNG."""
    figure = gantt_chart(trace)
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)


def write_html(
    trace: SimulationTrace, path: Path, title: str, called: str, scenario: Scenario, seed: int
) -> None:
    """Write an HTML page with the scenario, the figures, the chart and the table.

    Args:
        called: the name or the file of the scenario.
    """
    head, *body = pool_table(trace)
    config = scenario.model_dump(mode="json", exclude_defaults=True)
    page = render_template(
        "simulation.html.jinja",
        name=f"{title}: simulation",
        tiles=summary_tiles(trace, seed),
        called=called,
        scenario=yaml.safe_dump(config, sort_keys=False) if config else "",
        sections=[
            {
                "name": "gantt",
                "title": "Last iterations",
                "svg": inline_svg(gantt_chart(trace), "g"),
            }
        ],
        head=head,
        rows=body,
    )
    write_user_file(path, page)


def _label(trace: SimulationTrace, pool: int) -> str:
    stages, gpus = trace.label(pool)
    return f"{stages}\n{gpus}"


def _stage_colours(trace: SimulationTrace) -> dict[str, str]:
    names = [stage.name for stage in trace.problem.stages]
    return {**stage_colours(names), **OTHER_COLOURS}
