"""A state cut into buckets comes together again to the bit, and damage is seen."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlinf.errors import WeightTransferError
from rlinf.weights.buckets import BucketLayout, bucket_checksum, split_tied_tensors, weighted_sum
from tests.rlinf.weights.states import same, states


def buckets_of(layout: BucketLayout, tensors: dict[str, Tensor]) -> list[Tensor]:
    out = []
    for index in range(layout.num_buckets):
        span = layout.bucket_slice(index)
        out.append(torch.zeros(span.stop - span.start, dtype=torch.uint8))
        layout.pack_bucket(index, tensors, out[-1])
    return out


def flat_of(layout: BucketLayout, tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([*buckets_of(layout, tensors), torch.empty(0, dtype=torch.uint8)])


@settings(deadline=None)
@given(states(), st.sampled_from([64, 128, 4096]))
def test_a_state_survives_its_buckets_in_any_order(state: dict[str, Tensor], size: int) -> None:
    layout = BucketLayout.from_tensors(state, bucket_bytes=size)
    parts = buckets_of(layout, state)
    assert all(len(part) == size for part in parts[:-1])
    flat = torch.empty(layout.nbytes, dtype=torch.uint8)
    for index in reversed(range(layout.num_buckets)):
        flat[layout.bucket_slice(index)] = parts[index]
    assert same(layout.tensor_views(flat), state)


@settings(deadline=None)
@given(states())
def test_views_of_the_flat_state_are_the_tensors(state: dict[str, Tensor]) -> None:
    layout = BucketLayout.from_tensors(state, bucket_bytes=128)
    flat = flat_of(layout, state)
    assert len(flat) == layout.nbytes
    got = layout.tensor_views(flat)
    assert same(got, state)
    low, high = flat.data_ptr(), flat.data_ptr() + len(flat)
    assert all(low <= t.data_ptr() < high for t in got.values() if t.numel()), "a copy was made"


@settings(deadline=None)
@given(states())
def test_a_layout_survives_its_text(state: dict[str, Tensor]) -> None:
    layout = BucketLayout.from_tensors(state, bucket_bytes=64)
    assert BucketLayout.from_json(layout.to_json()) == layout


def test_tied_weights_travel_once_and_stay_tied() -> None:
    table = torch.randn(32, 8)
    state = {"embed": table, "head": table, "bias": torch.randn(8)}
    layout = BucketLayout.from_tensors(state)
    assert layout.nbytes == 32 * 8 * 4 + 64
    assert layout.ties == {"head": "embed"}
    got = layout.tensor_views(flat_of(layout, state))
    assert got["head"] is got["embed"]


def test_equal_weights_that_are_not_tied_travel_both() -> None:
    one = torch.ones(4)
    kept, ties = split_tied_tensors({"a": one, "b": one.clone(), "c": one[:2], "d": torch.empty(0)})
    assert set(kept) == {"a", "b", "c", "d"}
    assert ties == {}


def test_only_float32_is_cast() -> None:
    state = {
        "weight": torch.randn(1000),
        "mean": torch.randn(3, dtype=torch.float64),
        "count": torch.tensor(7),
    }
    layout = BucketLayout.from_tensors(state, bucket_bytes=64, dtype=torch.bfloat16)
    got = layout.tensor_views(flat_of(layout, state))
    assert same(got, state | {"weight": state["weight"].to(torch.bfloat16)})


def test_a_tensor_that_is_not_contiguous_arrives_in_order() -> None:
    state = {"t": torch.arange(60.0).view(6, 10).t()}
    layout = BucketLayout.from_tensors(state, bucket_bytes=64)
    got = layout.tensor_views(flat_of(layout, state))
    assert torch.equal(got["t"], state["t"])


@pytest.mark.parametrize("size", [0, -64, 65])
def test_a_bucket_size_that_cuts_elements_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        BucketLayout.from_tensors({}, bucket_bytes=size)


@pytest.mark.parametrize(
    "change",
    [
        {"entries": [["a", "float31", [2], 0]]},
        {"entries": [["a", "float32", [-2], 0]]},
        {"entries": [["a", "float32", [2], 4]]},
        {"entries": [["a", "float32", [32], 0], ["b", "float32", [2], 64]]},
        {"entries": 3},
        {"ties": {"x": "nothing"}},
        {"bucket_bytes": 0},
        {"bucket_bytes": None},
    ],
)
def test_a_malformed_layout_is_refused(change: dict[str, object]) -> None:
    values = json.loads(BucketLayout.from_tensors({"a": torch.ones(2)}).to_json())
    with pytest.raises(WeightTransferError, match="damaged layout"):
        BucketLayout.from_json(json.dumps(values | change))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32), st.data())
def test_both_checksums_see_any_flipped_bit(words: int, seed: int, data: st.DataObject) -> None:
    torch.manual_seed(seed)
    block = torch.randint(0, 256, (8 * words,), dtype=torch.uint8)
    damaged = block.clone()
    damaged[data.draw(st.integers(0, 8 * words - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for function in (bucket_checksum, weighted_sum):
        assert function(block).item() == function(block.clone()).item()
        assert function(block).item() != function(damaged).item()


def test_both_checksums_see_words_in_another_order() -> None:
    block = torch.arange(32, dtype=torch.int64)
    for function in (bucket_checksum, weighted_sum):
        straight = function(block.view(torch.uint8)).item()
        assert straight != function(block.flip(0).contiguous().view(torch.uint8)).item()
