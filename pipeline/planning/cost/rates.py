"""Rate tables: the speed of a stage on 0 to n GPUs of a kind, with a layout for each number.

Rates come from measured points if there are some, else from data sheets. Every number names its
source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pipeline.planning.cost.hardware import GpuDevice
from pipeline.planning.cost.layout import CandidateLayout, candidate_layouts
from pipeline.planning.cost.memory import stage_memory
from pipeline.planning.cost.model_shape import ModelShape
from pipeline.planning.cost.regression import MIN_POINTS, TimingPoint, fit_times
from pipeline.planning.cost.times import BOUNDS, stage_seconds
from pipeline.planning.cost.workload import Workload
from rlinf.errors import PlanError

Array = np.ndarray
Source = Literal["measured", "fitted", "extrapolated", "data sheet", "cannot"]
SOURCES: tuple[Source, ...] = ("measured", "fitted", "extrapolated", "data sheet", "cannot")
DATA_SHEET_SPREAD = 0.25
"""Relative standard deviation of a time from data sheets. Nine in ten published runs lie within the
resulting interval (docs/cost-model.md)."""


@dataclass(frozen=True)
class RateTable:
    """Iterations per second of one stage on one kind of GPU. Arrays are ``[gpus + 1]``."""

    rates: Array
    """0 if that many GPUs cannot run it; a stage works on all GPUs of its pool."""
    spread: Array
    """Relative standard deviation of each time."""
    used: Array
    """Number of GPUs with work if that many exist, int64."""
    source_codes: Array
    """Index of each number's source in :data:`SOURCES`, int64."""
    bound_codes: Array
    """Index in :data:`pipeline.planning.cost.times.BOUNDS` of the largest part of the time, int64;
    -1: unknown."""
    memory_bytes: Array
    """Memory of each GPU; NaN: unknown. Generation fills the rest with the KV cache."""
    choices: Array
    """Layout of each number: its batch in ``layouts`` and its place there, int64 ``[gpus + 1, 2]``;
    -1: unknown."""
    layouts: tuple[CandidateLayout, ...] = ()
    """Batches of layouts; few objects, because there may be thousands of numbers."""
    warnings: tuple[str, ...] = ()

    def source(self, gpus: int) -> Source:
        """Return the source of the rate on ``gpus`` GPUs."""
        return SOURCES[int(self.source_codes[gpus])]

    def bound(self, gpus: int) -> str:
        """Return the largest part of the time on ``gpus`` GPUs: one of
        :data:`pipeline.planning.cost.times.BOUNDS`, or ``unknown``."""
        code = int(self.bound_codes[gpus])
        return BOUNDS[code] if code >= 0 else "unknown"

    def layout(self, gpus: int) -> CandidateLayout | None:
        """Return the layout of the stage on ``gpus`` GPUs."""
        batch, place = self.choices[gpus]
        return self.layouts[batch].select(place) if batch >= 0 else None


def data_sheet_rates(shape: ModelShape, work: Workload, device: GpuDevice, gpus: int) -> RateTable:
    """Return rates from data sheets: the fastest layout that fits, for each number of GPUs.

    A stage that fits nowhere has rate 0 throughout.

    Raises:
        PlanError: the number of GPUs is negative.
    """
    if gpus < 0:
        raise PlanError(f"{device.name}: {gpus} GPUs")
    best = np.full(gpus + 1, np.inf)
    table = _empty(gpus, "data sheet")
    found: list[CandidateLayout] = []
    for some in candidate_layouts(shape, work, gpus, device.gpus_per_node):
        needs = stage_memory(shape, some, work).total
        fits = needs <= device.usable_bytes
        if not fits.any():
            continue
        able, needs = some.select(fits), needs[fits]
        times = stage_seconds(shape, able, work, device)
        total = times.total
        order = np.lexsort((total, able.gpus))
        counts, first = np.unique(able.gpus[order], return_index=True)
        winners = order[first]
        better = total[winners] < best[counts]
        counts, winners = counts[better], winners[better]
        best[counts] = total[winners]
        parts = np.stack([np.broadcast_to(p, total.shape)[winners] for p in vars(times).values()])
        table.bound_codes[counts] = parts.argmax(0)
        table.memory_bytes[counts] = needs[winners]
        table.choices[counts] = np.stack([np.full(len(winners), len(found)), winners], axis=1)
        found.append(able)
    with np.errstate(divide="ignore"):
        rates = 1.0 / best
    spread = np.full(gpus + 1, DATA_SHEET_SPREAD)
    return _only_able(replace(table, rates=rates, spread=spread, layouts=tuple(found)))


def measured_rates(
    points: Sequence[TimingPoint],
    size: float,
    gpus: int,
    *,
    runnable: Array | None = None,
    most: int | None = None,
    memory_bytes: float = math.nan,
    fits: bool = True,
) -> RateTable:
    """Return rates from measured points by a fit; extrapolated ones are flagged and have a wider
    spread.

    If the points are too few for a fit, only those measured at ``size`` are used, unchanged. One
    process of a point is one GPU.

    Args:
        size: work of one iteration, in the unit of the points.
        runnable: bool ``[gpus + 1]``, False if memory is known not to suffice.
        most: GPUs that there is work for; more are idle.
        memory_bytes: maximum measured memory of a GPU; NaN: unknown.
        fits: False: use points unchanged, however many there are.

    Raises:
        PlanError: a point is invalid (:func:`pipeline.planning.cost.regression.fit_times`).
    """
    counts = np.arange(gpus + 1)
    able = (counts > 0) & (True if runnable is None else np.asarray(runnable, dtype=bool))
    table = replace(_empty(gpus, "measured"), memory_bytes=np.full(gpus + 1, memory_bytes))
    if not fits or len({(point.processes, point.size) for point in points}) < MIN_POINTS:
        for point in points:
            if point.size == size and point.processes <= gpus and able[point.processes]:
                table.rates[point.processes] = 1 / point.seconds
                table.spread[point.processes] = point.spread_s / point.seconds
        return _only_able(table, most)
    answer = fit_times(points).predict(np.maximum(counts, 1), size)
    codes = np.where(answer.extrapolated, SOURCES.index("extrapolated"), SOURCES.index("fitted"))
    codes = np.where(answer.measured, SOURCES.index("measured"), codes)
    table = replace(
        table,
        rates=np.where(able, 1.0 / answer.seconds, 0.0),
        spread=answer.spread_s / answer.seconds,
        source_codes=codes,
        warnings=answer.warnings if np.any(answer.extrapolated & able) else (),
    )
    return _only_able(table, most)


def _empty(gpus: int, source: Source) -> RateTable:
    """Return a table in which only the source is known."""
    count = gpus + 1
    return RateTable(
        rates=np.zeros(count),
        spread=np.zeros(count),
        used=np.arange(count),
        source_codes=np.full(count, SOURCES.index(source)),
        bound_codes=np.full(count, -1),
        memory_bytes=np.full(count, np.nan),
        choices=np.full((count, 2), -1),
    )


def _only_able(table: RateTable, most: int | None = None) -> RateTable:
    """Clear the numbers that cannot run the stage; more than ``most`` GPUs are idle."""
    first = np.minimum(np.arange(len(table.rates)), len(table.rates) if most is None else most)
    rates = table.rates[first]
    able = rates > 0
    return replace(
        table,
        rates=rates,
        spread=np.where(able, table.spread[first], 0.0),
        used=np.where(able, table.used[first], 0),
        source_codes=np.where(able, table.source_codes[first], SOURCES.index("cannot")),
        bound_codes=np.where(able, table.bound_codes[first], -1),
        memory_bytes=np.where(able, table.memory_bytes[first], np.nan),
        choices=np.where(able[:, None], table.choices[first], -1),
    )
