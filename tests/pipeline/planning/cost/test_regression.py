"""Fits of measured times: true coefficients, honest intervals, flagged extrapolation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.planning.cost.regression import LEVEL, TERMS, TimingPoint, Z, fit_times
from rlinf.errors import PlanError

GRID = [(p, w) for p in (1, 2, 4, 8, 16) for w in (64.0, 256.0, 1024.0)]


def true_seconds(factors, processes, size):
    terms = (1.0, size, size / processes, np.log2(processes), processes - 1)
    return float(np.dot(factors, terms))


def measured(factors, rng=None, noise=0.03, grid=GRID) -> list[TimingPoint]:
    points = []
    for p, w in grid:
        seconds = true_seconds(factors, p, w)
        if rng is not None:
            seconds *= float(np.exp(noise * rng.standard_normal()))
        points.append(TimingPoint(p, w, seconds, 0.01 * seconds, 3))
    return points


@given(st.floats(0.1, 10), st.floats(0.001, 0.1), st.floats(0.01, 1))
def test_exact_measurements_give_the_coefficients_back(constant, serial, shared):
    fit = fit_times(measured((constant, serial, shared, 0, 0)))
    assert set(fit.terms) <= set(TERMS)
    for p, w in ((3, 100.0), (6, 700.0), (16, 64.0)):
        true = true_seconds((constant, serial, shared, 0, 0), p, w)
        assert float(fit.predict(p, w).seconds) == pytest.approx(true, rel=0.02)


def test_the_terms_that_made_the_times_are_found():
    fit = fit_times(measured((2.0, 0.0, 0.5, 0.0, 0.3)))
    assert fit.terms == ("constant", "size / processes", "processes - 1")
    assert fit.coefficients[[0, 2, 4]] == pytest.approx([2.0, 0.5, 0.3], rel=1e-6)


@pytest.mark.parametrize(
    "factors", [(2.0, 0.0, 0.5, 0.0, 0.0), (1.0, 0.01, 0.2, 0.0, 0.0), (0.5, 0.0, 0.3, 0.4, 0.0)]
)
@pytest.mark.parametrize("grid", [GRID, GRID[::3], [(p, 256.0) for p in (1, 2, 4, 8)]])
def test_intervals_hold_the_share_of_measurements_they_state(factors, grid):
    """At places between those measured; noise of 3 % where repeats within a run agree to 1 %."""
    rng = np.random.default_rng(1)
    sizes = sorted({w for _, w in grid})
    inside = []
    for _ in range(200):
        fit = fit_times(measured(factors, rng, grid=grid))
        p, w = int(rng.integers(2, 8)), float(rng.choice(sizes))
        answer = fit.predict(p, w)
        new = true_seconds(factors, p, w) * float(np.exp(0.03 * rng.standard_normal()))
        inside.append(abs(new - answer.seconds) <= Z * answer.spread_s)
    assert np.mean(inside) >= LEVEL - 0.05


def test_extrapolation_is_flagged_and_wider_the_further_it_goes():
    fit = fit_times(measured((2.0, 0.0, 0.5, 0.0, 0.0), np.random.default_rng(0)))
    answer = fit.predict(np.array([5, 16, 32, 64, 512]), 300.0)
    assert list(answer.extrapolated) == [False, False, True, True, True]
    relative = answer.spread_s / answer.seconds
    assert np.all(np.diff(relative[1:]) > 0)


def test_what_was_measured_is_given_back():
    points = measured((1.0, 0.0, 0.1, 0.0, 0.0), np.random.default_rng(0))
    twice = [*points, TimingPoint(4, 256.0, 2 * points[7].seconds, 0.0, 1)]
    answer = fit_times(twice).predict([2, 4], 256.0)
    assert list(answer.measured) == [True, True]
    assert answer.seconds[0] == points[4].seconds
    assert answer.seconds[1] == pytest.approx(1.5 * points[7].seconds)


@given(st.integers(1, 4096), st.floats(1, 1e6))
@settings(deadline=None)
def test_predictions_are_positive(processes, size):
    fit = fit_times(measured((1.0, 0.01, 0.1, 0.1, 0.0), np.random.default_rng(3)))
    answer = fit.predict(processes, size)
    assert answer.spread_s >= 0
    assert answer.seconds > 0


@given(st.floats(1, 1e5))
def test_more_work_never_takes_less_away_from_measured_points(size):
    fit = fit_times(measured((1.0, 0.01, 0.1, 0.1, 0.0), np.random.default_rng(3)))
    both = fit.predict(3, np.array([size, 1.01 * size])).seconds
    assert both[1] >= both[0]


def test_too_few_or_impossible_points_are_refused():
    with pytest.raises(PlanError, match="2 measured points are too few"):
        fit_times([TimingPoint(1, 1.0, 1.0), TimingPoint(2, 1.0, 1.0), TimingPoint(2, 1.0, 1.1)])
    with pytest.raises(PlanError, match=r"point 1.*above 0"):
        fit_times([TimingPoint(1, 1.0, 1.0), TimingPoint(2, 1.0, 0.0), TimingPoint(4, 1.0, 1.0)])
    with pytest.raises(PlanError, match="not finite"):
        fit_times([TimingPoint(1, float("nan"), 1.0)])
    with pytest.raises(PlanError, match="sizes above 0"):
        fit_times(measured((1, 0, 1, 0, 0))).predict(0, 1.0)
