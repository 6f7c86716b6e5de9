"""When the first part of a rollout is ready: of samples that are decoded side by side.

A process decodes so many samples at once as its engine has rows; one that ends leaves its row to
the next. A step costs ``c0``, and each sample in it ``c1``. Parts of a batch are always the same
samples, so the first of ``m`` is ready when the longest of the first ``1 / m`` has ended: long
after ``1 / m`` of the time where lengths have a tail, and only at the end where all are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Array = np.ndarray
DRAWN = 16384
"""Samples that are drawn at least."""
DRAWS = (2, 256)
"""Batches that are drawn, at least and at most."""
STEPS = 512
"""The longest sample counts so many at most: others are rounded to what one of them is then."""


def leads(
    lengths: Sequence[int],
    samples: int,
    rows: int | None,
    processes: Sequence[int],
    parts: Sequence[int],
    fixed: float,
    seed: int = 0,
) -> dict[int, dict[int, float]]:
    """By number of parts, then of processes: after what share of the rollout the first is ready.

    Args:
        lengths: steps of samples, as they were seen.
        samples: of a batch.
        rows: that a process decodes at once; None: all.
        fixed: share of the time of one process that half of the batch would take as well.
        seed: of the drawn batches; the same seed gives the same answer.
    """
    known = np.asarray(lengths, np.float64)
    known = np.maximum(1, np.rint(known / max(1.0, known.max() / STEPS))).astype(np.int64)
    rng = np.random.default_rng(seed)
    draws = min(max(DRAWN // samples, DRAWS[0]), DRAWS[1])
    half, whole = (_decoded(rng.choice(known, (draws, n)), rows) for n in (samples // 2, samples))
    steps, tokens = whole[1].max(1).mean(), samples * float(known.mean())
    # Of the steps those of the tail are there however small the batch is.
    tail = 2 * half[1].max(1).mean() - steps if samples > 1 else steps
    c0 = min(fixed / max(tail, 1e-9), 1 / steps)
    c1 = (1 - c0 * steps) / tokens
    found: dict[int, dict[int, float]] = {m: {} for m in parts}
    for count in processes:
        each = math.ceil(samples / count)
        begins, ends = _decoded(rng.choice(known, (draws * count, each)), rows)
        spent = _spent(begins, ends, c0, c1)
        last = np.take_along_axis(spent, ends.max(1, keepdims=True), 1).reshape(draws, count)
        for m in parts:
            first = ends[:, : math.ceil(each / m)].max(1, keepdims=True)
            ready = np.take_along_axis(spent, first, 1).reshape(draws, count)
            share = float((ready.max(1) / last.max(1)).mean())
            found[m][count] = min(1.0, max(1 / m, share))
    return found


def _decoded(lengths: Array, rows: int | None) -> tuple[Array, Array]:
    """Steps at which samples ``[processes, n]`` begin and end, in the order that they are asked."""
    processes, count = lengths.shape
    begins, ends = np.zeros_like(lengths), lengths.copy()
    if rows is None or count <= rows:
        return begins, ends
    every, busy = np.arange(processes), ends[:, :rows].copy()
    for sample in range(rows, count):
        row = busy.argmin(1)
        begins[:, sample] = busy[every, row]
        ends[:, sample] += begins[:, sample]
        busy[every, row] = ends[:, sample]
    return begins, ends


def _spent(begins: Array, ends: Array, c0: float, c1: float) -> Array:
    """Time ``[processes, steps + 1]`` until each step has ended."""
    processes, steps = len(ends), int(ends.max())
    change = np.zeros((processes, steps + 1))
    every = np.repeat(np.arange(processes), ends.shape[1])
    np.add.at(change, (every, begins.ravel()), 1)
    np.add.at(change, (every, ends.ravel()), -1)
    alive = change.cumsum(1)[:, :-1]
    cost = np.where(alive > 0, c0 + c1 * alive, 0.0)
    return np.concatenate([np.zeros((processes, 1)), cost.cumsum(1)], axis=1)
