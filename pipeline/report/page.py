"""The page: charts, tables and transcripts in one file without references to anything outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.actuals import compare
from pipeline.durations import duration
from pipeline.notices import notices
from pipeline.report.data import ReportData, read
from pipeline.report.idle import idle
from rlinf.artifacts import write_atomic
from stages.layout import CONFIG, PLAN

FOLDER = "report"


def write_report(run: Path) -> Path:
    """Write ``report/report.html`` and a PNG of each chart; returns the page's path."""
    from pipeline.report.charts import CHARTS
    from pipeline.report.style import inline, render

    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    data = read(run)
    sections = []
    for name, (title, draw) in CHARTS.items():
        figure = draw(data)
        if figure is None:
            continue
        figure.savefig(folder / f"{name}.png", dpi=120)
        sections.append({"name": name, "title": title, "svg": inline(figure, name)})
    html = render(
        "report.html.jinja",
        name=data.run.folder.name,
        notices=notices(data.run),
        tiles=tiles(data),
        sections=sections,
        samples=data.samples,
        stages=stage_table(data),
        idle=idle(data.spans),
        iterations=len(data.rows),
        predicted=compare(data.run) if (run / PLAN).exists() else [],
        config=(run / CONFIG).read_text(encoding="utf-8"),
        plan=(run / PLAN).read_text(encoding="utf-8") if (run / PLAN).exists() else "",
    )
    page = folder / "report.html"
    write_atomic(page, html)
    return page


def tiles(data: ReportData) -> list[tuple[str, str]]:
    """The numbers at the top of the page."""
    config = data.run.config
    found = [
        ("task", config.task.name),
        ("algorithm", config.algorithm.name),
        ("iterations", f"{len(data.rows)} of {config.iterations}"),
    ]
    if data.scores:
        first, best, last = data.scores[0][1], max(s for _, s in data.scores), data.scores[-1][1]
        found += [
            ("held-out score before RL", f"{first:.3g}"),
            ("held-out score now", f"{last:.3g}"),
            ("best held-out score", f"{best:.3g}"),
        ]
    if data.wall_s:
        found.append(("wall time", duration(data.wall_s)))
        found.append(("time in stages", duration(data.busy_s)))
    steps = sum(row.get("rollout/steps", 0.0) for row in data.rows)
    if steps:
        found.append(("steps collected", f"{steps:,.0f}"))
    return found


def stage_table(data: ReportData) -> list[dict[str, Any]]:
    """Per stage: how often it ran, how long, where."""
    table: dict[str, dict[str, Any]] = {}
    for entry in data.stages:
        row = table.setdefault(
            entry["stage"], {"count": 0, "seconds": 0.0, "hosts": set(), "jobs": set()}
        )
        row["count"] += 1
        row["seconds"] += entry["seconds"]
        row["hosts"].add(entry["host"])
        row["jobs"] |= {entry["job"]} - {""}
    return [
        {
            "stage": stage,
            "count": row["count"],
            "mean": f"{row['seconds'] / row['count']:.2f}",
            "total": f"{row['seconds']:.1f}",
            "hosts": ", ".join(sorted(row["hosts"])),
            "jobs": len(row["jobs"]),
        }
        for stage, row in table.items()
    ]
