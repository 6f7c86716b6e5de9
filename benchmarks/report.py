"""The report of a long run: what it takes to write, and to open in a browser."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.long_run import stretch
from benchmarks.row import Row, median_row
from pipeline.commands.experiment import compose, execute
from pipeline.report.data import read
from tests.browser import browser
from tests.conftest import QUIET, TINY

ITERATIONS, WORKERS, REPEATS = 500, 1, 5
WRITE = """
import sys, time
from pathlib import Path
from pipeline.report import write_report
write_report(Path(sys.argv[1]))
print(time.process_time())
"""


def measure() -> list[Row]:
    """Processor seconds of a process that writes the report of 500 iterations and does nothing
    else, imports included; seconds from asking Chromium for that file to what is in view drawn."""
    with tempfile.TemporaryDirectory(prefix="rlinf-report-") as folder:
        execute(compose(["experiment=arithmetic_grpo", f"++run.root={folder}", *QUIET, *TINY]))
        run = stretch(Path(folder) / "tiny", Path(folder) / "long", ITERATIONS, workers=WORKERS)
        assert len(read(run).rows) == ITERATIONS
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
