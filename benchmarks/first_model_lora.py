"""As :mod:`benchmarks.first_model`, by adapters: ``experiment=smollm_lora``."""

from __future__ import annotations

from benchmarks.first_model import trained
from benchmarks.gain import gain
from benchmarks.row import Row


def measure() -> list[Row]:
    """See the module."""
    return gain("first_model_lora", trained("smollm_lora"), 10)
