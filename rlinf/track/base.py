"""The tracker interface, and the guard that keeps a tracker's failure away from training."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from rlinf.errors import ConfigError

log = logging.getLogger("rlinf")


@runtime_checkable
class Sink(Protocol):
    """Takes numbers of one step (an iteration, counted from 1)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def identified(run: Path) -> tuple[str, str]:
    """Name and identity that a run has in ``run.json``.

    Raises:
        ConfigError: the file is damaged.
    """
    path = run / "run.json"
    try:
        about = json.loads(path.read_bytes())
        return str(about["name"]), str(about["id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: damaged ({error!r}); resume with --keep, which writes it anew"
        ) from None


class Guarded:
    """A sink that is dropped, with one warning, when it fails: training matters more."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name = name
        self._sink: Sink | None = sink

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._sink is None:
            return
        try:
            self._sink.log(step, metrics)
        except Exception as error:  # a tracker may raise anything, and must not stop training
            log.warning("tracker %s failed and is switched off: %s", self._name, error)
            self._sink = None

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()
