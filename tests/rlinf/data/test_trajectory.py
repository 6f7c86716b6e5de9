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
    GROUPED_FIELDS,
    ChannelItem,
    PolicyOutputs,
    StepRewards,
    Trajectory,
)
from rlinf.errors import InputError

IDENTITY = RecordId(3, 7)
STEP_NAMES = [*Trajectory.STEPS, "images.front", "video.side", "chain", "tokens"]
CONTEXT_NAMES = [*Trajectory.CONTEXT, "table"]
INFO_NAMES = [*Trajectory.INFO, "exact", "number"]
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
    named = [*Trajectory.STEPS.values(), *Trajectory.CONTEXT.values(), *Trajectory.INFO.values()]
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


@pytest.mark.parametrize(
    "item",
    [
        StepRewards(identity=IDENTITY, rewards=np.arange(3.0), score=0.5, group=3),
        StepRewards(
            identity=IDENTITY,
            rewards=np.arange(3.0),
            action_rewards=np.ones((3, 2)),
            episode_ends=np.array([0, 1, 0], np.uint8),
            is_included=False,
            failure="unanswered",
        ),
        PolicyOutputs(identity=IDENTITY),
        PolicyOutputs(identity=IDENTITY, logprobs=np.zeros(3), values=np.ones(3)),
    ],
)
def test_rewards_and_policy_outputs_come_back_from_their_records(item: ChannelItem) -> None:
    record = item.to_record()
    back = type(item).from_record(record)
    assert back.to_record().digest() == record.digest()
    for each in fields(item):
        np.testing.assert_array_equal(getattr(back, each.name), getattr(item, each.name))


def test_rewards_keep_the_names_of_their_record() -> None:
    record = StepRewards(identity=IDENTITY, rewards=np.zeros(2), failure="").to_record()
    assert record.info == {"score": 0.0, "keep": 1, "group": 0, "trouble": ""}


def test_a_field_that_is_needed_and_not_there_is_named_with_those_that_are() -> None:
    trajectory = Trajectory(identity=IDENTITY, actions=np.zeros(3), text="7", extra={"unit": "cm"})
    assert trajectory.require("text") == "7"
    with pytest.raises(InputError, match=r"no .rewards.; the trajectory has .*actions.*text.*unit"):
        trajectory.require("rewards")


def test_a_record_without_actions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no column 'actions'; it has \['rewards'\]"):
        Trajectory.from_record(Record(IDENTITY, {"rewards": np.zeros(2)}))
