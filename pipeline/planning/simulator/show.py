"""``rlinf simulate``: what to simulate, by name or from files, and its table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.table import Table

from pipeline.durations import duration
from pipeline.plan import read_plan
from pipeline.planning.planner.predict import Predictor
from pipeline.planning.planner.problem import Placement, Problem
from pipeline.planning.planner.problem_file import placement_of, read_problem
from pipeline.planning.planner.search import solve
from pipeline.planning.simulator import studies
from pipeline.planning.simulator.scenario import Scenario
from pipeline.planning.simulator.simulation import simulate
from pipeline.planning.simulator.trace import Trace
from pipeline.terminal import terminal
from rlinf.config import validate
from rlinf.errors import ConfigError, PlanError, nearest
from rlinf.yaml_file import read_yaml

WAITS_SHOWN = 2


def load(what: str, plan: Path | None) -> tuple[Problem, Placement]:
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
            f"{what!r} is neither a YAML file nor a study{nearest(what, studies.STUDIES)}"
        )
    if plan is not None:
        known = read_plan(plan)
        seldom = known.flow.table.keys() - known.flow.stages
        placement = placement_of(problem, known.pools, known.chunks, seldom)
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
        hint = nearest(scenario, studies.SCENARIOS) if what in studies.STUDIES else ""
        raise ConfigError(f"scenario: no file {path}{hint}")
    values = read_yaml(path, "scenario", ConfigError) or {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected a mapping")
    return validate(Scenario, values, str(path))


def show(
    what: str,
    plan: Path | None,
    scenario: str | None,
    iterations: int,
    seed: int,
    png: Path | None,
    page: Path | None,
) -> None:
    """Simulate, print the table, and write the pictures asked for."""
    problem, placement = load(what, plan)
    goes_wrong = load_scenario(what, scenario)
    trace = simulate(problem, placement, goes_wrong, iterations, seed)
    console = terminal()
    head, *body = rows(trace)
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


def summary(trace: Trace) -> str:
    """The figures of a whole simulation."""
    seconds = trace.iteration_s
    low, high = np.quantile(seconds, [0.1, 0.9])
    lines = [
        f"{trace.placement.mode}, {trace.placement.chunks} micro-batches",
        f"iteration: {seconds.mean():.1f} s (q10 {low:.1f}, q90 {high:.1f}); "
        f"predicted {_predicted_s(trace):.1f}",
        f"{len(seconds)} iterations: {duration(trace.total_s)} from submission to end, "
        f"{trace.gpu_hours:,.1f} GPU-hours, price {trace.cost:,.1f}",
    ]
    if trace.losses or trace.renewals:
        lines.append(
            f"{len(trace.losses)} losses, {trace.redone} iterations done again, "
            f"{trace.renewals} jobs renewed"
        )
    return "\n".join(lines)


def figures(trace: Trace, seed: int) -> list[tuple[str, str]]:
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
        ("from submission to end", duration(trace.total_s)),
        ("placement", f"{trace.placement.mode}, {trace.placement.chunks} micro-batches"),
        ("seed", str(seed)),
    ]
    if trace.losses or trace.renewals:
        found.append(("losses, iterations done again", f"{len(trace.losses)}, {trace.redone}"))
        found.append(("jobs renewed", str(trace.renewals)))
    return found


def _predicted_s(trace: Trace) -> float:
    """What the planner's formula says of an iteration, without disturbances."""
    return float(Predictor(trace.problem).one(trace.placement).total_s)


def rows(trace: Trace) -> list[tuple[str, ...]]:
    """A table by pool, its head first."""
    out: list[tuple[str, ...]] = [("pool", "GPUs", "idle", "waits for")]
    for pool in range(len(trace.placement.pools)):
        stages, gpus = trace.label(pool)
        waits = [f"{what} {share:.0%}" for what, share in trace.waits_most(pool) if share >= 0.005]
        out.append((stages, gpus, f"{trace.idle(pool):.0%}", ", ".join(waits[:WAITS_SHOWN])))
    return out
