"""As :mod:`benchmarks.vla`, of the policy that denoises its actions."""

from __future__ import annotations

from benchmarks.row import Row
from benchmarks.vla import measured


def measure() -> list[Row]:
    """See the module."""
    return measured("smolvla", "metaworld_smolvla")
