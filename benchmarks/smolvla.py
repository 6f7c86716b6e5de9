"""As :mod:`benchmarks.vla`, of the policy that denoises its actions."""

from __future__ import annotations

from benchmarks.row import BenchmarkRow
from benchmarks.vla import measured


def measure() -> list[BenchmarkRow]:
    """See the module."""
    return measured("smolvla", "metaworld_smolvla")
