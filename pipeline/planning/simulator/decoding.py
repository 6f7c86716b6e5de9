"""End times of the samples of a decoding stage, with continuous batching and unequal lengths.

A worker has ``c`` slots. A decoding step of ``b`` running samples takes ``fixed + b * each``; a
finished sample leaves its slot to the next one. So the ends, counted in steps, follow from the
lengths alone. The time between the ``j``-th and the next end is their distance in steps times
``fixed + min(c, n - j) * each``, because slots only stay empty when no sample waits.
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
        known = np.asarray(lengths.empirical, dtype=np.float64)
        return rng.choice(known, count) / known.mean()
    if not lengths.sigma:
        return np.ones(count)
    mu = _location(lengths.sigma, lengths.longest)
    return np.minimum(np.exp(mu + lengths.sigma * rng.standard_normal(count)), lengths.longest)


def _location(sigma: float, longest: float) -> float:
    """Return ``mu`` for which ``min(lognormal(mu, sigma), longest)`` has mean 1, by bisection.

    Its mean is ``exp(mu + sigma^2/2) P(z < a - sigma) + longest P(z > a)`` with ``a = (log(longest)
    - mu) / sigma``.
    """

    def below(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    low, high = -0.5 * sigma**2 - 1, math.log(longest)
    for _ in range(60):
        mu = (low + high) / 2
        a = (math.log(longest) - mu) / sigma
        mean = math.exp(mu + sigma**2 / 2) * below(a - sigma) + longest * (1 - below(a))
        low, high = (mu, high) if mean < 1 else (low, mu)
    return (low + high) / 2


def completion_times(lengths: Array, slots: int, fixed: float, each: float) -> Array:
    """Return the times ``[workers, n]`` at which each worker has finished 1, 2, ... n samples.

    Args:
        lengths: steps of each sample ``[workers, n]`` in the order of their start; zeros (padding)
            take no time.
        slots: samples that a worker runs at once.
        fixed: time of a step that does not depend on the running samples.
        each: time of a step per running sample.
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
    return np.cumsum(steps * (fixed + running * each), axis=1)


@dataclass(frozen=True)
class DecodingWorkers:
    """The workers of one kind in a pool."""

    workers: int
    gpus: int
    """GPUs per worker."""
    slots: int
    fixed_share: float
    samples: int
    """Samples of an iteration, for all workers of the kind."""


class DecodingStage:
    """Samples durations of a decoding stage on one pool, whose duration for equal lengths is
    ``seconds``."""

    def __init__(
        self, lengths: LengthDistribution, parts: list[DecodingWorkers], seconds: float, seed: int
    ) -> None:
        self._lengths, self._parts = lengths, parts
        self._samples = sum(part.samples for part in parts)
        self._scale = seconds
        if lengths.profiled:
            last = [
                self._draw(random_generator(seed, "calibration", i))[0][-1]
                for i in range(CALIBRATION_DRAWS)
            ]
            self._scale = seconds * seconds / float(np.mean(last))

    def iteration(self, rng: np.random.Generator, cut: int) -> tuple[Array, Array]:
        """Return the work of one iteration.

        Returns:
            seconds ``[cut]`` from one micro-batch of finished samples to the next; and seconds of
                work of each GPU ``[gpus]``, in the order of the parts.
        """
        done, busy = self._draw(rng)
        last = np.ceil(np.arange(1, cut + 1) * len(done) / cut).astype(np.int64) - 1
        return np.diff(done[last], prepend=0.0), busy

    def _draw(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Return the sorted end times of samples ``[samples]``, and the seconds of work of each
        GPU."""
        lengths = relative_lengths(self._lengths, self._samples, rng)
        done, busy, assigned = [], [], 0
        for part in self._parts:
            if not part.samples:
                busy.append(np.zeros(part.workers * part.gpus))
                continue
            mine = lengths[assigned : assigned + part.samples]
            assigned += part.samples
            each_worker = -(-part.samples // part.workers)
            padded = np.zeros(part.workers * each_worker)
            # Samples are dealt like cards; a worker with one sample less has a leading zero.
            padded[padded.size - part.samples :] = mine
            table = padded.reshape(each_worker, part.workers).T
            # Scaled so that equal lengths take one unit of time.
            step = (part.slots, part.fixed_share, (1 - part.fixed_share) / part.slots)
            unit = completion_times(np.ones((1, each_worker)), *step)[0, -1]
            times = completion_times(table, *step) / unit
            done.append(_real(times, table))
            busy.append(np.repeat(times[:, -1], part.gpus))
        return np.sort(np.concatenate(done)) * self._scale, np.concatenate(busy) * self._scale


def _real(times: Array, table: Array) -> Array:
    """Return the times of samples without padding, which comes first on a worker."""
    padding = (table == 0).sum(1, keepdims=True)
    return times[np.arange(times.shape[1])[None] >= padding]
