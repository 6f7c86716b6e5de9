"""The measured speeds of generators and helpers, and the sizes of shares that follow from them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

HISTORY_SIZE = 64
"""Maximum number of measured times."""
MAX_OVERHEAD_SHARE = 0.25
"""Maximum part of a share's time that may be fixed, that is, independent of its size."""


class WorkerSpeeds:
    """A linear model of the time of shares, and the speeds of workers.

    A share of n starts takes about ``fixed_s + n * per_start_s`` seconds, because an engine decodes
    a batch of few samples in nearly the same time as a batch of many.
    """

    def __init__(self) -> None:
        self._times: deque[tuple[int, float]] = deque(maxlen=HISTORY_SIZE)
        self._speeds: dict[str, float] = {}

    def record(self, worker: str, size: int, seconds: float) -> None:
        """Record the seconds of a finished share of ``size`` starts."""
        self._times.append((size, seconds))
        speed = size / max(seconds, 1e-6)
        self._speeds[worker] = (self._speeds.get(worker, speed) + speed) / 2

    def forget(self, worker: str) -> None:
        """Drop the speed of a worker that has left; the times of its shares stay."""
        self._speeds.pop(worker, None)

    def speeds(self, workers: Sequence[str]) -> dict[str, float]:
        """Return starts per second by worker; unmeasured workers get the average."""
        known = [self._speeds[worker] for worker in workers if worker in self._speeds]
        average = sum(known) / len(known) if known else 1.0
        return {worker: self._speeds.get(worker, average) for worker in workers}

    def fit_line(self) -> tuple[float, float]:
        """Return the fixed seconds of a share, and the seconds per start."""
        sizes, times = [size for size, _ in self._times], [seconds for _, seconds in self._times]
        if not sizes:
            return 0.0, 0.0
        mean_size, mean_time = sum(sizes) / len(sizes), sum(times) / len(times)
        spread = sum((size - mean_size) ** 2 for size in sizes)
        if not spread:
            return 0.0, mean_time / mean_size
        per_start_s = sum((n - mean_size) * (t - mean_time) for n, t in self._times) / spread
        per_start_s = min(max(per_start_s, 0.0), mean_time / mean_size)
        return mean_time - per_start_s * mean_size, per_start_s

    def share_size(self, num_pending: int, part: float) -> int:
        """Return the size of a worker's next share by guided self-scheduling.

        It is half of the worker's part of the pending starts, so that shares shrink and all workers
        finish at about the same time. A share is large enough to amortise the fixed seconds, but at
        most the whole part.

        Args:
            part: speed of the worker, divided by the speed of all workers.
        """
        fixed_s, per_start_s = self.fit_line()
        min_size = 1.0
        if fixed_s:
            ratio = fixed_s / per_start_s if per_start_s else math.inf
            min_size = max(1.0, ratio * (1 / MAX_OVERHEAD_SHARE - 1))
        whole_part = math.ceil(num_pending * part)
        return math.ceil(max(1, min(whole_part, max(math.ceil(whole_part / 2), min_size))))
