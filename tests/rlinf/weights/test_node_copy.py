"""Processes of a node share one copy of the weights, if there is shared memory for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rlinf.trainers.ranks import run_ranks

PROGRAM = """
import logging, os, pathlib, sys
import torch
import torch.distributed as dist
from rlinf import shared_memory
from rlinf.safetensors_io import StreamedState
from rlinf.weights import node_copy

folder, case, rank, size = pathlib.Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
)
if case == "full":
    def refuse(name, size):
        raise node_copy.StorageError("full")
    node_copy.create_segment = refuse
if case == "nodes":  # two of the processes on each of two machines
    node_copy.shared_memory_id = lambda: f"machine {rank // 2}"
torch.manual_seed(0)
embedding = torch.randn(70_001, 3)
own = {
    "embedding": embedding,
    "head": embedding,
    "half": torch.randn(5, 7).bfloat16(),
    "count": torch.tensor(3),
    "empty": torch.zeros(0, 4),
}

def open_stream(*, copy=False):
    first = {id(tensor): name for name, tensor in reversed(own.items())}
    pairs = ((name, own[name]) for name in first.values())
    return StreamedState(own, ((n, t.clone() if copy else t) for n, t in pairs))

is_needed = rank != 2
for version in range(3):
    embedding += 1
    tensors = node_copy.collect_once_per_node(open_stream, is_needed=is_needed)
    assert (tensors is not None) == is_needed
    if tensors is None:
        continue
    assert tensors.keys() == own.keys()
    for name, tensor in own.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name
    assert tensors["head"] is tensors["embedding"]
    embedding += 1
    assert not torch.equal(tensors["embedding"], embedding), "the trainer's own tensors go on"
    embedding -= 1
dist.barrier()  # the writer has removed the name of its segment
mapped = [line for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
          if "/dev/shm/rlinf-" in line and "deleted" in line]
shares = {"shared": rank in (0, 1, 3), "full": False, "nodes": rank in (0, 1)}[case]
assert len(mapped) == shares, (rank, mapped)
segments = [path for path in pathlib.Path("/dev/shm").glob(f"rlinf-{os.getuid()}-*")
            if f"-{os.getpid()}-" in path.name]
assert not segments, "nothing remains when a process is killed now"
if case == "shared" and is_needed:
    inode = mapped[0].split()[4]
    (folder / f"inode-{rank}").write_text(inode)
del tensors
assert "/dev/shm/rlinf-" not in pathlib.Path("/proc/self/maps").read_text()
dist.barrier()
dist.destroy_process_group()
print("ok")
"""


@pytest.mark.parametrize("case", ["shared", "full", "nodes"])
def test_processes_of_a_node_share_the_weights(case: str, tmp_path: Path) -> None:
    run_ranks(PROGRAM, 4, tmp_path, case)
    inodes = {path.read_text() for path in tmp_path.glob("inode-*")}
    assert len(inodes) == (case == "shared")
