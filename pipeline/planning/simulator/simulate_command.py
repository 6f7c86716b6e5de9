"""The command ``rlinf simulate``: load a placement problem, simulate it, and print a table."""

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


def load_problem(name: str, plan: Path | None) -> tuple[PlacementProblem, Placement]:
    """Return the problem of a study or YAML file, and its placement.

    The placement is that of ``plan``, else that of the file, else the best one.

    Raises:
        PlanError: the study or file does not exist, or is invalid.
    """
    placement = None
    if name in studies.STUDIES:
        problem = studies.STUDIES[name].problem
    elif Path(name).suffix in (".yaml", ".yml"):
        problem, placement = read_problem(Path(name))
    else:
        raise PlanError(
            f"{name!r} is neither a YAML file nor a study{did_you_mean(name, studies.STUDIES)}"
        )
    if plan is not None:
        loaded = read_plan(plan)
        occasional = loaded.flow.all_stages.keys() - loaded.flow.stages
        placement = placement_from_pools(problem, loaded.pools, loaded.num_chunks, occasional)
    return problem, placement or solve(problem)[0].placement


def load_scenario(problem_name: str, scenario: str | None) -> Scenario:
    """Return a scenario by name (for a study) or from a file; None: no disturbances.

    Raises:
        ConfigError: the file is missing, not YAML, or invalid; the message names the key.
    """
    if scenario is None:
        return Scenario()
    if problem_name in studies.STUDIES and scenario in studies.SCENARIOS:
        return studies.STUDIES[problem_name].scenario(scenario)
    path = Path(scenario)
    if not path.exists():
        hint = did_you_mean(scenario, studies.SCENARIOS) if problem_name in studies.STUDIES else ""
        raise ConfigError(f"scenario: no file {path}{hint}")
    values = read_yaml(path, "scenario", ConfigError) or {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected a mapping")
    return validate(Scenario, values, str(path))


def run_simulate(
    problem_name: str,
    plan: Path | None,
    scenario: str | None,
    iterations: int,
    seed: int,
    png: Path | None,
    page: Path | None,
) -> None:
    """Simulate, print the table, and write the requested charts."""
    problem, placement = load_problem(problem_name, plan)
    loaded_scenario = load_scenario(problem_name, scenario)
    trace = simulate(problem, placement, loaded_scenario, iterations, seed)
    console = create_console()
    header, *body = pool_table(trace)
    table = Table(*header)
    for row in body:
        table.add_row(*row)
    console.print(table)
    console.print(summary(trace))
    if png is not None or page is not None:
        from pipeline.planning.simulator import charts

        if png is not None:
            charts.write_png(trace, png)
        if page is not None:
            scenario_name = scenario or "none"
            charts.write_html(trace, page, problem_name, scenario_name, loaded_scenario, seed)
