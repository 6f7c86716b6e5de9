"""``rlinf stop``: end all that belongs to a run, wherever it is; the run can be resumed.

A driver of this host is sent TERM, one in a job has its job cancelled, and one elsewhere sees a
file that names it. Jobs are found by the notes beside their outputs, with a driver or without.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launchers.submission_queue import JOB_NOTE, JobNote, read_job_note
from pipeline.commands.driver_job import find_driver_job
from pipeline.lock import LOCK_FILE, living_owner
from pipeline.run import Run
from rlinf.artifacts import MANIFEST, write_atomic
from slurm.client import SlurmClient
from stages.layout import DRIVER_JOB_FOLDER, POOLS_FOLDER, STATUS_FILE, STOP_FILE

STOP_CHECK_INTERVAL_S = 2.0
"""How often a driver looks for the file."""
STOP_TIMEOUT_S = 75.0
"""How long a driver has to end: longer than the heartbeat of a dead one counts."""
KILL_AFTER_S = 30.0
"""After which one on this host is killed."""


class StopRequest:
    """Whether the driver in this process is to stop: its job ends, or ``rlinf stop`` named it."""

    def __init__(self, run: Path, ends: Callable[[], bool]) -> None:
        self._run, self._ends = run, ends
        self._looked = 0.0
        self.is_requested = False

    def __call__(self) -> bool:
        if time.monotonic() - self._looked > STOP_CHECK_INTERVAL_S:
            self._look()
        if not self.is_requested and self._ends():
            self._look()  # the signal may come of rlinf stop
            return True
        return self.is_requested

    def _look(self) -> None:
        self._looked = time.monotonic()
        with contextlib.suppress(OSError):
            named = (self._run / STOP_FILE).read_text().strip()
            self.is_requested = bool(named) and named == _token(self._run)


def stop_run(folder: Path) -> list[str]:
    """End all that belongs to a run; says what that was, a line each.

    Raises:
        ConfigError: not a run directory.
        SlurmError: it has jobs, and Slurm does not answer.
    """
    run = Run.open(folder)
    return [*_stop_driver(run), *cancel_run_jobs(run.folder)]


def cancel_run_jobs(run: Path) -> list[str]:
    """Cancel what stages and pools of a run that nobody drives have in the queue.

    Raises:
        SlurmError: there is some, and Slurm does not answer.
    """
    client = SlurmClient()
    jobs = {identity: job.name for job in _jobs(run) for identity in job.find_ids(client)}
    queue = client.queue() if jobs else {}
    there = {i: name for i, name in jobs.items() if i in queue and queue[i].state.is_active}
    client.cancel(list(there))
    (run / POOLS_FOLDER / STATUS_FILE).unlink(missing_ok=True)
    return [f"job {identity} ({name}) cancelled" for identity, name in sorted(there.items())]


def _stop_driver(run: Run) -> list[str]:
    said = []
    owner, job = living_owner(run.folder / LOCK_FILE), find_driver_job(run)
    if owner is not None:
        write_atomic(run.folder / STOP_FILE, owner.token)
    if job is not None:
        SlurmClient().cancel([job[0]])
        said.append(f"job {job[0]} (driver) cancelled")
    if owner is None:
        return said
    what = f"driver (process {owner.pid} on {owner.host})"
    here = owner.host == socket.gethostname() and not owner.job
    began, killed = time.monotonic(), False
    if here:
        _signal(owner.pid, signal.SIGTERM)
    while _token(run.folder) == owner.token and living_owner(run.folder / LOCK_FILE):
        if here and not killed and time.monotonic() - began > KILL_AFTER_S:
            _signal(owner.pid, signal.SIGKILL)
            killed = True
        if time.monotonic() - began > STOP_TIMEOUT_S:
            return [
                *said,
                f"{what} does not answer; it stops once it sees {run.folder / STOP_FILE}",
            ]
        time.sleep(0.1)
    (run.folder / STOP_FILE).unlink(missing_ok=True)
    return [*said, f"{what} {'killed' if killed else 'stopped'}"]


def _token(run: Path) -> str | None:
    """Of the driver that has the run, or had it last."""
    try:
        return str(json.loads((run / LOCK_FILE).read_text())["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _jobs(run: Path) -> Iterator[JobNote]:
    """The jobs noted beside outputs that are not there yet."""
    for pattern in (f"{POOLS_FOLDER}/*/*", "it/*/*", "evaluate/*", "*"):
        for note in run.glob(f"{pattern}/{JOB_NOTE}"):
            if note.parent.name == DRIVER_JOB_FOLDER or (note.parent / MANIFEST).exists():
                continue
            if (job := read_job_note(note.parent)) is not None:
                yield job
