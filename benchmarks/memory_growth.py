"""Memory growth of processes over many channel operations and many iterations.

The unique set size of each process (USS) is read after a warm-up and at the end.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from benchmarks.channels import RecordChannel, open_process, produce
from benchmarks.row import BenchmarkRow, median_row
from benchmarks.run_helpers import LOG, start_driver
from rlinf.data.record import Record, RecordId
from stages.layout import stage_folder
from stages.worker.record_transfer import SHARED_MEMORY, SOCKET

MIB = 1 << 20
WARM, OPERATIONS, PART = 2000, 10_000, 100
FIRST, LAST = 150, 350
PATIENCE_S = 600.0
SETTINGS = [
    "experiment=arithmetic_grpo",
    f"iterations={LAST}",
    "run.name=memory",
    "model.hidden=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.intermediate=64",
    "sft.max_steps=0",
    "rollout.batch_size=4",
    "rollout.group_size=4",
    "rollout.horizon=6",
    "evaluate.every=0",
    "evaluate.samples=8",
    "algorithm.filter_zero_variance_groups=false",
    "algorithm.entropy_coeff=0.1",
    "log.trackers=[]",
    "cluster=local",
]
PLAN = {
    "num_chunks": 2,
    "pools": [
        {"stages": ["rollout"], "devices": {"local": 1}},
        {"stages": ["reward", "inference", "train"], "devices": {"local": 1}},
    ],
}


def measure() -> list[BenchmarkRow]:
    """Measure the growth of the process that grew most."""
    channels = [
        *channel_growth(SHARED_MEMORY),
        *channel_growth(SOCKET),
    ]
    return [
        median_row("memory_10k_operations_mib", [max(channels)], "MiB", 4.0, "lower"),
        median_row("memory_200_iterations_mib", [max(run_growth())], "MiB", 4.0, "lower"),
    ]


def channel_growth(transport: str) -> list[float]:
    """Return the growth of consumer and producer over ``OPERATIONS`` records, MiB."""
    with tempfile.TemporaryDirectory() as folder:
        channel = RecordChannel(Path(folder), transport)
        with open_process(produce, folder, _record_of_many_sizes) as pipe:
            readings = []
            for count in (WARM, OPERATIONS):
                for _ in range(count // PART):
                    # Fetch few records at a time, so that records in memory do not count as growth.
                    for _ in channel.read(PART, pipe):
                        pass
                child = psutil.Process().children()[0]
                readings.append((_unique_bytes(), _unique_bytes(child.pid)))
            pipe.send(None)
        channel.close()
    first, last = readings
    return [
        (end_bytes - start_bytes) / MIB for start_bytes, end_bytes in zip(first, last, strict=True)
    ]


def _record_of_many_sizes(sample: int) -> Record:
    # Memory that is kept per size would be visible.
    return Record(RecordId(0, sample), {"x": np.ones(64 * (1 + sample % 97), np.uint8)})


def run_growth() -> list[float]:
    """Return the growth of the driver and each worker over the last 200 iterations, MiB."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        driver = start_driver(root, PLAN, SETTINGS)
        readings = []
        for iteration in (FIRST, LAST - 1):
            _wait_for(stage_folder(root / "memory", "rollout", iteration), driver, root / LOG)
            processes = [driver.pid, *(p.pid for p in psutil.Process(driver.pid).children(True))]
            readings.append({pid: _unique_bytes(pid) for pid in processes})
        driver.wait(PATIENCE_S)
    first, last = readings
    return [(last[pid] - first[pid]) / MIB for pid in first.keys() & last.keys()]


def _wait_for(path: Path, driver: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        if driver.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no {path}:\n{log.read_text()}")
        time.sleep(0.02)


def _unique_bytes(pid: int | None = None) -> int:
    return int(psutil.Process(pid).memory_full_info().uss)
