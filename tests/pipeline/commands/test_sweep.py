"""Sweeps: a bad point stops all of them before anything is written; the end shows every run."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from pipeline.commands.sweep import SweepPoint, show_sweep, sweep_points
from pipeline.report.comparison import ComparedRun, write_comparison
from rlinf.errors import ConfigError
from rlinf.launch import main, sweep_suffix_override

SMALL = ["++run.name=s", "++log.trackers=[]"]


def words(root: Path, *further: str) -> list[str]:
    given = ["experiment=arithmetic_grpo", f"++run.root={root}", *SMALL, *further]
    return [*given, *sweep_suffix_override(["-m", *given])]


def test_the_points_are_those_of_the_values_given(tmp_path: Path) -> None:
    found = sweep_points(words(tmp_path, "++optimizer.lr=1e-4,3e-4", "++seed=range(2)"))
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
    assert main(["-m", *words(tmp_path, "optimizer.lr=1e-4,-1")]) == 65
    output = capsys.readouterr().err
    assert "point 1 of the sweep (lr=-1): optimizer.lr" in output
    assert list(tmp_path.iterdir()) == []


def test_points_that_would_be_the_same_run_are_refused(tmp_path: Path) -> None:
    given = ["experiment=arithmetic_grpo", f"++run.root={tmp_path}", *SMALL, "++seed=1,2"]
    with pytest.raises(ConfigError, match="points 0 and 1 of the sweep would both be"):
        sweep_points(given)


def test_options_may_stand_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = words(tmp_path, "optimizer.lr=-1,-2")
    assert main([call[0], "-m", *call[1:]]) == 65
    assert "point 0 of the sweep (lr=-1)" in capsys.readouterr().err


def test_the_table_has_every_run_and_where_its_report_is(tiny_run: Path, tmp_path: Path) -> None:
    console = io.StringIO()
    with contextlib.redirect_stdout(console):
        show_sweep([SweepPoint(tiny_run, "lr=[a]"), SweepPoint(tmp_path / "never", "lr=2")])
    output = console.getvalue()
    assert "lr=[a]" in output, "brackets are no markup"
    assert "2 of 2" in output
    assert "not started" in output
    assert str(tiny_run / "report" / "report.html") in output


def test_one_page_compares_the_runs(tiny_run: Path, tmp_path: Path) -> None:
    """Every metric of each run, in charts that share their axes; names are text, not markup."""
    runs = [ComparedRun(tiny_run, f"lr={i}</script><b>", "2 of 2", "0.1", "0.2") for i in range(3)]
    page = write_comparison(tmp_path / "sweeps" / "comparison.html", "Comparison", runs)
    text = page.read_text()
    content = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert [plot["name"] for plot in content["groups"][0]["plots"]][:2] == [
        "evaluate/score",
        "reward/mean",
    ]
    rows = [json.loads(line) for line in (tiny_run / "metrics.jsonl").read_text().splitlines()]
    drawn = {plot["name"]: plot["series"] for group in content["groups"] for plot in group["plots"]}
    assert drawn.keys() == (rows[0].keys() - {"iteration"}) | {"evaluate/score"}
    assert [series["y"] for series in drawn["train/lr"]] == 3 * [
        [pytest.approx(row["train/lr"], rel=1e-5) for row in rows]
    ]
    assert "<b>" not in text.replace("<b>{{", "")
    (link,) = set(re.findall(r'<a href="([^"]*report.html)"', text))
    assert (page.parent / link).resolve() == (tiny_run / "report" / "report.html").resolve()
