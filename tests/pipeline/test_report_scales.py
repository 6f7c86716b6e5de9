"""Charts of constants, tiny ranges and single points can be read."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.report import page
from pipeline.report.charts import bin_edges, json_numbers

CASES: dict[str, list[float]] = {
    "one point": [0.5],
    "one zero": [0.0],
    "zeros": [0.0, 0.0, 0.0],
    "constant": [0.25, 0.25, 0.25],
    "negative constant": [-3.0, -3.0],
    "tiny constant": [1e-300, 1e-300],
    "huge constant": [1e300, 1e300],
    "differences of 1e-9": [1.0, 1.0 + 1e-9, 1.0 + 2e-9],
    "differences of 1e-9 at 1e-6": [1e-6, 1e-6 + 1e-15],
    "large with small differences": [1e9, 1e9 + 1, 1e9 + 2],
    "neighbours in float64": [1.0, np.nextafter(1.0, 2.0)],
    "huge": [1e10, 1e300],
    "both signs": [-1e-7, 1e-7],
    "gaps": [0.1, math.nan, 0.3, math.nan, 0.2],
}


def test_the_page_keeps_small_differences() -> None:
    assert json_numbers([1.0, 1.0 + 1e-9, None, math.nan]) == [1.0, 1.000000001, None, None]
    assert json_numbers([0.123456789, 2.0]) == [0.123457, 2.0]
    assert json_numbers([]) == []


@given(st.floats(-1e300, 1e300), st.floats(0, 1e300))
def test_bins_are_around_all_values(low: float, spread: float) -> None:
    edges = bin_edges(low, low + spread, 24)
    assert edges[0] <= low <= low + spread <= edges[-1]
    assert edges[0] < edges[-1]


def finite(values: list[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def in_node(call: str, cases: list[Any]) -> list[Any]:
    """The results of a function of ``scales.js``, for lists of arguments."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here")
    script = (
        f"const scales = require({json.dumps(str(page.ASSETS / 'scales.js'))});"
        "const cases = JSON.parse(require('fs').readFileSync(0));"
        f"console.log(JSON.stringify(cases.map((case_) => {call})));"
    )
    ended = subprocess.run(
        [node, "-e", script], input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    found: list[Any] = json.loads(ended.stdout)
    return found


FORMAT = "(value) => Number(value.toPrecision(4)).toLocaleString('en')"


@settings(max_examples=5, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-1e12, 1e12), st.floats(1e-12, 1e12), st.integers(2, 9)),
        min_size=50,
        max_size=50,
    )
)
def test_labels_of_the_page_never_repeat(axes: list[tuple[float, float, int]]) -> None:
    cases = [[first + step * n for n in range(count)] for first, step, count in axes]
    for ticks, labels in zip(
        cases, in_node(f"scales.tickLabels(case_, {FORMAT})", cases), strict=True
    ):
        shown = [label for label in labels if label]
        assert len(set(shown)) == len(shown), (ticks, labels)
        assert len(shown) == len(set(ticks)), (ticks, labels)


def test_ordinary_labels_of_the_page_are_short() -> None:
    cases = [[0, 0.2, 0.4], [1.0, 1.000000001], [1e-9, 2e-9], [1e9, 1e9 + 1]]
    assert in_node(f"scales.tickLabels(case_, {FORMAT})", cases) == [
        ["0", "0.2", "0.4"],
        ["1", "1.000000001"],
        ["1.0e-9", "2.0e-9"],
        ["1.000000000e+9", "1.000000001e+9"],
    ]


def test_an_axis_has_room_for_its_longest_label() -> None:
    cases = [None, ["0", "1"], ["1.0000000118", "1.00000012"]]
    assert in_node("scales.axisWidth(case_)", cases) == [58, 58, 90]


def test_the_page_has_a_range_around_every_value() -> None:
    cases = [[min(v), max(v)] for v in map(finite, CASES.values())]
    for (least, most), (low, high) in zip(
        cases, in_node("scales.yRange(...case_, false)", cases), strict=True
    ):
        assert low < least <= most < high
    assert in_node("scales.yRange(...case_, true)", [[0, 0], [2, 2]]) == [[0, 1], [0, 2.12]]
    assert in_node("scales.yRange(...case_, false)", [[None, None]]) == [[0, 1]]
    assert in_node("scales.xRange(...case_)", [[3, 3], [1, 4]]) == [[2, 4], [1, 4]]


def test_points_that_no_line_shows_are_found() -> None:
    cases = [[1], [1, 2], [1, None, 2, 3], [None, 1, 1], [], [None]]
    assert in_node("scales.hasIsolated(case_)", cases) == [True, False, True, False, False, False]
