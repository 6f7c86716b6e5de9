"""A language model with a critic in a sharded trainer: one state, two networks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.load_balancing import StepSpan
from rlinf.device_memory import DeviceMemoryManager
from rlinf.errors import ConfigError
from rlinf.models.base import StepOutputs
from rlinf.models.causal_lm_critic import CausalLMCritic, CausalLMCriticConfig
from rlinf.trainers.base import Loss, loss_from_steps
from rlinf.trainers.deepspeed import DeepSpeedConfig, DeepSpeedTrainer
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from tests.contracts.test_trainer import assert_alike, weights
from tests.rlinf.trainers.test_options import together
from tests.rlinf.trainers.test_threaded_data_parallel import CONFIG, folder, records

__all__ = ["folder"]
LR = 1e-3


def make(
    folder: Path, world: ProcessGroupInfo | None = None, critic: str = "own", **options: Any
) -> FSDPTrainer:
    world = world or ProcessGroupInfo()
    config = CausalLMCriticConfig.model_validate(
        {**CONFIG.model_dump(exclude_unset=True), "critic": critic}
    )
    load = CausalLMCritic.meta_from_folder if world.size > 1 else CausalLMCritic.load
    given = {"device": "cpu", "max_tokens_per_microbatch": 40, **options}
    return FSDPTrainer(
        load(folder, config), FSDPConfig.model_validate(given), OptimizerSection(lr=LR), world
    )


def policy_loss(outputs: StepOutputs, spans: list[StepSpan]) -> Loss:
    return -outputs.logprobs.sum() / 50, {}


def both_losses(outputs: StepOutputs, spans: list[StepSpan]) -> Loss:
    assert outputs.values is not None
    error = ((outputs.values - 0.5) ** 2).sum() / 50
    return error - outputs.logprobs.sum() / 50, {"value_loss": error.detach()}


imitate, learn = loss_from_steps(policy_loss), loss_from_steps(both_losses)


@pytest.mark.parametrize("critic", ["own", "shared"])
def test_the_critic_learns_and_is_taken_up_where_it_was(
    critic: str, folder: Path, tmp_path: Path
) -> None:
    trainer, again, data = make(folder, critic=critic), make(folder, critic=critic), records()
    errors = [trainer.step(data, learn, lr=10 * LR)["value_loss"] for _ in range(12)]
    assert errors[-1] < errors[0] / 2
    trainer.save(tmp_path)
    again.load(tmp_path)
    for each in (trainer, again):
        each.step(data, learn, lr=LR)
    assert_alike(trainer.snapshot(), again.snapshot())
    found_outputs = [dict(each.forward(data, 1.0)) for each in (trainer, again)]
    for row, outputs in found_outputs[0].items():
        theirs = found_outputs[1][row].values
        assert outputs.values is not None
        assert theirs is not None
        assert torch.equal(outputs.values, theirs)
        assert outputs.values.any()


def test_an_update_of_the_value_alone_leaves_the_policy_as_it_is(folder: Path) -> None:
    trainer, data = make(folder), records()
    before = weights(trainer)
    for _ in range(2):
        trainer.step(data, learn, lr=LR, groups=["value"])
    after = weights(trainer)
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"critic"}


def test_the_critic_leaves_the_device_with_the_policy(folder: Path) -> None:
    stays, moves, data = make(folder), make(folder), records()
    residency = DeviceMemoryManager(moves.device, sys.maxsize)
    residency.acquire(moves)
    held = sum(size.on_device for size in moves.group_sizes().values())
    assert held >= sum(p.nbytes for p in moves.policy.module.parameters())
    for _ in range(2):
        residency.acquire(moves)
        residency.offload_all()
        assert not any(size.on_device for size in moves.group_sizes().values())
        residency.acquire(moves)
        assert stays.step(data, learn, lr=LR) == moves.step(data, learn, lr=LR)
    assert_alike(weights(stays), weights(moves))


def test_adapters_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora: CausalLMCritic"):
        make(folder, lora={"rank": 2})


RANKS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.models.causal_lm_critic import CausalLMCritic, CausalLMCriticConfig
from tests.rlinf.trainers.test_critic import assert_alike, imitate, learn, make, weights, LR
from tests.rlinf.trainers.test_threaded_data_parallel import records

folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rendezvous = folder.parent / "channels" / "group-critic.json"
world = ProcessGroupInfo(rank, size, rendezvous_file=rendezvous)
data = records()
for critic in ("own", "shared"):
    for options in ({"fsdp_wrap_min_mb": 0}, {}):
        alone, both = make(folder, critic=critic), make(folder, world, critic, **options)
        assert_alike(weights(both), weights(alone))
        # The critic's units are not there in this backward pass.
        for how in (imitate, learn, learn):
            one, other = alone.step(data, how, lr=LR), both.step(data, how, lr=LR)
            assert all(abs(one[n] - other[n]) < 1e-4 * max(1, abs(one[n])) for n in one)
        assert_alike(weights(both), weights(alone), LR / 20)
        name = f"{critic}{len(options)}"
        both.save(folder.parent / name)
        dist.barrier()
        alone.load(folder.parent / name)
        assert_alike(weights(both), weights(alone))
        said, there = dict(alone.forward(data, 1.0)), both.forward(data, 1.0)
        assert there
        for row, outputs in there:
            torch.testing.assert_close(outputs.values, said[row].values, atol=1e-5, rtol=1e-4)
        # A policy folder, written as the tensors come and read by rows.
        target = folder.parent / f"policy-{name}"
        if rank == 0:
            target.mkdir()
            both.policy.save_state(target, both.stream_weights())
        else:
            both.stream_weights().drain()
        dist.barrier()
        fresh = make(folder, world, critic, **options)
        fresh.load_policy_folder(target)
        assert_alike(weights(fresh), weights(both))
        fresh.load_policy_folder(folder)
        assert_alike(weights(fresh), weights(make(folder, critic=critic)))
print("ok")
"""


def test_processes_share_both_networks(folder: Path) -> None:
    together(folder, RANKS, 2)


def test_a_trainer_that_was_not_tried_with_it_refuses(folder: Path) -> None:
    policy = make(folder).policy
    with pytest.raises(ConfigError, match=r"trainer\.name: CausalLMCritic has several networks"):
        DeepSpeedTrainer(
            policy, DeepSpeedConfig(device="cpu"), OptimizerSection(), ProcessGroupInfo()
        )
