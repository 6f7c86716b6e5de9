"""What was measured is kept."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import benchmarks.__main__ as bench
from benchmarks.row import BenchmarkRow


def test_no_measured_row_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results.json")
    names = ["of_no_table", "plan_vs_exhaustive", "plan_128x4_ms"]
    rows = {name: asdict(BenchmarkRow(name, 1.0, "x", None, "higher", 1, 0.0)) for name in names}
    kept = bench.keep(rows)
    assert [row["name"] for row in kept] == ["plan_128x4_ms", "plan_vs_exhaustive", "of_no_table"]
    bench.keep({"plan_vs_exhaustive": rows["plan_vs_exhaustive"]})
    assert json.loads((tmp_path / "results.json").read_text()) == {"rows": kept}
