"""The run directory: created once, then everything is read from it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.lock import LOCK, Lock
from rlinf import __version__
from rlinf.artifacts import write_atomic
from rlinf.config import RunConfig, digest
from rlinf.errors import ConfigError, InputError
from stages.layout import CONFIG, PLAN, RUN
from stages.runner import load_config


@dataclass(frozen=True)
class Run:
    """An existing run directory and its frozen configuration."""

    folder: Path
    config: RunConfig

    @classmethod
    def create(cls, config: RunConfig, plan: dict[str, Any]) -> Run:
        """Make the run directory, or open it when it holds the same experiment.

        More iterations than before are accepted: the run goes on.

        Raises:
            ConfigError: the name is taken by a run with another configuration.
            InputError: no permission to write there.
        """
        folder = config.run.folder
        known = folder / CONFIG
        if known.exists():
            old = load_config(known)
            differing = _differences(old.semantic(), config.semantic())
            if differing - {"iterations"}:
                key = sorted(differing - {"iterations"})[0]
                raise ConfigError(
                    f"run.name: {folder} holds another experiment ({key} differs); choose another "
                    "run.name, or resume that run as it is with: rlinf resume " + str(folder)
                )
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
            values = config.model_dump(mode="json")
            write_atomic(known, yaml.safe_dump(values, sort_keys=False))
            if not (folder / PLAN).exists() or config.plan is not None:
                write_atomic(folder / PLAN, yaml.safe_dump(plan, sort_keys=False))
            if not (folder / RUN).exists():
                about = {
                    "name": folder.name,
                    "id": digest(config.semantic()),
                    "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                    "version": __version__,
                }
                write_atomic(folder / RUN, json.dumps(about, indent=1))
        except OSError as error:
            raise InputError(
                f"run.root: cannot write {error.filename or folder}: {error.strerror}; "
                "choose another run.root"
            ) from None
        return cls(folder, config)

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Open an existing run.

        Raises:
            ConfigError: not a run directory.
        """
        folder = folder.expanduser().absolute()
        return cls(folder, load_config(folder / CONFIG))

    @contextlib.contextmanager
    def driven(self) -> Iterator[Lock]:
        """Be the only driver of this run.

        The owner writes a heartbeat. An owner on this host counts as gone when its process is; on
        another host when its heartbeat has stopped for a minute (:mod:`pipeline.lock`).

        Raises:
            RunLockedError: another driver owns the run.
        """
        lock = Lock(self.folder / LOCK)
        try:
            yield lock
        finally:
            lock.release()


def _differences(old: dict[str, Any], new: dict[str, Any]) -> set[str]:
    """Dotted keys whose values differ."""
    found = set()
    for key in old.keys() | new.keys():
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= {f"{key}.{inner}" for inner in _differences(a, b)}
        elif a != b:
            found.add(key)
    return found
