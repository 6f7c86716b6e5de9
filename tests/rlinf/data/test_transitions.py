"""Transitions say what came after each step, and keep an end and a cut apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.data.transitions import (
    action_clip_ratio,
    concatenate_transitions,
    dtype_mismatch,
    executed_actions,
    to_transitions,
    transition_dtype,
)
from rlinf.errors import InputError


def trajectory(**changed: Any) -> Trajectory:
    """Two episodes and a beginning: one ends after step 1, one is cut after step 3."""
    whole = Trajectory(
        identity=RecordId(0, 0),
        observations=np.arange(6, dtype=np.float32)[:, None] * 10,
        actions=np.arange(6, dtype=np.float64)[:, None] / 10,
        terminated=np.array([0, 1, 0, 0, 0, 0], np.uint8),
        truncation_steps=np.array([3, 5]),
        final_observations=np.array([[333], [555]], np.float32),
    )
    return replace(whole, **changed)


REWARDS = np.arange(6, dtype=np.float32)


def test_each_step_has_what_was_seen_after_it_in_its_own_episode() -> None:
    rows = to_transitions(trajectory(), REWARDS)
    assert rows["next_observations"][:, 0].tolist() == [10, 10, 30, 333, 50, 555]
    assert rows["terminated"].tolist() == [0, 1, 0, 0, 0, 0]
    assert rows["truncated"].tolist() == [0, 0, 0, 1, 0, 1]
    assert rows["rewards"].tolist() == [0, 1, 2, 3, 4, 5]
    np.testing.assert_allclose(rows["actions"][:, 0], np.arange(6) / 10, rtol=1e-6)


def test_steps_that_do_not_count_are_left_out() -> None:
    rows = to_transitions(trajectory(mask=np.array([1, 1, 0, 0, 1, 1])), REWARDS)
    assert rows["observations"][:, 0].tolist() == [0, 10, 40, 50]


def test_a_trajectory_without_what_came_last_is_refused() -> None:
    record = trajectory()
    record.truncation_steps = np.array([3])
    record.final_observations = np.array([[333]], np.float32)
    with pytest.raises(InputError, match="after its last step"):
        to_transitions(record, REWARDS)
    with pytest.raises(InputError, match="'truncation_steps'"):
        to_transitions(trajectory(truncation_steps=None, final_observations=None), REWARDS)


def test_types_of_rows_are_told_apart_by_field() -> None:
    assert dtype_mismatch(transition_dtype(3, 2), transition_dtype(3, 2)) is None
    assert "field 'observations'" in str(
        dtype_mismatch(transition_dtype(3, 2), transition_dtype(4, 2))
    )
    assert "field 'actions'" in str(dtype_mismatch(transition_dtype(3, 2), transition_dtype(3, 1)))
    with pytest.raises(InputError, match="actions"):
        concatenate_transitions(
            [np.zeros(1, transition_dtype(3, 2)), np.zeros(1, transition_dtype(3, 1))]
        )


def test_chunks_of_actions_are_no_transitions() -> None:
    """Nothing says what was seen between their actions."""
    actions = np.zeros((6, 3, 1), np.float32)
    record = trajectory(actions=actions, num_executed=np.full(6, 3, np.int32))
    with pytest.raises(InputError, match=r"acts by chunks.*model\.chunk_size=1"):
        to_transitions(record, REWARDS)


@pytest.mark.parametrize(("kind", "wanted"), [(float, [0.2, 2.0, -1.0]), (int, [0.0, 2.0, -1.0])])
def test_what_is_learned_from_is_what_was_carried_out(kind: type, wanted: list[float]) -> None:
    """Clipped to the bounds, and rounded where they are integers; where a person acted, theirs."""
    actions = np.array([[0.2], [9.0], [-9.0]], np.float32)
    done = Trajectory(
        identity=RecordId(0, 0),
        actions=actions,
        observations=np.zeros((3, 2), np.float32),
        terminated=np.array([0, 0, 1], np.uint8),
        truncation_steps=np.zeros(0, np.int64),
        final_observations=np.zeros((0, 2), np.float32),
        action_low=np.array([-1], kind),
        action_high=np.array([2], kind),
    )
    rows = to_transitions(done, np.zeros(3, np.float32))
    np.testing.assert_allclose(rows["actions"][:, 0], wanted, rtol=1e-6)
    assert action_clip_ratio(done) == pytest.approx(2 / 3)
    helped = replace(
        done,
        intervened=np.array([0, 1, 0], np.uint8),
        executed_actions=np.array([[0], [1.5], [0]], np.float32),
    )
    np.testing.assert_allclose(
        executed_actions(helped)[:, 0], [wanted[0], 1.5, wanted[2]], rtol=1e-6
    )
    unbounded = replace(done, action_low=None, action_high=None)
    assert action_clip_ratio(unbounded) is None
    np.testing.assert_array_equal(executed_actions(unbounded), actions)
