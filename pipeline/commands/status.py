"""``rlinf status``: the state of a run, from its files and one query of the queue."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.table import Table

from launchers.submission_queue import read_submitted_job
from pipeline.commands.results import weight_versions
from pipeline.console import create_console, format_duration, format_number, format_rate
from pipeline.gpu_hours import format_gpu_hours, read_gpu_hours
from pipeline.graph import Graph, StageNode
from pipeline.health_checks import run_warnings
from pipeline.lock import LOCK_FILE, find_live_owner
from pipeline.metrics import (
    folder_manifest,
    headline_metrics,
    iteration_metrics,
    list_iterations,
    stage_manifest,
    step_unit,
)
from pipeline.pools.pool_status import PoolsStatus, pool_table, read_pools_status
from pipeline.pools.work_log import count_disk_fallbacks
from pipeline.run import Run, compute_texts
from pipeline.run_control import find_driver_job, last_driver_job_id
from rlinf.errors import RlinfError
from slurm.client import SlurmClient
from slurm.records import QueuedJob
from stages.flow import EVALUATE, flow_of
from stages.identity import AcceptedMismatch, read_accepted_mismatches
from stages.layout import setup_stage_folder, stage_folder
from stages.retention import BestWeights, best_weights
from stages.runner import DISK_FALLBACKS

REFRESH_INTERVAL_S = 2.0
"""Seconds between two reads of the run's files."""
QUEUE_INTERVAL_S = 30.0
"""Minimum seconds between two queries of the queue."""
RECENT_ITERATIONS = 10
"""Number of finished iterations over which the median time and rate are computed."""


@dataclass
class RunStatus:
    """The content of the status table."""

    name: str
    iterations_done: int
    iterations_total: int
    stage: str
    """Stage and iteration in progress, or ``finished``."""
    driver: str
    """Process or job of the driver, as text."""
    iteration_s: float | None
    """Median seconds of recent iterations; None before the first is finished."""
    steps_per_s: float | None
    """Median throughput of recent iterations."""
    step_unit: str
    """Unit of the throughput: tokens or steps."""
    score: float | None
    """The newest held-out score; None before the first evaluation."""
    metrics: dict[str, float]
    """The headline metrics of the newest finished iteration."""
    versions: list[int]
    """Versions of the weights on disk."""
    jobs: list[tuple[str, str, str, str, str]] = field(default_factory=list)
    """Id, name, state, partition and reason to wait of each active stage job."""
    warnings: list[str] = field(default_factory=list)
    pools: PoolsStatus | None = None
    """State of the pools, if the run uses pools and is running."""
    disk_fallbacks: dict[str, int] = field(default_factory=dict)
    """Number of inputs that recent iterations read from disk instead of memory, by edge. An elastic
    generator counts one per work item."""
    accepted_mismatches: tuple[AcceptedMismatch, ...] = ()
    """Results that ``--keep`` accepted although their configuration or code had changed."""
    gpu_hours: dict[str, float] = field(default_factory=dict)
    """GPU-hours used by partition."""
    gpu_hours_budget: float | None = None
    """GPU-hours after which the run ends; None: no limit."""
    best: BestWeights | None = None
    """The weights with the best held-out score; None before the first evaluation."""
    compute: dict[str, str] = field(default_factory=dict)
    """Data types and devices of engine and trainer in the newest iteration."""

    @property
    def progress(self) -> str:
        """Finished and total iterations, as text."""
        return f"{self.iterations_done} of {self.iterations_total}"

    @property
    def reward(self) -> float | None:
        """Mean reward of the newest finished iteration."""
        return self.metrics.get("reward")

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds until the last iteration ends, at the median pace of recent ones."""
        if self.iteration_s is None:
            return None
        return self.iteration_s * (self.iterations_total - self.iterations_done)


class CachedQueueClient(SlurmClient):
    """A Slurm client that queries the queue at most every :data:`QUEUE_INTERVAL_S`."""

    _cached: dict[str, QueuedJob] | None = None
    _queried_at = 0.0

    def queue(self) -> dict[str, QueuedJob]:
        if self._cached is None or time.monotonic() - self._queried_at > QUEUE_INTERVAL_S:
            self._cached, self._queried_at = super().queue(), time.monotonic()
        return self._cached


def read_status(folder: Path, client: SlurmClient | None = None) -> RunStatus:
    """Read the state of a run.

    Args:
        client: Slurm client to query jobs.

    Raises:
        ConfigError: not a run directory.
    """
    run, client = Run.open(folder), client or SlurmClient()
    iterations, graph = list_iterations(run.folder), Graph(run.config)
    first_stage, publish_stage = next(iter(graph.flow.stages)), graph.flow.publish_stage
    published = [i for i in iterations[-50:] if stage_manifest(run.folder, publish_stage, i)]
    iterations_done = (max(published) + 1) if published else 0
    current = min(iterations_done, run.config.iterations - 1)
    stage = "finished" if iterations_done >= run.config.iterations else _current_stage(run, current)
    durations, rates = [], []
    for i in published[-RECENT_ITERATIONS:]:
        first_manifest = stage_manifest(run.folder, first_stage, i)
        last_manifest = stage_manifest(run.folder, publish_stage, i)
        if first_manifest and last_manifest:
            # Pools may start a rollout early: count from the end of the previous iteration.
            previous = stage_manifest(run.folder, publish_stage, i - 1) if i else None
            start = max(first_manifest.timing["start"], previous.timing["end"] if previous else 0.0)
            durations.append(last_manifest.timing["end"] - start)
            rates.append(first_manifest.metrics.get("steps", 0.0) / max(1e-9, durations[-1]))
    scores = [
        m.metrics["score"]
        for v in range(iterations_done + 1)
        if graph.is_evaluated(v) and (m := stage_manifest(run.folder, EVALUATE, v)) is not None
    ]
    row = iteration_metrics(run.folder, iterations_done - 1) if iterations_done else None
    newest = [StageNode(stage, i) for i in iterations[-2:] for stage in graph.flow.stages]
    manifests = [m for node in newest if (m := stage_manifest(run.folder, *node)) is not None]
    return RunStatus(
        name=run.folder.name,
        iterations_done=iterations_done,
        iterations_total=run.config.iterations,
        stage=stage,
        driver=_driver_text(run, client, is_finished=stage == "finished"),
        iteration_s=statistics.median(durations) if durations else None,
        steps_per_s=statistics.median(rates) if rates else None,
        step_unit=step_unit(run.config),
        score=scores[-1] if scores else None,
        metrics=headline_metrics(run.config, row or {}),
        versions=sorted(weight_versions(run.folder)),
        jobs=_active_jobs(run, client, iterations_done),
        warnings=run_warnings(run),
        disk_fallbacks=_count_disk_fallbacks(run, graph, published[-RECENT_ITERATIONS:]),
        pools=read_pools_status(run.folder),
        accepted_mismatches=read_accepted_mismatches(run.folder).entries,
        gpu_hours=read_gpu_hours(run.folder),
        gpu_hours_budget=run.config.budget.gpu_hours,
        best=best_weights(run.config, run.folder),
        compute=compute_texts(manifests),
    )


def show_status(folder: Path, *, watch: bool) -> None:
    """Print the status, or refresh it until the run is finished."""
    console = create_console()
    if not watch:
        console.print(status_view(read_status(folder)))
        return
    client = CachedQueueClient()
    with Live(console=console, refresh_per_second=2) as live:
        while True:
            status = read_status(folder, client)
            live.update(status_view(status))
            if status.stage == "finished":
                return
            time.sleep(REFRESH_INTERVAL_S)


def status_view(status: RunStatus) -> Group:
    """Return the status table and, with pools, the table of pools."""
    pools = [] if status.pools is None else [pool_table(status.pools)]
    return Group(status_table(status), *pools)


def status_table(status: RunStatus) -> Table:
    table = Table(title=f"run {status.name}", show_header=False, title_justify="left")
    table.add_row("finished iterations", status.progress)
    table.add_row("stage", status.stage)
    table.add_row("driver", status.driver)
    if status.iteration_s is not None:
        table.add_row("time per iteration", f"{status.iteration_s:.1f} s")
    if status.steps_per_s:
        table.add_row("throughput", f"{format_rate(status.steps_per_s)} {status.step_unit}/s")
    if status.eta_s:
        table.add_row("time left", format_duration(status.eta_s))
    for name, value in status.metrics.items():
        table.add_row(name, format_number(value))
    if status.score is not None:
        table.add_row("held-out score", format_number(status.score))
    if status.best is not None:
        table.add_row("best held-out score", format_best(status.best))
    if status.gpu_hours or status.gpu_hours_budget:
        table.add_row("GPU-hours", format_gpu_hours(status.gpu_hours, status.gpu_hours_budget))
    for part, text in status.compute.items():
        table.add_row(f"{part} computes in", text)
    table.add_row("weights on disk", _versions_text(status.versions))
    for warning in status.warnings:
        table.add_row("warning", warning)
    if status.disk_fallbacks:
        edges = ", ".join(f"{edge} {count}" for edge, count in status.disk_fallbacks.items())
        table.add_row(
            "read from disk",
            f"{edges} (recent inputs that were expected in memory; see the pool logs)",
        )
    for entry in status.accepted_mismatches:
        results = f"{len(entry.outputs)} results on {entry.recorded_at} despite changes to: "
        table.add_row("accepted (--keep)", results + "; ".join(entry.differences))
    for job_id, name, state, partition, reason in status.jobs:
        table.add_row(f"job {job_id}", f"{name}: {state} on {partition} {reason}".rstrip())
    return table


def _versions_text(versions: Sequence[int]) -> str:
    return f"versions {', '.join(map(str, versions))}" if versions else "none yet"


def format_best(best: BestWeights) -> str:
    """Return score, version and path of the best weights, as text."""
    location = "removed by the retention policy" if best.folder is None else str(best.folder)
    return f"{format_number(best.score)} after iteration {best.version}: {location}"


def _count_disk_fallbacks(run: Run, graph: Graph, iterations: Sequence[int]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    nodes = [StageNode(stage, i) for i in iterations for stage in graph.flow.stages]
    for node in nodes + [StageNode(EVALUATE, i + 1) for i in iterations]:
        manifest = stage_manifest(run.folder, *node)
        for name in manifest.extra.get(DISK_FALLBACKS, ()) if manifest is not None else ():
            source = graph.inputs(node).get(name)
            counts[f"{source.stage if source else name} -> {node.stage}"] += 1
    generator_fallbacks = count_disk_fallbacks(run.folder)
    if count := sum(generator_fallbacks[i] for i in iterations):
        counts[f"{graph.flow.publish_stage} -> {graph.flow.elastic_stage}"] += count
    return dict(counts)


def _current_stage(run: Run, iteration: int) -> str:
    flow = flow_of(run.config)
    for stage in flow.setup_stages:
        if folder_manifest(setup_stage_folder(run.folder, stage)) is None:
            return stage
    for stage in flow.stages:
        if stage_manifest(run.folder, stage, iteration) is None:
            return f"{stage} of iteration {iteration + 1}"
    return EVALUATE


def _driver_text(run: Run, client: SlurmClient, *, is_finished: bool) -> str:
    owner = find_live_owner(run.folder / LOCK_FILE)
    if owner is not None:
        job = f", job {owner.job}" if owner.job else ""
        return f"process {owner.pid} on {owner.host}{job}"
    try:
        driver_job = find_driver_job(run, client)
    except RlinfError as error:
        job = last_driver_job_id(run) or "without an id"
        return f"job {job}, state unknown ({error})"
    if driver_job is None:
        return "none, the run is finished" if is_finished else "none (start one with rlinf resume)"
    return f"job {driver_job[0]}, {driver_job[1].state.value} {driver_job[1].reason}".strip()


def _active_jobs(
    run: Run, client: SlurmClient, iteration: int
) -> list[tuple[str, str, str, str, str]]:
    """Return the queued and running jobs of unfinished outputs (see :attr:`RunStatus.jobs`)."""
    flow = flow_of(run.config)
    folders = [setup_stage_folder(run.folder, stage) for stage in flow.setup_stages]
    folders += [stage_folder(run.folder, stage, iteration) for stage in flow.stages]
    folders += list((run.folder / EVALUATE).glob("*"))
    names_by_id = {}
    for folder in folders:
        if (folder / "manifest.json").exists():
            continue
        if (job := read_submitted_job(folder)) is not None and job.id:
            names_by_id[job.id] = job.name
    if not names_by_id:
        return []
    try:
        queue = client.queue()
    except RlinfError:
        return []
    return [
        (job_id, name, status.state.value, status.partition, status.reason)
        for job_id, name in names_by_id.items()
        if (status := queue.get(job_id)) is not None
    ]
