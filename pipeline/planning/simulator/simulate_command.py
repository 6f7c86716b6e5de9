"""The command ``rlinf simulate``: simulate a placement problem; print a table, draw a chart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.table import Table

from pipeline.console import create_console, format_duration
from pipeline.plan import read_plan
from pipeline.planning.planner.problem import (
    Placement,
    PlacementProblem,
    placement_from_pools,
    read_problem,
)
from pipeline.planning.planner.search import solve
from pipeline.planning.simulator.scenario import Scenario
from pipeline.planning.simulator.simulation import SimulationTrace, simulate
from pipeline.report.theme import STAGE_COLOURS, stage_colours
from rlinf.config import validate
from rlinf.errors import ConfigError
from rlinf.yaml_file import read_yaml


def load_problem(path: Path, plan: Path | None) -> tuple[PlacementProblem, Placement]:
    """Return the problem of a YAML file, and a placement: that of ``plan``, else that of the file,
    else the best placement.

    Raises:
        PlanError: a file does not exist, or is invalid.
    """
    problem, placement = read_problem(path)
    if plan is not None:
        loaded = read_plan(plan)
        occasional = loaded.flow.all_stages.keys() - loaded.flow.stages
        placement = placement_from_pools(problem, loaded.pools, loaded.num_chunks, occasional)
    return problem, placement or solve(problem)[0].placement


def load_scenario(path: Path) -> Scenario:
    """Read a scenario.

    Raises:
        ConfigError: the file is missing, not YAML, or invalid; the message names the key.
    """
    values = read_yaml(path, "scenario", ConfigError) or {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected a mapping")
    try:
        return validate(Scenario, values, "scenario")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def run_simulate(
    path: Path,
    plan: Path | None,
    scenario: Path | None,
    iterations: int,
    seed: int,
    png: Path | None,
) -> None:
    """Simulate, print the table, and write the chart if requested."""
    problem, placement = load_problem(path, plan)
    disturbances = load_scenario(scenario) if scenario else Scenario()
    trace = simulate(problem, placement, disturbances, iterations, seed)
    console = create_console()
    header, *body = pool_table(trace)
    table = Table(*header)
    for row in body:
        table.add_row(*row)
    console.print(table)
    for label, value in summary(trace, seed):
        console.print(f"{label}: {value}", highlight=False)
    if png is not None:
        write_png(trace, png)


def summary(trace: SimulationTrace, seed: int) -> list[tuple[str, str]]:
    """Return the statistics and settings of a simulation as labels and values."""
    seconds = trace.iteration_s
    low, high = np.quantile(seconds, [0.1, 0.9])
    mean, predicted = float(seconds.mean()), trace.predicted_s
    rows = [
        ("placement", f"{trace.placement.mode}, {trace.placement.num_chunks} chunks"),
        ("iteration, simulated", f"{mean:.1f} s"),
        ("80 % of iterations", f"{low:.1f} - {high:.1f} s"),
        ("iteration, predicted", f"{predicted:.1f} s ({predicted / mean - 1:+.1%})"),
        (f"cost of {len(seconds)} iterations", f"{trace.cost:,.1f}"),
        ("GPU-hours", f"{trace.gpu_hours:,.1f}"),
        ("from submission to end", format_duration(trace.total_s)),
        ("seed", str(seed)),
    ]
    if trace.interruptions:
        rows.append(("jobs interrupted", str(trace.interruptions)))
    if trace.renewals:
        rows.append(("jobs renewed", str(trace.renewals)))
    return rows


def pool_table(trace: SimulationTrace) -> list[tuple[str, ...]]:
    """Return the table of pools; the first row is the header."""
    rows: list[tuple[str, ...]] = [("pool", "GPUs", "idle", "without a job")]
    shares = zip(trace.idle_shares, trace.down_shares, strict=True)
    for pool, (idle, down) in enumerate(shares):
        rows.append((*trace.label(pool), f"{idle:.0%}", f"{down:.0%}"))
    return rows


OTHER_COLOURS = {
    "switch": "#b8bfc7",
    "sync": STAGE_COLOURS["sync"],
    "queue": "#efe3c2",
    "down": "#d8a0a0",
}
"""Colours of spans without work, by activity."""


def gantt_chart(trace: SimulationTrace, num_iterations: int = 3) -> Figure:
    """Draw the spans of the last ``num_iterations``, with one row per pool."""
    pools = len(trace.placement.pools)
    start_s = trace.iteration_starts[max(0, len(trace.iteration_starts) - 1 - num_iterations)]
    names = [stage.name for stage in trace.problem.stages]
    colours = {**stage_colours(names), **OTHER_COLOURS}
    height = 0.55 * pools + 1.3
    figure, axis = plt.subplots(figsize=(10, height))
    drawn: set[str] = set()
    for pool in range(pools):
        bars: dict[str, list[tuple[float, float]]] = {}
        for span in trace.spans:
            if span.pool == pool and span.end > start_s:
                name = span.stage if span.activity == "work" else span.activity
                span_start = max(span.start, start_s)
                bars.setdefault(name, []).append((span_start - start_s, span.end - span_start))
        for name, spans in bars.items():
            drawn.add(name)
            # Weights are sent while the pool does other work.
            y, size = (pool + 0.26, 0.14) if name == "sync" else (pool - 0.36, 0.6)
            edge = "white" if len(spans) <= 120 else "none"
            axis.broken_barh(spans, (y, size), facecolors=colours[name], edgecolor=edge, lw=0.3)
    for boundary in trace.iteration_starts:
        if boundary >= start_s:
            axis.axvline(boundary - start_s, color="#9aa4af", lw=0.8, ls=":")
    axis.set_yticks(
        range(pools), ["\n".join(trace.label(pool)) for pool in range(pools)], fontsize=8
    )
    axis.set(
        xlim=(0, trace.iteration_starts[-1] - start_s),
        ylim=(pools - 0.45, -0.55),
        xlabel="seconds",
    )
    axis.grid(axis="y", visible=False)
    shown = [name for name in colours if name in drawn]
    handles = [Patch(color=colours[name], label=name) for name in shown]
    axis.legend(
        handles=handles, ncols=len(shown), loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=8
    )
    figure.tight_layout()
    return figure


def write_png(trace: SimulationTrace, path: Path) -> None:
    """Write the chart as a PNG."""
    figure = gantt_chart(trace)
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
