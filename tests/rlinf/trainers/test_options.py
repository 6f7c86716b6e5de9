"""Options of the sharded trainer: each does what it says, and the update stays what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf.channels.process_group import ParallelLayout, ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.errors import ConfigError
from rlinf.models import causal_lm
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from rlinf.models.causal_lm import CausalLM
from rlinf.trainers import optimizer
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from tests.rlinf.trainers.ranks import run_ranks
from tests.rlinf.trainers.run_components import run_components
from tests.rlinf.trainers.test_threaded_data_parallel import CONFIG, folder, loss, records

__all__ = ["folder"]
LR = 1e-3


def make(folder: Path, world: ProcessGroupInfo | None = None, **options: Any) -> FSDPTrainer:
    world = world or ProcessGroupInfo()
    policy = (CausalLM.meta_from_folder if world.size > 1 else CausalLM.load)(folder, CONFIG)
    given = {"device": "cpu", "max_tokens_per_microbatch": 40, "packing": False, **options}
    config = FSDPConfig.model_validate(given)
    return FSDPTrainer(policy, config, OptimizerSection(lr=LR), world)


def assert_close(one: FSDPTrainer, other: FSDPTrainer, atol: float) -> None:
    theirs = other.full_state_dict()
    for name, tensor in one.full_state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=atol, msg=name)


def saved_bytes(trainer: FSDPTrainer) -> int:
    """Of all activations that a gradient keeps for the backward pass."""
    count = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal count
        count += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer.accumulate(records(), loss)
    trainer.discard_gradients()
    return count


@pytest.mark.parametrize("threads", [1, 2])
def test_activations_that_are_not_kept_are_computed_again(folder: Path, threads: int) -> None:
    plain = make(folder, cpu_threads=threads)
    again = make(folder, cpu_threads=threads, gradient_checkpointing=True)
    if threads == 1:
        assert saved_bytes(again) < saved_bytes(plain) / 2
    for _ in range(2):
        assert plain.step(records(), loss, lr=LR) == again.step(records(), loss, lr=LR)
    assert_close(plain, again, 0.0)


def test_a_policy_without_blocks_has_nothing_to_compute_again(tmp_path: Path) -> None:
    spec = {"observation": 3, "action": {"kind": "discrete", "size": 2}}
    MLPPolicy.create(MLPConfig(), spec, 0, tmp_path)
    config = FSDPConfig(device="cpu", gradient_checkpointing=True)
    with pytest.raises(ConfigError, match="gradient_checkpointing"):
        FSDPTrainer(
            MLPPolicy.load(tmp_path, MLPConfig()), config, OptimizerSection(), ProcessGroupInfo()
        )


def test_offloaded_optimizer_state_comes_to_the_device_in_parts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU here: which bytes are moved where is what is seen."""
    there = peak = 0

    def moved(tensor: Tensor, device: torch.device) -> Tensor:
        nonlocal there, peak
        there += -tensor.nbytes if device is optimizer.HOST_DEVICE else tensor.nbytes
        peak = max(peak, there)
        return tensor.clone()

    monkeypatch.setattr(optimizer, "start_move", moved)
    monkeypatch.setattr(optimizer.step_with_offload, "__defaults__", (8192,))
    plain, away = make(folder), make(folder, offload_optimizer=True)
    sizes = [p.nbytes for p in away.policy.module.parameters()]
    for number in range(3):
        assert plain.step(records(), loss, lr=LR) == away.step(records(), loss, lr=LR)
        # State that is made in a step only leaves.
        there, peak = 0, peak if number else 0
    assert 0 < peak <= 2 * max(8192, *sizes) < 2 * sum(sizes)
    assert_close(plain, away, 0.0)
    away.save(tmp_path)
    other = make(folder, offload_optimizer=True)
    other.load(tmp_path)
    assert there < 0  # what was read is on the host
    assert "optimizer" not in {name for name, size in other.group_sizes().items() if sum(size)}
    for trainer in (plain, other):
        trainer.step(records(), loss, lr=LR)
    assert_close(plain, other, 0.0)


RANKS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.models import causal_lm
from rlinf.sharded_tensors import local_shard
from tests.rlinf.trainers.test_threaded_data_parallel import loss, records
from tests.rlinf.trainers.test_options import LR, assert_close, make

folder, rank, size, options = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
world = ProcessGroupInfo(rank, size, rendezvous_file=folder.parent / "channels" / "group-t.json")
data = records()
alone = make(folder)
alone.step(data, loss, lr=LR)
"""
SHARDED = (
    RANKS
    + """
one = make(folder, world, fsdp_wrap_min_mb=0)
right = one.step(data, loss, lr=LR)
both = {"gradient_checkpointing": True, "packing": True}
for options in (both, {"offload_optimizer": True}, {"parts": True}):
    causal_lm.MAX_LOGITS = 40 if options.pop("parts", False) else 1 << 25
    other = make(folder, world, fsdp_wrap_min_mb=0, **options)
    said = other.step(data, loss, lr=LR)
    assert all(abs(said[name] - value) < 1e-5 * max(1, abs(value)) for name, value in right.items())
    assert_close(other, alone, LR / 50)
for whole in (1 << 25, 40):
    causal_lm.MAX_LOGITS = whole
    types = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    half = make(folder, world, fsdp_wrap_min_mb=0, **types)
    seen = set()
    for block in half.policy.blocks():
        block.register_forward_hook(lambda module, _, out: seen.add(
            (out[0] if isinstance(out, tuple) else out).dtype))
    said = half.step(data, loss, lr=LR)
    assert seen == {torch.bfloat16}
    # Eight bits in forward and backward; the weights that are trained have all of theirs.
    assert abs(said["loss"] - right["loss"]) < 1e-2 * abs(right["loss"])
    assert abs(said["grad_norm"] - right["grad_norm"]) < 5e-2 * right["grad_norm"]
    assert {p.dtype for p in half.policy.module.parameters()} == {torch.float32}
    assert_close(half, alone, 2.1 * LR)
print("ok")
"""
)
HYBRID = (
    RANKS
    + """
both = make(folder, world, dp_replicate=2)
weight = both.policy.module.get_input_embeddings().weight
assert weight.device_mesh.shape == (2, 2)
assert len(local_shard(weight)) * 2 >= weight.shape[0] > len(local_shard(weight))
both.step(data, loss, lr=LR)
assert_close(both, alone, LR / 50)
both.save(folder.parent / "hybrid", both.snapshot())
dist.barrier()
assert sorted(path.name for path in (folder.parent / "hybrid").iterdir()) == [
    "rank-0-of-2.safetensors", "rank-1-of-2.safetensors"]
alone.load(folder.parent / "hybrid")
assert_close(both, alone, 0.0)
again = make(folder, world, dp_replicate=2)
again.load(folder.parent / "hybrid")
sharded = make(folder, world)
sharded.load(folder.parent / "hybrid")
for trainer in (alone, again, sharded):
    trainer.step(data, loss, lr=LR)
assert_close(again, alone, LR / 50)
assert_close(sharded, alone, LR / 50)
print("ok")
"""
)


def together(folder: Path, program: str, size: int) -> None:
    (folder.parent / "channels").mkdir(exist_ok=True)
    (folder.parent / "channels" / "group-t.json").unlink(missing_ok=True)
    run_ranks(program, size, folder)


def test_sharded_updates_are_those_of_one_process_under_every_option(folder: Path) -> None:
    together(folder, SHARDED, 2)


def test_copies_of_a_sharded_model_update_as_one_process_does(folder: Path) -> None:
    together(folder, HYBRID, 4)


@pytest.mark.parametrize("threads", [1, 2])
def test_packed_rows_make_the_same_update_with_fewer_micro_batches(
    folder: Path, threads: int
) -> None:
    plain = make(folder, max_tokens_per_microbatch=36)
    packed = make(folder, max_tokens_per_microbatch=36, cpu_threads=threads, packing=True)
    if threads == 1:
        (one,), (other,) = (
            plain.split_micro_batches(records()),
            packed.split_micro_batches(records()),
        )
        assert len(other.spans) < len(one.spans)
    right = plain.step(records(), loss, lr=LR)
    assert packed.step(records(), loss, lr=LR) == pytest.approx(right, rel=1e-5)
    assert_close(packed, plain, LR / 50)
    for (_, mine), (_, theirs) in zip(
        packed.forward(records(), 1.0), plain.forward(records(), 1.0), strict=True
    ):
        # Of updated weights, which are not the same to the last bit.
        torch.testing.assert_close(mine.logprobs, theirs.logprobs, rtol=0, atol=1e-3)


def test_copies_that_do_not_divide_the_processes_are_refused() -> None:
    def check(processes: int) -> None:
        given = run_components(CONFIG), ParallelLayout(), processes, "train.layout"
        FSDPTrainer.check_layout(FSDPConfig(dp_replicate=3), *given)

    for good in (1, 3, 6):
        check(good)
    with pytest.raises(ConfigError, match=r"trainer\.dp_replicate: 3 does not .* 4 .*of train;"):
        check(4)


def test_log_probs_of_a_lane_in_parts_are_those_of_the_plain_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make(folder).step(records(), loss, lr=LR)
    monkeypatch.setattr(causal_lm, "MAX_LOGITS", 40)
    found = make(folder, cpu_threads=2).step(records(), loss, lr=LR)
    assert found == pytest.approx(plain, rel=1e-5)
