"""Threads that compute micro-batches side by side: the same update, the same bytes each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.load_balancing import StepSpan
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.models.base import Batch, Policy, StepOutputs
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.trainers.base import Loss, loss_from_steps
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer

CONFIG = CausalLMConfig(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    CausalLM.create(CONFIG, {"alphabet": "0123456789+="}, 0, path)
    return path


def records(count: int = 11, lowest: int = 2) -> list[Trajectory]:
    """Some answer the same prompt. The tokens 0 and 1 are padding and the end."""
    random = np.random.default_rng(1)
    prompts = [random.integers(lowest, 14, random.integers(1, 6)) for _ in range(1 + count // 3)]
    return [
        Trajectory(
            identity=RecordId(0, i),
            actions=random.integers(lowest, 14, random.integers(1, 9)),
            prompt=prompts[i // 3],
        )
        for i in range(count)
    ]


def trainer(folder: Path, threads: int, budget: int = 40) -> FSDPTrainer:
    return FSDPTrainer(
        CausalLM.load(folder, CONFIG),
        FSDPConfig(cpu_threads=threads, max_tokens_per_microbatch=budget, device="cpu"),
        OptimizerSection(lr=1e-3),
        ProcessGroupInfo(),
    )


def step_loss(outputs: StepOutputs, spans: list[StepSpan]) -> Loss:
    rows = torch.tensor(float(len(spans)), device=outputs.logprobs.device)
    return -outputs.logprobs.sum() / 50, {"rows": rows}


loss = loss_from_steps(step_loss)


def updated(
    folder: Path, threads: int, data: list[Trajectory], budget: int = 40
) -> dict[str, torch.Tensor]:
    made = trainer(folder, threads, budget)
    for _ in range(3):
        metrics = made.step(data, loss, lr=1e-3)
    assert metrics["rows"] == len(data)
    return {name: tensor.clone() for name, tensor in made.full_state_dict().items()}


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_change_the_update(folder: Path, threads: int) -> None:
    one, several = updated(folder, 1, records()), updated(folder, threads, records())
    for name, tensor in one.items():
        torch.testing.assert_close(several[name], tensor, rtol=0, atol=1e-5, msg=name)


def test_the_bytes_are_the_same_each_time(folder: Path) -> None:
    first, again = updated(folder, 2, records()), updated(folder, 2, records())
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_fewer_samples_than_threads(folder: Path) -> None:
    one, many = updated(folder, 1, records(1)), updated(folder, 4, records(1))
    for name, tensor in one.items():
        torch.testing.assert_close(many[name], tensor, rtol=0, atol=1e-5)


def test_forward_covers_every_row_once(folder: Path) -> None:
    data = records()
    alone = trainer(folder, 1).forward(data, 1.0)
    side_by_side = trainer(folder, 2).forward(data, 1.0)
    assert [row for row, _ in side_by_side] == list(range(len(data)))
    for (_, one), (_, other) in zip(alone, side_by_side, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-5)


def test_an_error_in_a_lane_reaches_the_caller(folder: Path) -> None:
    def broken(policy: Policy, inputs: Batch, spans: list[StepSpan]) -> Any:
        raise ValueError("this loss")

    with pytest.raises(ValueError, match="this loss"):
        trainer(folder, 2).step(records(), broken, lr=1e-3)


def test_what_a_failed_step_left_behind_does_not_count(folder: Path) -> None:
    """Neither gradients of any lane, nor a lane that still runs."""
    made, calls = trainer(folder, 2, budget=20), []

    def half(policy: Policy, inputs: Batch, spans: list[StepSpan]) -> Any:
        calls.append(spans)
        if len(calls) == 3:
            raise ValueError("the third")
        return loss(policy, inputs, spans)

    with pytest.raises(ValueError, match="the third"):
        made.step(records(), half, lr=1e-3)
    count = len(calls)
    for _ in range(3):
        made.step(records(), loss, lr=1e-3)
    assert len(calls) == count
    clean = updated(folder, 2, records(), 20)
    assert all(torch.equal(clean[name], tensor) for name, tensor in made.full_state_dict().items())


def test_a_loaded_checkpoint_reaches_every_lane(folder: Path, tmp_path: Path) -> None:
    source = trainer(folder, 2)
    source.step(records(), loss, lr=1e-2)
    source.save(tmp_path / "checkpoint")
    target = trainer(folder, 2)
    target.load(tmp_path / "checkpoint")
    for one, other in zip(
        source.forward(records(), 1.0), target.forward(records(), 1.0), strict=True
    ):
        assert torch.equal(one[1].logprobs, other[1].logprobs)
