"""Trajectories and the records that they travel as hold the same."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import (
    CONTEXT_FIELDS,
    GROUPED_FIELDS,
    INFO_FIELDS,
    STEP_FIELDS,
    Trajectory,
)

IDENTITY = RecordId(3, 7)
STEP_NAMES = [*STEP_FIELDS, "images.front", "video.side", "chain", "tokens"]
CONTEXT_NAMES = [*CONTEXT_FIELDS, "table"]
INFO_NAMES = [*INFO_FIELDS, "exact", "number"]
SHAPES = st.lists(st.integers(1, 3), max_size=2).map(tuple)


@st.composite
def records(draw: Any) -> Record:
    """Records of any columns, of the names that trajectories know and of others."""
    length = draw(st.integers(1, 5))
    names = {"actions", *draw(st.sets(st.sampled_from(STEP_NAMES)))}
    steps = {name: np.arange(length * 6.0).reshape(length, 6) + len(name) for name in names}
    context = {
        name: np.full(draw(SHAPES), len(name))
        for name in draw(st.sets(st.sampled_from(CONTEXT_NAMES)))
    }
    scalars = st.one_of(st.integers(-5, 5), st.floats(-1, 1), st.text(max_size=4))
    info = {name: draw(scalars) for name in draw(st.sets(st.sampled_from(INFO_NAMES)))}
    return Record(IDENTITY, steps, context, info)


@given(records())
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    back = Trajectory.from_record(record).to_record()
    assert back.digest() == record.digest()
    assert back.identity == record.identity


@given(records(), st.data())
def test_steps_are_sliced_as_those_of_the_record(record: Record, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(record) - 1))
    stop = data.draw(st.integers(start + 1, len(record)))
    part = Trajectory.from_record(record).slice_steps(start, stop)
    assert len(part) == stop - start
    assert part.to_record().digest() == record.slice_steps(start, stop).digest()


def test_every_field_stands_in_one_table() -> None:
    """A field that no table names would be lost on the way."""
    named = [*STEP_FIELDS.values(), *CONTEXT_FIELDS.values(), *INFO_FIELDS.values()]
    assert len(set(named)) == len(named)
    assert {*named, *GROUPED_FIELDS, "identity"} == {each.name for each in fields(Trajectory)}


def test_columns_of_cameras_and_policies_go_to_groups() -> None:
    steps = {"actions": np.zeros((2, 1)), "images.front": np.zeros((2, 4, 4, 3), np.uint8)}
    steps |= {"video.side": np.zeros((2, 4, 4, 3), np.uint8), "chain": np.zeros((2, 3, 1))}
    trajectory = Trajectory.from_record(Record(IDENTITY, steps, info={"number": 4}))
    assert [*trajectory.images, *trajectory.videos] == ["front", "side"]
    assert [*trajectory.policy_columns] == ["chain"]
    assert trajectory.extra == {"number": 4}


def test_arrays_are_not_copied() -> None:
    actions = np.zeros(4)
    trajectory = Trajectory.from_record(Record(IDENTITY, {"actions": actions}))
    assert trajectory.actions is actions
    assert trajectory.to_record().steps["actions"] is actions


def test_versions_are_those_of_each_step_or_of_the_sample() -> None:
    trajectory = Trajectory(identity=IDENTITY, actions=np.zeros(3), policy_version=2)
    assert trajectory.step_versions().tolist() == [2, 2, 2]
    changed = replace(trajectory, versions=np.array([2, 2, 3]))
    assert changed.step_versions().tolist() == [2, 2, 3]


def test_columns_say_what_kind_a_trajectory_is() -> None:
    plain = Trajectory(identity=IDENTITY, actions=np.zeros(3))
    assert plain.is_demonstration
    assert not plain.is_chunked
    sampled = replace(plain, logprobs=np.zeros(3), num_executed=np.ones(3, np.int32))
    assert sampled.is_chunked
    assert not sampled.is_demonstration


def test_a_record_without_actions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no column 'actions'; it has \['rewards'\]"):
        Trajectory.from_record(Record(IDENTITY, {"rewards": np.zeros(2)}))
