"""Weights of a trainer on a device reach an engine of another process on a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.devices import need_two
from tests.rlinf.trainers.ranks import run_ranks
from tests.rlinf.trainers.test_threaded_data_parallel import folder

__all__ = ["folder"]
START = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.engines.transformers import TransformersConfig, TransformersEngine
from rlinf.models.causal_lm import CausalLM
from tests.rlinf.trainers.test_options import LR, make
from tests.rlinf.trainers.test_threaded_data_parallel import CONFIG, loss, records

folder, out = map(Path, sys.argv[1:3])
kind, case = sys.argv[3:5]
rank, size = map(int, sys.argv[5:])
several = kind == "cuda" and torch.cuda.device_count() > 1
device = f"cuda:{rank}" if several else f"{kind}:0" if kind == "cuda" else kind
world = ProcessGroupInfo(rank, size, rank, rendezvous_file=out / "group-w.json")


def create_engine():
    engine = TransformersEngine(TransformersConfig(device=device), CausalLM, CONFIG)
    engine.load(folder, 0)
    return engine


def assert_has(engine, weights, dtype=torch.float32):
    state = engine._module.state_dict()
    assert {tensor.device.type for tensor in state.values()} == {kind}
    for name, tensor in weights.items():
        assert torch.equal(state[name].cpu().to(dtype), tensor.to(dtype)), name
"""
NODE_COPY = (
    START
    + """
from rlinf.weights.node_copy import collect_once_per_node

if case == "sharded":
    trainer = make(folder, world, device=device, fsdp_wrap_min_mb=0)
else:  # a copy of the model in each process, which may share one GPU
    world.init_process_group("cpu")
    trainer = make(folder, device=device)
engine = create_engine()
for version in (1, 2):
    trainer.step(records(), loss, lr=LR)
    weights = collect_once_per_node(trainer.stream_weights, is_needed=True)
    assert {tensor.device.type for tensor in weights.values()} == {"cpu"}
    right = trainer.full_state_dict(copy=True)
    for name, tensor in right.items():
        assert torch.equal(tensor, weights[name]), name
    engine.load_state(weights.items(), version)
    assert_has(engine, right)
    del weights
dist.barrier()
dist.destroy_process_group()
print("ok")
"""
)
BROADCAST = (
    START
    + """
from rlinf.weights.broadcast import WeightBroadcast
from stages.worker.weight_transfer import create_process_group

backend = "nccl" if kind == "cuda" else "gloo"
group = create_process_group(backend, dist.FileStore(str(out / "store"), size), rank, size)
end = WeightBroadcast(group, 0, device)
trainer = make(folder, device=device)
engine = create_engine()
for version in (1, 2):
    trainer.step(records(), loss, lr=LR)
    right = trainer.full_state_dict(copy=True)
    if rank == 0:
        digest = end.send(version, right, dtype=torch.bfloat16, bucket_bytes=4096)
    else:
        got = end.receive()
        assert got.version == version
        engine.load_state(got.tensors.items(), version)
        assert_has(engine, right, torch.bfloat16)
end.close()
del group, end
print("ok")
"""
)


@pytest.mark.parametrize("case", ["replicated", "sharded"])
def test_processes_of_a_node_collect_one_copy(
    folder: Path, tmp_path: Path, device: str, case: str
) -> None:
    if case == "sharded":
        need_two(device)
    run_ranks(NODE_COPY, 2, folder, tmp_path, device, case)


def test_a_broadcast_reaches_the_engine_of_another_process(
    folder: Path, tmp_path: Path, device: str
) -> None:
    need_two(device)
    run_ranks(BROADCAST, 2, folder, tmp_path, device, "broadcast")
