"""The run directory and its frozen configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.lock import LOCK_FILE, RunLock
from rlinf.config import RunConfig
from rlinf.errors import InputError
from stages.layout import CONFIG_FILE
from stages.runner import load_config


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
        return cls(folder, load_config(folder / CONFIG_FILE))

    @contextlib.contextmanager
    def lock(self) -> Iterator[RunLock]:
        """Own the run as its only driver.

        The owner writes a heartbeat. An owner on this host is dead if its process has ended,
        one on another host if its heartbeat stopped for a minute (:mod:`pipeline.lock`).

        Raises:
            RunLockedError: another driver owns the run.
        """
        lock = RunLock(self.folder / LOCK_FILE)
        try:
            yield lock
        finally:
            lock.release()


@contextlib.contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turn write errors in a run directory into an error that names ``run.root``.

    Raises:
        InputError: an ``OSError`` was raised within.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"run.root: cannot write {error.filename or folder}: {error.strerror}; "
            "choose another run.root"
        ) from None
