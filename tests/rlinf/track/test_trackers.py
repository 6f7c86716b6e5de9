"""Trackers are told everything once, in whatever order it comes, and let go at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pipeline.commands.experiment import execute
from rlinf.config import RunConfig
from rlinf.track.tensorboard import TensorBoard

Compose = Callable[..., dict[str, Any]]


class Board:
    """Stands for W&B as far as it refuses: steps that go back, a second run beside an open one."""

    def __init__(self) -> None:
        self.runs: list[Board.Run] = []

    class Run:
        def __init__(self) -> None:
            self.rows: list[dict[str, float]] = []
            self.step, self.open = -1, True

        def define_metric(self, name: str, step_metric: str) -> None:
            self.over = step_metric

        def log(self, row: Mapping[str, float], step: int | None = None) -> None:
            step = self.step + 1 if step is None else step
            if step >= self.step:
                self.step = step
                self.rows.append(dict(row))

        def finish(self) -> None:
            self.open = False
            raise OSError("the last words of a tracker may fail too")

    def init(self, **wanted: Any) -> Board.Run:
        assert wanted["reinit"] == "create_new"
        assert not any(run.open for run in self.runs)
        self.runs.append(self.Run())
        return self.runs[-1]


def installed(monkeypatch: pytest.MonkeyPatch, init: Callable[..., Any]) -> None:
    """A package ``wandb`` that has but this."""
    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.__spec__ = ModuleSpec("wandb", None, origin=__file__)
    monkeypatch.setitem(sys.modules, "wandb", module)


@pytest.mark.usefixtures("undrawn")
def test_every_score_arrives_and_each_run_has_its_own(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board()
    installed(monkeypatch, board.init)
    for name in ("first", "second"):
        execute(compose("log.trackers=[wandb]", f"run.name={name}", "evaluate.every=1"))
    assert len(board.runs) == 2
    for run in board.runs:
        over = [row[run.over] for row in run.rows if "evaluate/score" in row]
        assert over == [0, 1, 2]
        assert [row[run.over] for row in run.rows if "train/loss" in row] == [1, 2]
        assert not run.open


@pytest.mark.usefixtures("undrawn")
def test_a_tracker_that_cannot_begin_stops_nothing(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**wanted: Any) -> None:
        raise OSError("no such server")

    installed(monkeypatch, init)
    execute(compose("log.trackers=[wandb]"))
    assert "tracker wandb failed and is switched off: no such server" in capsys.readouterr().err


def test_an_older_step_after_a_resume_erases_nothing(tmp_path: Path) -> None:
    """What is evaluated is told later than what it is of."""
    pytest.importorskip("tensorboard", reason="the extra 'track' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = RunConfig.model_construct()
    first = TensorBoard(tmp_path, config)
    for step in range(1, 7):
        first.log(step, {"train/loss": 1 / step})
    first.close()
    resumed = TensorBoard(tmp_path, config)
    resumed.log(5, {"evaluate/score": 0.5})
    resumed.log(7, {"train/loss": 1 / 7})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [*range(1, 8)]
    assert [event.step for event in events.Scalars("evaluate/score")] == [5]
