"""Weights & Biases; offline unless the user's environment says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rlinf.config import RunConfig
from rlinf.errors import MissingPackageError
from rlinf.track.base import identified, settings_of

STEP = "iteration"
"""What all is drawn over."""


class WeightsAndBiases:
    """One W&B run per run directory: its id is that of ``run.json``, so a resumed run goes on."""

    package = ("wandb", "wandb")

    def __init__(self, run: Path, config: RunConfig) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingPackageError("wandb", "wandb", "log.trackers: wandb") from None
        os.environ.setdefault("WANDB_MODE", "offline")
        name, identity = identified(run)
        self._run = wandb.init(
            project="rlinf",
            name=name,
            id=identity[:16],
            dir=str(run),
            resume="allow",
            config=settings_of(run, config),
            # Another run of this process is not gone on with.
            reinit="create_new",
        )
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # W&B's own step only goes up, and what is evaluated comes later than what it is of.
        self._run.log({**metrics, STEP: step})

    def close(self) -> None:
        self._run.finish()
