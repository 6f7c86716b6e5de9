"""Control of a run: the lock for starting it, the search for its driver, and stop requests."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.lock import LOCK_FILE, RunLock, find_live_owner
from pipeline.run import Run, explain_write_errors
from rlinf.errors import RunLockedError
from slurm.jobs import JOB_FILE, current_job_id
from stages.layout import DRIVER_JOB_FOLDER, STOP_FILE

if TYPE_CHECKING:  # a run in one process does not need Slurm
    from launchers.submission_queue import SubmittedJob
    from slurm.client import QueuedJob, SlurmClient

START_LOCK = "start-lock.json"
"""Lock file in the driver's folder, for processes that create or change the run or submit its
driver."""
STOP_CHECK_INTERVAL_S = 2.0
"""Seconds between two checks for the stop file."""


@contextlib.contextmanager
def start_lock(run: Run) -> Iterator[None]:
    """Lock the creation or change of a run, and the submission of its driver.

    Nothing is written in the run unless this process has the lock. Folders that are empty at the
    end are removed.

    Raises:
        RunLockedError: another process has the lock, or the run has a driver.
        InputError: no permission to write in the run directory.
    """
    lock_folder = run.folder / DRIVER_JOB_FOLDER
    with explain_write_errors(run.folder):
        lock_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            lock = RunLock(lock_folder / START_LOCK)
        except (RunLockedError, FileNotFoundError):  # the other process may remove the folder
            raise RunLockedError(
                f"{run.folder}: another process is starting this run or submitting its driver; "
                f"see rlinf status {run.folder}"
            ) from None
    try:
        check_not_driven(run)
        yield
    finally:
        lock.release()
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            lock_folder.rmdir()
            run.folder.rmdir()


def check_not_driven(run: Run) -> None:
    """Check that a run has no driver.

    Raises:
        RunLockedError: the run has a driver or a driver job.
    """
    owner = find_live_owner(run.folder / LOCK_FILE)
    if owner is not None:
        raise RunLockedError(
            f"{run.folder}: already driven by process {owner.pid} on {owner.host}; stop "
            f"it first with: rlinf stop {run.folder}"
        )
    check_no_driver_job(run)


def find_driver_job(run: Run, client: SlurmClient | None = None) -> tuple[str, QueuedJob] | None:
    """Return id and state of the pending or running driver job of a run, if there is one.

    Raises:
        SlurmError: a job was submitted, and Slurm does not answer.
    """
    submitted = _read_driver_job(run)
    if submitted is None:
        return None
    if client is None:
        from slurm.client import SlurmClient

        client = SlurmClient()
    ids = submitted.find_ids(client)
    queue = client.queue() if ids else {}
    active = ((i, queue[i]) for i in ids if i in queue and queue[i].state.is_active)
    return next(active, None)


def last_driver_job_id(run: Run) -> str | None:
    """Return the id of the last submitted driver job; None if none was submitted or its id is
    unknown."""
    submitted = _read_driver_job(run)
    return None if submitted is None else submitted.id or None


def check_no_driver_job(run: Run) -> None:
    """Check that no other job drives the run or is pending to do so.

    Raises:
        RunLockedError: such a job exists.
    """
    submitted = _read_driver_job(run)
    if submitted is None or submitted.id == current_job_id():
        return
    active = find_driver_job(run)
    if active is not None and active[0] != current_job_id():
        raise RunLockedError(
            f"{run.folder}: job {active[0]}, {active[1].state.value}, drives this run; see rlinf "
            f"status {run.folder}, or end it with: rlinf stop {run.folder}"
        )


def _read_driver_job(run: Run) -> SubmittedJob | None:
    """Return the last submitted driver job; None if none was submitted."""
    folder = run.folder / DRIVER_JOB_FOLDER
    if not (folder / JOB_FILE).exists():
        return None
    from launchers.submission_queue import read_submitted_job

    return read_submitted_job(folder)


class StopRequest:
    """A callable that returns whether this driver must stop: its job is about to end, or
    ``rlinf stop`` wrote the driver's token to the stop file."""

    def __init__(self, run: Path, is_job_ending: Callable[[], bool]) -> None:
        self._run, self._is_job_ending = run, is_job_ending
        self._checked_at = 0.0
        self.is_requested = False
        """Whether ``rlinf stop`` requested the stop."""

    def __call__(self) -> bool:
        if time.monotonic() - self._checked_at > STOP_CHECK_INTERVAL_S:
            self._check_file()
        if not self.is_requested and self._is_job_ending():
            self._check_file()  # the signal may come from rlinf stop
            return True
        return self.is_requested

    def _check_file(self) -> None:
        self._checked_at = time.monotonic()
        with contextlib.suppress(OSError):
            token = (self._run / STOP_FILE).read_text().strip()
            self.is_requested = bool(token) and token == driver_token(self._run)


def driver_token(run: Path) -> str | None:
    """Return the token of the current or last driver of a run."""
    try:
        return str(json.loads((run / LOCK_FILE).read_text())["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
