"""Weights & Biases; offline unless the user's environment says otherwise."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from rlinf.config import RunConfig
from rlinf.errors import MissingPackageError


class WeightsAndBiases:
    """One W&B run per run directory: its id is that of ``run.json``, so a resumed run goes on."""

    package = ("wandb", "wandb")

    def __init__(self, run: Path, config: RunConfig) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingPackageError("wandb", "wandb", "log.trackers: wandb") from None
        os.environ.setdefault("WANDB_MODE", "offline")
        about = json.loads((run / "run.json").read_text())
        self._run = wandb.init(
            project="rlinf",
            name=about["name"],
            id=about["id"][:16],
            dir=str(run),
            resume="allow",
            config=config.semantic(),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
