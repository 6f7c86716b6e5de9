"""Engine and trainer take turns on a device whose memory holds only one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlinf.device_memory import DeviceMemoryManager, MemorySize
from rlinf.engines.transformers import TransformersConfig, TransformersEngine
from rlinf.models.causal_lm import CausalLM
from rlinf.trainers.fsdp import FSDPTrainer
from tests.gpu.test_generation import assert_equal, generate
from tests.rlinf.trainers.test_options import LR, make
from tests.rlinf.trainers.test_threaded_data_parallel import CONFIG, folder, loss, records

__all__ = ["folder"]


def total(holder: FSDPTrainer | TransformersEngine) -> MemorySize:
    sizes = holder.group_sizes().values()
    return MemorySize(*(sum(column) for column in zip(*sizes, strict=True)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_one_that_waits_leaves_and_comes_back_unchanged(
    folder: Path, device: str, dtype: str
) -> None:
    """With bfloat16, FSDP2 shards the module even of one process."""
    moving, fixed = (make(folder, device=device, param_dtype=dtype) for _ in range(2))
    engine = TransformersEngine(TransformersConfig(device=device), CausalLM, CONFIG)
    engine.load(folder, 0)
    before = generate(engine, 12)
    for trainer in (moving, fixed):
        trainer.step(records(), loss, lr=LR)  # creates the optimizer's state
    manager = DeviceMemoryManager(torch.device(device), sum(total(moving)))
    manager.acquire(engine)
    for _ in range(3):
        manager.acquire(moving)
        assert total(engine).on_device == 0
        mine, right = (trainer.step(records(), loss, lr=LR) for trainer in (moving, fixed))
        assert mine == pytest.approx(right, rel=1e-5)
        manager.offload_all()
        manager.acquire(engine)
        assert (total(moving).on_device, total(engine).on_host) == (0, 0)
        assert_equal(generate(engine, 12), before)
    manager.acquire(moving)
    theirs = fixed.full_state_dict()
    for name, tensor in moving.full_state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=LR / 50, msg=name)


def test_offloaded_memory_is_free_for_other_processes(folder: Path, device: str) -> None:
    trainer = make(folder, device=device)
    trainer.step(records(), loss, lr=LR)
    manager = DeviceMemoryManager(torch.device(device), 1 << 40)
    manager.acquire(trainer)
    on_device = total(trainer).on_device
    allocated = torch.cuda.memory_allocated() if device == "cuda" else on_device
    manager.offload_all()
    assert total(trainer).on_device == 0
    assert total(trainer).on_host == on_device > 0
    if device == "cuda":
        assert allocated - torch.cuda.memory_allocated() >= on_device
        assert torch.cuda.memory_reserved() < allocated
    manager.acquire(trainer)
    assert total(trainer).on_device == on_device
