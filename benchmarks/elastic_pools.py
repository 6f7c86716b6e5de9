"""Elastic rollout pools: start-up time of a new worker, and throughput without one of four workers.

Real runs on the dev cluster with staleness 1, so that there is always work for generators. For the
second measurement the nodes of the generators run 10 % of the time. Four generators and the trainer
then fit on the machine, no generator becomes faster when another one is lost, and generation never
waits for training. The learning rate is almost 0, because a policy that learns shorter responses
would make later windows faster.
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
from typing import TypeVar

import yaml

from benchmarks.row import BenchmarkRow, median_row
from benchmarks.run_helpers import LOG, start_driver
from benchmarks.slurm_jobs import start_dev_cluster
from pipeline.pools.autoscaler import request_scale
from pipeline.pools.pool_status import read_pools_status
from pipeline.pools.work_log import WORK_LOG
from pipeline.run import Run
from stages.layout import POOLS_FOLDER

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
    # Generation takes longer than all other stages, even with four workers.
    "engine.max_num_seqs=16",
    "algorithm.filter_zero_variance_groups=false",
    # Groups whose samples all fail have no gradient.
    "algorithm.entropy_coeff=0.01",
    "optimizer.lr=1e-12",
    "log.trackers=[]",
    "cluster=slurm",
    "cluster.poll_interval_s=0.2",
]


def measure() -> list[BenchmarkRow]:
    """Start the dev cluster and measure all rows."""
    start_dev_cluster()
    seconds = [scale_up() for _ in range(ROUNDS)]
    during, after = measure_loss()
    return [
        median_row("scale_up_s", seconds, "s", 10, "lower"),
        median_row("loss_of_one_of_four", during, "of throughput", 0.3, "lower"),
        median_row("loss_after_replacement", after, "of throughput", None, "lower"),
    ]


def scale_up() -> float:
    """Return the seconds from the start of a new worker's job to its first sample."""
    with running("cpu", workers=1, duty=1.0) as live:
        old_workers = live.workers(1)
        live.first_sample_time(*old_workers)
        request_scale(Run.open(live.folder), "rollout+1")
        (name,) = live.workers(2).keys() - old_workers.keys()
        seconds = live.first_sample_time(name) - _job_start_time(live.workers(2)[name])
        print(f"  the second worker's first sample after {seconds:.1f} s")
        return seconds


def measure_loss() -> tuple[list[float], list[float]]:
    """Return the shares of throughput lost without one of four workers, and after its replacement.

    While the worker is missing, the partition starts no other job.
    """
    during, after = [], []
    with running("a100", workers=4, duty=DUTY) as live:
        for _ in range(ROUNDS):
            old_workers = live.workers(4)
            for name in old_workers:
                live.first_sample_time(name)
            full_rate = live.rate()
            _set_partition_state("a100", "DOWN")
            try:
                lost_worker = sorted(old_workers)[-1]
                subprocess.run(["scancel", old_workers[lost_worker]], check=True)
                rate_without = live.rate()
            finally:
                _set_partition_state("a100", "UP")
            for name in live.workers(4, excluded=lost_worker).keys() - old_workers.keys():
                live.first_sample_time(name)
            rate_replaced = live.rate()
            during.append(1 - rate_without() / full_rate())
            after.append(1 - rate_replaced() / full_rate())
            print(f"  missing without one: {during[-1]:.2f}, replaced: {after[-1]:.2f}")
    return during, after


class ElasticRun:
    """An active run, observed through its files."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self._log = folder, log

    def workers(self, count: int, excluded: str = "") -> dict[str, str]:
        """Wait for ``count`` connected generators; returns their jobs by worker."""

        def read_jobs() -> dict[str, str]:
            status = read_pools_status(self.folder)
            workers = [] if status is None else status.pools[0].workers
            jobs = {worker.name: worker.job for worker in workers if worker.is_connected}
            jobs.pop(excluded, None)
            return jobs if len(jobs) == count else {}

        return self._wait(read_jobs, f"{count} workers")

    def first_sample_time(self, worker: str) -> float:
        """Return the time at which a generator began its first samples."""

        def read_starts() -> list[float]:
            return [start for name, start, _, _ in self._generated() if name == worker]

        return min(self._wait(read_starts, f"samples of {worker}"))

    def rate(self) -> Callable[[], float]:
        """Wait for one window; returns a function that gives its prompts per second.

        The function waits until the work items of the window are finished. The prompts of a work
        item are spread evenly over its duration.
        """
        window_start = time.time()
        time.sleep(WINDOW_S)
        window_end = time.time()

        def prompts_per_s() -> float:
            self._wait(
                lambda: any(s > window_end for _, s, _, _ in self._generated()), "a later work item"
            )
            parts = (
                count * max(0.0, min(e, window_end) - max(s, window_start)) / (e - s)
                for _, s, e, count in self._generated()
            )
            return sum(parts) / (window_end - window_start)

        return prompts_per_s

    def _generated(self) -> Iterator[tuple[str, float, float, int]]:
        """Yield worker, start, end and number of prompts of every finished work item."""
        for line in (self.folder / POOLS_FOLDER / WORK_LOG).read_text().splitlines():
            row = json.loads(line)
            for name, start, end in row["spans"]:
                if name == "generate":
                    yield row["worker"], start, end, len(row["starts"])

    def _wait(self, read: Callable[[], T], description: str) -> T:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            # The file may not exist yet, or be incomplete.
            with suppress(OSError, ValueError):
                if result := read():
                    return result
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no {description} in {PATIENCE_S:g} s:\n{self._log.read_text()}"
                )
            time.sleep(0.05)


@contextmanager
def running(partition: str, workers: int, duty: float) -> Iterator[ElasticRun]:
    """Start a run whose generators are jobs of a partition; stop it at the end of the block."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        site = {"defaults": {"duty_cycle": {partition: duty}}}
        (root / "site.yaml").write_text(yaml.safe_dump(site))
        resources = {"partition": partition, "gpu_type": partition, "gpus": 1}
        plan = {
            "defaults": {"partition": "h100", "mem_mb": 1500, "cpus": 1, "time_limit_min": 60},
            "pools": [
                {"stages": ["rollout"], "workers": workers, "devices": {partition: 1}},
                {"stages": ["reward", "inference", "train"], "devices": {"h100": 1}},
            ],
            "stages": {"rollout": resources if partition != "cpu" else {"partition": "cpu"}},
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
    status = read_pools_status(folder)
    assert status is not None
    return sorted({worker.job for pool in status.pools for worker in pool.workers})


def _job_start_time(job: str) -> float:
    """Return the start time of a job, to the second."""
    (text,) = _squeue("-o", "%S", "-j", job)
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def _set_partition_state(name: str, state: str) -> None:
    subprocess.run(["scontrol", "update", f"partitionname={name}", f"state={state}"], check=True)


def _squeue(*words: str) -> list[str]:
    process = subprocess.run(["squeue", "-h", *words], capture_output=True, text=True, check=False)
    return process.stdout.split()
