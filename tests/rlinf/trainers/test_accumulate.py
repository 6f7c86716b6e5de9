"""Gradients of the parts of a batch add up to that of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.errors import StageError
from rlinf.models.base import StepOutputs
from rlinf.trainers.fsdp import FSDPTrainer
from tests.rlinf.trainers.test_lanes import folder, loss, records, trainer

__all__ = ["folder"]
LR = 1e-3


def gradients(made: FSDPTrainer) -> dict[str, torch.Tensor]:
    named = made.policy.module.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def weights(made: FSDPTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.full_state().items()}


def assert_close(some: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert some.keys() == other.keys()
    for name, tensor in some.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-6, msg=name)


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
    assert_close(weights(parts), weights(whole))


def test_the_scale_is_that_of_the_loss(folder: Path) -> None:
    def fourfold(outputs: StepOutputs, rows: list[int]) -> tuple[Any, dict[str, Any]]:
        value, metrics = loss(outputs, rows)
        return 4 * value, {name: 4 * part for name, part in metrics.items()}

    plain, scaled = trainer(folder, 1), trainer(folder, 1)
    plain.accumulate(records(), loss)
    scaled.accumulate(records(), fourfold)
    one, other = plain.update(lr=LR), scaled.update(lr=LR, scale=0.25)
    assert other == pytest.approx(one, rel=1e-5)
    assert_close(weights(scaled), weights(plain))


@pytest.mark.parametrize("end", ["error", "discard", "not finite"])
def test_an_attempt_that_did_not_end_leaves_nothing_behind(folder: Path, end: str) -> None:
    def broken(outputs: StepOutputs, rows: list[int]) -> tuple[Any, dict[str, Any]]:
        if end == "error":
            raise ArithmeticError
        value, metrics = loss(outputs, rows)
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
        used.discard()
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


def test_a_snapshot_stays_as_it_was(folder: Path, tmp_path: Path) -> None:
    made, again = trainer(folder, 1), trainer(folder, 1)
    made.step(records(), loss, lr=LR)
    before, state = weights(made), made.snapshot()
    made.step(records(), loss, lr=LR)
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(made).items())
    made.save(tmp_path / "checkpoint", state)
    again.load(tmp_path / "checkpoint")
    assert_close(weights(again), before)
