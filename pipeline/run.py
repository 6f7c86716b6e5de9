"""The run directory: created once, then everything is read from it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rlinf.config import RunConfig
from rlinf.errors import RunLockedError
from slurm.ids import own_id
from stages.layout import CONFIG
from stages.runner import load_config

LOCK = "driver.json"
HEARTBEAT_S = 10.0
STALE_S = 60.0


@dataclass(frozen=True)
class Run:
    """An existing run directory and its frozen configuration."""

    folder: Path
    config: RunConfig

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Open an existing run.

        Raises:
            ConfigError: not a run directory, or its configuration cannot be read.
        """
        folder = folder.expanduser().absolute()
        return cls(folder, load_config(folder / CONFIG))

    @contextlib.contextmanager
    def driven(self) -> Iterator[Lock]:
        """Be the only driver of this run.

        The owner writes a heartbeat. An owner on this host counts as gone when its process is; on
        another host when its heartbeat has stopped for a minute.

        Raises:
            RunLockedError: another driver owns the run.
        """
        lock = Lock(self.folder / LOCK)
        try:
            yield lock
        finally:
            lock.release()


class Lock:
    """The right to drive a run, held by this process.

    Raises:
        RunLockedError: another driver has it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mine = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
            "job": own_id(),
            "token": secrets.token_hex(8),
        }
        _take(path, self._mine)
        self._beaten, self._lost = time.monotonic(), False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """See that it is still ours; looks at the file only if no heartbeat was due to.

        Raises:
            RunLockedError: this process stood still for so long that another took over.
        """
        if time.monotonic() - self._beaten > STALE_S / 2:
            self._beat()
        if self._lost:
            raise RunLockedError(
                f"{self._path.parent}: another driver took over while this one stood still; "
                "it goes on with the run and its jobs (rlinf status shows it)"
            )

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        if self._holder() == self._mine["token"]:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _work(self) -> None:
        while not self._over.wait(HEARTBEAT_S) and not self._lost:
            self._beat()

    def _beat(self) -> None:
        holder = self._holder()
        if holder == self._mine["token"]:
            with contextlib.suppress(OSError):
                os.utime(self._path)
        # A file that cannot be read now, on a network filesystem say, is nobody else's.
        self._lost = self._lost or holder not in (self._mine["token"], None)
        self._beaten = time.monotonic()

    def _holder(self) -> str | None:
        owner = _owner(self._path)
        return None if owner is None else owner.get("token")


def _take(path: Path, mine: dict[str, Any]) -> None:
    for _ in range(3):
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            owner = _owner(path)
            if owner is not None and _alive(path, owner):
                raise RunLockedError(
                    f"{path.parent}: driven by process {owner['pid']} on {owner['host']}; "
                    "stop that one first (rlinf status shows what it is doing)"
                ) from None
            with contextlib.suppress(FileNotFoundError):
                path.rename(path.with_name(f"{LOCK}.stale"))
            continue
        with os.fdopen(descriptor, "w") as file:
            json.dump(mine, file)
        return
    raise RunLockedError(f"{path}: several drivers start at once; try again")


def _owner(path: Path) -> dict[str, Any] | None:
    try:
        owner: dict[str, Any] = json.loads(path.read_text())
        return owner if {"host", "pid", "started"} <= owner.keys() else None
    except (OSError, ValueError):
        return None


def _alive(path: Path, owner: dict[str, Any]) -> bool:
    if owner.get("job") is not None and owner["job"] == own_id() and owner["pid"] != os.getpid():
        return False  # Slurm started this job again: its former life is over
    if owner["host"] == socket.gethostname():
        try:
            process = psutil.Process(int(owner["pid"]))
            return abs(process.create_time() - float(owner["started"])) < 1.0
        except psutil.NoSuchProcess:
            return False
    try:
        return time.time() - path.stat().st_mtime < STALE_S
    except FileNotFoundError:
        return False


def is_driven(path: Path) -> dict[str, Any] | None:
    """The living owner noted in a lock file, if there is one."""
    owner = _owner(path)
    return owner if owner is not None and _alive(path, owner) else None
