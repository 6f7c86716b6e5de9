"""TensorBoard event files in ``tensorboard/`` of the run."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlinf.config import RunConfig
from rlinf.errors import MissingPackageError
from rlinf.track.base import settings_of


class TensorBoard:
    """Writes settings as text, and scalars; each is written once, whatever interrupts the run."""

    package = ("tensorboard", "track")

    def __init__(self, run: Path, config: RunConfig) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingPackageError("tensorboard", "track", "log.trackers: tensorboard") from None
        self._make = SummaryWriter
        self._folder = run / "tensorboard"
        self._settings = settings_of(run, config)
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            first = not self._folder.exists()
            self._writer = self._make(str(self._folder))
            if first:
                text = yaml.safe_dump(self._settings, sort_keys=False)
                self._writer.add_text("settings", textwrap.indent(text, "    "))
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
