"""The time at which a rollout has its first chunk ready, from the measured lengths of samples.

A process decodes as many samples at once as its engine has rows; the next sample uses the row of a
finished sample. A decoding step takes ``c0``, plus ``c1`` for each running sample. The assignment
of samples to chunks is fixed, so the first of ``m`` chunks is ready when the longest of the first
``1 / m`` of the samples has ended. If lengths have a tail, this is long after ``1 / m`` of the
time; if all lengths are equal, it is at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Array = np.ndarray
MIN_SAMPLED_LENGTHS = 16384
"""Minimum number of sampled lengths, over all sampled batches."""
BATCH_DRAWS = (2, 256)
"""Minimum and maximum number of sampled batches."""
MAX_LENGTH_STEPS = 512
"""Maximum steps of a sample; if a sample is longer, all lengths are scaled down."""


def first_chunk_shares(
    lengths: Sequence[int],
    samples: int,
    rows: int | None,
    processes: Sequence[int],
    chunk_counts: Sequence[int],
    fixed: float,
    seed: int = 0,
) -> dict[int, dict[int, float]]:
    """Return the share of the rollout's time after which the first chunk is ready, by number of
    chunks, then by number of processes.

    Args:
        lengths: measured steps of samples.
        samples: samples of a batch.
        rows: samples that a process decodes concurrently; None: all.
        processes: numbers of processes.
        chunk_counts: numbers of chunks.
        fixed: share of a process's time that does not depend on the number of samples.
        seed: seed of the sampled batches; the same seed gives the same result.
    """
    scaled = np.asarray(lengths, np.float64)
    scaled = scaled / max(1.0, scaled.max() / MAX_LENGTH_STEPS)
    measured = np.maximum(1, np.rint(scaled)).astype(np.int64)
    rng = np.random.default_rng(seed)
    draws = min(max(MIN_SAMPLED_LENGTHS // samples, BATCH_DRAWS[0]), BATCH_DRAWS[1])
    sizes = (samples // 2, samples)
    half, whole = (_decode_steps(rng.choice(measured, (draws, n)), rows) for n in sizes)
    steps, tokens = whole[1].max(1).mean(), samples * float(measured.mean())
    # The number of steps in the tail does not depend on the size of the batch.
    tail = 2 * half[1].max(1).mean() - steps if samples > 1 else steps
    c0 = min(fixed / max(tail, 1e-9), 1 / steps)
    c1 = (1 - c0 * steps) / tokens
    shares: dict[int, dict[int, float]] = {m: {} for m in chunk_counts}
    for count in processes:
        per_process = math.ceil(samples / count)
        begins, ends = _decode_steps(rng.choice(measured, (draws * count, per_process)), rows)
        elapsed = _elapsed_times(begins, ends, c0, c1)
        last = np.take_along_axis(elapsed, ends.max(1, keepdims=True), 1).reshape(draws, count)
        for m in chunk_counts:
            first = ends[:, : math.ceil(per_process / m)].max(1, keepdims=True)
            ready = np.take_along_axis(elapsed, first, 1).reshape(draws, count)
            share = float((ready.max(1) / last.max(1)).mean())
            shares[m][count] = min(1.0, max(1 / m, share))
    return shares


def _decode_steps(lengths: Array, rows: int | None) -> tuple[Array, Array]:
    """Return the steps at which samples begin and end, ``[processes, n]`` each, in the order of
    ``lengths``."""
    processes, count = lengths.shape
    begins, ends = np.zeros_like(lengths), lengths.copy()
    if rows is None or count <= rows:
        return begins, ends
    indices, row_ends = np.arange(processes), ends[:, :rows].copy()
    for sample in range(rows, count):
        row = row_ends.argmin(1)
        begins[:, sample] = row_ends[indices, row]
        ends[:, sample] += begins[:, sample]
        row_ends[indices, row] = ends[:, sample]
    return begins, ends


def _elapsed_times(begins: Array, ends: Array, c0: float, c1: float) -> Array:
    """Return the time until the end of each step, ``[processes, steps + 1]``, relative to the whole
    rollout on one process."""
    processes, steps = len(ends), int(ends.max())
    change = np.zeros((processes, steps + 1))
    indices = np.repeat(np.arange(processes), ends.shape[1])
    np.add.at(change, (indices, begins.ravel()), 1)
    np.add.at(change, (indices, ends.ravel()), -1)
    running = change.cumsum(1)[:, :-1]
    cost = np.where(running > 0, c0 + c1 * running, 0.0)
    return np.concatenate([np.zeros((processes, 1)), cost.cumsum(1)], axis=1)
