"""Memory over many channel operations and many iterations: what a process holds must not grow.

Unique memory of each process (what would be freed if it ended), after a warm-up and at the end.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil

from benchmarks.channels import open_process
from benchmarks.row import BenchmarkRow, median_row
from benchmarks.run_helpers import LOG, start_driver
from rlinf.channels.record_streams import SharedMemorySink, SocketSink, SocketSource
from rlinf.data.record import Record, RecordId
from stages.layout import stage_folder

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
    """Growth of the process that grew most."""
    channels = [
        *through(SharedMemorySink),
        *through(SocketSink),
    ]
    return [
        median_row("memory_10k_operations_mib", [max(channels)], "MiB", 4.0, "lower"),
        median_row("memory_200_iterations_mib", [max(iterations())], "MiB", 4.0, "lower"),
    ]


def through(writes: type[SocketSink]) -> list[float]:
    """MiB by which reader and writer grow over as many records."""
    with tempfile.TemporaryDirectory() as folder:
        channel = SocketSource(Path(folder), "c")
        with open_process(_produce, folder, writes) as pipe:
            marks = []
            for count in (WARM, OPERATIONS):
                for _ in range(count // PART):
                    # Few at a time: what waits for a slow reader is no growth.
                    pipe.send(PART)
                    for _ in range(PART):
                        channel.get()
                pipe.send(0)
                marks.append((_used(), pipe.recv()))
            pipe.send(None)
        channel.close()
    begin, end = marks
    return [(after - before) / MIB for before, after in zip(begin, end, strict=True)]


def _produce(folder: str, kind: type[SocketSink], pipe: Connection) -> None:
    channel = kind(Path(folder), "c")
    pipe.send("ready")
    number = 0
    while (count := pipe.recv()) is not None:
        for _ in range(count):
            # Of many sizes, so that what is kept of each would show.
            data = np.ones(64 * (1 + number % 97), np.uint8)
            channel.put(Record(RecordId(0, number), {"x": data}))
            number += 1
        if not count:
            channel.flush()
            pipe.send(_used())
    channel.close()


def iterations() -> list[float]:
    """MiB by which the driver and each worker of a run grow over its last 200 iterations."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        driver = start_driver(root, PLAN, SETTINGS)
        marks = []
        for iteration in (FIRST, LAST - 1):
            _until(stage_folder(root / "memory", "rollout", iteration), driver, root / LOG)
            processes = [driver.pid, *(p.pid for p in psutil.Process(driver.pid).children(True))]
            marks.append({pid: _used(pid) for pid in processes})
        driver.wait(PATIENCE_S)
    begin, end = marks
    return [(end[pid] - begin[pid]) / MIB for pid in begin.keys() & end.keys()]


def _until(path: Path, driver: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        if driver.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no {path}:\n{log.read_text()}")
        time.sleep(0.02)


def _used(pid: int | None = None) -> int:
    return int(psutil.Process(pid).memory_full_info().uss)
