"""``rlinf simulate``: what to simulate, by name or from files, and its table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.table import Table

from pipeline.console import create_console, format_duration
from pipeline.plan import read_plan
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import (
    Placement,
    PlacementProblem,
    placement_from_pools,
    read_problem,
)
from pipeline.planning.planner.search import solve
from pipeline.planning.simulator import studies
from pipeline.planning.simulator.scenario import Scenario
from pipeline.planning.simulator.simulation import simulate
from pipeline.planning.simulator.trace import SimulationTrace
from rlinf.config import validate
from rlinf.errors import ConfigError, PlanError, did_you_mean
from rlinf.yaml_file import read_yaml

MAX_WAITS_SHOWN = 2


def load_problem(what: str, plan: Path | None) -> tuple[PlacementProblem, Placement]:
    """The problem of a study or file, and the placement of the plan, of the file, or the best.

    Raises:
        PlanError: no such study or file, or it is invalid.
    """
    placement = None
    if what in studies.STUDIES:
        problem = studies.STUDIES[what].problem
    elif Path(what).suffix in (".yaml", ".yml"):
        problem, placement = read_problem(Path(what))
    else:
        raise PlanError(
            f"{what!r} is neither a YAML file nor a study{did_you_mean(what, studies.STUDIES)}"
        )
    if plan is not None:
        known = read_plan(plan)
        seldom = known.flow.all_stages.keys() - known.flow.stages
        placement = placement_from_pools(problem, known.pools, known.num_chunks, seldom)
    return problem, placement or solve(problem)[0].placement


def load_scenario(what: str, scenario: str | None) -> Scenario:
    """A scenario file, or for a study one by name; everything off without one.

    Raises:
        ConfigError: missing, not YAML, or invalid; names the key.
    """
    if scenario is None:
        return Scenario()
    if what in studies.STUDIES and scenario in studies.SCENARIOS:
        return studies.STUDIES[what].scenario(scenario)
    path = Path(scenario)
    if not path.exists():
        hint = did_you_mean(scenario, studies.SCENARIOS) if what in studies.STUDIES else ""
        raise ConfigError(f"scenario: no file {path}{hint}")
    values = read_yaml(path, "scenario", ConfigError) or {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected a mapping")
    return validate(Scenario, values, str(path))


def run_simulate(
    what: str,
    plan: Path | None,
    scenario: str | None,
    iterations: int,
    seed: int,
    png: Path | None,
    page: Path | None,
) -> None:
    """Simulate, print the table, and write the pictures asked for."""
    problem, placement = load_problem(what, plan)
    goes_wrong = load_scenario(what, scenario)
    trace = simulate(problem, placement, goes_wrong, iterations, seed)
    console = create_console()
    head, *body = pool_table(trace)
    table = Table(*head)
    for row in body:
        table.add_row(*row)
    console.print(table)
    console.print(summary(trace))
    if png is not None or page is not None:
        from pipeline.planning.simulator import charts

        if png is not None:
            charts.write_png(trace, png)
        if page is not None:
            called = scenario or "none"
            charts.write_html(trace, page, what, called, goes_wrong, seed)


def summary(trace: SimulationTrace) -> str:
    """The figures of a whole simulation."""
    seconds = trace.iteration_s
    low, high = np.quantile(seconds, [0.1, 0.9])
    lines = [
        f"{trace.placement.mode}, {trace.placement.num_chunks} micro-batches",
        f"iteration: {seconds.mean():.1f} s (q10 {low:.1f}, q90 {high:.1f}); "
        f"predicted {_predicted_s(trace):.1f}",
        f"{len(seconds)} iterations: {format_duration(trace.total_s)} from submission to end, "
        f"{trace.gpu_hours:,.1f} GPU-hours, price {trace.cost:,.1f}",
    ]
    if trace.interruptions or trace.renewals:
        lines.append(
            f"{len(trace.interruptions)} losses, {trace.repeated_iterations} iterations done "
            f"again, {trace.renewals} jobs renewed"
        )
    return "\n".join(lines)


def summary_tiles(trace: SimulationTrace, seed: int) -> list[tuple[str, str]]:
    """The same, and what was simulated, as labels and values."""
    seconds = trace.iteration_s
    low, high = np.quantile(seconds, [0.1, 0.9])
    mean, predicted = float(seconds.mean()), _predicted_s(trace)
    found = [
        ("iteration, simulated", f"{mean:.1f} s"),
        ("80 % of iterations", f"{low:.1f} - {high:.1f} s"),
        ("iteration, predicted", f"{predicted:.1f} s ({predicted / mean - 1:+.1%})"),
        (f"price of {len(seconds)} iterations", f"{trace.cost:,.1f}"),
        ("GPU-hours", f"{trace.gpu_hours:,.1f}"),
        ("from submission to end", format_duration(trace.total_s)),
        ("placement", f"{trace.placement.mode}, {trace.placement.num_chunks} micro-batches"),
        ("seed", str(seed)),
    ]
    if trace.interruptions or trace.renewals:
        found.append(
            (
                "losses, iterations done again",
                f"{len(trace.interruptions)}, {trace.repeated_iterations}",
            )
        )
        found.append(("jobs renewed", str(trace.renewals)))
    return found


def _predicted_s(trace: SimulationTrace) -> float:
    """What the planner's formula says of an iteration, without disturbances."""
    return float(Predictor(trace.problem).predict(trace.placement).total_s)


def pool_table(trace: SimulationTrace) -> list[tuple[str, ...]]:
    """A table by pool, its head first."""
    out: list[tuple[str, ...]] = [("pool", "GPUs", "idle", "waits for")]
    for pool in range(len(trace.placement.pools)):
        stages, gpus = trace.label(pool)
        waits = [
            f"{what} {share:.0%}" for what, share in trace.longest_waits(pool) if share >= 0.005
        ]
        out.append((stages, gpus, f"{trace.idle(pool):.0%}", ", ".join(waits[:MAX_WAITS_SHOWN])))
    return out
