"""The report page: charts, tables and transcripts in one self-contained file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipeline.console import format_duration, format_number
from pipeline.gpu_hours import format_gpu_hours, read_gpu_hours
from pipeline.health_checks import run_warnings
from pipeline.metrics import headline_metrics, step_unit
from pipeline.report.charts import GIB, build_plots, gantt_columns
from pipeline.report.data import (
    REPORT_FOLDER,
    ReportData,
    read_report_data,
    transcript_columns,
    worker_idle_times,
)
from pipeline.report.theme import TEMPLATE_FOLDER as TEMPLATES
from pipeline.report.theme import render_template, stage_colours
from pipeline.run import RunRecord, flatten, provenance_rows, read_run_record
from rlinf.artifacts import write_atomic
from rlinf.config import redact
from rlinf.errors import ConfigError
from stages.layout import CONFIG_FILE, PLAN_FILE
from stages.retention import best_weights

if TYPE_CHECKING:  # imported where the plan has a forecast
    from pipeline.pools.measured_times import ForecastComparison

ASSETS = TEMPLATES / "assets"
LIBRARY = ("uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE")
"""Script, style sheet and licence of the chart library."""
SCRIPTS = (
    "page.js",
    "scales.js",
    "plots.js",
    "gantt.js",
    "transcripts.js",
    "settings.js",
    "start.js",
)


def write_report(run: Path) -> Path:
    """Write ``report/report.html``; returns its path."""
    folder = run / REPORT_FOLDER
    folder.mkdir(exist_ok=True)
    page = folder / "report.html"
    write_atomic(page, report_html(read_report_data(run)))
    return page


def report_html(data: ReportData) -> str:
    """Return the page as text."""
    run = data.run.folder
    plan = (run / PLAN_FILE).read_text(encoding="utf-8") if (run / PLAN_FILE).exists() else ""
    content = {
        "name": run.name,
        **build_plots(data),
        "gantt": gantt_columns(data),
        "transcripts": transcript_columns(data.samples),
        "step_unit": step_unit(data.run.config),
    }
    idle_rows = worker_idle_times(data.spans)
    try:
        record = read_run_record(run)
    except ConfigError:
        record = None
    stages = stage_table(data)
    settings = [] if record is None else settings_rows(record)
    return render_interactive(
        "report.html.jinja",
        content,
        SCRIPTS,
        colours={"light": data.colours, "dark": stage_colours(data.colours, dark=True)},
        notices=run_warnings(data.run),
        tiles=summary_tiles(data),
        stages=stages,
        uses_gpu=any(row["gpu"] or row["gpu_memory"] for row in stages),
        problem_sets=problem_set_rows(data),
        idle=idle_rows,
        idle_stages={stage for row in idle_rows for stage in row.stages},
        iterations=len(data.rows),
        videos=data.videos,
        predicted=_forecast_rows(data, plan),
        facts=[
            *provenance_rows(
                {} if record is None else redact(record.model_dump()),
                data.run.config.seed,
                data.manifests,
            ),
            *_best_weights_fact(data),
        ],
        settings=settings,
        num_changed=sum(changed for _, _, changed in settings),
        config=redact_yaml((run / CONFIG_FILE).read_text(encoding="utf-8")),
        plan=redact_yaml(plan),
    )


def redact_yaml(config: str) -> str:
    """Return a configuration or plan (YAML) with secrets redacted; unchanged if it has none."""
    values = yaml.safe_load(config)
    redacted = redact(values)
    if redacted == values:
        return config
    return yaml.safe_dump(redacted, sort_keys=False, allow_unicode=True)


def render_interactive(
    template: str, content: Mapping[str, Any], script_names: Sequence[str], **more: Any
) -> str:
    """Render a page that draws the charts of its content.

    Args:
        template: name of the template.
        content: ``name``, ``xs`` and ``groups`` of :func:`build_plots`, and other values that the
            scripts read.
        script_names: the scripts, in the order in which they run.
        more: values of the template.
    """
    library, style, licence = ((ASSETS / name).read_text(encoding="utf-8") for name in LIBRARY)
    code = "".join((ASSETS / name).read_text(encoding="utf-8") for name in script_names)
    scripts = [library, f'"use strict";\n(() => {{\n{code}}})();\n']
    return render_template(
        template,
        name=content["name"],
        scripts=scripts,
        script_hashes=" ".join(f"'{_csp_hash(script)}'" for script in scripts),
        styles=[style, (ASSETS / "page.css").read_text(encoding="utf-8")],
        licence=licence,
        data=script_json(content),
        groups=content["groups"],
        constant=content.get("constant", ()),
        **more,
    )


def script_json(content: Any) -> str:
    """Return JSON for a ``script`` element; nothing in it can end the element or start a
    comment."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _csp_hash(script: str) -> str:
    """Return a script's hash; the page's content security policy permits only listed scripts."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def summary_tiles(data: ReportData) -> list[tuple[str, str]]:
    """Return the numbers at the top of the page."""
    config = data.run.config
    tiles = []
    if data.scores:
        (_, initial_score), (version, newest_score) = data.scores[0], data.scores[-1]
        tiles.append((f"held-out score (iteration {version})", f"{newest_score:.3g}"))
        if version:
            tiles.append(("held-out score at the start", f"{initial_score:.3g}"))
    if (best := best_weights(config, data.run.folder)) is not None:
        label = f"best held-out score (iteration {best.version})"
        tiles.append((label, f"{best.score:.3g}"))
    if data.rows:
        headlines = headline_metrics(config, data.rows[-1])
        tiles += [(name, f"{value:.3g}") for name, value in headlines.items()]
    tiles += [
        ("iterations", f"{len(data.rows)} of {config.iterations}"),
        ("algorithm", config.algorithm.name),
        ("task", str((config.task.model_extra or {}).get("id", config.task.name))),
        ("model", config.model.name),
    ]
    steps = sum(row.get("rollout/steps", 0.0) for row in data.rows)
    if steps:
        tiles.append((f"{step_unit(config)} generated", f"{steps:,.0f}"))
    if data.wall_s:
        tiles.append(("wall time", format_duration(data.wall_s)))
        tiles.append(("time in stages", format_duration(data.busy_s)))
    if gpu_hours := read_gpu_hours(data.run.folder):
        tiles.append(("GPU-hours", format_gpu_hours(gpu_hours, config.budget.gpu_hours)))
    return tiles


def problem_set_rows(data: ReportData) -> list[dict[str, str]]:
    """Return a row per set of problems, formatted."""
    return [
        {
            "key": part.key,
            "problems": f"{part.num_problems:,}",
            "share": "" if part.share is None else f"{100 * part.share:.3g} %",
            "too_long": f"{100 * part.num_too_long / part.num_measured:.3g} %",
            "longest": f"{part.longest_prompt:,}",
        }
        for part in data.problem_sets
    ]


def settings_rows(record: RunRecord) -> list[tuple[str, str, bool]]:
    """Return key, value (JSON) and whether the value is not the default, for all settings;
    non-defaults first."""
    changed = set(record.non_default or ())
    rows = [
        (key, json.dumps(value), key in changed)
        for key, value in flatten(redact(record.settings or {}))
    ]
    return sorted(rows, key=lambda row: not row[2])


def _best_weights_fact(data: ReportData) -> list[tuple[str, str]]:
    """Return a row for the weights with the best held-out score; empty without evaluations."""
    best = best_weights(data.run.config, data.run.folder)
    if best is None:
        return []
    when = f"after iteration {best.version}" if best.version else "before iteration 1"
    label = f"{when}, held-out score {format_number(best.score)}: "
    if best.folder is None:
        return [("best weights", f"{label}removed by the retention policy")]
    path = best.folder.relative_to(data.run.folder)
    return [("best weights", f"{label}{path} of the run (rlinf export --best copies them)")]


def stage_table(data: ReportData) -> list[dict[str, Any]]:
    """Return a row per stage: number of its outputs, seconds, hosts and resource usage."""
    table: dict[str, dict[str, Any]] = {}
    for entry in data.stages:
        row = table.setdefault(
            entry["stage"],
            {"count": 0, "seconds": 0.0, "hosts": set(), "jobs": set(), "usage": []},
        )
        row["count"] += 1
        row["seconds"] += entry["seconds"]
        row["hosts"].add(entry["host"])
        row["jobs"] |= {entry["job"]} - {""}
        row["usage"] += entry["usage"]
    return [
        {
            "stage": stage,
            "count": row["count"],
            "mean": f"{row['seconds'] / row['count']:.2f}",
            "total": f"{row['seconds']:.1f}",
            "hosts": ", ".join(sorted(row["hosts"])),
            "jobs": len(row["jobs"]),
            **_usage_cells(row["usage"]),
        }
        for stage, row in table.items()
    ]


def _usage_cells(usage: list[dict[str, Any]]) -> dict[str, str]:
    """Return the resource usage of a stage's processes; empty cells if nothing was recorded."""
    seconds = sum(entry["seconds"] for entry in usage)
    gpu = [entry["gpu_share"] for entry in usage if "gpu_share" in entry]
    return {
        "cores": f"{sum(e['cpu_s'] for e in usage) / seconds:.2f}" if seconds else "",
        "memory": f"{max(e['memory_peak_bytes'] for e in usage) / GIB:.2f}" if usage else "",
        "gpu": f"{100 * sum(gpu) / len(gpu):.0f} %" if gpu else "",
        "gpu_memory": _format_gib(max((e.get("gpu_peak_bytes", 0) for e in usage), default=0)),
    }


def _format_gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size else ""


def _forecast_rows(data: ReportData, plan: str) -> Sequence[ForecastComparison]:
    """Return predicted and measured times for a plan (YAML); empty if it has no forecast."""
    if not (yaml.safe_load(plan) or {}).get("forecast"):
        return []
    from pipeline.pools.measured_times import compare_with_forecast

    return compare_with_forecast(data.run)
