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
    """Standard deviation of the normal distribution with the interval ``low_s`` to ``high_s``. With
    few points it exceeds the standard deviation of the regression, because of Student's t."""
    low_s: Array
    high_s: Array
    """Interval that contains the share :data:`LEVEL` of measurements."""
    measured: Array
    """True if this number of processes and size was measured; the value is then the measurement."""
    extrapolated: Array
    """True outside the measured range."""
    warnings: tuple[str, ...]


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
        is_extrapolated = (doublings > 0) & ~measured
        return TimePrediction(
            value,
            spread,
            np.maximum(value - Z * spread, 0.0),
            value + Z * spread,
            measured,
            is_extrapolated,
            self._warnings(count, amount, is_extrapolated),
        )

    def _points_by_setting(self) -> dict[tuple[int, float], list[TimingPoint]]:
        settings: dict[tuple[int, float], list[TimingPoint]] = {}
        for point in self.points:
            settings.setdefault((point.processes, point.size), []).append(point)
        return settings

    def _extrapolation_doublings(self, processes: Array, size: Array) -> Array:
        """Return the distance to the convex hull of the points, in doublings; 0 inside."""
        measured = np.unique(
            [(math.log2(p.processes), math.log2(p.size)) for p in self.points], axis=0
        )
        queried = np.stack([np.log2(processes), np.log2(size)], axis=-1)
        return _distance_to_polygon(queried, _convex_hull(measured))

    def _warnings(self, processes: Array, size: Array, is_extrapolated: Array) -> tuple[str, ...]:
        if not is_extrapolated.any():
            return ()
        counts, sizes = processes[is_extrapolated], size[is_extrapolated]
        min_count, max_count = _min_max(point.processes for point in self.points)
        min_size, max_size = _min_max(point.size for point in self.points)
        return (
            f"{_format_range(counts)} processes on size {_format_range(sizes)} are outside the "
            f"measured range ({min_count:g} to {max_count:g} processes, size {min_size:g} to "
            f"{max_size:g}): extrapolated, with a wider interval; profile there to be sure",
        )


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


def _convex_hull(points: Array) -> Array:
    """Return the corners of the convex hull of points ``[n, 2]``, in order (Andrew's algorithm)."""
    if len(points) < 3:
        return points
    ordered = points[np.lexsort((points[:, 1], points[:, 0]))]
    chains: list[list[Array]] = []
    for sequence in (ordered, ordered[::-1]):
        chain: list[Array] = []
        for point in sequence:
            while len(chain) > 1 and _cross(chain[-2], chain[-1], point) <= 1e-12:
                chain.pop()
            chain.append(point)
        chains.append(chain[:-1])
    return np.array(chains[0] + chains[1])


def _cross(a: Array, b: Array, c: Array) -> float:
    return float((b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]))


def _distance_to_polygon(points: Array, hull: Array) -> Array:
    """Return the distance of points ``[..., 2]`` from a convex polygon, line or point; 0 inside."""
    starts, ends = hull, np.roll(hull, -1, axis=0)
    edges = ends - starts
    offset = points[..., None, :] - starts
    length = np.maximum((edges**2).sum(-1), 1e-300)
    along = np.clip((offset * edges).sum(-1) / length, 0, 1)
    nearest = np.linalg.norm(offset - along[..., None] * edges, axis=-1).min(-1)
    if len(hull) > 2:
        cross = edges[:, 0] * offset[..., 1] - edges[:, 1] * offset[..., 0]
        nearest = np.where(np.all(cross >= 0, axis=-1), 0.0, nearest)
    return np.where(nearest < 1e-9, 0.0, nearest)


def _min_max(values: Any) -> tuple[float, float]:
    items = list(values)
    return min(items), max(items)


def _format_range(values: Array) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
