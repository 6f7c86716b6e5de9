"""TensorBoard event files in ``tensorboard/`` of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf.config import RunConfig
from rlinf.errors import MissingPackageError


class TensorBoard:
    """Writes scalars; each is written once, whatever interrupts the run."""

    package = ("tensorboard", "track")

    def __init__(self, run: Path, config: RunConfig) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingPackageError("tensorboard", "track", "log.trackers: tensorboard") from None
        self._make = SummaryWriter
        self._folder = run / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._make(str(self._folder))
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
