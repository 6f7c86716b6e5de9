"""A fit of measured times to the number of processes and the size of the work, with intervals.

Predictions outside the measured range are flagged as extrapolated. The model is
``seconds = a + b size + c size / processes + d log2(processes) + e (processes - 1)`` with
non-negative coefficients: fixed cost, serial work, parallel work, and communication over trees and
rings. Terms are selected by leave-one-out errors. Non-negative least squares follows Lawson and
Hanson 1974, chapter 23; intervals are those of linear regression with Student's t on the nonzero
terms (Seber and Lee 2003, section 5.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls
from scipy.stats import norm
from scipy.stats import t as student

from rlinf.errors import PlanError

Array = np.ndarray

TERMS = ("constant", "size", "size / processes", "log2(processes)", "processes - 1")
"""Terms of the model, in this order."""
TERM_SETS = ((2,), (0, 2), (0, 1, 2), (0, 2, 3), (0, 2, 4), (0, 1, 2, 3, 4))
"""Sets of indices in :data:`TERMS` to select from, simplest first."""
MIN_POINTS = 3
"""Minimum number of different settings (processes and size) for a fit."""
NOISE_FLOOR = 0.01
"""Minimum relative standard deviation of a point, as runs differ more than repeats in a run."""
RICHER_MODEL_FACTOR = 0.8
"""A larger set of terms needs a leave-one-out error below this share of the smaller set's."""
EXTRAPOLATION_SPREAD = 0.25
"""Relative standard deviation that each doubling beyond the measured range adds."""
LEVEL = 0.9
"""Share of measurements inside an interval."""
Z = float(norm.ppf((1 + LEVEL) / 2))
"""Half the width of that interval, in standard deviations of a normal distribution."""


@dataclass(frozen=True)
class TimingPoint:
    """One measurement of a time."""

    processes: int
    size: float
    """Amount of work, in samples or tokens."""
    seconds: float
    """Median of the repeats."""
    spread_s: float = 0.0
    """Standard deviation of the repeats."""
    repeats: int = 1


@dataclass(frozen=True)
class TimePrediction:
    """Predicted times. The arrays have the shape of the arguments of :meth:`TimeModel.predict`."""

    seconds: Array
    spread_s: Array
    """Standard deviation of a normal distribution of which the share :data:`LEVEL` of measurements
    is in the central interval. With few points it exceeds the standard deviation of the regression,
    because of Student's t."""
    measured: Array
    """True if this number of processes and size was measured; the value is then the measurement."""
    extrapolated: Array
    """True outside the measured range."""


@dataclass(frozen=True)
class TimeModel:
    """A fitted model of measured times."""

    points: tuple[TimingPoint, ...]
    coefficients: Array
    """Coefficients of :data:`TERMS`, float64 ``[5]``; 0 for unused terms."""
    covariance: Array
    """Covariance of the coefficients ``[5, 5]``; 0 for unused terms."""
    degrees_of_freedom: int
    """Number of points minus number of used terms."""
    relative_error: float
    """Root mean square of the relative leave-one-out errors."""
    residual_scale: float
    """Ratio of the standard deviations of the residuals and of repeats, at least 1."""

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the used terms."""
        return tuple(
            name for name, value in zip(TERMS, self.coefficients, strict=True) if value > 0
        )

    def predict(self, processes: Any, size: Any) -> TimePrediction:
        """Predict the times for ``size`` on ``processes``: numbers or arrays that broadcast.

        Inside the measured range (the convex hull of the logarithms of processes and size), the
        spread is that of the regression or the leave-one-out error, whichever is larger. Outside,
        it grows by :data:`EXTRAPOLATION_SPREAD` per doubling, and the prediction is flagged.

        Raises:
            PlanError: a number of processes or a size is not positive.
        """
        count, amount = np.broadcast_arrays(np.asarray(processes, float), np.asarray(size, float))
        if not (np.all(count >= 1) and np.all(amount > 0) and np.all(np.isfinite(amount))):
            raise PlanError("times can be predicted for one process or more and sizes above 0")
        design = _design(count, amount)
        value = design @ self.coefficients
        variance = np.einsum("...i,ij,...j->...", design, self.covariance, design)
        noise = self.residual_scale * NOISE_FLOOR * value
        spread = np.maximum(np.sqrt(variance + noise**2), self.relative_error * value)
        doublings = self._extrapolation_doublings(count, amount)
        spread = np.hypot(spread, EXTRAPOLATION_SPREAD * doublings * value)
        measured = np.zeros(count.shape, dtype=bool)
        for (point_count, point_size), points in self._points_by_setting().items():
            matches = (count == point_count) & (amount == point_size)
            measured |= matches
            value = np.where(matches, np.mean([point.seconds for point in points]), value)
            point_spread = math.hypot(*(_sigma(point) for point in points)) / len(points)
            spread = np.where(matches, point_spread * self.residual_scale, spread)
        # With few points the spread itself is uncertain.
        t_ratio = float(student.ppf((1 + LEVEL) / 2, max(self.degrees_of_freedom, 1))) / Z
        spread = t_ratio * spread
        return TimePrediction(value, spread, measured, (doublings > 0) & ~measured)

    def _points_by_setting(self) -> dict[tuple[int, float], list[TimingPoint]]:
        settings: dict[tuple[int, float], list[TimingPoint]] = {}
        for point in self.points:
            settings.setdefault((point.processes, point.size), []).append(point)
        return settings

    def _extrapolation_doublings(self, processes: Array, size: Array) -> Array:
        """Return the distance to the measured ranges of processes and size, in doublings."""
        beyond = []
        for queried, values in (
            (processes, [point.processes for point in self.points]),
            (size, [point.size for point in self.points]),
        ):
            low, high = np.log2(min(values)), np.log2(max(values))
            beyond.append(np.maximum(low - np.log2(queried), np.log2(queried) - high).clip(0))
        distance = np.hypot(*beyond)
        return np.where(distance < 1e-9, 0.0, distance)


def fit_times(points: Sequence[TimingPoint]) -> TimeModel:
    """Fit a model to measured times.

    Raises:
        PlanError: fewer than :data:`MIN_POINTS` different settings, or an invalid number.
    """
    points = tuple(points)
    for index, point in enumerate(points):
        values = (point.processes, point.size, point.seconds, point.spread_s)
        if not all(math.isfinite(value) for value in values):
            raise PlanError(f"measured point {index}: {point} holds a number that is not finite")
        if point.processes < 1 or point.size <= 0 or point.seconds <= 0 or point.spread_s < 0:
            raise PlanError(
                f"measured point {index}: {point}; processes, size and seconds must be above 0"
            )
    settings = {(point.processes, point.size) for point in points}
    if len(settings) < MIN_POINTS:
        raise PlanError(
            f"{len(settings)} measured points are too few for a fit; measure at {MIN_POINTS} or "
            "more different numbers of processes or sizes"
        )
    design = _design(
        np.array([point.processes for point in points], float),
        np.array([point.size for point in points], float),
    )
    times = np.array([point.seconds for point in points])
    weights = 1 / np.array([_sigma(point) for point in points])
    best_terms, best_error = None, math.inf
    for terms in TERM_SETS:
        # If one setting is left out, the others must still determine the coefficients.
        if len(settings) <= len(terms):
            continue
        error = _leave_one_out(design, times, weights, terms)
        if best_terms is None or error < RICHER_MODEL_FACTOR * best_error:
            best_terms, best_error = terms, error
    assert best_terms is not None
    coefficients = _solve(design, times, weights, best_terms)
    nonzero = np.flatnonzero(coefficients)
    degrees_of_freedom = len(points) - len(nonzero)
    residuals = (times - design @ coefficients) * weights
    residual_scale = max(1.0, math.sqrt(float(residuals @ residuals) / max(degrees_of_freedom, 1)))
    weighted = design[:, nonzero] * weights[:, None]
    covariance = np.zeros((len(TERMS), len(TERMS)))
    covariance[np.ix_(nonzero, nonzero)] = residual_scale**2 * np.linalg.pinv(weighted.T @ weighted)
    return TimeModel(
        points, coefficients, covariance, degrees_of_freedom, best_error, residual_scale
    )


def _design(processes: Array, size: Array) -> Array:
    """Return the values of the terms, ``[..., 5]``."""
    terms = [np.ones_like(size), size, size / processes, np.log2(processes), processes - 1]
    return np.stack(terms, axis=-1)


def _sigma(point: TimingPoint) -> float:
    """Return the standard deviation of a point's median."""
    median_spread = point.spread_s * math.sqrt(math.pi / 2 / max(point.repeats, 1))
    return max(median_spread, NOISE_FLOOR * point.seconds)


def _solve(design: Array, times: Array, weights: Array, terms: Sequence[int]) -> Array:
    """Return coefficients ``[5]`` by weighted non-negative least squares."""
    columns = design[:, list(terms)] * weights[:, None]
    # The solver is inaccurate for columns of very different magnitude.
    scale = np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    scaled, _ = nnls(columns / scale, times * weights)
    coefficients = np.zeros(len(TERMS))
    coefficients[list(terms)] = scaled / scale
    return coefficients


def _leave_one_out(design: Array, times: Array, weights: Array, terms: Sequence[int]) -> float:
    """Return the root mean square of relative errors; each setting is predicted from the others."""
    errors = []
    for i in range(len(times)):
        # Leave out all points of the same setting, or it would predict itself.
        others = np.any(design != design[i], axis=1)
        coefficients = _solve(design[others], times[others], weights[others], terms)
        errors.append(float(design[i] @ coefficients) / times[i] - 1)
    return math.sqrt(float(np.mean(np.square(errors))))
