"""Durations in the tables of plans."""

from __future__ import annotations

import pytest

from pipeline.planning.planner.plan_tables import format_interval, format_seconds


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0 s"),
        (0.00634, "6.34 ms"),
        (0.0999, "99.9 ms"),
        (0.151, "0.151 s"),
        (101.4, "101 s"),
        (900.0, "15 min"),
    ],
)
def test_a_duration_has_a_unit_of_its_size(value: float, words: str) -> None:
    assert format_seconds(value) == words


def test_a_spread_has_one_unit() -> None:
    assert format_interval(0.09, 0.151) == "0.09 - 0.151 s"
    assert format_interval(0.0, 0.0018) == "0 - 1.8 ms"
