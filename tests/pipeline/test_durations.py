"""Durations are told with the figures that matter."""

from __future__ import annotations

import pytest

from pipeline.console import format_duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (119.4, "119 s"),
        (119.7, "2 min 0 s"),
        (274.3, "4 min 34 s"),
        (599.6, "10 min"),
        (1513, "25 min"),
        (7199, "2 h 0 min"),
        (11100, "3 h 5 min"),
    ],
)
def test_a_duration_in_words(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words
