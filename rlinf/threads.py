"""Threads of a process: one to start with, and waiting ones must not spin.

Small models become several times slower when threads spin at barriers on busy cores. A stage sets
how many threads it uses from the configuration (``engine.threads``, ``trainer.threads``).
"""

from __future__ import annotations

import os

DEFAULTS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def environment() -> dict[str, str]:
    """The variables for a child process; what the user has set stays."""
    return {name: os.environ.get(name, value) for name, value in DEFAULTS.items()}


def apply() -> None:
    """Set them in this process; they are read when torch is imported."""
    os.environ.update(environment())
