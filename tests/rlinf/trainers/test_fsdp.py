"""A sharded trainer: whole weights for others, and shards that leave the device and come back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMON = """
import sys
from pathlib import Path
import torch
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.device_memory import DeviceMemoryManager
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from tests.rlinf.trainers.test_threaded_data_parallel import loss, records

folder = Path(sys.argv[1])
config = CausalLMConfig(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64)
CausalLM.create(config, {"alphabet": "0123456789+="}, 0, folder)

def make():
    options = FSDPConfig(device="cpu", param_dtype="bfloat16", fsdp_wrap_min_mb=int(sys.argv[2]))
    policy = CausalLM.load(folder, config)
    return FSDPTrainer(policy, options, OptimizerSection(), ProcessGroupInfo())

trainer = make()
assert type(next(trainer.policy.module.parameters()).data).__name__ == "DTensor"
"""
WHOLE = """
before = {n: t.clone() for n, t in CausalLM.load(folder, config).module.state_dict().items()}
state = trainer.full_state_dict()
assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
assert state.keys() == before.keys()
assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
print("ok")
"""
MOVED = """
stays, moves, data = trainer, make(), records()
residency = DeviceMemoryManager(moves.device, sys.maxsize)

def need(*groups):
    residency.acquire(moves)
    residency.offload_all()
    held = [t for tensors in moves.tensor_groups().values() for t in tensors]
    held += [t for t in moves.policy.module.parameters()]  # nothing is still gathered
    assert not any(getattr(t, "_local_tensor", t).untyped_storage().nbytes()
                   for t in held if not t.is_meta)
    residency.acquire(moves, *groups)

for _ in range(2):
    for part in (data[:4], data[4:]):
        need("weights")
        for (_, one), (_, other) in zip(stays.forward(part, 1.0), moves.forward(part, 1.0)):
            assert torch.equal(one.logprobs, other.logprobs)
        need("weights", "gradients")
        stays.accumulate(part, loss)
        moves.accumulate(part, loss)
    need()
    assert stays.update(lr=1e-3) == moves.update(lr=1e-3)
need("weights")
kept, moved = stays.full_state_dict(), moves.full_state_dict()
assert all(torch.equal(kept[name], tensor) for name, tensor in moved.items())
print("ok")
"""


TAKEN = """
whole = FSDPTrainer(CausalLM.load(folder, config), FSDPConfig(device="cpu"), OptimizerSection(),
                    ProcessGroupInfo())
trainer.accumulate(records(), loss)
trainer.update(lr=1e-2)
for other in (make(), whole):
    before = other.full_state_dict(copy=True)
    other.load_weights(trainer.full_state_dict().items())
    after = other.full_state_dict()
    assert all(torch.equal(after[name], t) for name, t in trainer.full_state_dict().items())
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    assert after["lm_head.weight"] is after["model.embed_tokens.weight"]
print("ok")
"""


TOGETHER = """
import os, pickle
import torch.distributed as dist
from torch.distributed import distributed_c10d

def refuse(*arguments, **options):
    raise AssertionError("pickled, or open to strangers")

pickle.dumps = pickle.loads = refuse
distributed_c10d._object_to_tensor = distributed_c10d._tensor_to_object = refuse
sys.modules["torch.distributed.rendezvous"].TCPStore = refuse
rendezvous = folder.parent / "channels" / "group-t.json"
world = ProcessGroupInfo(int(sys.argv[3]), 2, rendezvous_file=rendezvous)

def make():
    options = FSDPConfig(device="cpu", fsdp_wrap_min_mb=0)
    return FSDPTrainer(CausalLM.load(folder, config), options, OptimizerSection(), world)

kept, again = make(), make()
kept.step(records(), loss, lr=1e-2)
kept.save(folder.parent / "checkpoint", kept.snapshot())
dist.barrier()
again.load(folder.parent / "checkpoint")
for trainer in (kept, again):
    trainer.step(records(), loss, lr=1e-2)
right, state = kept.full_state_dict(), again.full_state_dict()
assert all(torch.equal(right[name], tensor) for name, tensor in state.items())
whole = FSDPTrainer(CausalLM.load(folder, config), FSDPConfig(device="cpu"), OptimizerSection(),
                    ProcessGroupInfo())
whole.load(folder.parent / "checkpoint")
whole.step(records(), loss, lr=1e-2)
assert all(torch.allclose(right[n], t, atol=1e-5) for n, t in whole.full_state_dict().items())
print("ok")
"""


def run(program: str, folder: Path, fsdp_wrap_min_mb: int = 32) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMON + program, str(folder), str(fsdp_wrap_min_mb)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "ok\n", done.stderr


def test_weights_of_a_sharded_module_are_whole_and_tied_ones_are_one(tmp_path: Path) -> None:
    run(WHOLE, tmp_path)


@pytest.mark.parametrize("fsdp_wrap_min_mb", [0, 32])
def test_shards_leave_the_device_between_all_calls_and_no_byte_changes(
    tmp_path: Path, fsdp_wrap_min_mb: int
) -> None:
    run(MOVED, tmp_path, fsdp_wrap_min_mb)


@pytest.mark.parametrize("fsdp_wrap_min_mb", [0, 32])
def test_whole_weights_are_taken_by_sharded_and_other_trainers(
    tmp_path: Path, fsdp_wrap_min_mb: int
) -> None:
    run(TAKEN, tmp_path, fsdp_wrap_min_mb)


def test_ranks_train_and_save_without_a_pickle_or_an_open_store(tmp_path: Path) -> None:
    program = COMMON.partition("trainer = make()")[0] + TOGETHER
    processes = []
    for rank in "01":
        (tmp_path / rank).mkdir()
        command = [sys.executable, "-c", program, str(tmp_path / rank), "0", rank]
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [out for out, _ in outputs] == ["ok\n"] * 2, outputs
