"""Scores of a task are one number for each trajectory, or the task is refused by its name."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.envs.base import score_trajectories
from rlinf.errors import InputError

RECORDS = [Trajectory(identity=RecordId(0, number), actions=np.zeros(1)) for number in range(2)]


def scored(returned: Any) -> list[float]:
    task: Any = SimpleNamespace(score=lambda trajectories, counts: returned)
    return score_trajectories(task, RECORDS, Counter())


@pytest.mark.parametrize(
    "returned", [[1.0, 0.0], (True, False), np.array([1, 0]), [np.float32(1), 0]]
)
def test_numbers_are_scores(returned: Any) -> None:
    assert scored(returned) == [1.0, 0.0]


def test_a_trajectory_may_have_no_score() -> None:
    assert math.isnan(scored([math.nan, 1.0])[0])


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "returned None; it must return a list of numbers"),
        ("ab", "returned 'ab'"),
        (["1", "2"], r"returned \['1', '2'\]"),
        ([1.0, None], r"returned \[1.0, None\]"),
        ([[1.0], [1.0, 2.0]], "returned "),
        (
            [1.0],
            r"returned scores of shape \[1\] for 2 trajectories; it must return one number",
        ),
        ([], r"returned scores of shape \[0\] for 2 trajectories"),
        ([[1.0], [2.0]], r"returned scores of shape \[2, 1\]"),
    ],
)
def test_anything_else_is_refused(returned: Any, text: str) -> None:
    with pytest.raises(InputError, match=rf"SimpleNamespace\.score {text}"):
        scored(returned)
