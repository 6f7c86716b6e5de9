"""Rewards lie on the steps that count, and none of them is lost on the way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory, loss_mask, move_rewards_to_unmasked

PLAIN = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(-9, 9, width=32), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n).filter(any),
    )
)


@given(PLAIN)
def test_the_sum_stays_and_lies_on_steps_that_count(case: tuple[list[float], list[bool]]) -> None:
    rewards, counts = np.array(case[0]), np.array(case[1])
    got = move_rewards_to_unmasked(rewards, counts)
    assert got.sum() == pytest.approx(rewards.sum(), abs=1e-4)
    assert not got[~counts].any()


@given(PLAIN)
def test_a_reward_on_a_step_that_counts_stays_in_its_place(
    case: tuple[list[float], list[bool]],
) -> None:
    counts = np.array(case[1])
    rewards = np.array(case[0]) * counts
    np.testing.assert_array_equal(
        move_rewards_to_unmasked(rewards, counts), rewards.astype(np.float32)
    )


def test_a_reward_goes_to_the_choice_that_led_to_it() -> None:
    got = move_rewards_to_unmasked(
        np.array([1.0, 2, 4, 8, 16]), np.array([False, True, False, True, False])
    )
    assert got.tolist() == [0, 7, 0, 24, 0]


def test_without_a_mask_all_steps_count() -> None:
    record = Trajectory(identity=RecordId(0, 0), actions=np.zeros(3))
    assert loss_mask(record).tolist() == [True] * 3
