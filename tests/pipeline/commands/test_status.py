"""``rlinf status`` asks little of a controller that all users wait for."""

from __future__ import annotations

import pytest

import pipeline.commands.status
from pipeline.commands.status import Rarely
from slurm.client import SlurmClient


def test_a_watched_run_asks_for_the_queue_every_half_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, now = [], [100.0]
    monkeypatch.setattr(SlurmClient, "queue", lambda self: asked.append(now[0]) or {})
    monkeypatch.setattr(pipeline.commands.status.time, "monotonic", lambda: now[0])
    client = Rarely()
    for _ in range(60):
        assert client.queue() == {}
        now[0] += 2.0
    assert asked == [100.0, 132.0, 164.0, 196.0]
