"""Three processes on this machine: every receiver has the sender's weights, or knows it has not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COUNT = 3
PROGRAM = '''
"""Rank 0 sends three versions, the others compare; the last one is of another layout."""
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from rlinf.errors import TransferError
from rlinf.weights.broadcast import Broadcast
from rlinf.weights.buckets import Layout
from tests.rlinf.weights.states import TYPES, random_tensor, same

rank, folder, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3,
    timeout=timedelta(seconds=60),
)


def state(version):
    out = {str(kind): random_tensor(kind, (version + 3, 41), version) for kind in TYPES}
    out["large"] = torch.randn(5000, generator=torch.Generator().manual_seed(version))
    return out | {"tied": out["large"], "empty": torch.empty(0, 3), "scalar": torch.tensor(version)}


def wanted(version):
    cast = {k: t.to(torch.bfloat16) if t.dtype == torch.float32 else t
            for k, t in state(version).items() if k != "torch.float32"}
    return cast


end = Broadcast()
if case == "damage" and rank == 0:
    pack = Layout.pack
    started = end._start

    def start(buffer):
        # As a bad link would: after the checksum was made. Only in the first version.
        if not hasattr(end, "hurt") and len(buffer) > 4000:
            end.hurt = True
            buffer[100] ^= 1
        return started(buffer)

    end._start = start
for version in (0, 1, 1, 2):
    if rank == 0:
        values = state(version)
        del values["torch.float32"]
        end.send(version, values, dtype=torch.bfloat16, bucket_bytes=4096)
        continue
    try:
        got = end.receive()
        assert got.version == version
        assert same(got.tensors, wanted(version)), version
        assert got.tensors["tied"] is got.tensors["large"]
        print("whole", version)
    except TransferError as error:
        print("refused", version, "1 of" in str(error))
dist.destroy_process_group()
'''


@pytest.mark.parametrize("case", ["whole", "damage"])
def test_every_rank_has_every_version_or_knows_it_has_not(tmp_path: Path, case: str) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path), case],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(COUNT)
    ]
    first = "refused 0 True" if case == "damage" else "whole 0"
    for rank, process in enumerate(ranks):
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        if rank:
            assert output.splitlines() == [first, "whole 1", "whole 1", "whole 2"]
