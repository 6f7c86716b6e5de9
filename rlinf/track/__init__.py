"""Trackers: where metrics go beside ``metrics.jsonl``, which is always written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf.config import RunConfig, Section, validate
from rlinf.registry import Registry
from rlinf.track.base import Guarded, Sink

sinks = Registry(
    "tracker",
    {
        "tensorboard": "rlinf.track.tensorboard:TensorBoard",
        "wandb": "rlinf.track.wandb:WeightsAndBiases",
        "mlflow": "rlinf.track.mlflow:MLflow",
    },
    base="rlinf.track.base:Sink",
)


class LogConfig(Section):
    """Trackers by name."""

    trackers: tuple[str, ...] = ()


def open_sinks(log: Mapping[str, Any], run: Path, config: RunConfig) -> list[Sink]:
    """The configured trackers of a run.

    Raises:
        ConfigError: unknown tracker.
        MissingPackageError: its package is not installed.
    """
    names = validate(LogConfig, log, "log").trackers
    return [
        Guarded(name, sinks.get(name, f"log.trackers.{number}")(run, config))
        for number, name in enumerate(names)
    ]
