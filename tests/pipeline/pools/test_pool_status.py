"""What ``rlinf status`` says of resident pools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.commands.experiment import prepare_run
from pipeline.commands.status import read_status, status_view
from pipeline.plan import StagePlan
from pipeline.pools.leases import Lease, PoolState
from pipeline.pools.pool_status import pool_table, read_pools_status, write_pools_status

NOW = 1_000_000.0


def stage(node: str = "rollout/3", **values: Any) -> dict[str, Any]:
    """A stage that has run on a worker for 20 s."""
    usual = {
        "node": node,
        "stage": node.split("/", maxsplit=1)[0],
        "activity": "computing",
        "started_at": NOW - 20,
    }
    progress = {"done": 0, "total": 0, "unit": "", "note": "", "compute_s": None}
    return {**usual, **progress, **values}


def worker(rank: int = 0, *stages: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {
        "name": f"pool-0-1-r{rank}",
        "slot": None,
        "rank": rank,
        "job": "17",
        "host": "n1",
        "lease_ends_at": None,
        "is_connected": True,
        "is_leaving": False,
        "last_seen_s": 0.1,
        "active_stages": list(stages),
        "version": None,
        "queued_records": 0,
        "malformed": 0,
        **values,
    }


def write(run: Path, *workers: dict[str, Any], time: float = NOW, **pool: Any) -> None:
    row = {"number": 0, "stages": ["rollout"], "waiting": [], "failures": 0, "reason": ""}
    row |= {**pool, "workers": list(workers)}
    (run / "pools").mkdir(exist_ok=True)
    content = {"written_at": time, "pools": [row]}
    (run / "pools/status.json").write_text(json.dumps(content))


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the time at which the status is read."""

    def move(seconds: float) -> None:
        monkeypatch.setattr("pipeline.pools.pool_status.time.time", lambda: seconds)

    move(NOW)
    return move


def text(run: Path) -> str:
    """The table as printed, on one line."""
    status = read_pools_status(run)
    assert status is not None
    console = Console(width=200)
    with console.capture() as capture:
        console.print(pool_table(status))
    return " ".join(capture.get().split())


def test_a_worker_says_what_it_does_and_how_far_it_is(tmp_path: Path) -> None:
    busy = stage(done=16, total=32, unit="samples", note="loss 0.5")
    write(tmp_path, worker(0, busy, version=3, queued_records=5, lease_ends_at=NOW + 7200))
    shown = text(tmp_path)
    assert "pool 0: rollout rank 0 on n1, job 17" in shown
    assert "16/32 samples, loss 0.5, computing for 20 s 3 5 2 h 0 min" in shown


def test_stages_that_wait_for_their_turn_share_a_line(tmp_path: Path) -> None:
    nodes = [f"{stage}/3" for stage in ("inference", "train", "sync", "evaluate", "rollout")]
    later = [stage(node, activity="waiting for the device") for node in nodes]
    write(tmp_path, worker(0, stage("reward/3", activity="waiting for trajectories"), *later))
    shown = text(tmp_path)
    assert "reward/3 waiting for trajectories for 20 s" in shown
    assert "then inference/3, train/3, sync/3 and 2 more" in shown


def test_messages_that_were_dropped_are_seen(tmp_path: Path) -> None:
    write(tmp_path, worker(0, malformed=7))
    assert "dropped 7 malformed messages" in text(tmp_path)


def test_a_worker_in_the_queue_is_not_taken_for_an_idle_one(tmp_path: Path) -> None:
    write(tmp_path, worker(0, is_connected=False, host=""))
    assert "queued or starting" in text(tmp_path)
    write(tmp_path, worker(0))
    assert "idle" in text(tmp_path)


def test_a_pool_without_a_job_says_why(tmp_path: Path) -> None:
    write(tmp_path, waiting=["rollout/4"], failures=2, reason="job 17 FAILED: NonZeroExit\nmore")
    shown = text(tmp_path)
    assert "failed 2 times: job 17 FAILED: NonZeroExit); rollout/4 waiting" in shown


def test_workers_of_an_elastic_pool_stand_under_its_stages(tmp_path: Path) -> None:
    needs = (StagePlan(),)
    pools = [
        PoolState(0, ("rollout", "evaluate"), needs, 0),
        PoolState(1, ("train",), needs),
        PoolState(0, (), needs, 1, failures=1, reason="lost"),
    ]
    for pool, job in zip(pools, ("17", "18", "19"), strict=True):
        pool.leases.append(Lease(pool, f"pool-{pool.name}-0", job))
    write_pools_status(tmp_path, {pool: [] for pool in pools}, {})
    status = read_pools_status(tmp_path)
    assert status is not None
    assert [(p.number, p.stages, p.failures, p.reason) for p in status.pools] == [
        (0, ["rollout", "evaluate"], 1, "lost"),
        (1, ["train"], 0, ""),
    ]
    shown = text(tmp_path)
    assert shown.index("pool 0: rollout, evaluate") < shown.index("worker 0, job 17")
    assert shown.index("worker 1, job 19") < shown.index("pool 1: train")


@pytest.mark.parametrize(
    ("slow", "others", "marked"),
    [
        ({"done": 4, "total": 32}, {"done": 30, "total": 32}, True),
        ({"done": 28, "total": 32}, {"done": 30, "total": 32}, False),
        ({}, {"activity": "committing", "compute_s": 4.0}, True),
        ({}, {"activity": "committing", "compute_s": 17.0}, False),
        ({"started_at": NOW - 4}, {"activity": "committing", "compute_s": 1.0}, False),
        ({}, {}, False),
    ],
)
def test_a_rank_that_is_much_slower_is_marked(
    tmp_path: Path, slow: dict[str, Any], others: dict[str, Any], marked: bool
) -> None:
    ranks = [worker(rank, stage(**others)) for rank in range(3)]
    write(tmp_path, *ranks, worker(3, stage(**slow)))
    shown = text(tmp_path)
    assert shown.count("slower than the other ranks") == marked
    assert not marked or shown.index("rank 3") < shown.index("slower than")


def test_ranks_of_two_leases_are_not_compared(tmp_path: Path) -> None:
    old = worker(0, stage(done=32, total=32), job="16")
    write(tmp_path, old, worker(0, stage(done=1, total=32)))
    assert "slower" not in text(tmp_path)


def test_a_file_that_nobody_writes_any_more_says_how_old_it_is(
    tmp_path: Path, now: Callable[[float], None]
) -> None:
    write(tmp_path, worker())
    now(NOW + 5)
    assert "ago" not in text(tmp_path)
    now(NOW + 600)
    assert "10 min ago: the driver is dead or hangs" in text(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"written_at": 1, "pools": [{}]}'])
def test_a_file_that_cannot_be_read_shows_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "pools").mkdir()
    (tmp_path / "pools/status.json").write_text(content)
    assert read_pools_status(tmp_path) is None


def test_the_pools_stand_below_the_status_of_the_run(
    compose: Callable[..., dict[str, Any]],
) -> None:
    run = prepare_run(compose()).folder
    assert read_status(run).pools is None
    write(run, worker(0, stage()))
    console = Console(width=200)
    with console.capture() as capture:
        console.print(status_view(read_status(run)))
    assert capture.get().index("driver") < capture.get().index("rollout/3")
