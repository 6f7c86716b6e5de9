"""Joining channels notices what is missing or doubled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.batch import TrainingSample, build_step_batch, gather_steps, join_by_identity
from rlinf.data.load_balancing import StepSpan
from rlinf.data.record import RecordId
from rlinf.data.trajectory import PolicyOutputs, StepRewards, Trajectory
from rlinf.errors import InputError


def trajectory(sample: int, length: int, **columns: Any) -> Trajectory:
    """A trajectory whose columns are equal to its number."""
    whole = np.full(length, float(sample))
    return Trajectory(
        identity=RecordId(0, sample), actions=whole, logprobs=whole, group=0, **columns
    )


def rewards(sample: int, length: int) -> StepRewards:
    return StepRewards(identity=RecordId(0, sample), rewards=np.full(length, float(sample)))


def outputs(*samples: int) -> list[PolicyOutputs]:
    return [PolicyOutputs(identity=RecordId(0, sample)) for sample in samples]


def samples(*channels: Sequence[Any]) -> list[TrainingSample]:
    return [TrainingSample(*row) for row in join_by_identity(*channels)]


def test_records_meet_by_identity_whatever_their_order() -> None:
    rows = join_by_identity(outputs(1, 2, 3), outputs(3, 1, 2))
    assert all(a.identity == b.identity for a, b in rows)


def test_a_missing_record_is_noticed() -> None:
    with pytest.raises(ValueError, match="no record for"):
        join_by_identity(outputs(1, 2), outputs(1))


def test_a_doubled_record_is_noticed() -> None:
    with pytest.raises(ValueError, match="two records"):
        join_by_identity(outputs(1), outputs(1, 1))


def test_columns_are_padded_and_masked() -> None:
    trajectories = [trajectory(1, 2), trajectory(2, 3)]
    given = [rewards(1, 2), rewards(2, 3)]
    batch = build_step_batch(samples(trajectories, given, outputs(1, 2)))
    assert batch.mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.old_logprobs.tolist() == [[1, 1, 0], [2, 2, 2]], "falls back to the engine's"
    assert batch.values is None
    with pytest.raises(ValueError, match="no column 'values'"):
        batch.require("values")


def test_values_are_of_the_version_that_the_bootstrap_is_of() -> None:
    """With staleness the inference stage evaluates a later version than the one that collected."""
    ones = np.ones(2)
    trajectories = [trajectory(1, 2, values=ones, bootstrap_values=ones)]
    later = [PolicyOutputs(identity=RecordId(0, 1), values=np.full(2, 9.0))]
    batch = build_step_batch(samples(trajectories, [rewards(1, 2)], later))
    assert batch.require("values").tolist() == batch.bootstrap_values.tolist() == [[1, 1]]


def masked(sample: int, mask: list[float]) -> Trajectory:
    return trajectory(sample, len(mask), mask=np.array(mask))


def test_a_reward_that_the_mask_would_take_away_is_an_error_that_names_the_sample() -> None:
    trajectories = [masked(1, [1, 1]), masked(2, [1, 0])]
    given = [StepRewards(identity=RecordId(0, s), rewards=np.array([0.0, 0.5])) for s in (1, 2)]
    with pytest.raises(InputError, match=r"sample=2.*reward of 0.5 lies on step 1"):
        build_step_batch(samples(trajectories, given, outputs(1, 2)))


def test_trajectories_with_and_without_a_mask_stand_side_by_side() -> None:
    given = [StepRewards(identity=RecordId(0, s), rewards=np.zeros(n)) for s, n in ((1, 3), (2, 2))]
    trajectories = [trajectory(1, 3), masked(2, [1, 0])]
    batch = build_step_batch(samples(trajectories, given, outputs(1, 2)))
    assert batch.mask.tolist() == [[1, 1, 1], [1, 0, 0]]


@given(data=st.data())
def test_steps_of_trajectories_are_taken_and_padded(data: st.DataObject) -> None:
    shape = (4, 6, *data.draw(st.sampled_from([(), (3,), (2, 2)])))
    column = torch.arange(1.0, 1 + np.prod(shape)).view(shape)
    ends = st.lists(st.integers(0, 6), min_size=2, max_size=2).map(sorted)
    drawn = data.draw(st.lists(st.tuples(st.integers(0, 3), ends), min_size=1, max_size=5))
    spans = [StepSpan(row, *pair) for row, pair in drawn]
    length = max(span.stop - span.start for span in spans) + data.draw(st.integers(0, 2))
    found = gather_steps(column, spans, length)
    assert found.shape == (len(spans), length, *shape[2:])
    for row, span in zip(found, spans, strict=True):
        inside = span.stop - span.start
        assert torch.equal(row[:inside], column[span.row, span.start : span.stop])
        assert not row[inside:].any()
    assert gather_steps(torch.arange(4), spans, length).tolist() == [span.row for span in spans]
