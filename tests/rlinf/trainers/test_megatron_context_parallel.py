"""Positions of a sequence are shared out over processes, and come together again."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf import package_paths
from rlinf.trainers.megatron.parallel_dims import gather_order, local_positions
from tests.environments import need_environment


@given(processes=st.integers(1, 8), half=st.integers(1, 9))
def test_what_is_shared_out_comes_together_in_order(processes: int, half: int) -> None:
    length = 2 * processes * half
    sequence = torch.randn(length, 3)
    parts = [sequence[local_positions(length, processes, rank)] for rank in range(processes)]
    assert {len(part) for part in parts} == {2 * half}
    assert torch.equal(torch.cat(parts)[gather_order(length, processes)], sequence)


@given(processes=st.integers(1, 8), half=st.integers(1, 9))
def test_all_have_as_much_to_attend_to(processes: int, half: int) -> None:
    """A position sees itself and all before it."""
    length = 2 * processes * half
    work = {int((local_positions(length, processes, r) + 1).sum()) for r in range(processes)}
    assert len(work) == 1


THEIRS = """
import json, sys
import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

length, processes = json.loads(sys.argv[1])
parallel_state.get_context_parallel_world_size = lambda: processes
found = []
for rank in range(processes):
    parallel_state.get_context_parallel_rank = lambda: rank
    batch = get_batch_on_this_cp_rank({"tokens": torch.arange(length)[None]})
    found.append(batch["tokens"][0].tolist())
print(json.dumps(found))
"""


@pytest.mark.parametrize(("length", "processes"), [(24, 3), (32, 4)])
def test_they_are_shared_out_as_megatron_does(length: int, processes: int) -> None:
    done = subprocess.run(
        [need_environment("megatron"), "-c", THEIRS, json.dumps([length, processes])],
        cwd=package_paths.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    own = [local_positions(length, processes, rank).tolist() for rank in range(processes)]
    assert json.loads(done.stdout.splitlines()[-1]) == own
