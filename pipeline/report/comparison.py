"""Comparison of runs: every metric of all runs in one chart, on one page."""

from __future__ import annotations

import colorsys
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.metrics import read_metrics, stage_manifest
from pipeline.report.interactive_charts import HEADLINES, TITLES, json_numbers
from pipeline.report.page import render_interactive
from rlinf.artifacts import write_atomic

SCRIPTS = ("page.js", "scales.js", "plots.js", "compare.js")
GOLDEN_RATIO_STEP = 0.381966
"""Step between the hues of consecutive runs, as a share of the colour circle, for distinct hues."""


@dataclass(frozen=True)
class ComparedRun:
    """A run and the texts of its cells in the comparison table."""

    folder: Path
    varied: str
    """Overrides that differ between the runs."""
    iterations: str
    reward: str
    score: str


def write_comparison(page: Path, name: str, runs: Sequence[ComparedRun]) -> Path:
    """Write the comparison page and its folder; returns the path of the page."""
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, comparison_html(page.parent, name, runs))
    return page


def comparison_html(folder: Path, name: str, runs: Sequence[ComparedRun]) -> str:
    """Return the page as text. Links to reports are relative to ``folder``."""
    metrics = [{row["iteration"] + 1: row for row in read_metrics(run.folder)} for run in runs]
    scores = [_read_scores(run.folder) for run in runs]
    xs = {
        "rows": sorted({i for by_iteration in metrics for i in by_iteration}),
        "versions": sorted({version for by_version in scores for version in by_version}),
    }
    labels = [run.varied or run.folder.name for run in runs]

    def plot(key: str, title: str, x: str, values: Callable[[int, int], Any], **more: Any) -> Any:
        kind = "points" if x == "versions" else "metric"
        series = [
            {
                "label": label,
                "colour": f"run-{number}",
                "y": json_numbers(values(number, x_value) for x_value in xs[x]),
                "kind": kind,
            }
            for number, label in enumerate(labels)
        ]
        description = {"id": key.replace("/", "-"), "name": key, "title": title, "x": x}
        return {**description, "series": series, "linked": True, **more}

    def metric_at(key: str) -> Callable[[int, int], Any]:
        return lambda number, x_value: metrics[number].get(x_value, {}).get(key)

    rows = [row for by_iteration in metrics for row in by_iteration.values()]
    names = {name for row in rows for name in row} - {"iteration"}
    headlines = [name for name in HEADLINES if name in names]
    metric_plots = [
        plot(
            key,
            TITLES.get(key, key.partition("/")[2].replace("_", " ")),
            "rows",
            metric_at(key),
        )
        for key in [*headlines, *sorted(names - {*headlines})]
    ]
    held_out = plot(
        "evaluate/score", "Held-out score", "versions", lambda n, v: scores[n].get(v), wide=True
    )
    groups = [
        {"title": "Learning", "plots": [held_out, *metric_plots[: len(headlines)]]},
        {"title": "All metrics", "plots": metric_plots[len(headlines) :]},
    ]
    colours = {
        theme: {f"run-{number}": run_colour(number, lightness) for number in range(len(runs))}
        for theme, lightness in (("light", 0.42), ("dark", 0.68))
    }
    table = [
        {
            "name": run.folder.name,
            "colour": f"run-{number}",
            "report": _report_link(folder, run.folder),
            "varied": run.varied,
            "iterations": run.iterations,
            "reward": run.reward,
            "score": run.score,
        }
        for number, run in enumerate(runs)
    ]
    content = {"name": name, "xs": xs, "groups": groups}
    return render_interactive(
        "comparison.html.jinja", content, SCRIPTS, colours=colours, runs=table
    )


def run_colour(number: int, lightness: float) -> str:
    """Return the colour of a run as ``#rrggbb``."""
    parts = colorsys.hls_to_rgb(number * GOLDEN_RATIO_STEP % 1, lightness, 0.62)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _read_scores(run: Path) -> dict[int, float]:
    scores = {}
    for folder in sorted((run / "evaluate").glob("[0-9]*")):
        manifest = stage_manifest(run, "evaluate", int(folder.name))
        if manifest is not None and "score" in manifest.metrics:
            scores[int(folder.name)] = manifest.metrics["score"]
    return scores


def _report_link(folder: Path, run: Path) -> str:
    page = run / "report" / "report.html"
    return os.path.relpath(page, folder) if page.exists() else ""
