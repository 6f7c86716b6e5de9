"""Trackers: destinations of metrics in addition to ``metrics.jsonl``, which is always written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from rlinf.config import RunConfig, Section, validate
from rlinf.errors import RlinfError
from rlinf.registry import Registry
from rlinf.track.trackers import (
    FailSafeTracker,
    MlflowConfig,
    TrackioConfig,
    WandbConfig,
)

trackers = Registry(
    "tracker",
    {
        "tensorboard": "rlinf.track.trackers:TensorBoardTracker",
        "wandb": "rlinf.track.trackers:WandbTracker",
        "mlflow": "rlinf.track.trackers:MlflowTracker",
        "trackio": "rlinf.track.trackers:TrackioTracker",
    },
    base="rlinf.track.trackers:Tracker",
)


class LogConfig(Section):
    """Trackers by name, and their settings."""

    trackers: tuple[str, ...] = ()
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    trackio: TrackioConfig = TrackioConfig()
    samples: int = Field(default=8, ge=0)
    """Number of training samples that trackers get as a table: the worst, the best and truncated
    ones. 0: none."""
    samples_every: int = Field(default=10, gt=0)
    """Iterations between two such tables; the first iteration has one too."""

    @model_validator(mode="after")
    def _reject_unused_settings(self) -> LogConfig:
        for name in ("wandb", "mlflow", "trackio"):
            if name in self.model_fields_set and name not in self.trackers:
                raise ValueError(
                    f"{name} has settings, but log.trackers does not name it; add {name} there, or "
                    f"remove log.{name}"
                )
        return self


def open_trackers(
    section: Mapping[str, Any], run: Path, config: RunConfig
) -> list[FailSafeTracker]:
    """Open the trackers of a run's section ``log``; leave out those that fail, with a warning.

    Raises:
        ConfigError: a tracker is unknown.
        MissingPackageError: the package of a tracker is not installed.
    """
    opened: list[FailSafeTracker] = []
    for index, name in enumerate(validate(LogConfig, section, "log").trackers):
        tracker_class = trackers.get(name, f"log.trackers.{index}")
        try:
            opened.append(FailSafeTracker(name, tracker_class(run, config)))
        except RlinfError:
            raise
        except Exception as error:  # for example, its server does not answer
            FailSafeTracker.warn_disabled(name, error)
    return opened
