"""The page: charts, tables and transcripts in one file without references to anything outside."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import jinja2

from pipeline.report.data import ReportData, read
from rlinf.artifacts import write_atomic
from stages.layout import CONFIG, PLAN

FOLDER = "report"


def write_report(run: Path) -> Path:
    """Write ``report/report.html`` and a PNG of each chart; returns the page's path."""
    import matplotlib.pyplot as plt

    from pipeline.report.charts import CHARTS

    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    data = read(run)
    sections = []
    for name, (title, draw) in CHARTS.items():
        figure = draw(data)
        if figure is None:
            continue
        figure.savefig(folder / f"{name}.png", dpi=120)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        plt.close(figure)
        sections.append({"name": name, "title": title, "svg": _inline(buffer.getvalue(), name)})
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True
    ).get_template("page.html.jinja")
    html = template.render(
        name=data.run.folder.name,
        tiles=tiles(data),
        sections=sections,
        samples=data.samples,
        stages=stage_table(data),
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
        found.append(("wall time", _duration(data.wall_s)))
        found.append(("time in stages", _duration(data.busy_s)))
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


def _inline(svg: str, name: str) -> str:
    """An SVG fit to stand in a page: no XML head, no ids shared with another chart, no links."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\b(id=")', rf"\1{name}-", body)
    body = re.sub(r'((?:xlink:)?href="#)', rf"\1{name}-", body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"',
        r"\1",
        re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1),
        count=1,
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
