"""Training on a GPU: what a CPU computes, the types of a GPU, and processes that meet by NCCL."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig
from rlinf.trainers.fsdp import FSDPTrainer
from tests.gpu.devices import CUDA, need_interpreter, need_two
from tests.rlinf.trainers import test_megatron as megatron
from tests.rlinf.trainers.ranks import run_ranks
from tests.rlinf.trainers.test_options import LR, make
from tests.rlinf.trainers.test_threaded_data_parallel import folder, loss, records

__all__ = ["folder"]


def steps(trainer: FSDPTrainer, count: int = 2) -> list[dict[str, float]]:
    return [trainer.step(records(), loss, lr=LR) for _ in range(count)]


def assert_like_cpu(
    folder: Path, device: str, relative: float, rates: float, **options: Any
) -> FSDPTrainer:
    """An update on the device is that of one process on the CPU in float32.

    Args:
        relative: what loss and norm may differ by.
        rates: what weights may, in learning rates.
    """
    cpu, gpu = make(folder), make(folder, device=device, **options)
    assert next(gpu.policy.module.parameters()).device.type == device
    for right, mine in zip(steps(cpu), steps(gpu), strict=True):
        assert mine["loss"] == pytest.approx(right["loss"], rel=relative)
        assert mine["grad_norm"] == pytest.approx(right["grad_norm"], rel=relative)
    theirs = cpu.full_state_dict()
    for name, tensor in gpu.full_state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=rates * LR, msg=name)
    return gpu


@pytest.mark.parametrize("packing", [False, True])
def test_an_update_is_that_of_a_cpu(folder: Path, device: str, packing: bool) -> None:
    assert_like_cpu(folder, device, 1e-5, 0.02, packing=packing)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_update_in_half_precision_by_fsdp2_is_close(
    folder: Path, device: str, dtype: str
) -> None:
    """One process shards its module too where it computes in another type than it trains."""
    gpu = assert_like_cpu(folder, device, 5e-2, 4.2, param_dtype=dtype)
    assert all(hasattr(p, "device_mesh") for p in gpu.policy.module.parameters())


def test_layers_are_computed_again_and_moments_wait_on_the_host(folder: Path, device: str) -> None:
    options = {"gradient_checkpointing": True, "offload_optimizer": True}
    gpu = assert_like_cpu(folder, device, 1e-5, 0.02, **options)
    moments = [t for state in gpu.optimizer.state.values() for t in state.values() if t.dim()]
    assert moments
    assert {tensor.device.type for tensor in moments} == {"cpu"}


def test_a_state_goes_on_from_gpu_to_cpu(folder: Path, tmp_path: Path, device: str) -> None:
    gpu, cpu = make(folder, device=device), make(folder)
    steps(gpu)
    gpu.save(tmp_path, gpu.snapshot())
    cpu.load(tmp_path)
    for mine, theirs in zip(steps(gpu), steps(cpu), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.skipif(find_spec("flash_attn") is None, reason="the package flash-attn is not there")
def test_flash_attention_on_packed_rows_is_that_of_padded_ones(folder: Path, device: str) -> None:
    packed, padded = (
        make(folder, device=device, param_dtype="bfloat16", packing=packing)
        for packing in (True, False)
    )
    implementation = packed.policy.network.config._attn_implementation  # type: ignore[attr-defined]
    assert implementation == "flash_attention_2"
    for (_, one), (_, other) in zip(
        packed.forward(records(), 1.0), padded.forward(records(), 1.0), strict=True
    ):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=3e-2)
    for mine, theirs in zip(steps(packed), steps(padded), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-2)


@pytest.mark.parametrize("name", ["deepspeed", "megatron"])
def test_other_trainers_update_as_fsdp2_on_a_cpu(name: str, device: str, tmp_path: Path) -> None:
    """A process in the trainer's environment, and back to FSDP2 in this one."""
    python, model = need_interpreter(name, device), tmp_path / "model"
    model.mkdir()
    sizes = CausalLMConfig(**megatron.SIZES)
    CausalLM.create(sizes, megatron.ALPHABET, 0, model)
    metrics, found = megatron.run(
        model, tmp_path / "out", "", 1, trainer=name, python=python, device=device
    )
    right = megatron.alone(model)
    for mine, theirs in zip(metrics, right.metrics, strict=True):  # type: ignore[attr-defined]
        assert mine == pytest.approx(theirs, rel=1e-4)
    megatron.assert_weights(found, right.full_state_dict())


RANKS = """
import sys
from pathlib import Path
import torch.distributed as dist
from rlinf.channels.process_group import ProcessGroupInfo
from tests.rlinf.trainers.test_threaded_data_parallel import loss, records
from tests.rlinf.trainers.test_options import LR, assert_close, make

folder, channels, kind, rank = *map(Path, sys.argv[1:3]), sys.argv[3], int(sys.argv[4])
world = ProcessGroupInfo(rank, 2, rank, rendezvous_file=channels / "group-n.json")
alone = make(folder)
device = f"cuda:{rank}" if kind == "cuda" else kind
both = make(folder, world, fsdp_wrap_min_mb=0, device=device)
assert ("nccl" in dist.get_backend_config()) == (kind == "cuda")
for _ in range(2):
    right, mine = (trainer.step(records(), loss, lr=LR) for trainer in (alone, both))
    assert abs(mine["loss"] - right["loss"]) < 1e-5 * abs(right["loss"])
assert_close(both, alone, LR / 50)
print("ok")
"""


def test_two_processes_share_a_module(folder: Path, tmp_path: Path, device: str) -> None:
    """On GPUs they meet by NCCL."""
    need_two(device)
    run_ranks(RANKS, 2, folder, tmp_path, device)
