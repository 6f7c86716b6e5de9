"""The command ``rlinf simulate``: simulate a placement problem; print a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
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
) -> None:
    """Simulate, and print the table."""
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
