"""A delta leads from one state to another to the bit, and is small where little changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from rlinf.errors import WeightTransferError
from rlinf.weights.buckets import split_tied_tensors
from rlinf.weights.delta import WeightDelta, WeightSnapshot, apply_delta, compute_delta
from tests.rlinf.weights.states import TYPES, random_tensor, same, states


def one(tensor: Tensor) -> WeightSnapshot:
    return WeightSnapshot.from_tensors({"w": tensor})


@settings(deadline=None)
@given(states(), states())
def test_any_state_is_reached_from_another(old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    kept = {name: tensor.clone() for name, tensor in old.items()}
    base, target = WeightSnapshot.from_tensors(old), WeightSnapshot.from_tensors(new)
    if base.ties == target.ties:
        assert same(apply_delta(base, compute_delta(base, target)).tensors, new)
    else:
        with pytest.raises(WeightTransferError, match="other weights"):
            apply_delta(base, compute_delta(base, target))
    assert same(old, kept), "the old state was changed"


@settings(deadline=None)
@given(
    st.sampled_from([kind for kind in TYPES if kind != torch.bool]),
    st.integers(1, 3000),
    st.floats(0, 1),
    st.integers(0, 2**32),
)
def test_any_share_of_changes_is_kept_exactly(
    dtype: torch.dtype, count: int, share: float, seed: int
) -> None:
    was = random_tensor(dtype, (count,), seed)
    chosen = torch.from_numpy(np.random.default_rng(seed).random(count) < share)
    old, new = one(was), one(torch.where(chosen, random_tensor(dtype, (count,), seed + 1), was))
    delta = compute_delta(old, new)
    assert same(apply_delta(old, delta).tensors, new.tensors)
    assert delta.nbytes <= new.nbytes


def test_a_step_that_changes_one_weight_in_fifty_costs_a_fiftieth() -> None:
    torch.manual_seed(0)
    was = torch.randn(100_000).to(torch.bfloat16)
    pattern = was.view(torch.int16).clone()
    chosen = torch.rand(100_000) < 0.02
    pattern[chosen] += torch.where(torch.rand(int(chosen.sum())) < 0.5, 1, -1).to(torch.int16)
    delta = compute_delta(one(was), one(pattern.view(torch.bfloat16)))
    assert delta.changed == {"w": int(chosen.sum())}
    assert delta.nbytes < was.nbytes / 50


def test_changes_far_apart_are_found_again() -> None:
    was, now = torch.zeros(3000), torch.zeros(3000)
    for position in (0, 254, 255, 256, 510, 766, 1276, 2999):
        now[position] = float("nan")
    old, new = one(was), one(now)
    assert same(apply_delta(old, compute_delta(old, new)).tensors, new.tensors)


def test_a_tensor_without_changes_is_not_mentioned() -> None:
    was = {"w": torch.tensor([float("nan"), -0.0]), "scalar": torch.tensor(1.0)}
    old = WeightSnapshot.from_tensors(was)
    delta = compute_delta(
        old, WeightSnapshot.from_tensors({name: tensor.clone() for name, tensor in was.items()})
    )
    assert delta.tensors == {}
    assert apply_delta(old, delta).distinct["w"] is old.distinct["w"]


def test_a_zero_that_changed_its_sign_is_a_change() -> None:
    old, new = one(torch.zeros(5)), one(torch.tensor([0.0, -0.0, 0.0, 0.0, 0.0]))
    assert compute_delta(old, new).changed == {"w": 1}
    assert same(apply_delta(old, compute_delta(old, new)).tensors, new.tensors)


@settings(deadline=None)
@given(states(), states())
def test_a_delta_survives_its_file(
    tmp_path_factory: pytest.TempPathFactory, was: dict[str, Tensor], now: dict[str, Tensor]
) -> None:
    path = tmp_path_factory.mktemp("delta") / "delta.safetensors"
    old, new = (
        WeightSnapshot(split_tied_tensors(was)[0], {}),
        WeightSnapshot(split_tied_tensors(now)[0], {}),
    )
    delta = compute_delta(old, new)
    delta.save(path)
    again = WeightDelta.load(path)
    assert replace(again, tensors={}) == replace(delta, tensors={})
    assert same(apply_delta(old, again).tensors, new.tensors)


def test_float32_is_compared_as_the_wanted_type_and_what_is_tied_is_sent_once() -> None:
    embed, count = torch.randn(300), torch.tensor(3)
    snapshot = WeightSnapshot.from_tensors(
        {"embed": embed, "head": embed, "count": count}, torch.bfloat16
    )
    assert same(snapshot.distinct, {"embed": embed.bfloat16(), "count": count})
    assert snapshot.tensors["head"] is snapshot.tensors["embed"]
    moved = WeightSnapshot.from_tensors(
        {"embed": embed * (1 + 1e-6), "head": embed, "count": count}
    )
    assert not moved.ties
    assert moved.digest != snapshot.digest


def test_a_delta_of_other_weights_is_refused() -> None:
    was, now = torch.zeros(500), torch.zeros(500)
    now[400:410] = 1
    delta = compute_delta(one(was), one(now))
    others = {"v": was}, {"w": torch.zeros(300)}, {"w": now}, {"w": was.bfloat16()}
    for other in map(WeightSnapshot.from_tensors, others):
        with pytest.raises(WeightTransferError, match="does not start from these"):
            apply_delta(other, delta)
    for other in map(WeightSnapshot.from_tensors, others[:2]):
        with pytest.raises(WeightTransferError, match="'w'"):
            apply_delta(other, replace(delta, base_digest=other.digest))


def test_a_delta_that_leads_elsewhere_than_it_says_is_refused() -> None:
    old, new = one(torch.zeros(500)), one(torch.ones(500))
    with pytest.raises(WeightTransferError, match="other weights than its target"):
        apply_delta(old, replace(compute_delta(old, new), target_digest="0" * 32))


@pytest.mark.parametrize("part", ["gaps/w", "steps/w"])
def test_a_delta_cut_short_or_too_long_is_refused(part: str) -> None:
    torch.manual_seed(0)
    now = torch.zeros(5000)
    now[torch.randperm(5000)[:400]] = torch.randn(400)
    old = one(torch.zeros(5000))
    delta = compute_delta(old, one(now))
    for tampered in (delta.tensors[part][:-3], torch.zeros(9, dtype=torch.uint8)):
        with pytest.raises(WeightTransferError):
            apply_delta(old, replace(delta, tensors=delta.tensors | {part: tampered}))
    with pytest.raises(WeightTransferError):
        apply_delta(old, replace(delta, changed={"w": 399}))


def test_an_ordinary_safetensors_file_is_no_delta(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(3)}, path)
    with pytest.raises(WeightTransferError, match="not a delta"):
        WeightDelta.load(path)
    path.write_bytes(b"torn")
    with pytest.raises(WeightTransferError, match="not a delta"):
        WeightDelta.load(path)
