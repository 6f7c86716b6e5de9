"""A delta leads from one state to another to the bit, and is small where little changed."""

from __future__ import annotations

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
from rlinf.weights.delta import Delta, diff, patch
from tests.rlinf.weights.states import TYPES, bits, random_tensor, same, states


@settings(deadline=None)
@given(states(), states())
def test_any_state_is_reached_from_another(old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    kept = {name: tensor.clone() for name, tensor in old.items()}
    assert same(patch(old, diff(old, new)), new)
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
    old = {"w": random_tensor(dtype, (count,), seed)}
    chosen = torch.from_numpy(np.random.default_rng(seed).random(count) < share)
    new = {"w": torch.where(chosen, random_tensor(dtype, (count,), seed + 1), old["w"])}
    delta = diff(old, new)
    assert same(patch(old, delta), new)
    assert delta.nbytes <= new["w"].nbytes


def test_a_step_that_changes_one_weight_in_fifty_costs_a_fiftieth() -> None:
    torch.manual_seed(0)
    old = {"w": torch.randn(100_000).to(torch.bfloat16)}
    pattern = old["w"].view(torch.int16).clone()
    chosen = torch.rand(100_000) < 0.02
    pattern[chosen] += torch.where(torch.rand(int(chosen.sum())) < 0.5, 1, -1).to(torch.int16)
    delta = diff(old, {"w": pattern.view(torch.bfloat16)})
    assert delta.changed == {"w": int(chosen.sum())}
    assert delta.nbytes < old["w"].nbytes / 50


def test_changes_far_apart_are_found_again() -> None:
    old = {"w": torch.zeros(3000)}
    new = {"w": old["w"].clone()}
    for position in (0, 254, 255, 256, 510, 766, 1276, 2999):
        new["w"][position] = float("nan")
    assert same(patch(old, diff(old, new)), new)


def test_a_tensor_without_changes_is_not_mentioned() -> None:
    old = {"w": torch.tensor([float("nan"), -0.0]), "scalar": torch.tensor(1.0)}
    delta = diff(old, {name: tensor.clone() for name, tensor in old.items()})
    assert delta.tensors == {}
    assert patch(old, delta)["w"] is old["w"]


def test_a_zero_that_changed_its_sign_is_a_change() -> None:
    old, new = {"w": torch.zeros(5)}, {"w": torch.tensor([0.0, -0.0, 0.0, 0.0, 0.0])}
    assert diff(old, new).changed == {"w": 1}
    assert bits(patch(old, diff(old, new))["w"]) == bits(new["w"])


@settings(deadline=None)
@given(states(), states())
def test_a_delta_survives_its_file(
    tmp_path_factory: pytest.TempPathFactory, old: dict[str, Tensor], new: dict[str, Tensor]
) -> None:
    path = tmp_path_factory.mktemp("delta") / "delta.safetensors"
    new, _ = distinct(new)
    delta = diff(old, new)
    delta.save(path)
    again = Delta.load(path)
    assert (again.changed, again.removed) == (delta.changed, delta.removed)
    assert same(patch(old, again), new)


def test_a_delta_of_other_weights_is_refused() -> None:
    old = {"w": torch.zeros(500)}
    new = {"w": old["w"].clone()}
    new["w"][400:410] = 1
    delta = diff(old, new)
    for other in ({"v": old["w"]}, {"w": torch.zeros(300)}):
        with pytest.raises(TransferError, match="'w'"):
            patch(other, delta)


@pytest.mark.parametrize("part", ["gaps/w", "steps/w"])
def test_a_delta_cut_short_or_too_long_is_refused(part: str) -> None:
    torch.manual_seed(0)
    old = {"w": torch.zeros(5000)}
    new = {"w": old["w"].clone()}
    new["w"][torch.randperm(5000)[:400]] = torch.randn(400)
    delta = diff(old, new)
    for tampered in (delta.tensors[part][:-3], torch.zeros(9, dtype=torch.uint8)):
        with pytest.raises(TransferError):
            patch(old, Delta(delta.tensors | {part: tampered}, delta.changed))
    with pytest.raises(TransferError):
        patch(old, Delta(delta.tensors, {"w": 399}))


def test_an_ordinary_safetensors_file_is_no_delta(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(3)}, path)
    with pytest.raises(TransferError, match="not a delta"):
        Delta.load(path)
    path.write_bytes(b"torn")
    with pytest.raises(TransferError, match="not a delta"):
        Delta.load(path)
