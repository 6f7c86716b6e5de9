"""Gradients of the parts of a batch add up to that of the whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.data.load_balancing import StepSpan
from rlinf.device_memory import DeviceMemoryManager
from rlinf.errors import StageError
from rlinf.models.base import Batch, Policy
from rlinf.trainers.fsdp import FSDPTrainer
from tests.rlinf.trainers.test_threaded_data_parallel import folder, loss, records, trainer

__all__ = ["folder"]
LR = 1e-3


def gradients(made: FSDPTrainer) -> dict[str, torch.Tensor]:
    named = made.policy.module.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def weights(made: FSDPTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.full_state_dict().items()}


def assert_close(
    some: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 1e-6
) -> None:
    assert some.keys() == other.keys()
    for name, tensor in some.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("threads", [1, 2])
def test_parts_have_the_gradient_and_the_metrics_of_the_whole(folder: Path, threads: int) -> None:
    data = records()
    whole, parts = trainer(folder, threads), trainer(folder, threads)
    whole.accumulate(data, loss)
    for start, stop in ((0, 4), (4, 5), (5, 11)):
        parts.accumulate(data[start:stop], loss)
        parts.forward(data, 1.0)  # inference on later parts has its turns in between
    assert_close(gradients(parts), gradients(whole))
    one, several = whole.update(lr=LR), parts.update(lr=LR)
    assert several == pytest.approx(one, rel=1e-5)
    # The first step of Adam has a length near LR whatever the gradient's; of one near its epsilon
    # the rounding, which differs between processors, shows as a part of that.
    assert_close(weights(parts), weights(whole), atol=LR / 50)


def test_the_scale_is_that_of_the_loss(folder: Path) -> None:
    def fourfold(
        policy: Policy, inputs: Batch, spans: list[StepSpan]
    ) -> tuple[Any, dict[str, Any]]:
        value, metrics = loss(policy, inputs, spans)
        return 4 * value, {name: 4 * part for name, part in metrics.items()}

    plain, scaled = trainer(folder, 1), trainer(folder, 1)
    plain.accumulate(records(), loss)
    scaled.accumulate(records(), fourfold)
    one, other = plain.update(lr=LR), scaled.update(lr=LR, scale=0.25)
    assert other == pytest.approx(one, rel=1e-5)
    assert_close(weights(scaled), weights(plain))


@pytest.mark.parametrize("end", ["error", "discard", "not finite"])
def test_an_attempt_that_did_not_end_leaves_nothing_behind(folder: Path, end: str) -> None:
    def broken(policy: Policy, inputs: Batch, spans: list[StepSpan]) -> tuple[Any, dict[str, Any]]:
        if end == "error":
            raise ArithmeticError
        value, metrics = loss(policy, inputs, spans)
        return value * (float("nan") if end == "not finite" else 3.0), metrics

    data = records()
    fresh, used = trainer(folder, 2), trainer(folder, 2)
    before = weights(used)
    used.accumulate(data[:5], loss)
    if end == "error":
        with pytest.raises(ArithmeticError):
            used.accumulate(data[5:], broken)
    else:
        used.accumulate(data[5:], broken)
    if end == "discard":
        used.discard_gradients()
    elif end == "not finite":
        with pytest.raises(StageError, match="previous weights are untouched"):
            used.update(lr=LR)
    with pytest.raises(ValueError, match="nothing was accumulated"):
        used.update(lr=LR)
    assert_close(weights(used), before)
    for made in (fresh, used):
        made.accumulate(data, loss)
        made.update(lr=LR)
    assert_close(weights(used), weights(fresh))


@pytest.mark.parametrize("threads", [1, 2])
def test_leaving_the_device_between_all_calls_changes_no_byte(folder: Path, threads: int) -> None:
    data = records()
    stays, moves = trainer(folder, threads), trainer(folder, threads)
    residency = DeviceMemoryManager(moves.device, sys.maxsize)

    def need(*groups: str) -> None:
        residency.acquire(moves)
        residency.offload_all()
        assert not any(map(bytes_of, moves.tensor_groups().values()))
        residency.acquire(moves, *groups)

    for _ in range(2):
        for part in (data[:4], data[4:]):
            need("weights")
            before, after = (made.forward(part, 1.0) for made in (stays, moves))
            for (_, one), (_, other) in zip(before, after, strict=True):
                assert torch.equal(one.logprobs, other.logprobs)
            need("weights", "gradients")
            for made in (stays, moves):
                made.accumulate(part, loss)
        need()
        assert stays.update(lr=LR) == moves.update(lr=LR)
        need("weights")
        kept, moved = weights(stays), weights(moves)
        assert all(torch.equal(kept[name], tensor) for name, tensor in moved.items())
    need("weights", "optimizer")
    assert_same(moves.snapshot(), stays.snapshot())


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if not tensor.is_meta)


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)


def test_what_will_be_there_counts_as_much_as_what_is(folder: Path) -> None:
    made = trainer(folder, 1)

    def sizes() -> dict[str, int]:
        return {
            name: sum(t.nbytes for t in tensors) for name, tensors in made.tensor_groups().items()
        }

    before = sizes()
    made.accumulate(records(), loss)
    assert not any(tensor.is_meta for tensor in made.tensor_groups()["gradients"])
    assert sizes() == before
    made.update(lr=LR)
    assert all(tensor.is_meta for tensor in made.tensor_groups()["gradients"]), "given back"
    steps = 4 * len(made.optimizer.state)
    assert sizes() == {**before, "optimizer": before["optimizer"] + steps}


def test_a_snapshot_stays_as_it_was(folder: Path, tmp_path: Path) -> None:
    made, again = trainer(folder, 1), trainer(folder, 1)
    made.step(records(), loss, lr=LR)
    before, state = weights(made), made.snapshot()
    made.step(records(), loss, lr=LR)
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(made).items())
    made.save(tmp_path / "checkpoint", state)
    again.load(tmp_path / "checkpoint")
    assert_close(weights(again), before)


def test_a_snapshot_takes_the_memory_of_one_that_was_written(folder: Path, tmp_path: Path) -> None:
    made = trainer(folder, 1)
    made.step(records(), loss, lr=LR)
    first = made.snapshot()
    second = made.snapshot()
    where = {name: tensor.data_ptr() for name, tensor in first.items()}
    assert not set(where.values()) & {tensor.data_ptr() for tensor in second.values()}, "unwritten"
    made.save(tmp_path / "checkpoint", first)
    made.step(records(), loss, lr=LR)
    third = made.snapshot()
    assert {name: tensor.data_ptr() for name, tensor in third.items()} == where
    assert_same(third, made.snapshot())
    assert any(not torch.equal(third[name], tensor) for name, tensor in second.items())
