"""Sweeps: a bad point stops all of them before anything is written; the end shows every run."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from pipeline.sweep import Point, points, show
from rlinf.errors import ConfigError
from rlinf.launch import main, suffix

SMALL = ["++run.name=s", "++log.trackers=[]"]


def words(root: Path, *further: str) -> list[str]:
    given = ["experiment=arithmetic_grpo", f"++run.root={root}", *SMALL, *further]
    return [*given, *suffix(["-m", *given])]


def test_the_points_are_those_of_the_values_given(tmp_path: Path) -> None:
    found = points(words(tmp_path, "++algorithm.lr=1e-4,3e-4", "++seed=range(2)"))
    assert [point.varied for point in found] == [
        "lr=0.0001, seed=0",
        "lr=0.0001, seed=1",
        "lr=0.0003, seed=0",
        "lr=0.0003, seed=1",
    ]
    assert len({point.folder for point in found}) == 4
    assert list(tmp_path.iterdir()) == []


def test_a_bad_point_is_refused_before_the_first_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", *words(tmp_path, "algorithm.lr=1e-4,-1")]) == 65
    said = capsys.readouterr().err
    assert "point 1 of the sweep (lr=-1): algorithm.lr" in said
    assert list(tmp_path.iterdir()) == []


def test_points_that_would_be_the_same_run_are_refused(tmp_path: Path) -> None:
    given = ["experiment=arithmetic_grpo", f"++run.root={tmp_path}", *SMALL, "++seed=1,2"]
    with pytest.raises(ConfigError, match="points 0 and 1 of the sweep would both be"):
        points(given)


def test_options_may_stand_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = words(tmp_path, "algorithm.lr=-1,-2")
    assert main([call[0], "-m", *call[1:]]) == 65
    assert "point 0 of the sweep (lr=-1)" in capsys.readouterr().err


def test_the_table_has_every_run_and_where_its_report_is(tiny_run: Path, tmp_path: Path) -> None:
    console = io.StringIO()
    with contextlib.redirect_stdout(console):
        show([Point(tiny_run, "lr=[a]"), Point(tmp_path / "never", "lr=2")])
    said = console.getvalue()
    assert "lr=[a]" in said, "brackets are no markup"
    assert "2 of 2" in said
    assert "not started" in said
    assert str(tiny_run / "report" / "report.html") in said
