"""What processes use is seen while they use it."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from typing import Any

from stages.resource_usage import UsageMeter, sample_usage

BUSY = "import sys\nx = bytearray(b'1') * (80 << 20)\nprint(flush=True)\nwhile True: pass"


def test_children_count_and_what_they_used_stays_when_they_end() -> None:
    before = sample_usage()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        deadline = time.monotonic() + 60
        while (during := sample_usage()).cpu_s < before.cpu_s + 0.2 and time.monotonic() < deadline:
            time.sleep(0.05)
        child.kill()
        child.wait()
    assert during.cpu_s >= before.cpu_s + 0.2
    assert during.memory_bytes > before.memory_bytes + (80 << 20)
    after = sample_usage()
    assert after.cpu_s >= during.cpu_s - 0.02  # a tick of each counter
    assert after.memory_bytes < during.memory_bytes - (40 << 20)


def test_a_peak_between_beginning_and_end_is_seen() -> None:
    meter, found = UsageMeter(interval_s=0.01), list[dict[str, Any]]()
    # Not from the heap, which may have room that is resident already.
    with meter.measure(found, rank=3), mmap.mmap(-1, 64 << 20) as held:
        held.write(b"1" * (64 << 20))
        time.sleep(0.2)
    (entry,) = found
    assert entry["rank"] == 3
    assert entry["seconds"] >= 0.2
    assert entry["memory_peak_bytes"] >= entry["memory_mean_bytes"] > 0
    assert entry["memory_peak_bytes"] > sample_usage().memory_bytes + (32 << 20)


def test_two_windows_at_once_get_the_same_samples_and_a_failing_one_ends() -> None:
    meter, outer, inner = (
        UsageMeter(interval_s=0.01),
        list[dict[str, Any]](),
        list[dict[str, Any]](),
    )
    try:
        with meter.measure(outer), meter.measure(inner):
            time.sleep(0.05)
            raise OSError
    except OSError:
        pass
    assert len(outer) == len(inner) == 1
    assert not meter._windows


def test_without_a_gpu_in_use_nothing_is_said_of_one() -> None:
    sample = sample_usage()
    assert (sample.gpu_share, sample.gpu_bytes, sample.gpu_total_bytes) == (None, None, None)
