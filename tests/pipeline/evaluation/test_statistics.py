"""Statistics of repeated attempts agree with their definitions, computed the long way."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.evaluation.statistics import (
    Z_95,
    Proportion,
    average_at_k,
    majority_at_k,
    mean_over_problems,
    paired_difference,
    pass_at_k,
)

RIGHT_OR_WRONG = st.integers(1, 6).flatmap(
    lambda k: st.lists(
        st.lists(st.sampled_from([0.0, 1.0]), min_size=k, max_size=k), min_size=1, max_size=5
    )
)


@given(RIGHT_OR_WRONG, st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_attempt(
    rows: list[list[float]], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(rows[0])))
    by_subsets = [
        np.mean([any(subset) for subset in itertools.combinations(row, k)]) for row in rows
    ]
    assert pass_at_k(np.array(rows), k).mean == pytest.approx(np.mean(by_subsets))


@given(RIGHT_OR_WRONG)
def test_pass_at_1_is_the_average(rows: list[list[float]]) -> None:
    scores = np.array(rows)
    assert pass_at_k(scores, 1).mean == pytest.approx(average_at_k(scores).mean)


def test_pass_at_k_needs_k_attempts() -> None:
    with pytest.raises(ValueError, match="pass@3 needs at least 3 attempts; there are 2"):
        pass_at_k(np.zeros((4, 2)), 3)


def test_many_attempts_do_not_overflow() -> None:
    scores = np.zeros((1, 4096))
    scores[0, :2048] = 1
    assert pass_at_k(scores, 2).mean == pytest.approx(1 - 2048 * 2047 / (4096 * 4095))


def test_the_standard_error_is_that_of_problems_not_of_attempts() -> None:
    scores = np.array([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]])
    estimate = average_at_k(scores)
    assert estimate.mean == 0.5
    assert estimate.standard_error == pytest.approx(0.5 / math.sqrt(3))
    assert mean_over_problems(np.array([0.3])).standard_error is None
    with pytest.raises(ValueError, match="no problems"):
        mean_over_problems(np.array([]))


def test_the_most_frequent_answer_counts_and_the_first_of_equals() -> None:
    scores = np.array([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    answers = [["3", "4", "4"], ["7", "8", None], [None, "2", "2"], [None, None, None]]
    assert majority_at_k(scores, answers).mean == pytest.approx(1 / 4)


def test_a_difference_is_paired_by_problem() -> None:
    random = np.random.default_rng(0)
    difficulty = random.random((50, 1))
    left = (random.random((50, 8)) < difficulty).astype(float)
    right = np.minimum(left + (np.arange(8) == 0), 1)
    estimate = paired_difference(right, left)
    assert estimate.mean == pytest.approx(right.mean() - left.mean())
    unpaired = math.hypot(*(average_at_k(s).standard_error or 0 for s in (left, right)))
    assert estimate.standard_error is not None
    assert estimate.standard_error < unpaired / 3
    interval = estimate.interval
    assert interval is not None
    assert interval[0] > 0


@given(st.integers(1, 500), st.data())
def test_the_ends_of_wilsons_interval_are_where_the_share_is_as_far_as_allowed(
    count: int, data: st.DataObject
) -> None:
    """By definition: a true share at an end is 1.96 of its own standard errors away."""
    share = Proportion(data.draw(st.integers(0, count)), count)
    low, high = share.interval
    assert 0 <= low <= share.mean <= high <= 1
    for end in {low, high} - {0.0, 1.0}:
        distance = abs(share.mean - end)
        assert distance == pytest.approx(Z_95 * math.sqrt(end * (1 - end) / count), abs=1e-9)
