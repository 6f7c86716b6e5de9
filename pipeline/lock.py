"""The driver lock: a file in the run folder that names the process that drives the run.

The file is created atomically with ``link``. Only its owner, or the process that replaces a dead
owner, changes it. On the same boot of the same machine the operating system reports whether the
owner is alive; elsewhere an owner counts as alive while it keeps touching the file. The age of a
file is the difference between its time and that of a new file, so only the filesystem's clock
matters. A file is complete when it appears, so one that cannot be read was changed by somebody else
and is never replaced.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlinf.errors import RunLockedError
from rlinf.shared_memory import boot_id, is_alive, own_start_time, pid_namespace
from slurm.jobs import current_job_id

LOCK_FILE = "driver.json"
HEARTBEAT_S = 10.0
"""Seconds between two touches of the lock file by its owner."""
STALE_S = 60.0
"""Age of a lock file, in seconds, from which an owner on another machine counts as dead."""
ACQUIRE_TIMEOUT_S = 5.0
"""Seconds to retry while other drivers start at the same time."""
log = logging.getLogger("rlinf")


@dataclass(frozen=True)
class LockOwner:
    """A process that drives or drove a run."""

    host: str
    pid: int
    token: str
    """Random text that distinguishes this owner from all earlier and later ones."""
    boot_id: str = ""
    pid_namespace: int = 0
    """``pid`` is unique within this boot of the machine and this PID namespace."""
    start_ticks: int = 0
    """Start time of the process, in clock ticks since boot."""
    job: str = ""
    """Id of the Slurm job, if the process runs in one."""

    @classmethod
    def current(cls) -> LockOwner:
        """Return the description of this process."""
        token = secrets.token_hex(8)
        process_fields = (boot_id(), pid_namespace(), own_start_time(), current_job_id() or "")
        return cls(socket.gethostname(), os.getpid(), token, *process_fields)

    @classmethod
    def read(cls, path: Path) -> LockOwner:
        """Read the owner from a lock file.

        Raises:
            OSError: the file does not exist or cannot be read.
            RunLockedError: the file is damaged.
        """
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes(), strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise RunLockedError(
                f"{path}: damaged ({reason}); if no driver runs, remove it"
            ) from None


class RunLock:
    """The driver lock of a run, owned by this process.

    Raises:
        RunLockedError: another driver owns the run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner = LockOwner.current()
        _acquire(path, self._owner)
        self._last_beat, self._is_lost = time.monotonic(), False
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check that this process still owns the lock. The file is read only if a heartbeat is
        overdue.

        Raises:
            RunLockedError: this process was suspended for so long that another one replaced it.
        """
        if time.monotonic() - self._last_beat > STALE_S / 2:
            self._beat()
        if self._is_lost:
            raise RunLockedError(
                f"{self._path.parent}: another driver took over while this one was suspended; "
                "it continues the run and its jobs (see rlinf status)"
            )

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        with contextlib.suppress(OSError), _owner_file(self._path, self._owner) as owner_file:
            _swap(self._path, self._owner.token, owner_file, remove=True)

    def _send_heartbeats(self) -> None:
        while not self._released.wait(HEARTBEAT_S) and not self._is_lost:
            self._beat()

    def _beat(self) -> None:
        # A damaged or unreadable file belongs to no other process.
        with contextlib.suppress(OSError, RunLockedError):
            self._is_lost = self._is_lost or LockOwner.read(self._path).token != self._owner.token
        if not self._is_lost:
            with contextlib.suppress(OSError):
                os.utime(self._path)
        self._last_beat = time.monotonic()


def find_live_owner(path: Path) -> LockOwner | None:
    """Return the owner in a lock file if its process is alive, else None; a damaged file is
    logged."""
    try:
        owner = LockOwner.read(path)
    except OSError:
        return None
    except RunLockedError as error:
        log.warning("%s", error)
        return None
    return owner if _is_owner_alive(path, owner) else None


def orphaned_lock_files(folder: Path) -> list[Path]:
    """Return lock files in a run folder that dead drivers left; they can be removed."""
    orphaned = []
    for path in folder.glob(f".{LOCK_FILE}.*"):
        with contextlib.suppress(FileNotFoundError):
            try:
                is_orphaned = not _is_owner_alive(path, LockOwner.read(path))
            except RunLockedError:  # its process was killed while it wrote the file
                is_orphaned = file_age_s(path) > STALE_S
            if is_orphaned:
                orphaned.append(path)
    return orphaned


def file_age_s(path: Path) -> float:
    """Return the seconds since a file was last modified, by the clock of its filesystem.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    probe = path.with_name(f".{path.name}.clock-{secrets.token_hex(4)}")
    modified_at = path.stat().st_mtime
    try:
        probe.touch(exist_ok=False)
        try:
            return probe.stat().st_mtime - modified_at
        finally:
            probe.unlink(missing_ok=True)
    except OSError:
        # The folder is not writable, for this user or at all.
        return time.time() - modified_at


def _acquire(path: Path, new_owner: LockOwner) -> None:
    deadline = time.monotonic() + ACQUIRE_TIMEOUT_S
    with _owner_file(path, new_owner) as owner_file:
        while not _try_link(owner_file, path):
            with contextlib.suppress(FileNotFoundError):
                owner = LockOwner.read(path)
                if _is_owner_alive(path, owner):
                    raise RunLockedError(
                        f"{path.parent}: driven by process {owner.pid} on {owner.host}; "
                        "stop that one first (rlinf status shows what it is doing)"
                    )
                # Replace only the file that was examined, not a newer one.
                if _swap(path, owner.token, owner_file):
                    return
            if time.monotonic() > deadline:
                raise RunLockedError(f"{path}: several drivers start at once; try again")
            time.sleep(0.01)


def _swap(path: Path, token: str, owner_file: Path, *, remove: bool = False) -> bool:
    """Replace or remove the lock file with ``token``; returns False if another process was first.

    A process must first create a claim file named after the token, which only one process can. So
    only one of the processes that saw the same dead owner replaces the lock file, and none replaces
    the file of a new owner. The claim file of a dead process is replaced in the same way.
    """
    claim = path.with_name(f".{LOCK_FILE}.{token}")
    if not _try_link(owner_file, claim):
        claimant = LockOwner.read(claim)
        if _is_owner_alive(claim, claimant) or not _swap(claim, claimant.token, owner_file):
            return False
    try:
        if LockOwner.read(path).token != token:
            return False
        if remove:
            path.unlink()
        else:
            # Rename a copy: the claim is a link to the lock file, so renaming it would do nothing.
            with _owner_file(path, LockOwner.read(owner_file)) as new:
                new.replace(path)
        return True
    except FileNotFoundError:
        return False
    finally:
        claim.unlink(missing_ok=True)


@contextlib.contextmanager
def _owner_file(path: Path, owner: LockOwner) -> Iterator[Path]:
    """Write a description of the owner to a temporary file beside the lock; yields its path."""
    temporary = path.with_name(f".{LOCK_FILE}.new-{secrets.token_hex(8)}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            json.dump(asdict(owner), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o600)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _try_link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    return True


def _is_owner_alive(path: Path, owner: LockOwner) -> bool:
    if owner.job and owner.job == current_job_id() and owner.pid != os.getpid():
        return False  # Slurm requeued this job: its earlier execution has ended
    if owner.start_ticks and (owner.boot_id, owner.pid_namespace) == (boot_id(), pid_namespace()):
        return is_alive(owner.pid, owner.start_ticks)
    try:
        return file_age_s(path) < STALE_S
    except FileNotFoundError:
        return False
