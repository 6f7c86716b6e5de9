"""The forecast of a placement with uncertain speeds: distribution and sensitivity of its time.

:mod:`pipeline.planning.planner.predictor` computes the times from randomly sampled speeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import norm

from pipeline.planning.cost.rates import RateTable, RateTables
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import (
    Placement,
    PlacementProblem,
    PlacementStage,
    interruption_overhead,
    pools_of_stages,
)
from rlinf.errors import PlanError

Array = np.ndarray

UsedSpeed = tuple[int, int, int]
"""Key of a speed that a placement uses: index of the stage, index of the kind, number of GPUs."""
DRAWS = 1024
"""Number of samples of the speeds."""
IMPROVEMENT = 0.1
"""Relative improvement of a quantity in the sensitivity analysis."""


@dataclass(frozen=True)
class Sensitivity:
    """The time that is saved if one quantity improves by :data:`IMPROVEMENT`."""

    quantity: str
    """Name of the quantity: ``train on h100: seconds``."""
    saved_s: float
    """Seconds by which the iteration would be shorter."""


@dataclass(frozen=True)
class PlacementForecast:
    """The forecast of a placement."""

    nominal_s: float
    """Seconds of an iteration with the problem's speeds."""
    mean_s: float
    """Mean of an iteration's seconds with sampled speeds; the next fields are quantiles."""
    q10_s: float
    q50_s: float
    q90_s: float
    idle_shares: tuple[float, ...]
    """For each job: share of the time of its GPUs in which they do no work."""
    memory_bytes: tuple[Mapping[str, float], ...]
    """Maximum memory of a GPU by pool and kind; NaN if a stage's memory is unknown."""
    gpu_hours: float
    """GPU-hours of one iteration, including idle time."""
    interruption_s: float
    """Expected seconds that preemption and failures cost per iteration; not included in the other
    times."""
    sensitivities: tuple[Sensitivity, ...]
    """Sensitivities to all quantities, largest saving first."""
    unmeasured: tuple[str, ...]
    """Speeds that are extrapolated or from data sheets: ``train on h100: extrapolated``."""


def forecast_placement(
    problem: PlacementProblem,
    placement: Placement,
    tables: RateTables,
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
        tables: spreads, sources and memory of every stage and kind that the placement uses.
        draws: number of samples.
        seed: seed of the samples; the same seed gives the same result.

    Raises:
        PlanError: the placement does not fit the problem, cannot run, or a table is missing.
    """
    _check(problem, placement)
    predictor = Predictor(problem)
    nominal = predictor.predict(placement)
    if not np.isfinite(nominal.total_s):
        raise PlanError("this placement cannot run: a stage has no GPUs that it can use")
    total_s = float(nominal.total_s)
    speed_keys = list(_used_speeds(problem, placement, predictor))
    spread = np.zeros((len(problem.stages), len(problem.kinds)))
    for s, k, gpus in speed_keys:
        spread[s, k] = _rate_table(problem, tables, s, k).spread[gpus]
    sampler = _SamplingPredictor(problem, spread, draws, np.random.default_rng(seed))
    samples = sampler.total_s(placement)
    q10, q50, q90 = (float(q) for q in np.quantile(samples, (0.1, 0.5, 0.9)))
    job_gpus = [np.array(placement.gpus)[list(job)].sum(0) for job in placement.jobs]
    overhead = interruption_overhead(
        problem, np.array([total_s]), [gpus[:, None] for gpus in job_gpus]
    )
    busy = np.zeros(len(job_gpus))
    for s, k, gpus in speed_keys:
        job = next(j for j, pools in enumerate(placement.jobs) if s in placement.stages_of(pools))
        num_working = float(_rate_table(problem, tables, s, k).used[gpus])
        busy[job] += float(nominal.busy_s[s]) * num_working / job_gpus[job].sum()
    return PlacementForecast(
        nominal_s=total_s,
        mean_s=float(samples.mean()),
        q10_s=q10,
        q50_s=q50,
        q90_s=q90,
        idle_shares=tuple(float(share) for share in 1 - busy / total_s),
        memory_bytes=tuple(
            _memory(problem, placement, tables, speed_keys, p) for p in range(len(placement.pools))
        ),
        gpu_hours=sum(sum(pool) for pool in placement.gpus) * total_s / 3600,
        interruption_s=float(overhead[0]) * total_s,
        sensitivities=_sensitivities(problem, placement, speed_keys, total_s),
        unmeasured=tuple(
            f"{_speed_name(problem, s, k)}: {source}"
            for s, k, gpus in speed_keys
            if (source := tables[problem.stages[s].name][problem.kinds[k].name].source(gpus))
            in ("extrapolated", "data sheet")
        ),
    )


class _SamplingPredictor(Predictor):
    """A predictor whose batch has ``draws`` elements, each with other random speeds."""

    def __init__(
        self, problem: PlacementProblem, spread: Array, draws: int, rng: np.random.Generator
    ) -> None:
        super().__init__(problem)
        self._draws = draws
        strata = rng.permuted(np.tile(np.arange(draws), (*spread.shape, 1)), axis=-1)
        normal = norm.ppf((strata + rng.random(strata.shape)) / draws)
        sigma = np.sqrt(np.log1p(spread**2))[..., None]
        self._factors = np.exp(sigma * normal - sigma**2 / 2)
        """Factors of the times, ``[stages, kinds, draws]``, with mean 1."""

    def rates(self, stage: int, gpus: Array, assigned_gpus: Array) -> Array:
        return super().rates(stage, gpus, assigned_gpus) / self._factors[stage]

    def total_s(self, placement: Placement) -> Array:
        """Return the seconds of an iteration ``[draws]``."""
        gpus = [np.tile(np.array(pool)[:, None], self._draws) for pool in placement.gpus]
        return self.predict_batch(placement.pools, gpus, placement.num_chunks).total_s


def _check(problem: PlacementProblem, placement: Placement) -> None:
    stages = list(pools_of_stages(placement.pools))
    if stages != list(range(len(problem.stages))) or len(placement.gpus) != len(placement.pools):
        raise PlanError("the placement must have every stage of the problem in one of its pools")
    for k, kind in enumerate(problem.kinds):
        num_gpus = sum(pool[k] for pool in placement.gpus)
        if num_gpus > kind.gpus:
            raise PlanError(
                f"the placement holds {num_gpus} GPUs of {kind.name!r}; there are {kind.gpus}"
            )


def _used_speeds(
    problem: PlacementProblem, placement: Placement, predictor: Predictor
) -> Iterator[UsedSpeed]:
    for s in range(len(problem.stages)):
        for k, number in enumerate(placement.gpus_of(s)):
            if predictor.tables[s][k][number] > 0:
                yield s, k, number


def _rate_table(problem: PlacementProblem, tables: RateTables, stage: int, kind: int) -> RateTable:
    table = tables.get(problem.stages[stage].name, {}).get(problem.kinds[kind].name)
    if table is None:
        raise PlanError(
            f"{_speed_name(problem, stage, kind)}: the spread of its speed is unknown; "
            "pass its rate table"
        )
    return table


def _speed_name(problem: PlacementProblem, stage: int, kind: int) -> str:
    return f"{problem.stages[stage].name} on {problem.kinds[kind].name}"


def _memory(
    problem: PlacementProblem,
    placement: Placement,
    tables: RateTables,
    speeds: list[UsedSpeed],
    pool: int,
) -> dict[str, float]:
    """Return the memory of a GPU in bytes, by kind: the sum over resident stages, plus the largest
    of the stages that are offloaded while others run (with ``switch_s`` above 0)."""
    resident: dict[str, float] = {}
    offloaded: dict[str, float] = {}
    for s, k, gpus in speeds:
        if s not in placement.pools[pool]:
            continue
        stage, kind = problem.stages[s], problem.kinds[k].name
        memory = float(_rate_table(problem, tables, s, k).memory_bytes[gpus])
        if stage.switch_s.get(kind, 0.0) > 0:
            offloaded[kind] = float(np.maximum(offloaded.get(kind, 0.0), memory))
        else:
            resident[kind] = resident.get(kind, 0.0) + memory
    return {
        kind: resident.get(kind, 0.0) + offloaded.get(kind, 0.0)
        for kind in sorted(resident.keys() | offloaded.keys())
    }


def _sensitivities(
    problem: PlacementProblem,
    placement: Placement,
    speeds: list[UsedSpeed],
    total_s: float,
) -> tuple[Sensitivity, ...]:
    sensitivities = []
    for name, improved in _improved_problems(problem, speeds):
        improved_s = float(Predictor(improved).predict(placement).total_s)
        sensitivities.append(Sensitivity(name, total_s - improved_s))
    return tuple(sorted(sensitivities, key=lambda entry: (-entry.saved_s, entry.quantity)))


def _improved_problems(
    problem: PlacementProblem, speeds: list[UsedSpeed]
) -> Iterator[tuple[str, PlacementProblem]]:
    """Yield the name of each quantity that determines the placement's time, and a copy of the
    problem in which this quantity is better by :data:`IMPROVEMENT`."""
    factor = 1 - IMPROVEMENT

    def with_stage(s: int, stage: PlacementStage) -> PlacementProblem:
        return replace(problem, stages=[*problem.stages[:s], stage, *problem.stages[s + 1 :]])

    for s, k, _ in speeds:
        stage, kind = problem.stages[s], problem.kinds[k].name
        rates = {**stage.rates, kind: stage.rates[kind] / factor}
        yield f"{_speed_name(problem, s, k)}: seconds", with_stage(s, replace(stage, rates=rates))
        if stage.switch_s.get(kind, 0.0) > 0:
            switch = {**stage.switch_s, kind: factor * stage.switch_s[kind]}
            yield (
                f"{_speed_name(problem, s, k)}: switching",
                with_stage(s, replace(stage, switch_s=switch)),
            )
    for s, stage in enumerate(problem.stages):
        if stage.chunk_s > 0:
            yield (
                f"{stage.name}: overhead of a chunk",
                with_stage(s, replace(stage, chunk_s=factor * stage.chunk_s)),
            )
    for pair, sync_s in problem.sync_s.items():
        if sync_s > 0:
            yield (
                f"weights from {pair[0]} to {pair[1]}",
                replace(problem, sync_s={**problem.sync_s, pair: factor * sync_s}),
            )
