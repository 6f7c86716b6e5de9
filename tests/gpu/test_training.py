"""Training on a GPU: what a CPU computes, the types of a GPU, and processes that meet by NCCL.

``make test-gpu`` runs these; elsewhere they are skipped.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.trainers.fsdp import FSDPTrainer
from tests.rlinf.trainers.test_options import LR, make
from tests.rlinf.trainers.test_threaded_data_parallel import folder, loss, records

__all__ = ["folder"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
GPU: dict[str, Any] = {"device": "cuda"}


def steps(trainer: FSDPTrainer, count: int = 2) -> list[dict[str, float]]:
    return [trainer.step(records(), loss, lr=LR) for _ in range(count)]


def assert_like_cpu(folder: Path, relative: float, rates: float, **options: Any) -> FSDPTrainer:
    """An update on the GPU is that of one process on the CPU in float32.

    Args:
        relative: what loss and norm may differ by.
        rates: what weights may, in learning rates.
    """
    cpu, gpu = make(folder), make(folder, **GPU, **options)
    assert next(gpu.policy.module.parameters()).device.type == "cuda"
    for right, mine in zip(steps(cpu), steps(gpu), strict=True):
        assert mine["loss"] == pytest.approx(right["loss"], rel=relative)
        assert mine["grad_norm"] == pytest.approx(right["grad_norm"], rel=relative)
    theirs = cpu.full_state_dict()
    for name, tensor in gpu.full_state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=rates * LR, msg=name)
    return gpu


@pytest.mark.parametrize("packing", [False, True])
def test_an_update_is_that_of_a_cpu(folder: Path, packing: bool) -> None:
    assert_like_cpu(folder, 1e-5, 0.02, packing=packing)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_update_in_half_precision_by_fsdp2_is_close(folder: Path, dtype: str) -> None:
    """One process shards its module too where it computes in another type than it trains."""
    gpu = assert_like_cpu(folder, 5e-2, 4.2, param_dtype=dtype)
    assert all(hasattr(p, "device_mesh") for p in gpu.policy.module.parameters())


def test_layers_are_computed_again_and_moments_wait_on_the_host(folder: Path) -> None:
    options = {"gradient_checkpointing": True, "offload_optimizer": True}
    gpu = assert_like_cpu(folder, 1e-5, 0.02, **options)
    moments = [t for state in gpu.optimizer.state.values() for t in state.values() if t.dim()]
    assert moments
    assert {tensor.device.type for tensor in moments} == {"cpu"}


def test_a_state_goes_on_from_gpu_to_cpu(folder: Path, tmp_path: Path) -> None:
    gpu, cpu = make(folder, **GPU), make(folder)
    steps(gpu)
    gpu.save(tmp_path, gpu.snapshot())
    cpu.load(tmp_path)
    for mine, theirs in zip(steps(gpu), steps(cpu), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.skipif(find_spec("flash_attn") is None, reason="the package flash-attn is not there")
def test_flash_attention_on_packed_rows_is_that_of_padded_ones(folder: Path) -> None:
    packed, padded = (
        make(folder, **GPU, param_dtype="bfloat16", packing=packing) for packing in (True, False)
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


RANKS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from rlinf.channels.process_group import ProcessGroupInfo
from tests.rlinf.trainers.test_threaded_data_parallel import loss, records
from tests.rlinf.trainers.test_options import LR, assert_close, make

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
world = ProcessGroupInfo(rank, 2, rank, rendezvous_file=folder.parent / "channels" / "group-n.json")
alone = make(folder)
both = make(folder, world, fsdp_wrap_min_mb=0, device=f"cuda:{rank}")
assert "nccl" in dist.get_backend_config()
for _ in range(2):
    right, mine = (trainer.step(records(), loss, lr=LR) for trainer in (alone, both))
    assert abs(mine["loss"] - right["loss"]) < 1e-5 * abs(right["loss"])
assert_close(both, alone, LR / 50)
print("ok")
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two GPUs")
def test_two_processes_meet_by_nccl(folder: Path) -> None:
    (folder.parent / "channels").mkdir(exist_ok=True)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(folder), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=280) for process in processes]
    assert [out for out, _ in outputs] == ["ok\n"] * 2, outputs
