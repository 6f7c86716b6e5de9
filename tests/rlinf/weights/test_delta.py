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

from rlinf.errors import TransferError
from rlinf.weights.buckets import distinct
from rlinf.weights.delta import Delta, Snapshot, diff, patch
from tests.rlinf.weights.states import TYPES, random_tensor, same, states


def one(tensor: Tensor) -> Snapshot:
    return Snapshot.of({"w": tensor})


@settings(deadline=None)
@given(states(), states())
def test_any_state_is_reached_from_another(old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    kept = {name: tensor.clone() for name, tensor in old.items()}
    base, target = Snapshot.of(old), Snapshot.of(new)
    if base.ties == target.ties:
        assert same(patch(base, diff(base, target)).tensors, new)
    else:
        with pytest.raises(TransferError, match="other weights"):
            patch(base, diff(base, target))
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
    delta = diff(old, new)
    assert same(patch(old, delta).tensors, new.tensors)
    assert delta.nbytes <= new.nbytes


def test_a_step_that_changes_one_weight_in_fifty_costs_a_fiftieth() -> None:
    torch.manual_seed(0)
    was = torch.randn(100_000).to(torch.bfloat16)
    pattern = was.view(torch.int16).clone()
    chosen = torch.rand(100_000) < 0.02
    pattern[chosen] += torch.where(torch.rand(int(chosen.sum())) < 0.5, 1, -1).to(torch.int16)
    delta = diff(one(was), one(pattern.view(torch.bfloat16)))
    assert delta.changed == {"w": int(chosen.sum())}
    assert delta.nbytes < was.nbytes / 50


def test_changes_far_apart_are_found_again() -> None:
    was, now = torch.zeros(3000), torch.zeros(3000)
    for position in (0, 254, 255, 256, 510, 766, 1276, 2999):
        now[position] = float("nan")
    old, new = one(was), one(now)
    assert same(patch(old, diff(old, new)).tensors, new.tensors)


def test_a_tensor_without_changes_is_not_mentioned() -> None:
    was = {"w": torch.tensor([float("nan"), -0.0]), "scalar": torch.tensor(1.0)}
    old = Snapshot.of(was)
    delta = diff(old, Snapshot.of({name: tensor.clone() for name, tensor in was.items()}))
    assert delta.tensors == {}
    assert patch(old, delta).kept["w"] is old.kept["w"]


def test_a_zero_that_changed_its_sign_is_a_change() -> None:
    old, new = one(torch.zeros(5)), one(torch.tensor([0.0, -0.0, 0.0, 0.0, 0.0]))
    assert diff(old, new).changed == {"w": 1}
    assert same(patch(old, diff(old, new)).tensors, new.tensors)


@settings(deadline=None)
@given(states(), states())
def test_a_delta_survives_its_file(
    tmp_path_factory: pytest.TempPathFactory, was: dict[str, Tensor], now: dict[str, Tensor]
) -> None:
    path = tmp_path_factory.mktemp("delta") / "delta.safetensors"
    old, new = Snapshot(distinct(was)[0], {}), Snapshot(distinct(now)[0], {})
    delta = diff(old, new)
    delta.save(path)
    again = Delta.load(path)
    assert replace(again, tensors={}) == replace(delta, tensors={})
    assert same(patch(old, again).tensors, new.tensors)


def test_float32_is_compared_as_the_wanted_type_and_what_is_tied_is_sent_once() -> None:
    embed, count = torch.randn(300), torch.tensor(3)
    snapshot = Snapshot.of({"embed": embed, "head": embed, "count": count}, torch.bfloat16)
    assert same(snapshot.kept, {"embed": embed.bfloat16(), "count": count})
    assert snapshot.tensors["head"] is snapshot.tensors["embed"]
    moved = Snapshot.of({"embed": embed * (1 + 1e-6), "head": embed, "count": count})
    assert not moved.ties
    assert moved.digest != snapshot.digest


def test_a_delta_of_other_weights_is_refused() -> None:
    was, now = torch.zeros(500), torch.zeros(500)
    now[400:410] = 1
    delta = diff(one(was), one(now))
    others = {"v": was}, {"w": torch.zeros(300)}, {"w": now}, {"w": was.bfloat16()}
    for other in map(Snapshot.of, others):
        with pytest.raises(TransferError, match="does not start from these"):
            patch(other, delta)
    for other in map(Snapshot.of, others[:2]):
        with pytest.raises(TransferError, match="'w'"):
            patch(other, replace(delta, start=other.digest))


def test_a_delta_that_leads_elsewhere_than_it_says_is_refused() -> None:
    old, new = one(torch.zeros(500)), one(torch.ones(500))
    with pytest.raises(TransferError, match="other weights than it says"):
        patch(old, replace(diff(old, new), end="0" * 32))


@pytest.mark.parametrize("part", ["gaps/w", "steps/w"])
def test_a_delta_cut_short_or_too_long_is_refused(part: str) -> None:
    torch.manual_seed(0)
    now = torch.zeros(5000)
    now[torch.randperm(5000)[:400]] = torch.randn(400)
    old = one(torch.zeros(5000))
    delta = diff(old, one(now))
    for tampered in (delta.tensors[part][:-3], torch.zeros(9, dtype=torch.uint8)):
        with pytest.raises(TransferError):
            patch(old, replace(delta, tensors=delta.tensors | {part: tampered}))
    with pytest.raises(TransferError):
        patch(old, replace(delta, changed={"w": 399}))


def test_an_ordinary_safetensors_file_is_no_delta(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(3)}, path)
    with pytest.raises(TransferError, match="not a delta"):
        Delta.load(path)
    path.write_bytes(b"torn")
    with pytest.raises(TransferError, match="not a delta"):
        Delta.load(path)
