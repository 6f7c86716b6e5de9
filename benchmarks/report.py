"""Time to write the report of a long run, and to open it in a browser."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from benchmarks.row import BenchmarkRow, median_row
from pipeline.commands.experiment import compose, run_experiment
from pipeline.metrics import list_iterations, stage_manifest
from pipeline.report.data import read_report_data
from rlinf.artifacts import FileEntry, Manifest, content_digest
from stages.flow import on_policy
from stages.layout import CONFIG_FILE, METRICS_FILE, PLAN_FILE, RUN_FILE, stage_folder
from tests.browser import browser
from tests.conftest import QUIET, TINY


def stretch_run(source: Path, folder: Path, count: int, *, kept: int = 5, workers: int = 1) -> Path:
    """Write a run of ``count`` iterations to ``folder`` by repeating the iterations of ``source``.

    Metrics vary and times continue. As after retention, only the first iteration and the newest
    ``kept`` ones have trajectories, if those of ``source`` that they repeat have them.

    Args:
        workers: number of lanes per stage, as in a pool with that many ranks.
    """
    folder.mkdir(parents=True, mode=0o700)
    config = yaml.safe_load((source / CONFIG_FILE).read_text())
    config["iterations"] = count
    config["run"] |= {"root": str(folder.parent), "name": folder.name}
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(config, sort_keys=False))
    for name in (PLAN_FILE, RUN_FILE):
        shutil.copy(source / name, folder / name)
    shutil.copytree(source / "sft", folder / "sft")
    source_iterations = list_iterations(source)
    first = _manifest_values(source, "rollout", source_iterations[0])["timing"]["start"]
    last = _manifest_values(source, "sync", source_iterations[-1])["timing"]["end"]
    period, rng = (last - first) / len(source_iterations), random.Random(0)
    rows = []
    for i in range(count):
        row: dict[str, Any] = {"iteration": i}
        for stage in on_policy.stages:
            template = source_iterations[i % len(source_iterations)]
            values = _manifest_values(source, stage, template)
            _shift(values, (i - template) * period, workers)
            values["iteration"] = i
            for name, value in values["metrics"].items():
                factor = 1 + 0.3 * math.sin(i / 40) + 0.1 * rng.random()
                values["metrics"][name] = value * factor
            target = stage_folder(folder, stage, i)
            target.mkdir(parents=True)
            data = stage_folder(source, stage, template) / values["data"]
            if (not i or i >= count - kept) and data.is_dir():
                shutil.copytree(data, target / data.name)
            else:
                (target / "pruned").touch()
            _write_manifest(target, values)
            row |= {f"{stage}/{name}": value for name, value in values["metrics"].items()}
        rows.append(row)
    (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    versions = sorted(int(path.name) for path in (source / "evaluate").iterdir())
    for version in range(0, count + 1, max(1, count // 50)):
        values = _manifest_values(source, "evaluate", versions[min(version, len(versions) - 1)])
        values["iteration"] = version
        values["metrics"]["score"] = 1 - math.exp(-version / count)
        target = stage_folder(folder, "evaluate", version)
        target.mkdir(parents=True)
        _shift(values, version * period, 1)
        _write_manifest(target, values)
    return folder


def _manifest_values(run: Path, stage: str, iteration: int) -> dict[str, Any]:
    manifest = stage_manifest(run, stage, iteration)
    assert manifest is not None, f"{run}: no {stage} of iteration {iteration}"
    return asdict(manifest)


def _write_manifest(folder: Path, values: dict[str, Any]) -> None:
    files = {name: FileEntry(**entry) for name, entry in values["files"].items()}
    values["content"] = content_digest(files, values["metrics"])
    manifest = Manifest(**{**values, "files": files})
    (folder / "manifest.json").write_text(manifest.to_json())


def _shift(values: dict[str, Any], by_s: float, workers: int) -> None:
    timing = values["timing"]
    for times in (timing, *timing["spans"]):
        for name in {"began", "start", "end"} & times.keys():
            times[name] += by_s
    spans = [{**span, "rank": rank} for rank in range(workers) for span in timing["spans"]]
    timing["spans"] = spans


ITERATIONS, WORKERS, REPEATS = 500, 1, 5
WRITE = """
import sys, time
from pathlib import Path
from pipeline.report import write_report
write_report(Path(sys.argv[1]))
print(time.process_time())
"""


def measure() -> list[BenchmarkRow]:
    """Measure CPU seconds of a process that writes the report of 500 iterations, with its imports,
    and seconds until Chromium has drawn the visible part of that file."""
    with tempfile.TemporaryDirectory(prefix="rlinf-report-") as folder:
        run_experiment(
            compose(["experiment=arithmetic_grpo", f"++run.root={folder}", *QUIET, *TINY])
        )
        run = stretch_run(Path(folder) / "tiny", Path(folder) / "long", ITERATIONS, workers=WORKERS)
        assert len(read_report_data(run).rows) == ITERATIONS
        written = [_write(run) for _ in range(REPEATS)]
        page = run / "report" / "report.html"
        with browser() as window:
            window.open(page)
            opened = [window.open(page) for _ in range(REPEATS)]
    return [
        median_row("report_write_cpu_s", written, "s", 5.0, "lower"),
        median_row("report_open_s", opened, "s", 2.0, "lower"),
    ]


def _write(run: Path) -> float:
    words = [sys.executable, "-c", WRITE, str(run)]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
