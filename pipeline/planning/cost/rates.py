"""Rate tables: the speed of a stage on 0 to n GPUs of a kind.

Rates come from measured points if there are any, else from data sheets. Every rate has a source.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pipeline.planning.cost.data_sheet import (
    CandidateLayout,
    GenerationWorkload,
    GpuDevice,
    TrainingWorkload,
    Workload,
    stage_memory,
    stage_seconds,
)
from pipeline.planning.cost.model_shape import RECOMPUTE, ModelShape

Array = np.ndarray
Source = Literal["measured", "fitted", "extrapolated", "data sheet", "cannot"]
SOURCES: tuple[Source, ...] = ("measured", "fitted", "extrapolated", "data sheet", "cannot")
"""Sources of a rate; ``cannot``: the stage cannot run, so the rate is 0."""
DATA_SHEET_SPREAD = 0.25
"""Relative standard deviation of a time from data sheets. The interval that follows from this
contains 90 % of the published runs (docs/howto/plan.md)."""


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
    tp: Array
    """Tensor-parallel degree by which the rate is reached, int64; 0: unknown."""

    def source(self, gpus: int) -> Source:
        """Return the source of the rate on ``gpus`` GPUs."""
        return SOURCES[int(self.source_codes[gpus])]


RateTables = Mapping[str, Mapping[str, RateTable]]
"""Rate tables by stage and kind."""


MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Micro-batches to try, in samples."""
MAX_EXHAUSTIVE_REPLICAS = 64
"""Up to this limit every number of replicas is tried. Above this limit, a number is tried only if
it reduces the work of the slowest replica, because further sharding of states saves very little."""


def data_sheet_rates(shape: ModelShape, work: Workload, device: GpuDevice, gpus: int) -> RateTable:
    """Return rates from data sheets: the fastest layout that fits, for each number of GPUs; 0 if
    none fits. ``tp`` divides the heads and a node's GPUs; other parallelism is not considered."""
    best_s, table = np.full(gpus + 1, np.inf), empty_table(gpus, "data sheet")
    replicas = np.arange(1, work.samples + 1)
    share = -(-work.samples // replicas)
    reduces_work = share < np.append(work.samples + 1, share[:-1])
    replicas = replicas[(replicas <= MAX_EXHAUSTIVE_REPLICAS) | reduces_work]
    sizes = (1,) if isinstance(work, GenerationWorkload) else MICRO_BATCHES
    recomputes = RECOMPUTE if isinstance(work, TrainingWorkload) else RECOMPUTE[:1]
    for tp in range(1, device.gpus_per_node + 1):
        kv_heads_fit = not shape.kv_heads % tp or not tp % shape.kv_heads
        if shape.heads % tp or device.gpus_per_node % tp or not kv_heads_fit:
            continue
        dp = replicas[replicas <= gpus // tp]
        for size, recompute in itertools.product(sizes, recomputes):
            layout = CandidateLayout(tp, dp, size, recompute)
            memory_bytes = stage_memory(shape, layout, work).total
            seconds = np.broadcast_to(stage_seconds(shape, layout, work, device).total, dp.shape)
            # A micro-batch larger than a replica's samples is equivalent to a smaller one.
            fits = (memory_bytes <= device.usable_bytes) & (
                (size == 1) | (work.samples >= size * dp)
            )
            is_faster = fits & (seconds < best_s[tp * dp])
            best_s[tp * dp[is_faster]] = seconds[is_faster]
            table.tp[tp * dp[is_faster]] = tp
    with np.errstate(divide="ignore"):
        rates = 1.0 / best_s
    spread = np.full(gpus + 1, DATA_SHEET_SPREAD)
    return clear_unrunnable(replace(table, rates=rates, spread=spread))


def empty_table(gpus: int, source: Source) -> RateTable:
    """Return a table without rates."""
    count = gpus + 1
    return RateTable(
        rates=np.zeros(count),
        spread=np.zeros(count),
        used=np.arange(count),
        source_codes=np.full(count, SOURCES.index(source)),
        tp=np.zeros(count, np.int64),
    )


def clear_unrunnable(table: RateTable, max_gpus: int | None = None) -> RateTable:
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
        tp=np.where(runs, table.tp[rows], 0),
    )
