"""The state of the pools for ``rlinf status``, in a file that the driver writes.

Readers also get the age of the file, which is the time since the driver's last update.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from pipeline.console import format_duration
from rlinf.artifacts import write_atomic
from stages.layout import POOLS_FOLDER, STATUS_FILE
from stages.worker_state import COMMITTING, WAITING_FOR_DEVICE

if TYPE_CHECKING:  # readers of the status load no sockets
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


@dataclass
class StageStatus:
    """A stage in progress on a worker."""

    node: str
    """Name of the graph node, such as ``rollout/3``."""
    activity: str
    """Current activity, such as computing, waiting for the device or committing."""
    elapsed_s: float
    """Seconds since the stage first got the device; until then, since it was ordered."""
    done: int = 0
    total: int = 0
    unit: str = ""
    note: str = ""
    """Progress (``done`` of ``total`` in ``unit``), and a text to show with it."""
    compute_s: float | None = None
    """Seconds of computing; None until only the commit remains."""
    is_straggler: bool = False
    """Whether the stage is much slower on this rank than on other ranks."""


@dataclass
class WorkerStatus:
    """The state of one rank of a pool, or of one worker of an elastic pool."""

    pool: int
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
    lease_left_s: float | None
    """Seconds to the time limit of its job; None if unknown."""
    version: int | None
    """Version of the weights in its engine; None or negative without weights."""
    queued_records: int
    """Number of received records that no stage has read yet."""
    malformed: int = 0
    """Number of malformed messages that were dropped."""
    stages: list[StageStatus] = field(default_factory=list)


@dataclass
class PoolStatus:
    """The state of a pool of the plan."""

    number: int
    stages: list[str]
    waiting: list[str]
    """Stages that wait for a worker."""
    failures: int
    """Consecutive failed leases; for an elastic pool those of its worst worker."""
    reason: str
    """Cause of the last failure."""
    workers: list[WorkerStatus] = field(default_factory=list)


@dataclass
class PoolsStatus:
    """The state of all pools."""

    age_s: float
    """Seconds since the driver wrote it."""
    pools: list[PoolStatus]

    @property
    def is_stale(self) -> bool:
        return self.age_s > DRIVER_TIMEOUT_S


def write_pools_status(
    run: Path, pools: Sequence[PoolState], peers: Mapping[str, PeerStatus]
) -> None:
    """Write the state of the pools to the run.

    Args:
        peers: status of each worker that ever connected, by name.
    """
    rows = [
        _worker_row(pool, lease, rank, worker, peers.get(worker))
        for pool in pools
        for lease in pool.leases
        for rank, worker in enumerate(lease.workers())
    ]
    pool_rows: dict[int, dict[str, Any]] = {}
    for pool in pools:
        pool_row = pool_rows.setdefault(
            pool.number, {"pool": pool.number, "stages": [], "waiting": [], "failures": 0}
        )
        # Each worker of an elastic pool has its own state; the first one has the stages.
        pool_row["stages"] += pool.stages
        pool_row["waiting"] += [node.name for node in pool.waiting]
        if pool.failures >= pool_row["failures"]:
            pool_row |= {"failures": pool.failures, "reason": pool.reason}
    (run / POOLS_FOLDER).mkdir(exist_ok=True)
    content = {"written_at": time.time(), "pools": list(pool_rows.values()), "workers": rows}
    write_atomic(run / POOLS_FOLDER / STATUS_FILE, json.dumps(content))


def _worker_row(
    pool: PoolState, lease: Lease, rank: int, worker: str, peer: PeerStatus | None
) -> dict[str, Any]:
    status = peer.status if peer is not None and peer.alive else {}
    return {
        "pool": pool.number,
        "worker": worker,
        "slot": pool.slot,
        "rank": rank,
        "job": lease.job,
        "host": lease.worker_info.get(rank, {}).get("host", ""),
        "lease_ends_at": lease.ends_at,
        "is_connected": rank in lease.worker_info,
        "is_leaving": lease.is_leaving,
        "last_seen_s": 0.0 if peer is None else peer.age_s,
        "active_stages": status.get("active_stages", []),
        "version": status.get("version"),
        "queued_records": status.get("queued_records", 0),
        "malformed": status.get("malformed", 0),
    }


def read_pools_status(run: Path, now: float | None = None) -> PoolsStatus | None:
    """Read the last written state of the pools; None without pools, or after their dismissal."""
    try:
        content = json.loads((run / POOLS_FOLDER / STATUS_FILE).read_text(encoding="utf-8"))
        written_at = float(content["written_at"])
        pools = {row["pool"]: _parse_pool(row) for row in content["pools"]}
        for row in content["workers"]:
            pools[row["pool"]].workers.append(_parse_worker(row, written_at))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for pool in pools.values():
        mark_stragglers(pool.workers)
    age_s = max(0.0, (time.time() if now is None else now) - written_at)
    return PoolsStatus(age_s, list(pools.values()))


def mark_stragglers(workers: list[WorkerStatus]) -> None:
    """Mark ranks that are much slower than the other ranks of their job.

    The time of a whole stage is extrapolated for each rank, and compared with the others' median.
    """
    stages_by_node: dict[tuple[str, str], list[StageStatus]] = {}
    for worker in workers:
        for stage in worker.stages:
            stages_by_node.setdefault((worker.job, stage.node), []).append(stage)
    for stages in stages_by_node.values():
        for stage in stages:
            other_totals = [
                other_s for s in stages if s is not stage and (other_s := _total_s(s)) is not None
            ]
            total_s = _total_s(stage) or stage.elapsed_s
            if other_totals and stage.compute_s is None:
                median_s = statistics.median(other_totals)
                stage.is_straggler = (
                    total_s > STRAGGLER_FACTOR * median_s and total_s - median_s > STRAGGLER_MIN_S
                )


def pool_table(status: PoolsStatus) -> Table:
    """Return a table with a row for each pool and for each of its workers."""
    ago = format_duration(status.age_s)
    title = f"pools, {ago} ago: the driver is dead or hangs" if status.is_stale else "pools"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    if status.is_stale:
        table.title_style = "bold red"
    table.add_column("worker", no_wrap=True)
    table.add_column("activity", ratio=1)
    for name in ("weights", "queued", "lease left"):
        table.add_column(name, justify="right")
    for pool in status.pools:
        head = Text(f"pool {pool.number}: {', '.join(pool.stages)}", style="bold")
        table.add_row(head, Text() if pool.workers else _no_job_line(pool))
        for worker in pool.workers:
            lease = "" if worker.lease_left_s is None else format_duration(worker.lease_left_s)
            version = "" if worker.version is None or worker.version < 0 else str(worker.version)
            queue = str(worker.queued_records) if worker.is_connected else ""
            table.add_row(_worker_label(worker), _worker_cell(worker), version, queue, lease)
    return table


def _worker_label(worker: WorkerStatus) -> str:
    host_text = f" on {worker.host}" if worker.host else ""
    worker_text = f"rank {worker.rank}" if worker.slot is None else f"worker {worker.slot}"
    return f"{worker_text}{host_text}, job {worker.job}"


def _worker_cell(worker: WorkerStatus) -> Text:
    if not worker.is_connected:
        return Text("not connected yet: queued or starting", style="yellow")
    lines = []
    if worker.last_seen_s > WORKER_TIMEOUT_S:
        lines.append(Text(f"no message for {format_duration(worker.last_seen_s)}", style="red"))
    if worker.malformed:
        lines.append(Text(f"dropped {worker.malformed} malformed messages", style="red"))
    lines += [
        _stage_line(stage)
        for stage in worker.stages
        if stage.activity != WAITING_FOR_DEVICE or stage.is_straggler
    ]
    waiting = [
        stage.node
        for stage in worker.stages
        if stage.activity == WAITING_FOR_DEVICE and not stage.is_straggler
    ]
    if waiting:
        suffix = f" and {len(waiting) - MAX_SHOWN} more" if len(waiting) > MAX_SHOWN else ""
        lines.append(Text(f"then {', '.join(waiting[:MAX_SHOWN])}{suffix}", style="dim"))
    if worker.is_leaving:
        lines.append(Text("ending: the worker of the next lease is connected"))
    if not lines:
        lines.append(Text("idle", style="dim"))
    return Text("\n").join(lines)


def _stage_line(stage: StageStatus) -> Text:
    line = Text(f"{stage.node} ")
    if stage.total and stage.activity != COMMITTING:
        filled = round(BAR_WIDTH * min(1.0, stage.done / stage.total))
        line.append("━" * filled, style="green").append("─" * (BAR_WIDTH - filled), style="dim")
        line.append(f" {stage.done}/{stage.total} {stage.unit}, ")
    if stage.note:
        line.append(f"{stage.note}, ")
    line.append(f"{stage.activity} for {format_duration(stage.elapsed_s)}")
    if stage.is_straggler:
        line.append(" slower than the other ranks", style="bold red")
    return line


def _no_job_line(pool: PoolStatus) -> Text:
    reason = f"failed {pool.failures} times: {pool.reason}" if pool.failures else pool.reason
    line = Text("no job" + (f" ({reason})" if reason else ""), style="yellow")
    if pool.waiting:
        line.append(f"; {', '.join(pool.waiting)} waiting")
    return line


def _total_s(stage: StageStatus) -> float | None:
    """Return the extrapolated seconds of a whole stage; None before its first progress."""
    if stage.compute_s is not None:
        return stage.compute_s
    if stage.done and stage.total:
        return stage.elapsed_s * stage.total / stage.done
    return None


def _parse_pool(row: dict[str, Any]) -> PoolStatus:
    return PoolStatus(
        int(row["pool"]),
        list(row["stages"]),
        list(row["waiting"]),
        int(row["failures"]),
        str(row["reason"]).strip().partition("\n")[0],
    )


def _parse_worker(row: dict[str, Any], written_at: float) -> WorkerStatus:
    ends = row["lease_ends_at"]
    return WorkerStatus(
        pool=int(row["pool"]),
        name=str(row["worker"]),
        slot=row["slot"],
        rank=int(row["rank"]),
        job=str(row["job"]),
        host=str(row["host"]),
        is_connected=bool(row["is_connected"]),
        is_leaving=bool(row["is_leaving"]),
        last_seen_s=float(row["last_seen_s"]),
        lease_left_s=None if ends is None else max(0.0, float(ends) - written_at),
        version=row["version"],
        queued_records=int(row["queued_records"]),
        malformed=int(row["malformed"]),
        stages=[
            StageStatus(
                node=str(stage["node"]),
                activity=str(stage["activity"]),
                elapsed_s=max(0.0, written_at - float(stage["started_at"])),
                done=int(stage["done"]),
                total=int(stage["total"]),
                unit=str(stage["unit"]),
                note=str(stage["note"]),
                compute_s=stage["compute_s"],
            )
            for stage in row["active_stages"]
        ],
    )
