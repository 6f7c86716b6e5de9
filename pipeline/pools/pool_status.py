"""The state of the pools for ``rlinf status``, in a file that the driver writes.

Readers also get the age of the file, which is the time since the driver's last update.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError
from rich import box
from rich.table import Table
from rich.text import Text

from pipeline.console import format_duration
from rlinf.artifacts import write_atomic
from stages.layout import POOLS_FOLDER, STATUS_FILE
from stages.worker_state import COMMITTING, WAITING_FOR_DEVICE

if TYPE_CHECKING:  # readers of the status load no sockets
    from pipeline.graph import StageNode
    from pipeline.pools.leases import Lease, PoolState
    from rlinf.channels.control_link import PeerStatus

DRIVER_TIMEOUT_S = 15.0
"""Age of the file after which the driver is dead or hangs; it writes the file every second."""
WORKER_TIMEOUT_S = 5.0
"""Seconds without a message after which the table shows that a worker is silent."""
STRAGGLER_FACTOR, STRAGGLER_MIN_S = 2.0, 5.0
"""A straggler takes more than this factor times the median of the other ranks, and exceeds the
median by more than this many seconds."""
BAR_WIDTH = 10
"""Characters of a progress bar."""
MAX_SHOWN = 3
"""Maximum number of waiting stages in a worker's row."""


class StageStatus(BaseModel):
    """A stage in progress on a worker (:class:`stages.worker_state.ActiveStage`)."""

    node: str
    """Name of the graph node, such as ``rollout/3``."""
    activity: str
    """Current activity, such as computing, waiting for the device or committing."""
    started_at: float
    """When the stage first got the device; until then, when it was ordered (Unix time, s)."""
    done: int = 0
    total: int = 0
    unit: str = ""
    note: str = ""
    """Progress (``done`` of ``total`` in ``unit``), and a text to show with it."""
    compute_s: float | None = None
    """Seconds of computing; None until only the commit remains."""


class WorkerStatus(BaseModel):
    """The state of one rank of a pool, or of one worker of an elastic pool."""

    name: str
    slot: int | None
    """Index of a worker of an elastic pool."""
    rank: int
    job: str
    """Job id."""
    host: str
    is_connected: bool
    is_leaving: bool
    """Whether it was ordered to stop."""
    last_seen_s: float
    """Seconds since its last message."""
    lease_ends_at: float | None
    """Unix time of the time limit of its job; None if unknown."""
    version: int | None = None
    """Version of the weights in its engine; None or negative without weights."""
    queued_records: int = 0
    """Number of received records that no stage has read yet."""
    malformed: int = 0
    """Number of malformed messages that were dropped."""
    active_stages: list[StageStatus] = []


class PoolStatus(BaseModel):
    """The state of a pool of the plan."""

    number: int
    stages: list[str]
    waiting: list[str]
    """Stages that wait for a worker."""
    failures: int
    """Consecutive failed leases; for an elastic pool those of its worst worker."""
    reason: str
    """Cause of the last failure."""
    workers: list[WorkerStatus]


class PoolsStatus(BaseModel):
    """The state of all pools at a time."""

    written_at: float
    """Unix time (s)."""
    pools: list[PoolStatus]

    def age_s(self) -> float:
        """Return the seconds since the driver wrote it."""
        return max(0.0, time.time() - self.written_at)


def write_pools_status(
    run: Path,
    waiting: Mapping[PoolState, Sequence[StageNode]],
    peers: Mapping[str, PeerStatus],
) -> None:
    """Write the state of the pools to the run.

    Args:
        waiting: all pools, each with the stages that wait for a worker.
        peers: status of each worker that ever connected, by name.
    """
    pools: dict[int, PoolStatus] = {}
    for state, nodes in waiting.items():
        pool = pools.setdefault(
            state.number,
            PoolStatus(
                number=state.number, stages=[], waiting=[], failures=0, reason="", workers=[]
            ),
        )
        # Each worker of an elastic pool has its own state; the first one has the stages.
        pool.stages += state.stages
        pool.waiting += [node.name for node in nodes]
        if state.failures >= pool.failures:
            pool.failures, pool.reason = state.failures, state.reason
        pool.workers += [
            _worker_status(lease, rank, worker, peers.get(worker))
            for lease in state.leases
            for rank, worker in enumerate(lease.workers())
        ]
    status = PoolsStatus(written_at=time.time(), pools=list(pools.values()))
    (run / POOLS_FOLDER).mkdir(exist_ok=True)
    write_atomic(run / POOLS_FOLDER / STATUS_FILE, status.model_dump_json())


def _worker_status(lease: Lease, rank: int, worker: str, peer: PeerStatus | None) -> WorkerStatus:
    return WorkerStatus(
        name=worker,
        slot=lease.pool.slot,
        rank=rank,
        job=lease.job,
        host=lease.worker_info.get(rank, {}).get("host", ""),
        is_connected=rank in lease.worker_info,
        is_leaving=lease.is_leaving,
        last_seen_s=0.0 if peer is None else peer.age_s,
        lease_ends_at=lease.ends_at,
        **(peer.status if peer is not None and peer.alive else {}),
    )


def read_pools_status(run: Path) -> PoolsStatus | None:
    """Read the last written state of the pools; None without pools, or after their dismissal."""
    try:
        return PoolsStatus.model_validate_json((run / POOLS_FOLDER / STATUS_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def find_stragglers(workers: Sequence[WorkerStatus], now: float) -> set[tuple[str, str]]:
    """Return (worker, node) of ranks that are much slower than the other ranks of their job.

    The time of a whole stage is extrapolated for each rank, and compared with the others' median.

    Args:
        now: Unix time of the status (s).
    """
    ranks_by_node: dict[tuple[str, str], list[tuple[str, StageStatus]]] = {}
    for worker in workers:
        for stage in worker.active_stages:
            ranks_by_node.setdefault((worker.job, stage.node), []).append((worker.name, stage))
    stragglers = set()
    for ranks in ranks_by_node.values():
        for name, stage in ranks:
            totals = [_total_s(other, now) for _, other in ranks if other is not stage]
            other_totals = [total for total in totals if total is not None]
            total_s = _total_s(stage, now) or now - stage.started_at
            if other_totals and stage.compute_s is None:
                median_s = statistics.median(other_totals)
                if total_s > max(STRAGGLER_FACTOR * median_s, median_s + STRAGGLER_MIN_S):
                    stragglers.add((name, stage.node))
    return stragglers


def _total_s(stage: StageStatus, now: float) -> float | None:
    """Return the extrapolated seconds of a whole stage; None before its first progress."""
    if stage.compute_s is not None:
        return stage.compute_s
    if stage.done and stage.total:
        return (now - stage.started_at) * stage.total / stage.done
    return None


def pool_table(status: PoolsStatus) -> Table:
    """Return a table with a row for each pool and for each of its workers."""
    age_s, now = status.age_s(), status.written_at
    table = Table(title="pools", title_justify="left", box=box.SIMPLE_HEAD)
    if age_s > DRIVER_TIMEOUT_S:
        table.title = f"pools, {format_duration(age_s)} ago: the driver is dead or hangs"
        table.title_style = "bold red"
    table.add_column("worker", no_wrap=True)
    table.add_column("activity", ratio=1)
    for name in ("weights", "queued", "lease left"):
        table.add_column(name, justify="right")
    for pool in status.pools:
        head = Text(f"pool {pool.number}: {', '.join(pool.stages)}", style="bold")
        table.add_row(head, Text() if pool.workers else _no_job_line(pool))
        stragglers = find_stragglers(pool.workers, now)
        for worker in pool.workers:
            ends_at = worker.lease_ends_at
            lease = "" if ends_at is None else format_duration(max(0.0, ends_at - now))
            version = "" if worker.version is None or worker.version < 0 else str(worker.version)
            queue = str(worker.queued_records) if worker.is_connected else ""
            slow = {node for name, node in stragglers if name == worker.name}
            table.add_row(
                _worker_label(worker), _worker_cell(worker, slow, now), version, queue, lease
            )
    return table


def _worker_label(worker: WorkerStatus) -> str:
    host_text = f" on {worker.host}" if worker.host else ""
    worker_text = f"rank {worker.rank}" if worker.slot is None else f"worker {worker.slot}"
    return f"{worker_text}{host_text}, job {worker.job}"


def _worker_cell(worker: WorkerStatus, slow_nodes: set[str], now: float) -> Text:
    if not worker.is_connected:
        return Text("not connected yet: queued or starting", style="yellow")
    lines = []
    if worker.last_seen_s > WORKER_TIMEOUT_S:
        lines.append(Text(f"no message for {format_duration(worker.last_seen_s)}", style="red"))
    if worker.malformed:
        lines.append(Text(f"dropped {worker.malformed} malformed messages", style="red"))
    waiting = []
    for stage in worker.active_stages:
        if stage.activity == WAITING_FOR_DEVICE and stage.node not in slow_nodes:
            waiting.append(stage.node)
        else:
            lines.append(_stage_line(stage, now, is_slow=stage.node in slow_nodes))
    if waiting:
        suffix = f" and {len(waiting) - MAX_SHOWN} more" if len(waiting) > MAX_SHOWN else ""
        lines.append(Text(f"then {', '.join(waiting[:MAX_SHOWN])}{suffix}", style="dim"))
    if worker.is_leaving:
        lines.append(Text("ending: the worker of the next lease is connected"))
    return Text("\n").join(lines or [Text("idle", style="dim")])


def _stage_line(stage: StageStatus, now: float, *, is_slow: bool) -> Text:
    line = Text(f"{stage.node} ")
    if stage.total and stage.activity != COMMITTING:
        filled = round(BAR_WIDTH * min(1.0, stage.done / stage.total))
        line.append("━" * filled, style="green").append("─" * (BAR_WIDTH - filled), style="dim")
        line.append(f" {stage.done}/{stage.total} {stage.unit}, ")
    if stage.note:
        line.append(f"{stage.note}, ")
    line.append(f"{stage.activity} for {format_duration(max(0.0, now - stage.started_at))}")
    if is_slow:
        line.append(" slower than the other ranks", style="bold red")
    return line


def _no_job_line(pool: PoolStatus) -> Text:
    reason = pool.reason.strip().partition("\n")[0]
    if pool.failures:
        reason = f"failed {pool.failures} times: {reason}"
    line = Text("no job" + (f" ({reason})" if reason else ""), style="yellow")
    if pool.waiting:
        line.append(f"; {', '.join(pool.waiting)} waiting")
    return line
