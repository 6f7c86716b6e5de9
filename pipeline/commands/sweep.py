"""Sweeps: all points are validated before the first one starts, and compared at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipeline.commands.experiment import compose, validate_experiment
from pipeline.commands.status import RunStatus, read_status
from pipeline.console import create_console
from pipeline.report.comparison import ComparedRun, write_comparison
from rlinf.errors import ConfigError, InputError, RlinfError

NAMING_KEYS = ("run.name", "run.suffix", "run.root", "hydra")
"""Prefixes of keys that name a run or configure Hydra; they are not shown as varied."""


@dataclass(frozen=True)
class SweepPoint:
    """One run of a sweep."""

    folder: Path
    varied: str
    """Overrides that differ between points, as text."""
    name: str = "runs"
    """``run.name``, from which the folder is derived."""

    @property
    def page(self) -> Path:
        """Path of the sweep's comparison page, if this is its first point."""
        return self.folder.parent / "sweeps" / self.name / "comparison.html"


def sweep_points(words: Sequence[str], searchpath: Sequence[str] = ()) -> list[SweepPoint]:
    """Return the points of a sweep over the values on the command line, in Hydra's order.

    Args:
        words: overrides, without options.
        searchpath: folders of further configuration files.

    Raises:
        ConfigError, DataError, PlanError: a point is invalid, or two points are the same run;
            nothing was written or submitted.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(list(words))
        (overrides_by_point,) = BasicSweeper.split_arguments(parsed, None)
    except HydraException as error:
        raise ConfigError(str(error)) from None
    keys = _varied_keys(overrides_by_point)
    points: list[SweepPoint] = []
    number_by_folder: dict[Path, int] = {}
    for number, overrides in enumerate(overrides_by_point):
        values = _by_key(overrides)
        varied = ", ".join(f"{key.split('.')[-1]}={values[key]}" for key in keys if key in values)
        try:
            config, _ = validate_experiment(compose(overrides, searchpath))
        except InputError as error:
            raise ConfigError(f"point {number} of the sweep ({varied}): {error}") from None
        folder = config.run.folder
        if folder in number_by_folder:
            raise ConfigError(
                f"run.suffix: points {number_by_folder[folder]} and {number} of the sweep would "
                f"both be {folder}; put the keys that differ into run.suffix, such as "
                "run.suffix='-${seed}'"
            )
        number_by_folder[folder] = number
        points.append(SweepPoint(folder, varied, config.run.name))
    return points


def compare_points(points: Sequence[SweepPoint]) -> list[ComparedRun]:
    """Return a summary of each point: varied overrides, progress and scores."""
    summaries = []
    for point in points:
        status = _status(point.folder)
        summaries.append(
            ComparedRun(
                point.folder,
                point.varied,
                "not started" if status is None else status.progress,
                _format_score(None if status is None else status.reward),
                _format_score(None if status is None else status.score),
            )
        )
    return summaries


def show_sweep(points: Sequence[SweepPoint]) -> None:
    """Print a table of the runs with the paths of their reports, and write the comparison page."""
    console, runs = create_console(), compare_points(points)
    table = Table(title=f"sweep of {len(runs)} runs", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("run", justify="right")
    table.add_column("varied", overflow="fold")
    for name in ("iterations", "reward", "held-out"):
        table.add_column(name, justify="right")
    for number, run in enumerate(runs):
        table.add_row(str(number), run.varied, run.iterations, run.reward, run.score)
    console.print(table)
    for number, run in enumerate(runs):
        report = run.folder / "report" / "report.html"
        location = report if report.exists() else f"{run.folder} (no report)"
        console.print(f"{number}: {location}", soft_wrap=True)
    started = [run for run in runs if run.folder.is_dir()]
    if started:
        page = write_comparison(points[0].page, "Comparison of runs", started)
        console.print(f"comparison: {page}", soft_wrap=True)


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    parts = (word.lstrip("+").partition("=") for word in overrides)
    return {key: value for key, _, value in parts}


def _varied_keys(overrides_by_point: Sequence[Sequence[str]]) -> list[str]:
    """Return the keys whose values differ between points, in the given order."""
    values: dict[str, set[str]] = {}
    for overrides in overrides_by_point:
        for key, value in _by_key(overrides).items():
            values.setdefault(key, set()).add(value)
    return [
        key
        for key, distinct in values.items()
        if len(distinct) > 1 and not key.startswith(NAMING_KEYS)
    ]


def _status(folder: Path) -> RunStatus | None:
    try:
        return read_status(folder)
    except RlinfError:
        return None


def _format_score(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3f}"
