"""Rate tables: the speed of a stage on 0 to n GPUs of a kind, with a layout for each number.

Rates come from measured points if there are any, else from data sheets. Every rate has a source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
"""Sources of a rate; ``cannot``: the stage cannot run, so the rate is 0."""
DATA_SHEET_SPREAD = 0.25
"""Relative standard deviation of a time from data sheets. The interval that follows from this
contains 90 % of the published runs (docs/explanation/cost-model.md)."""


@dataclass(frozen=True)
class RateTable:
    """Iterations per second of one stage on one kind of GPU. Arrays are ``[gpus + 1]``."""

    rates: Array
    """0 if the stage cannot run on this many GPUs."""
    spread: Array
    """Relative standard deviation of the time of an iteration."""
    used: Array
    """Number of the GPUs that have work, int64."""
    source_codes: Array
    """Index of each rate's source in :data:`SOURCES`, int64."""
    bound_codes: Array
    """Index in :data:`pipeline.planning.cost.times.BOUNDS` of the largest part of the time, int64;
    -1: unknown."""
    memory_bytes: Array
    """Memory that a stage needs on a GPU; NaN: unknown. In generation, KV cache fills the rest."""
    layout_indices: Array
    """Layout for each number of GPUs, int64 ``[gpus + 1, 2]``: index of a batch in ``layouts``, and
    index of the layout in this batch; -1: unknown."""
    layouts: tuple[CandidateLayout, ...] = ()
    """Batches of layouts with arrays, because thousands of single layouts would be slow."""
    warnings: tuple[str, ...] = ()
    """Warnings for the user: extrapolated rates."""

    def source(self, gpus: int) -> Source:
        """Return the source of the rate on ``gpus`` GPUs."""
        return SOURCES[int(self.source_codes[gpus])]

    def bound(self, gpus: int) -> str:
        """Return the name of the largest part of the time on ``gpus`` GPUs: one of
        :data:`pipeline.planning.cost.times.BOUNDS`, or ``unknown``."""
        code = int(self.bound_codes[gpus])
        return BOUNDS[code] if code >= 0 else "unknown"

    def layout(self, gpus: int) -> CandidateLayout | None:
        """Return the layout of the stage on ``gpus`` GPUs; None: unknown."""
        batch, index = self.layout_indices[gpus]
        return self.layouts[batch].select(index) if batch >= 0 else None


RateTables = Mapping[str, Mapping[str, RateTable]]
"""Rate tables by stage and kind."""


def data_sheet_rates(shape: ModelShape, work: Workload, device: GpuDevice, gpus: int) -> RateTable:
    """Return rates from data sheets: the fastest layout that fits, for each number of GPUs; 0 if
    none fits.

    Raises:
        PlanError: the number of GPUs is negative.
    """
    if gpus < 0:
        raise PlanError(f"{device.name}: {gpus} GPUs")
    best_s = np.full(gpus + 1, np.inf)
    table = _empty_table(gpus, "data sheet")
    batches: list[CandidateLayout] = []
    for layouts in candidate_layouts(shape, work, gpus, device.gpus_per_node):
        memory_bytes = stage_memory(shape, layouts, work).total
        fits = memory_bytes <= device.usable_bytes
        if not fits.any():
            continue
        fitting, memory_bytes = layouts.select(fits), memory_bytes[fits]
        times = stage_seconds(shape, fitting, work, device)
        total_s = times.total
        order = np.lexsort((total_s, fitting.gpus))
        counts, first_index = np.unique(fitting.gpus[order], return_index=True)
        fastest = order[first_index]
        is_faster = total_s[fastest] < best_s[counts]
        counts, fastest = counts[is_faster], fastest[is_faster]
        best_s[counts] = total_s[fastest]
        parts = np.stack([np.broadcast_to(p, total_s.shape)[fastest] for p in vars(times).values()])
        table.bound_codes[counts] = parts.argmax(0)
        table.memory_bytes[counts] = memory_bytes[fastest]
        table.layout_indices[counts] = np.stack(
            [np.full(len(fastest), len(batches)), fastest], axis=1
        )
        batches.append(fitting)
    with np.errstate(divide="ignore"):
        rates = 1.0 / best_s
    spread = np.full(gpus + 1, DATA_SHEET_SPREAD)
    return _clear_unrunnable(replace(table, rates=rates, spread=spread, layouts=tuple(batches)))


def measured_rates(
    points: Sequence[TimingPoint],
    size: float,
    gpus: int,
    *,
    runnable: Array | None = None,
    max_gpus: int | None = None,
    memory_bytes: float = math.nan,
    interpolate: bool = True,
) -> RateTable:
    """Return rates from a fit to measured points; extrapolated rates are flagged and have a wider
    spread.

    If there are too few points for a fit, only the points with this ``size`` are used, unchanged.
    Each process of a point counts as a GPU.

    Args:
        size: work of one iteration, in the unit of the points.
        runnable: bool ``[gpus + 1]``, False if the stage is known not to run; None: unknown.
        max_gpus: maximum number of GPUs that have work; further GPUs are idle. None: no limit.
        memory_bytes: maximum measured memory of a GPU; NaN: unknown.
        interpolate: False: never fit; use only the points with this ``size``.

    Raises:
        PlanError: a point is invalid (:func:`pipeline.planning.cost.regression.fit_times`).
    """
    counts = np.arange(gpus + 1)
    is_runnable = (counts > 0) & (True if runnable is None else np.asarray(runnable, dtype=bool))
    table = replace(_empty_table(gpus, "measured"), memory_bytes=np.full(gpus + 1, memory_bytes))
    if not interpolate or len({(point.processes, point.size) for point in points}) < MIN_POINTS:
        for point in points:
            if point.size == size and point.processes <= gpus and is_runnable[point.processes]:
                table.rates[point.processes] = 1 / point.seconds
                table.spread[point.processes] = point.spread_s / point.seconds
        return _clear_unrunnable(table, max_gpus)
    prediction = fit_times(points).predict(np.maximum(counts, 1), size)
    codes = np.full(gpus + 1, SOURCES.index("fitted"))
    codes[prediction.extrapolated] = SOURCES.index("extrapolated")
    codes[prediction.measured] = SOURCES.index("measured")
    table = replace(
        table,
        rates=np.where(is_runnable, 1.0 / prediction.seconds, 0.0),
        spread=prediction.spread_s / prediction.seconds,
        source_codes=codes,
        warnings=prediction.warnings if np.any(prediction.extrapolated & is_runnable) else (),
    )
    return _clear_unrunnable(table, max_gpus)


def _empty_table(gpus: int, source: Source) -> RateTable:
    count = gpus + 1
    return RateTable(
        rates=np.zeros(count),
        spread=np.zeros(count),
        used=np.arange(count),
        source_codes=np.full(count, SOURCES.index(source)),
        bound_codes=np.full(count, -1),
        memory_bytes=np.full(count, np.nan),
        layout_indices=np.full((count, 2), -1),
    )


def _clear_unrunnable(table: RateTable, max_gpus: int | None = None) -> RateTable:
    """Clear entries with rate 0. Entries beyond ``max_gpus`` repeat the entry of ``max_gpus``."""
    count = len(table.rates)
    rows = np.minimum(np.arange(count), count if max_gpus is None else max_gpus)
    rates = table.rates[rows]
    runs = rates > 0
    return replace(
        table,
        rates=rates,
        spread=np.where(runs, table.spread[rows], 0.0),
        used=np.where(runs, table.used[rows], 0),
        source_codes=np.where(runs, table.source_codes[rows], SOURCES.index("cannot")),
        bound_codes=np.where(runs, table.bound_codes[rows], -1),
        memory_bytes=np.where(runs, table.memory_bytes[rows], np.nan),
        layout_indices=np.where(runs[:, None], table.layout_indices[rows], -1),
    )
