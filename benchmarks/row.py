"""One benchmark result."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class BenchmarkRow:
    """A result with its goal; ``spread`` is the interquartile range of ``n`` measurements."""

    name: str
    value: float
    unit: str
    goal: float | None
    better: Literal["higher", "lower"]
    n: int
    spread: float

    @property
    def reached_goal(self) -> bool | None:
        """Return whether the goal was reached; None without one."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal


def median_row(
    name: str,
    values: Sequence[float],
    unit: str,
    goal: float | None,
    better: Literal["higher", "lower"],
) -> BenchmarkRow:
    """Return a row with the median and spread of repeated measurements."""
    spread = 0.0
    if len(values) > 3:
        low, _, high = statistics.quantiles(values, n=4)
        spread = high - low
    elif len(values) > 1:
        spread = max(values) - min(values)
    median = statistics.median(values)
    return BenchmarkRow(name, round(median, 4), unit, goal, better, len(values), round(spread, 4))
