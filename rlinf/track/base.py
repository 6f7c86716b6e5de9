"""The tracker interface, and a wrapper that keeps a tracker's failure away from training."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rlinf.config import RunConfig, redact, select_semantic
from rlinf.errors import ConfigError

log = logging.getLogger("rlinf")


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of one step (an iteration, counted from 1)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def run_name_and_id(run: Path) -> tuple[str, str]:
    """Return the name and id of a run from ``run.json``.

    Raises:
        ConfigError: the file is damaged.
    """
    path = run / "run.json"
    try:
        about = json.loads(path.read_bytes())
        return str(about["name"]), str(about["id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: damaged ({error!r}); resume with --keep, which writes it again"
        ) from None


def settings_of_run(run: Path, config: RunConfig) -> dict[str, Any]:
    """Return all settings in effect that can change a result, by section, from ``run.json``.

    Runs of earlier versions did not record them; for these the given settings are returned.
    Possible secrets are hidden.
    """
    try:
        settings = json.loads((run / "run.json").read_bytes()).get("settings")
    except (OSError, ValueError, AttributeError):
        settings = None
    settings_in_effect = (
        select_semantic(settings) if isinstance(settings, dict) else config.semantic_values()
    )
    shown: dict[str, Any] = redact(settings_in_effect)
    return shown


class FailSafeTracker:
    """A tracker that is dropped with one warning when it fails, because training matters more."""

    def __init__(self, name: str, sink: Tracker) -> None:
        self._name = name
        self._sink: Tracker | None = sink

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call_sink(lambda sink: sink.log(step, metrics))

    def close(self) -> None:
        self._call_sink(lambda sink: sink.close())
        self._sink = None

    def _call_sink(self, call: Callable[[Tracker], None]) -> None:
        if self._sink is None:
            return
        try:
            call(self._sink)
        except Exception as error:  # a tracker may raise anything, and must not stop training
            self.warn_disabled(self._name, error)
            self._sink = None

    @staticmethod
    def warn_disabled(name: str, error: Exception) -> None:
        """Log that a tracker is disabled for this run."""
        log.warning("tracker %s failed and is disabled: %s", name, error)
