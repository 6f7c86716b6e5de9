"""As :mod:`benchmarks.first_model`, by adapters: ``experiment=smollm_lora``."""

from __future__ import annotations

from benchmarks.first_model import trained
from benchmarks.row import BenchmarkRow
from benchmarks.score_gain import gain_rows


def measure() -> list[BenchmarkRow]:
    """See the module."""
    return gain_rows("first_model_lora", trained("smollm_lora"), 10)
