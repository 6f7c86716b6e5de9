"""End times of the samples of a decoding stage, with continuous batching and unequal lengths.

A worker has ``c`` slots. A decoding step of ``b`` running samples takes ``fixed + b *
per_sample``; a finished sample leaves its slot to the next one. So the ends, counted in steps,
follow from the lengths alone. The time between the ``j``-th and the next end is their distance in
steps times ``fixed + min(c, n - j) * per_sample``: slots stay empty only if no sample waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipeline.planning.simulator.scenario import LengthDistribution, random_generator

Array = np.ndarray
CALIBRATION_DRAWS = 8


def relative_lengths(lengths: LengthDistribution, count: int, rng: np.random.Generator) -> Array:
    """Return lengths ``[count]``, float64, with an expected value of 1."""
    if lengths.empirical:
        measured = np.asarray(lengths.empirical, dtype=np.float64)
        return rng.choice(measured, count) / measured.mean()
    if not lengths.sigma:
        return np.ones(count)
    mu = _location(lengths.sigma, lengths.longest)
    return np.minimum(np.exp(mu + lengths.sigma * rng.standard_normal(count)), lengths.longest)


def _location(sigma: float, longest: float) -> float:
    """Return ``mu`` for which ``min(lognormal(mu, sigma), longest)`` has mean 1, by bisection.

    Its mean is ``exp(mu + sigma^2/2) P(z < a - sigma) + longest P(z > a)`` with ``a = (log(longest)
    - mu) / sigma``.
    """

    def normal_cdf(z: float) -> float:
        return 0.5 * math.erfc(-z / math.sqrt(2))

    low, high = -0.5 * sigma**2 - 1, math.log(longest)
    for _ in range(60):
        mu = (low + high) / 2
        a = (math.log(longest) - mu) / sigma
        mean = math.exp(mu + sigma**2 / 2) * normal_cdf(a - sigma) + longest * (1 - normal_cdf(a))
        low, high = (mu, high) if mean < 1 else (low, mu)
    return (low + high) / 2


def completion_times(lengths: Array, slots: int, fixed: float, per_sample: float) -> Array:
    """Return the times ``[workers, n]`` at which each worker has finished 1, 2, ... n samples.

    Args:
        lengths: steps of each sample ``[workers, n]`` in the order of their start; zeros (padding)
            take no time.
        slots: maximum number of samples that a worker runs at the same time.
        fixed: part of a step's time that is independent of the number of running samples.
        per_sample: further time of a step for each running sample.
    """
    workers, count = lengths.shape
    ends = lengths.astype(np.float64)
    if count > slots:
        rows = np.arange(workers)
        busy = ends[:, :slots].copy()
        for j in range(slots, count):
            slot = busy.argmin(1)
            busy[rows, slot] += ends[:, j]
            ends[:, j] = busy[rows, slot]
    ends.sort(axis=1)
    running = np.minimum(slots, count - np.arange(count))
    steps = np.diff(ends, axis=1, prepend=0.0)
    return np.cumsum(steps * (fixed + running * per_sample), axis=1)


@dataclass(frozen=True)
class DecodingWorkers:
    """The workers of one kind in a pool."""

    workers: int
    gpus: int
    """GPUs per worker."""
    slots: int
    fixed_share: float
    samples: int
    """Samples per iteration of all workers of the kind together."""


class DecodingStage:
    """Draws durations of a decoding stage; for the scale see ``LengthDistribution.profiled``."""

    def __init__(
        self, lengths: LengthDistribution, workers: list[DecodingWorkers], seconds: float, seed: int
    ) -> None:
        self._lengths, self._workers = lengths, workers
        self._samples = sum(entry.samples for entry in workers)
        self._scale = seconds
        if lengths.profiled:
            end_times = [
                self._draw_times(random_generator(seed, "calibration", i))[0][-1]
                for i in range(CALIBRATION_DRAWS)
            ]
            self._scale = seconds * seconds / float(np.mean(end_times))

    def iteration(self, rng: np.random.Generator, num_chunks: int) -> tuple[Array, Array]:
        """Draw the durations of one iteration.

        Returns:
            seconds ``[num_chunks]`` from one chunk of finished samples to the next, and seconds of
                work of each GPU ``[gpus]``, ordered by kind.
        """
        end_times, gpu_seconds = self._draw_times(rng)
        last_samples = np.arange(1, num_chunks + 1) * len(end_times) / num_chunks
        chunk_ends = end_times[np.ceil(last_samples).astype(np.int64) - 1]
        return np.diff(chunk_ends, prepend=0.0), gpu_seconds

    def _draw_times(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Return sorted end times of the samples ``[samples]`` and work of each GPU, in seconds."""
        lengths = relative_lengths(self._lengths, self._samples, rng)
        end_times, gpu_seconds, assigned = [], [], 0
        for entry in self._workers:
            if not entry.samples:
                gpu_seconds.append(np.zeros(entry.workers * entry.gpus))
                continue
            worker_lengths = lengths[assigned : assigned + entry.samples]
            assigned += entry.samples
            per_worker = -(-entry.samples // entry.workers)
            padded = np.zeros(entry.workers * per_worker)
            # Round-robin assignment; a worker with one sample less has a leading zero.
            padded[padded.size - entry.samples :] = worker_lengths
            padded_lengths = padded.reshape(per_worker, entry.workers).T
            # Times are divided by that of equal lengths.
            step_args = (entry.slots, entry.fixed_share, (1 - entry.fixed_share) / entry.slots)
            equal_lengths_s = completion_times(np.ones((1, per_worker)), *step_args)[0, -1]
            times = completion_times(padded_lengths, *step_args) / equal_lengths_s
            end_times.append(_without_padding(times, padded_lengths))
            gpu_seconds.append(np.repeat(times[:, -1], entry.gpus))
        sorted_times = np.sort(np.concatenate(end_times))
        return sorted_times * self._scale, np.concatenate(gpu_seconds) * self._scale


def _without_padding(times: Array, lengths: Array) -> Array:
    """Return the times of real samples; padding comes first on a worker."""
    padding = (lengths == 0).sum(1, keepdims=True)
    return times[np.arange(times.shape[1])[None] >= padding]
