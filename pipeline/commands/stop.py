"""``rlinf stop``: stop all processes and jobs of a run. The run can be resumed.

A driver on this host gets SIGTERM, the job of a driver is cancelled, and a driver on another host
stops when it reads its token in the stop file. Jobs are found by their job files, even without a
driver.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from launchers.submission_queue import SubmittedJob, read_submitted_job
from pipeline.lock import LOCK_FILE, find_live_owner
from pipeline.run import Run
from pipeline.run_control import driver_token, find_driver_job
from rlinf.artifacts import MANIFEST, write_atomic
from slurm.client import SlurmClient
from slurm.jobs import JOB_FILE
from stages.layout import DRIVER_JOB_FOLDER, POOLS_FOLDER, STATUS_FILE, STOP_FILE

STOP_TIMEOUT_S = 75.0
"""Seconds to wait for the end of a driver: more than :data:`pipeline.lock.STALE_S`, after which a
driver on another host counts as dead."""
KILL_AFTER_S = 30.0
"""Seconds after which a driver on this host is killed."""


def stop_run(folder: Path) -> list[str]:
    """Stop all processes and jobs of a run; returns one line for each.

    Raises:
        ConfigError: not a run directory.
        SlurmError: the run has jobs, and Slurm does not answer.
    """
    run = Run.open(folder)
    return [*_stop_driver(run), *cancel_run_jobs(run.folder)]


def cancel_run_jobs(run: Path) -> list[str]:
    """Cancel the queued and running stage and pool jobs of a run; returns one line for each.

    Raises:
        SlurmError: the run has jobs, and Slurm does not answer.
    """
    client = SlurmClient()
    jobs = {job_id: job.name for job in _unfinished_jobs(run) for job_id in job.find_ids(client)}
    queue = client.queue() if jobs else {}
    active = {i: name for i, name in jobs.items() if i in queue and queue[i].state.is_active}
    client.cancel(list(active))
    (run / POOLS_FOLDER / STATUS_FILE).unlink(missing_ok=True)
    return [f"job {job_id} ({name}) cancelled" for job_id, name in sorted(active.items())]


def _stop_driver(run: Run) -> list[str]:
    lines = []
    owner, job = find_live_owner(run.folder / LOCK_FILE), find_driver_job(run)
    if owner is not None:
        write_atomic(run.folder / STOP_FILE, owner.token)
    if job is not None:
        SlurmClient().cancel([job[0]])
        lines.append(f"job {job[0]} (driver) cancelled")
    if owner is None:
        return lines
    description = f"driver (process {owner.pid} on {owner.host})"
    is_local = owner.host == socket.gethostname() and not owner.job
    started_at, was_killed = time.monotonic(), False
    if is_local:
        _signal(owner.pid, signal.SIGTERM)
    while driver_token(run.folder) == owner.token and find_live_owner(run.folder / LOCK_FILE):
        if is_local and not was_killed and time.monotonic() - started_at > KILL_AFTER_S:
            _signal(owner.pid, signal.SIGKILL)
            was_killed = True
        if time.monotonic() - started_at > STOP_TIMEOUT_S:
            return [
                *lines,
                f"{description} does not answer; it stops once it sees {run.folder / STOP_FILE}",
            ]
        time.sleep(0.1)
    (run.folder / STOP_FILE).unlink(missing_ok=True)
    return [*lines, f"{description} {'killed' if was_killed else 'stopped'}"]


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _unfinished_jobs(run: Path) -> Iterator[SubmittedJob]:
    """Yield the submitted jobs of pools, and of outputs that are not committed."""
    for pattern in (f"{POOLS_FOLDER}/*/*", "it/*/*", "evaluate/*", "*"):
        for job_file in run.glob(f"{pattern}/{JOB_FILE}"):
            if job_file.parent.name == DRIVER_JOB_FOLDER or (job_file.parent / MANIFEST).exists():
                continue
            if (job := read_submitted_job(job_file.parent)) is not None:
                yield job
