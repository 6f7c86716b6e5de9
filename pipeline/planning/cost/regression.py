"""Regression of measured times on processes and size, with intervals; extrapolation is always
flagged.

``seconds = a + b size + c size / processes + d log2(processes) + e (processes - 1)`` with no
negative factor: fixed cost, unshared work, shared work, and communication over trees and rings. The
terms are selected by leave-one-out errors. Least squares under these bounds is that of Lawson and
Hanson 1974, chapter 23; the intervals are those of linear regression with Student's t on the
nonzero terms (Seber and Lee 2003, section 5.3).
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
"""Sets of terms that are tried, simplest first."""
MIN_POINTS = 3
NOISE_FLOOR = 0.01
"""Minimum relative standard deviation of a point: repeats within one run vary less than runs."""
RICHER_MODEL_FACTOR = 0.8
"""A richer set of terms must reduce the leave-one-out error below this share of a simpler one's."""
EXTRAPOLATION_SPREAD = 0.25
"""Relative standard deviation added per doubling beyond the measured range."""
LEVEL = 0.9
"""Share of measurements inside an interval."""
Z = float(norm.ppf((1 + LEVEL) / 2))
"""Half of that interval, in standard deviations of a normal distribution."""


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
    """Predicted times; arrays of the shape of the query."""

    seconds: Array
    spread_s: Array
    """Standard deviation of the normal distribution with this interval; with few points it is
    larger than the regression's, because of Student's t."""
    low_s: Array
    high_s: Array
    """Interval that contains the share :data:`LEVEL` of measurements."""
    measured: Array
    """True if exactly this was measured; its value is then the measurement."""
    extrapolated: Array
    """True outside of the measured range."""
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class TimeModel:
    """A fitted model of measured times."""

    points: tuple[TimingPoint, ...]
    factors: Array
    """Factor of each of :data:`TERMS`, float64 ``[5]``; 0 for an unused term."""
    covariance: Array
    """Covariance of the factors ``[5, 5]``; 0 for unused ones."""
    degrees_of_freedom: int
    """Number of points minus used terms."""
    relative_error: float
    """Root mean square of the relative errors on left-out points."""
    scatter: float
    """Ratio of the points' deviation to that of their repeats, at least 1."""

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the used terms."""
        return tuple(name for name, factor in zip(TERMS, self.factors, strict=True) if factor > 0)

    def predict(self, processes: Any, size: Any) -> TimePrediction:
        """Predict the times of ``size`` work on ``processes``, numbers or arrays that broadcast.

        Inside the measured range (the convex hull in logarithms of processes and size) the interval
        is the larger of the regression's and the leave-one-out error. Outside, the standard
        deviation grows by :data:`EXTRAPOLATION_SPREAD` per doubling, and the prediction is flagged.

        Raises:
            PlanError: a number of processes or a size is not positive.
        """
        p, w = np.broadcast_arrays(np.asarray(processes, float), np.asarray(size, float))
        if not (np.all(p >= 1) and np.all(w > 0) and np.all(np.isfinite(w))):
            raise PlanError("times can be predicted for one process or more and sizes above 0")
        design = _design(p, w)
        value = design @ self.factors
        variance = np.einsum("...i,ij,...j->...", design, self.covariance, design)
        noise = self.scatter * NOISE_FLOOR * value
        spread = np.maximum(np.sqrt(variance + noise**2), self.relative_error * value)
        beyond = self._doublings_beyond(p, w)
        spread = np.hypot(spread, EXTRAPOLATION_SPREAD * beyond * value)
        measured = np.zeros(p.shape, dtype=bool)
        for (count, amount), there in self._places().items():
            here = (p == count) & (w == amount)
            measured |= here
            value = np.where(here, np.mean([point.seconds for point in there]), value)
            own = math.hypot(*(_sigma(point) for point in there)) / len(there)
            spread = np.where(here, own * self.scatter, spread)
        # With few points the scatter itself is uncertain.
        few = float(student.ppf((1 + LEVEL) / 2, max(self.degrees_of_freedom, 1))) / Z
        spread = few * spread
        outside = (beyond > 0) & ~measured
        return TimePrediction(
            value,
            spread,
            np.maximum(value - Z * spread, 0.0),
            value + Z * spread,
            measured,
            outside,
            self._warnings(p, w, outside),
        )

    def _places(self) -> dict[tuple[int, float], list[TimingPoint]]:
        places: dict[tuple[int, float], list[TimingPoint]] = {}
        for point in self.points:
            places.setdefault((point.processes, point.size), []).append(point)
        return places

    def _doublings_beyond(self, processes: Array, size: Array) -> Array:
        """Return the distance to the hull of the points in doublings; 0 inside."""
        there = np.unique(
            [(math.log2(p.processes), math.log2(p.size)) for p in self.points], axis=0
        )
        queried = np.stack([np.log2(processes), np.log2(size)], axis=-1)
        return _distance(queried, _hull(there))

    def _warnings(self, processes: Array, size: Array, outside: Array) -> tuple[str, ...]:
        if not outside.any():
            return ()
        p, w = processes[outside], size[outside]
        least, most = _span(point.processes for point in self.points)
        small, large = _span(point.size for point in self.points)
        return (
            f"{_range(p)} processes on size {_range(w)} lie outside what was measured "
            f"({least:g} to {most:g} processes, size {small:g} to {large:g}): extrapolated, with "
            "a wider interval; profile there to be sure",
        )


def fit_times(points: Sequence[TimingPoint]) -> TimeModel:
    """Fit a model to measured times.

    Raises:
        PlanError: fewer than :data:`MIN_POINTS` different places, or an invalid number.
    """
    points = tuple(points)
    for number, point in enumerate(points):
        values = (point.processes, point.size, point.seconds, point.spread_s)
        if not all(math.isfinite(value) for value in values):
            raise PlanError(f"measured point {number}: {point} holds a number that is not finite")
        if point.processes < 1 or point.size <= 0 or point.seconds <= 0 or point.spread_s < 0:
            raise PlanError(
                f"measured point {number}: {point}; processes, size and seconds must be above 0"
            )
    places = {(point.processes, point.size) for point in points}
    if len(places) < MIN_POINTS:
        raise PlanError(
            f"{len(places)} measured points are too few for a fit; measure at {MIN_POINTS} or "
            "more different numbers of processes or sizes"
        )
    design = _design(
        np.array([point.processes for point in points], float),
        np.array([point.size for point in points], float),
    )
    times = np.array([point.seconds for point in points])
    weights = 1 / np.array([_sigma(point) for point in points])
    chosen, error = None, math.inf
    for terms in TERM_SETS:
        # With one point left out, the others must still determine the terms.
        if len(places) <= len(terms):
            continue
        missed = _leave_one_out(design, times, weights, terms)
        if chosen is None or missed < RICHER_MODEL_FACTOR * error:
            chosen, error = terms, missed
    assert chosen is not None
    factors = _solve(design, times, weights, chosen)
    used = np.flatnonzero(factors)
    freedom = len(points) - len(used)
    residuals = (times - design @ factors) * weights
    scatter = max(1.0, math.sqrt(float(residuals @ residuals) / max(freedom, 1)))
    part = design[:, used] * weights[:, None]
    covariance = np.zeros((len(TERMS), len(TERMS)))
    covariance[np.ix_(used, used)] = scatter**2 * np.linalg.pinv(part.T @ part)
    return TimeModel(points, factors, covariance, freedom, error, scatter)


def _design(processes: Array, size: Array) -> Array:
    """Return the terms' values ``[..., 5]``."""
    terms = [np.ones_like(size), size, size / processes, np.log2(processes), processes - 1]
    return np.stack(terms, axis=-1)


def _sigma(point: TimingPoint) -> float:
    """Return the standard deviation of a point's median."""
    of_median = point.spread_s * math.sqrt(math.pi / 2 / max(point.repeats, 1))
    return max(of_median, NOISE_FLOOR * point.seconds)


def _solve(design: Array, times: Array, weights: Array, terms: Sequence[int]) -> Array:
    """Return factors ``[5]`` by weighted least squares, none negative."""
    columns = design[:, list(terms)] * weights[:, None]
    # The solver is inaccurate for columns of very different magnitude.
    scale = np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    found, _ = nnls(columns / scale, times * weights)
    out = np.zeros(len(TERMS))
    out[list(terms)] = found / scale
    return out


def _leave_one_out(design: Array, times: Array, weights: Array, terms: Sequence[int]) -> float:
    """Return the root mean square of relative errors, each place predicted from the others."""
    errors = []
    for i in range(len(times)):
        # All repeats of a place are left out together, or it would predict itself.
        others = np.any(design != design[i], axis=1)
        factors = _solve(design[others], times[others], weights[others], terms)
        errors.append(float(design[i] @ factors) / times[i] - 1)
    return math.sqrt(float(np.mean(np.square(errors))))


def _hull(points: Array) -> Array:
    """Return the corners of the convex hull of points ``[n, 2]`` in order (Andrew's monotone
    chain)."""
    if len(points) < 3:
        return points
    ordered = points[np.lexsort((points[:, 1], points[:, 0]))]
    chains: list[list[Array]] = []
    for run in (ordered, ordered[::-1]):
        chain: list[Array] = []
        for point in run:
            while len(chain) > 1 and _cross(chain[-2], chain[-1], point) <= 1e-12:
                chain.pop()
            chain.append(point)
        chains.append(chain[:-1])
    return np.array(chains[0] + chains[1])


def _cross(a: Array, b: Array, c: Array) -> float:
    return float((b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]))


def _distance(points: Array, hull: Array) -> Array:
    """Return the distance of points ``[..., 2]`` to a convex polygon, 0 inside; a line or point
    counts."""
    starts, ends = hull, np.roll(hull, -1, axis=0)
    edges = ends - starts
    offset = points[..., None, :] - starts
    length = np.maximum((edges**2).sum(-1), 1e-300)
    along = np.clip((offset * edges).sum(-1) / length, 0, 1)
    nearest = np.linalg.norm(offset - along[..., None] * edges, axis=-1).min(-1)
    if len(hull) > 2:
        turns = edges[:, 0] * offset[..., 1] - edges[:, 1] * offset[..., 0]
        nearest = np.where(np.all(turns >= 0, axis=-1), 0.0, nearest)
    return np.where(nearest < 1e-9, 0.0, nearest)


def _span(values: Any) -> tuple[float, float]:
    found = list(values)
    return min(found), max(found)


def _range(values: Array) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
