"""The time of this process's last progress.

Work that may take long marks each step that it completes: a decoded token or answered request, a
step of an environment, a micro-batch, a record. The watchdog of stages
(:mod:`stages.progress_watchdog`) ends a stage without such steps. Waiting is no progress, so a loop
that only waits marks nothing.
"""

from __future__ import annotations

import time


class ProgressClock:
    """The time of the last progress; any thread may mark it."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def mark(self) -> None:
        """Record that a step was completed now."""
        self._last = time.monotonic()

    @property
    def last(self) -> float:
        """Time of the last mark (monotonic, s)."""
        return self._last


PROGRESS = ProgressClock()
"""The clock of this process. Stages that run in it at the same time share it."""
