"""What a process is told of its machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlinf import process_tuning

FAULTS = """
import resource, sys
if sys.argv[1] == "kept":
    from rlinf import process_tuning
    process_tuning.retain_freed_memory()
import torch
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(1 << 20) for _ in range(64)]
    while blocks:
        blocks.pop()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


IN_THREADS = """
import resource, sys, threading
if sys.argv[1] == "kept":
    from rlinf import process_tuning
    process_tuning.retain_freed_memory()
over = threading.Event()
def step(done):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * 100_000 for _ in range(300)]
    del blocks
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    done.set()
    over.wait()  # an arena is given on when its thread ends
for _ in range(4):
    done = threading.Event()
    threading.Thread(target=step, args=(done,)).start()
    done.wait()
over.set()
"""


GAPS = """
import sys
if sys.argv[1] == "kept":
    from rlinf import process_tuning
    process_tuning.retain_freed_memory()
import psutil, torch
before = psutil.Process().memory_info().rss
small = []
for size in range(33, 65):
    block = torch.ones(size << 18)
    small.append(torch.ones(1 << 18))
    del block
print((psutil.Process().memory_info().rss - before) >> 20)
"""


def faults(how: str, program: str = FAULTS) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", program, how], capture_output=True, text=True, check=True
    )
    return [int(line) for line in done.stdout.split()]


def test_a_step_touches_the_pages_of_the_one_before() -> None:
    """256 MiB are 65,536 pages; clearing them takes longer than many a step.

    By itself glibc comes to keep blocks that it has seen often, or not, depending on what else
    there is.
    """
    given_back, kept = (sum(faults(how)[1:3]) for how in ("given back", "kept"))
    assert given_back > 50_000
    assert kept < given_back / 4


def test_a_thread_touches_the_pages_of_the_one_before() -> None:
    """30 MB are 7,300 pages; by itself glibc has an arena for each thread that is there."""
    apart, together = faults("given back", IN_THREADS), faults("kept", IN_THREADS)
    assert apart[-1] > 5_000
    assert together[0] > 5_000
    assert together[-1] < 500


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    values = process_tuning.child_environment()
    assert values["OMP_NUM_THREADS"] == "7"
    assert values["OMP_WAIT_POLICY"] == "PASSIVE"


def test_blocks_of_larger_models_leave_no_gaps() -> None:
    """Each a little larger than the last, with a small one that stays after it: 1.5 GiB in all."""
    (kept,) = faults("kept", GAPS)
    assert kept < 150, "MiB; 32 of them are the small ones"
