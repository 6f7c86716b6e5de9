"""Whether the process that left something behind still runs: by its number and when it began.

A number is used again after a while, so it is told with the start of the process (field 22 of
``/proc/PID/stat``, in clock ticks since boot, see proc(5)). Both mean something in one boot of one
machine and, with containers, in one space of process numbers.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

DEAD_STATES = "ZX"
"""State letters of processes that ended."""


def process_state_and_start(pid: int) -> tuple[str, int]:
    """State letter and start of a process, in ticks; ``("X", 0)`` when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X", 0
    # The name before may hold anything, brackets too.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def is_alive(pid: int, start_time: int) -> bool:
    """Whether the process with this number and start runs."""
    state, start = process_state_and_start(pid)
    return state not in DEAD_STATES and start == start_time


def own_start_time() -> int:
    """Of this process, in ticks."""
    return process_state_and_start(os.getpid())[1]


@cache
def boot_id() -> str:
    """This boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


@cache
def pid_namespace() -> int:
    """The space that process numbers of this process are from."""
    return Path("/proc/self/ns/pid").stat().st_ino
