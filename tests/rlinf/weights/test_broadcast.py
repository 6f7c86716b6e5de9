"""Three processes on this machine: every receiver has the sender's weights, or knows it has not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COUNT = 3
PROGRAM = '''
"""Rank 0 sends three versions, the others compare; the last one is of another layout."""
import os
import sys
import time
from datetime import timedelta
import torch
import torch.distributed as dist
from rlinf.errors import WeightTransferError
from rlinf.weights.broadcast import WeightBroadcast
from rlinf.weights.buckets import BucketLayout
from tests.rlinf.weights.states import TYPES, random_tensor, same

rank, folder, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = dist.FileStore(f"{folder}/store", 3)
group = dist.ProcessGroupGloo(store, rank, 3, timedelta(seconds=60 if case != "gone" else 2))


def state(version):
    out = {str(kind): random_tensor(kind, (version + 3, 41), version) for kind in TYPES}
    out["large"] = torch.randn(5000, generator=torch.Generator().manual_seed(version))
    return out | {"tied": out["large"], "empty": torch.empty(0, 3), "scalar": torch.tensor(version)}


def wanted(version):
    cast = {k: t.to(torch.bfloat16) if t.dtype == torch.float32 else t
            for k, t in state(version).items() if k != "torch.float32"}
    return cast


end = WeightBroadcast(group)
if case == "gone":
    if rank == 2:
        os._exit(0)
    began = time.monotonic()
    try:
        end.send(0, state(0)) if rank == 0 else end.receive()
        # The sender has passed on what it had: the one after the missing rank may not notice.
        end.send(1, state(0)) if rank == 0 else end.receive()
    except WeightTransferError as error:
        print("gone" if "gone" in str(error) else error, time.monotonic() - began < 20)
    end.close()
    del group, end
    sys.exit()
if case == "damage" and rank == 0:
    pack = BucketLayout.pack_bucket
    started = end._start_broadcast

    def start(buffer):
        # As a bad link would: after the checksum was made. Only in the first version.
        if not hasattr(end, "hurt") and len(buffer) > 4000:
            end.hurt = True
            buffer[100] ^= 1
        return started(buffer)

    end._start_broadcast = start
for version in (0, 1, 1, 2):
    if rank == 0:
        values = state(version)
        del values["torch.float32"]
        sent = end.send(version, values, dtype=torch.bfloat16, bucket_bytes=4096)
        print("whole", version, sent)
        continue
    try:
        got = end.receive()
        assert got.version == version
        assert same(got.tensors, wanted(version)), version
        assert got.tensors["tied"] is got.tensors["large"]
        print("whole", version, got.digest)
    except WeightTransferError as error:
        print("refused", version, "1 of" in str(error))
# What is left of it when Python ends would end the process.
end.close()
del group, end
'''


def outputs(folder: Path, case: str) -> list[list[str]]:
    """What each rank says."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(folder), case],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(COUNT)
    ]
    result = []
    for process in ranks:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        result.append(output.splitlines())
    return result


@pytest.mark.parametrize("case", ["whole", "damage"])
def test_every_rank_has_every_version_or_knows_it_has_not(tmp_path: Path, case: str) -> None:
    sent, *got = outputs(tmp_path, case)
    assert [line.split()[:2] for line in sent] == [["whole", n] for n in "0112"]
    assert len({line.split()[2] for line in sent}) == 3, "each version has a digest of its own"
    if case == "damage":
        sent[0] = "refused 0 True"
    assert got == [sent, sent]


def test_the_others_notice_soon_that_a_rank_is_gone(tmp_path: Path) -> None:
    assert outputs(tmp_path, "gone")[:2] == [["gone True"], ["gone True"]]
