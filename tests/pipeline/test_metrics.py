"""Metrics files stay whole and ordered, and trackers hear of each iteration once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import drive, prepare_run
from pipeline.metrics import MetricsLog, rewrite_metrics
from rlinf.track import trackers
from stages.layout import METRICS_FILE, TIMINGS_FILE, TRACKED_FILE

Compose = Callable[..., dict[str, Any]]
HEARD: list[int] = []


class Recorder:
    """A tracker that keeps the steps it is told."""

    def __init__(self, run: Path, config: Any) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "reward/mean" in metrics:
            HEARD.append(step)

    def close(self) -> None: ...


@pytest.fixture
def finished(tiny_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_run, tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.usefixtures("undrawn")
def test_an_early_result_made_again_leaves_metrics_ordered_and_trackers_told_once(
    finished: Path, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers._entries, "recorder", f"{__name__}:Recorder")
    HEARD.clear()
    whole = (finished / METRICS_FILE).read_bytes()
    (finished / METRICS_FILE).unlink()
    (finished / TRACKED_FILE).unlink(missing_ok=True)
    run = prepare_run(compose("log.trackers=[recorder]"))
    drive(run)
    assert HEARD == [1, 2], "what ended while no driver ran is told"
    (finished / "it/0000/reward/manifest.json").write_bytes(b"\xff")
    drive(run)
    assert list((finished / "it/0000/reward").glob("manifest.json.bad-*"))
    assert (finished / METRICS_FILE).read_bytes() == whole
    rows = [json.loads(line) for line in (finished / TIMINGS_FILE).read_text().splitlines()]
    assert [(r["iteration"], r["stage"]) for r in rows] == sorted(
        ((r["iteration"], r["stage"]) for r in rows), key=lambda pair: pair[0]
    )
    assert len(rows) == 10
    assert HEARD == [1, 2]


def test_iterations_added_in_any_order_are_in_order_and_once(finished: Path) -> None:
    rewrite_metrics(finished)
    whole = [(finished / name).read_bytes() for name in (METRICS_FILE, TIMINGS_FILE)]
    for order in ((0, 1), (1, 0), (0, 1, 0, 1)):
        for name in (METRICS_FILE, TIMINGS_FILE):
            (finished / name).write_text("")
        written = MetricsLog(finished)
        assert [written.append(i) is not None for i in order] == [True, True, False, False][
            : len(order)
        ]
        assert [(finished / name).read_bytes() for name in (METRICS_FILE, TIMINGS_FILE)] == whole


def test_what_was_left_in_the_files_is_replaced(finished: Path) -> None:
    whole = (finished / METRICS_FILE).read_bytes()
    (finished / METRICS_FILE).write_bytes(b"\xff" + whole + whole[:20])
    rewrite_metrics(finished)
    assert (finished / METRICS_FILE).read_bytes() == whole
