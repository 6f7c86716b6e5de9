"""Elastic rollout pools: how soon a new worker counts, and what the loss of one of four costs.

Real runs on the dev cluster with staleness 1, so that there is always something to generate. For
the second figure the generators' nodes run a tenth of the time: four of them and the trainer then
fit the machine, none gains by the loss of another, and training never holds generation up. The
weights hardly change in these runs: a policy that learns to be brief would make every window faster
than the one before.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml

from benchmarks.row import BenchmarkRow, median_row
from benchmarks.run_helpers import LOG, start_driver
from benchmarks.slurm_jobs import start_dev_cluster
from pipeline.pools.autoscaler import request_scale
from pipeline.pools.rollout_scheduler import WORK_LOG
from pipeline.run import Run
from stages.layout import POOLS_FOLDER, STATUS_FILE

T = TypeVar("T")
ROUNDS = 3
WINDOW_S = 60.0
PATIENCE_S = 180.0
DUTY = 0.1
SETTINGS = [
    "experiment=arithmetic_grpo",
    "iterations=100000",
    "run.name=elastic",
    "sft.max_steps=0",
    "evaluate.every=0",
    "evaluate.samples=8",
    "rollout.staleness=1",
    "rollout.batch_size=64",
    "rollout.group_size=8",
    # Generating takes longer than all else, even with four workers.
    "engine.max_num_seqs=16",
    "algorithm.filter_zero_variance_groups=false",
    # Samples that all fail would not be trained on.
    "algorithm.entropy_coeff=0.01",
    "optimizer.lr=1e-12",
    "log.trackers=[]",
    "cluster=slurm",
    "cluster.poll_interval_s=0.2",
]


def measure() -> list[BenchmarkRow]:
    """Bring the cluster up and measure."""
    start_dev_cluster()
    seconds = [scale_up() for _ in range(ROUNDS)]
    during, after = loss()
    return [
        median_row("scale_up_s", seconds, "s", 10, "lower"),
        median_row("loss_of_one_of_four", during, "of throughput", 0.3, "lower"),
        median_row("loss_after_replacement", after, "of throughput", None, "lower"),
    ]


def scale_up() -> float:
    """Seconds from the start of a new worker's job to its first sample."""
    with driven("cpu", workers=1, duty=1.0) as live:
        known = live.workers(1)
        live.first_of(*known)
        request_scale(Run.open(live.folder), "rollout+1")
        (name,) = live.workers(2).keys() - known.keys()
        seconds = live.first_of(name) - _started(live.workers(2)[name])
        print(f"  the second worker's first sample after {seconds:.1f} s")
        return seconds


def loss() -> tuple[list[float], list[float]]:
    """Shares of the throughput that are missing without one of four workers, and once it is
    replaced.

    While it is gone the partition starts no other job.
    """
    during, after = [], []
    with driven("a100", workers=4, duty=DUTY) as live:
        for _ in range(ROUNDS):
            known = live.workers(4)
            for name in known:
                live.first_of(name)
            whole = live.rate()
            _partition("a100", "DOWN")
            try:
                lost = sorted(known)[-1]
                subprocess.run(["scancel", known[lost]], check=True)
                without = live.rate()
            finally:
                _partition("a100", "UP")
            for name in live.workers(4, but=lost).keys() - known.keys():
                live.first_of(name)
            replaced = live.rate()
            during.append(1 - without() / whole())
            after.append(1 - replaced() / whole())
            print(f"  missing without one: {during[-1]:.2f}, replaced: {after[-1]:.2f}")
    return during, after


class ElasticRun:
    """A run that goes on, seen through its files."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self._log = folder, log

    def workers(self, count: int, but: str = "") -> dict[str, str]:
        """Job of each generator, once that many are there."""

        def found() -> dict[str, str]:
            rows = json.loads((self.folder / POOLS_FOLDER / STATUS_FILE).read_text())["workers"]
            there = {r["worker"]: r["job"] for r in rows if r["pool"] == 0 and r["is_connected"]}
            there.pop(but, None)
            return there if len(there) == count else {}

        return self._wait(found, f"{count} workers")

    def first_of(self, worker: str) -> float:
        """When a generator began with its first samples."""

        def found() -> list[float]:
            return [start for name, start, _, _ in self._generated() if name == worker]

        return min(self._wait(found, f"samples of {worker}"))

    def rate(self) -> Callable[[], float]:
        """Watch for a while; returns what tells, once all of it is known, starts per second.

        A work item appears when it is done; its starts are spread evenly over the time it took.
        """
        begin = time.time()
        time.sleep(WINDOW_S)
        end = time.time()

        def starts_per_s() -> float:
            self._wait(
                lambda: any(s > end for _, s, _, _ in self._generated()), "a later work item"
            )
            parts = (
                count * max(0.0, min(e, end) - max(s, begin)) / (e - s)
                for _, s, e, count in self._generated()
            )
            return sum(parts) / (end - begin)

        return starts_per_s

    def _generated(self) -> Iterator[tuple[str, float, float, int]]:
        """Worker, begin, end and number of starts of every work item that is done."""
        for line in (self.folder / POOLS_FOLDER / WORK_LOG).read_text().splitlines():
            row = json.loads(line)
            for what, start, end in row["spans"]:
                if what == "generate":
                    yield row["worker"], start, end, len(row["starts"])

    def _wait(self, look: Callable[[], T], what: str) -> T:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            # Not written yet, or just being written.
            with suppress(OSError, ValueError):
                if seen := look():
                    return seen
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} in {PATIENCE_S:g} s:\n{self._log.read_text()}")
            time.sleep(0.05)


@contextmanager
def driven(partition: str, workers: int, duty: float) -> Iterator[ElasticRun]:
    """A run whose generators are jobs of a partition; it ends with the block."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        site = {"defaults": {"duty_cycle": {partition: duty}}}
        (root / "site.yaml").write_text(yaml.safe_dump(site))
        where = {"partition": partition, "gpu_type": partition, "gpus": 1}
        plan = {
            "defaults": {"partition": "h100", "mem_mb": 1500, "cpus": 1, "time_limit_min": 60},
            "pools": [
                {"stages": ["rollout"], "workers": workers, "devices": {partition: 1}},
                {"stages": ["reward", "inference", "train"], "devices": {"h100": 1}},
            ],
            "stages": {"rollout": where if partition != "cpu" else {"partition": "cpu"}},
        }
        driver = start_driver(root, plan, [*SETTINGS, f"cluster.site={root}/site.yaml"])
        live = ElasticRun(root / "elastic", root / LOG)
        try:
            yield live
        finally:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
            jobs = _jobs(live.folder)
            subprocess.run(["scancel", *jobs], check=True)
            while _squeue("-o", "%A", "-j", ",".join(jobs)):
                time.sleep(0.2)


def _jobs(folder: Path) -> list[str]:
    rows: list[dict[str, Any]] = json.loads((folder / POOLS_FOLDER / STATUS_FILE).read_text())[
        "workers"
    ]
    return sorted({row["job"] for row in rows})


def _started(job: str) -> float:
    """When a job started, to the second."""
    (text,) = _squeue("-o", "%S", "-j", job)
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def _partition(name: str, state: str) -> None:
    subprocess.run(["scontrol", "update", f"partitionname={name}", f"state={state}"], check=True)


def _squeue(*words: str) -> list[str]:
    done = subprocess.run(["squeue", "-h", *words], capture_output=True, text=True, check=False)
    return done.stdout.split()
