"""Start and memory of a run on a file of a million problems.

Measured are the seconds until the first line of output, the CPU seconds until all rows are checked,
and the peak memory of the run's process, above that of the same run on a thousand problems.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.row import BenchmarkRow, median_row
from rlinf import package_paths
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig

NUM_ROWS, NUM_FEW_ROWS = 1_000_000, 1_000
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
STARTED = "algorithm grpo"
"""Text in the line that a driver prints after all checks."""


@dataclass(frozen=True)
class StartMeasurement:
    """Times of a run since its command, and its peak memory."""

    first_line_s: float
    start_cpu_s: float
    """CPU seconds until all checks are done."""
    peak_mib: float


def measure() -> list[BenchmarkRow]:
    """Measure all rows."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = root / "model"
        model.mkdir()
        sizes = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 64}
        config = CausalLMConfig.model_validate({"architecture": "llama", **sizes})
        CausalLM.create(config, {"alphabet": ALPHABET}, 0, model)
        few = write_problems(root / "few.jsonl", NUM_FEW_ROWS)
        many = write_problems(root / "many.jsonl", NUM_ROWS)
        small = start_run(root, model, few, "small")
        large = start_run(root, model, many, "large")
    return [
        median_row("large_data_first_line_s", [large.first_line_s], "s", 3.0, "lower"),
        median_row("large_data_start_cpu_s", [large.start_cpu_s], "s", None, "lower"),
        median_row("small_data_start_cpu_s", [small.start_cpu_s], "s", None, "lower"),
        median_row(
            "large_data_memory_mib", [large.peak_mib - small.peak_mib], "MiB", 512.0, "lower"
        ),
    ]


def write_problems(path: Path, count: int) -> Path:
    """Write a file of different problems; returns the file."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            question = f"Box {i} has {i % 97} red and {i % 89} blue balls. How many are in it?"
            file.write(json.dumps({"question": question, "answer": str(i % 97 + i % 89)}) + "\n")
    return path


def start_run(root: Path, model: Path, train: Path, name: str) -> StartMeasurement:
    """Run one iteration on a file of problems."""
    words = [
        "experiment=jsonl_grpo",
        f"model.path={model}",
        f"task.train={train}",
        f"task.test={root / 'few.jsonl'}",
        "task.allow_train_test_overlap=true",
        "task.max_prompt_length=128",
        f"run.root={root}",
        f"run.name={name}",
        "iterations=1",
        "rollout.batch_size=2",
        "rollout.group_size=2",
        "rollout.horizon=4",
        "evaluate.every=0",
        "evaluate.samples=2",
        "log.trackers=[]",
    ]
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "rlinf", "run", *words],
        cwd=package_paths.ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(root / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    first_line_s: float | None = None
    start_cpu_s: float | None = None
    for line in process.stdout:
        first_line_s = first_line_s or time.monotonic() - start
        if STARTED in line and start_cpu_s is None:
            times = psutil.Process(process.pid).cpu_times()
            start_cpu_s = times.user + times.system
        lines.append(line)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or start_cpu_s is None or first_line_s is None:
        raise RuntimeError(f"the run failed:\n{''.join(lines)}")
    return StartMeasurement(first_line_s, start_cpu_s, usage.ru_maxrss / 1024)
