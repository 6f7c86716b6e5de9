"""How a process uses its machine: few threads that do not spin, and memory that stays.

Small models become several times slower when threads spin at barriers on busy cores. A stage sets
how many threads it uses from the configuration (``engine.threads``, ``trainer.threads``).

Every step frees and allocates the same large blocks. glibc gives such blocks back to the system,
which clears each page anew when it is next touched; for small models that takes as long as much of
the arithmetic.
"""

from __future__ import annotations

import ctypes
import os

DEFAULTS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
"""Parameters of glibc's ``mallopt``, from its malloc.h."""
KEPT = {MMAP_MAX: 0, TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 64 << 20}
"""Large blocks come from the heap, which grows in large steps and does not shrink."""


def environment() -> dict[str, str]:
    """The variables for a child process; what the user has set stays."""
    return {name: os.environ.get(name, value) for name, value in DEFAULTS.items()}


def apply() -> None:
    """Set them in this process, where they are read when torch is imported; keep freed memory."""
    os.environ.update(environment())
    keep_freed()


def keep_freed() -> None:
    """Let the C library reuse what is freed; others than glibc keep their ways."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for parameter, value in KEPT.items():
        mallopt(parameter, value)
