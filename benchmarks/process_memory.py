"""Peak anonymous and shared memory of processes, polled from outside.

Memory that is mapped from files does not count. Allocating a gigabyte of pages takes hundreds of
milliseconds, so polling every 2 ms misses no peak.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

POLL_INTERVAL_S = 0.002


def memory_bytes(pid: int) -> int:
    """Return the current anonymous and shared memory of a process in bytes; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = dict(line.split(":", 1) for line in text.splitlines())
    return sum(1024 * int(lines.get(name, "0 kB").split()[0]) for name in ("RssAnon", "RssShmem"))


def proportional_bytes(pid: int) -> int:
    """Return the proportional set size of a process in bytes, anonymous and shared memory only.

    A page that ``n`` processes have mapped counts as ``1 / n`` of a page in each.
    """
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    lines = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return sum(1024 * int(lines[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))


def measure_peaks(commands: Sequence[Sequence[str]]) -> list[tuple[int, int, str]]:
    """Run processes that print ``ready``, continue when they read a line, and print a result.

    Returns:
        For each process: bytes when it was ready, peak bytes after that, and its further output.

    Raises:
        RuntimeError: a process ended before it was ready, or failed.
    """
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("a process ended before it was ready")
        baselines = [memory_bytes(process.pid) for process in processes]
        peaks = list(baselines)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                raise RuntimeError("a process failed")
            peaks = [max(p, memory_bytes(q.pid)) for p, q in zip(peaks, processes, strict=True)]
            time.sleep(POLL_INTERVAL_S)
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return list(zip(baselines, peaks, outputs, strict=True))
