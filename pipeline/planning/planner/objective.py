"""What a plan is to make small."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.planning.planner.problem import Problem

Array = np.ndarray


class Objective(ABC):
    """A cost that grows with the time of an iteration and never falls with the GPUs held."""

    unit = "s"

    @abstractmethod
    def cost(self, problem: Problem, total_s: Array, gpus: Sequence[Array]) -> Array:
        """Costs ``[n]``.

        Args:
            problem: the kinds and their prices, waits and losses.
            total_s: seconds of an iteration ``[n]``.
            gpus: by pool int ``[kinds, n]``, the GPUs held.
        """

    @abstractmethod
    def of_job(
        self, seconds: float, price_per_hour: float, wait_s: float, losses_per_hour: float
    ) -> float:
        """What a stage that is a job of its own adds to the cost."""

    @abstractmethod
    def bound(self, problem: Problem, total_s: float) -> float:
        """What no placement whose iteration takes at least ``total_s`` seconds goes below."""


@dataclass(frozen=True)
class IterationTime(Objective):
    """Seconds of one iteration."""

    def cost(self, problem: Problem, total_s: Array, gpus: Sequence[Array]) -> Array:
        return total_s

    def of_job(
        self, seconds: float, price_per_hour: float, wait_s: float, losses_per_hour: float
    ) -> float:
        return seconds

    def bound(self, problem: Problem, total_s: float) -> float:
        return total_s


@dataclass(frozen=True)
class Money(Objective):
    """Price of one iteration: all GPUs held, for its whole duration.

    With all prices 1 these are GPU-hours.
    """

    unit = "price"

    def cost(self, problem: Problem, total_s: Array, gpus: Sequence[Array]) -> Array:
        prices = np.array([kind.price for kind in problem.kinds])
        return np.asarray(total_s * sum(prices @ pool for pool in gpus) / 3600)

    def of_job(
        self, seconds: float, price_per_hour: float, wait_s: float, losses_per_hour: float
    ) -> float:
        return seconds * price_per_hour / 3600

    def bound(self, problem: Problem, total_s: float) -> float:
        """Each stage at its cheapest: an hour of a kind does at most its best rate per GPU."""
        whole = 0.0
        for stage in problem.stages:
            each = [np.inf]
            for k, kind in enumerate(problem.kinds):
                rates = problem.table(stage, k)
                best = float(np.max(rates[1:] / np.arange(1, len(rates)), initial=0.0))
                if best > 0:
                    each.append(kind.price / best)
            whole += min(each)
        return whole / 3600


@dataclass(frozen=True)
class TimeTo(Objective):
    """Seconds until some iterations are done, the queue and expected losses included.

    The run starts when the slowest of its pools has started. A pool that is lost comes back after
    the wait of its kind, and half an iteration is done again on average. Waits are those of as many
    nodes as the pool takes of the kind.
    """

    iterations: int

    def cost(self, problem: Problem, total_s: Array, gpus: Sequence[Array]) -> Array:
        start = np.max([np.max(_waits(problem, pool), axis=0) for pool in gpus], axis=0)
        lost = lost_share(problem, total_s, gpus)
        return np.asarray(start + self.iterations * total_s * (1 + lost))

    def of_job(
        self, seconds: float, price_per_hour: float, wait_s: float, losses_per_hour: float
    ) -> float:
        """Every job waits; one that is lost waits again, and half of it was in vain on average."""
        lost = losses_per_hour / 3600 * seconds * (wait_s + seconds / 2)
        return self.iterations * (wait_s + seconds + lost)

    def bound(self, problem: Problem, total_s: float) -> float:
        return self.iterations * total_s


def lost_share(problem: Problem, total_s: Array, gpus: Sequence[Array]) -> Array:
    """Seconds expected to be lost by preemption and failures per second of work ``[n]``.

    A pool that is lost comes back after the wait of its kind, and half an iteration is done again
    on average. Arguments as of :meth:`Objective.cost`.
    """
    losses = np.array([kind.losses_per_hour for kind in problem.kinds])[:, None] / 3600
    each = [losses * (_waits(problem, pool) + total_s / 2) * (pool > 0) for pool in gpus]
    return np.asarray(sum(pool.sum(0) for pool in each))


def _waits(problem: Problem, pool: Array) -> Array:
    """Of each kind ``[kinds, n]``: the wait for so many GPUs of it."""
    return np.stack([kind.waits(n) for kind, n in zip(problem.kinds, pool, strict=True)])
