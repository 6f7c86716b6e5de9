"""The forecast of a placement with uncertain speeds: distribution and sensitivity of its time.

Each stage's time on each kind is multiplied by random factors, and
:mod:`pipeline.planning.planner.predictor` computes the iteration for all draws at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import (
    Placement,
    PlacementProblem,
    gpu_hours,
    interruption_s,
)
from pipeline.planning.planner.stage_times import StageTables
from rlinf.errors import PlanError

Array = np.ndarray
DRAWS = 1024
"""Number of samples of the speeds."""
IMPROVEMENT = 0.1
"""Relative improvement of a time in the sensitivity analysis."""


@dataclass(frozen=True)
class PlacementForecast:
    """The forecast of a placement."""

    nominal_s: float
    """Seconds of an iteration with the problem's speeds."""
    q10_s: float
    q90_s: float
    """Quantiles of the seconds with sampled speeds."""
    idle_shares: tuple[float, ...]
    """For each pool: share of the time of its GPUs in which they do no work; empty for jobs."""
    gpu_hours: float
    """GPU-hours of one iteration; for pools including idle time."""
    interruption_s: float
    """Expected seconds that preemption and failures cost per iteration; not included in the other
    times."""
    sensitivities: tuple[tuple[str, float], ...]
    """Seconds saved if a stage on a kind (``train on h100``) takes :data:`IMPROVEMENT` less time,
    largest saving first."""
    extrapolated: tuple[str, ...]
    """Speeds beyond the measurements: ``train on h100``."""


def forecast_placement(
    problem: PlacementProblem,
    placement: Placement,
    tables: StageTables,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> PlacementForecast:
    """Return the forecast of a placement.

    The time of each stage on each kind is sampled from a log-normal distribution whose mean is the
    table's time and whose relative standard deviation is the table's spread. There is one factor
    per stage and kind, because an error of the prediction applies to all of its GPUs. Samples are
    stratified (Latin hypercube, McKay, Beckman and Conover 1979), so few suffice.

    Args:
        tables: spreads and sources of every stage and kind that the placement uses.
        draws: number of samples.
        seed: seed of the samples; the same seed gives the same result.

    Raises:
        PlanError: the placement cannot run.
    """
    predictor = Predictor(problem)
    nominal = predictor.predict(placement)
    total_s = float(nominal.total_s)
    if not np.isfinite(total_s):
        raise PlanError("this placement cannot run: a stage has no GPUs that it can use")
    used = {
        (s, k): (f"{stage.name} on {kind.name}", tables[stage.name][kind.name], n)
        for s, stage in enumerate(problem.stages)
        for (k, kind), n in zip(enumerate(problem.kinds), placement.gpus_of(s), strict=True)
        if predictor.tables[s][k][n] > 0
    }
    spread = np.zeros((len(problem.stages), len(problem.kinds)))
    busy_gpu_s = np.zeros(len(placement.pools))
    for (s, k), (_, table, n) in used.items():
        spread[s, k] = table.spread[n]
        pool = next(p for p, stages in enumerate(placement.pools) if s in stages)
        busy_gpu_s[pool] += float(nominal.busy_s[s]) * table.used[n]
    samples = _total_s(predictor, placement, _random_factors(spread, draws, seed))
    q10, q90 = (float(q) for q in np.quantile(samples, (0.1, 0.9)))
    improved = np.ones((*spread.shape, len(used)))
    for i, (s, k) in enumerate(used):
        improved[s, k, i] = 1 - IMPROVEMENT
    savings = total_s - _total_s(predictor, placement, improved)
    names = [name for name, _, _ in used.values()]
    sensitivities = zip(names, (float(saved) for saved in savings), strict=True)
    num_gpus = np.array([sum(gpus) for gpus in placement.gpus])
    columns = [np.array(gpus)[:, None] for gpus in placement.gpus]
    times = np.array([total_s]), nominal.busy_s[:, None], columns
    idle_shares = () if problem.are_jobs else 1 - busy_gpu_s / num_gpus / total_s
    return PlacementForecast(
        nominal_s=total_s,
        q10_s=q10,
        q90_s=q90,
        idle_shares=tuple(float(share) for share in idle_shares),
        gpu_hours=float(np.sum(gpu_hours(problem, *times))),
        interruption_s=float(interruption_s(problem, *times)[0]),
        sensitivities=tuple(sorted(sensitivities, key=lambda entry: (-entry[1], entry[0]))),
        extrapolated=tuple(name for name, table, n in used.values() if table.extrapolated[n]),
    )


def _random_factors(spread: Array, draws: int, seed: int) -> Array:
    """Return log-normal factors ``[stages, kinds, draws]`` with mean 1 and standard deviation
    ``spread`` ``[stages, kinds]``."""
    rng = np.random.default_rng(seed)
    strata = rng.permuted(np.tile(np.arange(draws), (*spread.shape, 1)), axis=-1)
    normal = norm.ppf((strata + rng.random(strata.shape)) / draws)
    sigma = np.sqrt(np.log1p(spread**2))[..., None]
    return np.asarray(np.exp(sigma * normal - sigma**2 / 2))


def _total_s(predictor: Predictor, placement: Placement, factors: Array) -> Array:
    """Return the seconds of an iteration with factors of the times, ``[n]``."""
    gpus = [np.tile(np.array(pool)[:, None], factors.shape[-1]) for pool in placement.gpus]
    chunks = placement.num_chunks
    return predictor.predict_batch(placement.pools, gpus, chunks, factors=factors).total_s
