"""Statistics of repeated attempts at a set of problems.

``scores`` is ``[N, k]``: the score, from 0 to 1, of each of ``k`` attempts at ``N`` problems. The
spread between problems is the uncertainty: a mean over problems has the standard error ``sd /
sqrt(N)``, where ``sd`` is the standard deviation of the problems' values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Z_95 = 1.959964
"""Quantile of the normal distribution for an interval of 95 %."""


class Estimate(NamedTuple):
    """A mean over problems with its standard error."""

    mean: float
    standard_error: float | None
    """None: there is only one problem."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval by the normal approximation."""
        if self.standard_error is None:
            return None
        return self.mean - Z_95 * self.standard_error, self.mean + Z_95 * self.standard_error


class Proportion(NamedTuple):
    """A share of successful episodes."""

    successes: int
    total: int
    """Number of episodes."""

    @property
    def mean(self) -> float:
        return self.successes / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of Wilson (1927, JASA 22), which also holds near 0 and 1."""
        z2 = Z_95 * Z_95
        center = (self.successes + z2 / 2) / (self.total + z2)
        failures = self.total - self.successes
        spread = Z_95 * math.sqrt(self.successes * failures / self.total + z2 / 4)
        half = spread / (self.total + z2)
        # Rounding would move an end that is 0 or 1.
        return center - half if self.successes else 0.0, center + half if failures else 1.0


def mean_over_problems(values: np.ndarray) -> Estimate:
    """Return the mean of one value per problem ``[N]``.

    Raises:
        ValueError: there are no problems.
    """
    if not len(values):
        raise ValueError("no problems")
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(mean, None)
    return Estimate(mean, float(np.std(values, ddof=1)) / math.sqrt(len(values)))


def average_at_k(scores: np.ndarray) -> Estimate:
    """Return the mean score of all attempts (avg@k)."""
    return mean_over_problems(scores.mean(axis=1))


def pass_at_k(scores: np.ndarray, k: int) -> Estimate:
    """Return the probability that at least one of ``k`` attempts is right.

    The estimate is unbiased for ``k`` up to the number of attempts ``n``: of ``n`` attempts with
    ``c`` right ones it is ``1 - C(n - c, k) / C(n, k)`` (Chen et al., 2021, equation 1). An attempt
    is right if its score is 1.

    Raises:
        ValueError: ``k`` is above the number of attempts.
    """
    num_attempts = scores.shape[1]
    if not 1 <= k <= num_attempts:
        raise ValueError(f"pass@{k} needs at least {k} attempts; there are {num_attempts}")
    num_right = (scores >= 1).sum(axis=1)
    # The product form is stable where the binomial coefficients are large.
    failures = [
        math.prod(1 - k / i for i in range(num_attempts - c + 1, num_attempts + 1))
        if num_attempts - c >= k
        else 0.0
        for c in num_right.tolist()
    ]
    return mean_over_problems(1 - np.array(failures))


def majority_at_k(scores: np.ndarray, answers: Sequence[Sequence[str | None]]) -> Estimate:
    """Return the score of the most frequent answer of each problem (maj@k).

    Of equally frequent answers the first one counts. Attempts without an answer do not vote; if no
    attempt has one, the problem scores 0.

    Args:
        answers: the normalised answer of each attempt, ``[N][k]``.
    """
    values = []
    for row, attempts in zip(scores, answers, strict=True):
        votes = Counter(answer for answer in attempts if answer is not None)
        # Counter keeps the order of first occurrence, and max returns the first of equals.
        winner = max(votes, key=votes.__getitem__) if votes else None
        values.append(0.0 if winner is None else float(row[list(attempts).index(winner)]))
    return mean_over_problems(np.array(values))


def paired_difference(left: np.ndarray, right: np.ndarray) -> Estimate:
    """Return the mean difference of scores, ``left - right``, paired by problem.

    Args:
        left, right: scores ``[N, k]`` of two models for the same problems; ``k`` may differ.
    """
    return mean_over_problems(left.mean(axis=1) - right.mean(axis=1))
