"""Numbers as tokens, against a search through all bins."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.errors import DataError
from rlinf.models.action_encoding import (
    STATISTICS_FILE,
    ActionBins,
    compute_statistics,
    read_action_statistics,
)

BINS = ActionBins(np.array([-2.0, 0.5]), np.array([6.0, 0.75]), np.array([True, True]), 100)


@given(st.floats(-3, 7), st.floats(0.4, 0.8))
def test_a_number_gets_the_token_whose_bin_it_lies_in(one: float, other: float) -> None:
    values = np.array([one, other])
    found = BINS.decode(torch.tensor(BINS.encode(values))).numpy()
    for value, low, high, action in zip(values, BINS.low, BINS.high, found, strict=True):
        width = (high - low) / 255
        centers = low + width * (np.arange(255) + 0.5)
        nearest = centers[np.abs(centers - np.clip(value, low, high)).argmin()]
        # On an edge either neighbour is right.
        assert abs(action - np.clip(value, low, high)) <= width / 2 * (1 + 1e-3)
        assert abs(action - nearest) <= width * (1 + 1e-3)


def test_every_token_but_one_is_an_action_of_its_own() -> None:
    ids = torch.arange(100, 356)
    actions = BINS.decode(ids[:, None].expand(-1, 2))[:, 0]
    assert actions[0] == actions[1]
    assert (actions[1:-1] > actions[2:]).all(), "the last id is the smallest number"
    again = BINS.encode(actions[:, None].numpy().repeat(2, 1))[1:, 0]
    np.testing.assert_array_equal(again, ids[1:])


def test_a_number_that_is_not_scaled_stays_in_the_unit_interval() -> None:
    bins = ActionBins(np.array([0.0]), np.array([9.0]), np.array([False]), 0)
    found = bins.decode(torch.tensor(bins.encode(np.array([[-1.0], [0.0], [1.0]]))))
    np.testing.assert_allclose(found[:, 0], [-1, 0, 1], atol=1 / 255 + 1e-6)


def test_statistics_of_actions_are_those_that_are_read(tmp_path: Path) -> None:
    actions = np.random.default_rng(0).normal(size=(1000, 3))
    actions[:, 2] = 0.25
    path = tmp_path / STATISTICS_FILE
    path.write_text(json.dumps({"ours": {"action": compute_statistics(actions)}}))
    name, found = read_action_statistics(path, None, "model.norm_stats")
    bins = ActionBins.from_statistics(found["action"], 0, 256)
    assert name == "ours"
    assert ((actions[:, :2] < bins.low[:2]).mean(0) == 0.01).all()
    assert ((actions[:, :2] > bins.high[:2]).mean(0) == 0.01).all()
    assert bins.is_scaled.tolist() == [True, True, False]
    back = bins.decode(torch.tensor(bins.encode(actions))).numpy()
    inside = ((actions >= bins.low) & (actions <= bins.high)).all(1)
    assert np.abs(back - actions)[inside].max() < 0.02


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "no dataset_statistics"),
        ('{"a": {"action": {"q01": [1]}}}', "q99"),
        ('{"a": {"action": {"q01": [1], "q99": [0]}}}', "above"),
        ('{"a": {}, "b": {}}', r"model\.unnorm_key: .*a, b"),
    ],
)
def test_a_malformed_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / STATISTICS_FILE
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_action_statistics(path, None, "model.norm_stats")


def test_the_gripper_of_openvla_is_binarized_and_inverted() -> None:
    """In its data 1 opens, in the simulator -1; bins and numbers between are rounded."""
    statistics = {"q01": [0.0, 0.0], "q99": [2.0, 1.0], "mask": [True, False]}
    bins = ActionBins.from_statistics(statistics, 0, 256, "openvla")
    normalized = bins.normalize(np.array([[0.0, -1.0], [2.0, 1.0]]))
    np.testing.assert_allclose(normalized, [[-1, 1], [1, 0]], atol=1e-6)
    tokens = torch.tensor(bins.encode(np.array([[1.0, -1.0], [1.0, 1.0]])))
    np.testing.assert_array_equal(bins.decode(tokens)[:, 1].numpy(), [-1, 1])
    numbers = torch.tensor([[0.0, 0.9], [0.0, 0.51], [0.0, 0.49], [0.0, -1.0]])
    found = bins.unnormalize(numbers)
    np.testing.assert_allclose(found.numpy(), [[1, -1], [1, -1], [1, 1], [1, 1]])
