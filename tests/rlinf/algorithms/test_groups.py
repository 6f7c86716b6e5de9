"""Which groups take part in the update: the same settings wherever samples are judged by groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.algorithms import algorithms
from rlinf.algorithms.groups import GroupConfig, kept_groups

BY_GROUP = ("grpo", "dapo", "rloo", "reinforce_plus_plus_baseline")
SCORES = np.array([0.0, 1, 1, 1, 0, 0, 1, 0])
GROUPS = np.array([7, 7, 3, 3, 9, 9, 7, 7])
bounds = st.one_of(st.none(), st.floats(-1, 1))


def slow(
    scores: list[float], groups: list[int], drop: bool, low: float | None, high: float | None
) -> list[bool]:
    found = []
    for group in groups:
        mine = [s for s, g in zip(scores, groups, strict=True) if g == group]
        mean = sum(mine) / len(mine)
        fits = (low is None or mean >= low) and (high is None or mean <= high)
        found.append(fits and not (drop and min(mine) == max(mine)))
    return found


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.integers(0, 4)), max_size=20),
    st.booleans(),
    bounds,
    bounds,
    st.randoms(use_true_random=False),
)
def test_groups_are_kept_whole_by_what_their_scores_are(
    rows: list[tuple[float, int]], drop: bool, low: float | None, high: float | None, random: Any
) -> None:
    scores, groups = [score for score, _ in rows], [group for _, group in rows]
    settings: dict[str, Any] = {"drop_equal": drop, "low": low, "high": high}
    kept = kept_groups(np.array(scores), np.array(groups, int), **settings)
    assert kept.dtype == bool
    assert kept.tolist() == slow(scores, groups, drop, low, high)
    order = list(range(len(rows)))
    random.shuffle(order)
    moved = kept_groups(
        np.array([scores[i] for i in order]), np.array([groups[i] for i in order], int), **settings
    )
    assert moved.tolist() == [kept[i] for i in order]


@pytest.mark.parametrize("name", BY_GROUP)
@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({"drop_equal_groups": False}, {3, 7, 9}),
        ({"drop_equal_groups": True}, {7}),
        ({"drop_equal_groups": False, "group_mean_low": 0.5}, {3, 7}),
        ({"drop_equal_groups": False, "group_mean_high": 0.5}, {7, 9}),
        ({"drop_equal_groups": False, "group_mean_low": 0.1, "group_mean_high": 0.9}, {7}),
        ({"drop_equal_groups": True, "group_mean_high": 0.4}, set()),
    ],
)
def test_every_algorithm_of_groups_has_the_same_filters(
    name: str, settings: dict[str, Any], groups: set[int]
) -> None:
    cls = algorithms.get(name)
    kept = cls(cls.Config(**settings)).keep(SCORES, GROUPS)
    assert kept.tolist() == np.isin(GROUPS, list(groups)).tolist()


def test_bounds_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"group_mean_low 0\.9 is above group_mean_high 0\.1"):
        GroupConfig(group_mean_low=0.9, group_mean_high=0.1)
