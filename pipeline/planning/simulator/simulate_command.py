"""The command ``rlinf simulate``: load a problem by name or from files, simulate it, and print a
table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from pipeline.console import create_console
from pipeline.plan import read_plan
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
from pipeline.planning.simulator.trace import pool_table, summary
from rlinf.config import validate
from rlinf.errors import ConfigError, PlanError, did_you_mean
from rlinf.yaml_file import read_yaml


def load_problem(what: str, plan: Path | None) -> tuple[PlacementProblem, Placement]:
    """Return the problem of a study or file, and the placement of the plan, of the file, or the
    best.

    Raises:
        PlanError: the study or file does not exist, or is invalid.
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
    """Return the scenario of a file, or by name for a study; everything is off without one.

    Raises:
        ConfigError: the file is missing, not YAML, or invalid; names the key.
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
    """Simulate, print the table, and write the requested charts."""
    problem, placement = load_problem(what, plan)
    loaded = load_scenario(what, scenario)
    trace = simulate(problem, placement, loaded, iterations, seed)
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
            charts.write_html(trace, page, what, called, loaded, seed)
