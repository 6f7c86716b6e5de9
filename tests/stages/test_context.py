"""What a stage records of its time."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf.channels.process_group import ProcessGroupInfo
from stages.context import MERGEABLE_SPAN_S, MIN_WAIT_SPAN_S, StageContext


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of a stage as has spans, and a clock that stands still."""
    clock = [100.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    return SimpleNamespace(spans=[], worker=0, world=ProcessGroupInfo(0, 1, 0), clock=clock)


def took(stage: Any, name: str, seconds: float, after: float = 0.0) -> None:
    start = stage.clock[0] + after
    stage.clock[0] = start + seconds
    StageContext.add_span(stage, name, start)


def test_thousands_of_short_parts_in_a_row_are_one(stage: Any) -> None:
    for _ in range(1000):
        took(stage, "update", MERGEABLE_SPAN_S / 5, after=MIN_WAIT_SPAN_S / 2)
    (span,) = stage.spans
    assert span["end"] - span["start"] == pytest.approx(
        1000 * (MERGEABLE_SPAN_S / 5 + MIN_WAIT_SPAN_S / 2), rel=0.01
    )


def test_long_parts_others_and_those_after_a_pause_stay_apart(stage: Any) -> None:
    took(stage, "update", 2 * MERGEABLE_SPAN_S)
    took(stage, "update", 2 * MERGEABLE_SPAN_S)
    took(stage, "save", MERGEABLE_SPAN_S / 2)
    took(stage, "save", MERGEABLE_SPAN_S / 2, after=2 * MIN_WAIT_SPAN_S)
    assert [span["name"] for span in stage.spans] == ["update", "update", "save", "save"]
