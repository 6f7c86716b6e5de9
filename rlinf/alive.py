"""Whether the process that left something behind still runs: by its number and when it began.

A number is used again after a while, so it is told with the start of the process (field 22 of
``/proc/PID/stat``, in clock ticks since boot, see proc(5)). Both mean something in one boot of one
machine and, with containers, in one space of process numbers.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

DEAD = "ZX"
"""State letters of processes that ended."""


def process(pid: int) -> tuple[str, int]:
    """State letter and start of a process, in ticks; ``("X", 0)`` when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X", 0
    # The name before may hold anything, brackets too.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Whether the process with this number and start runs."""
    state, found = process(pid)
    return state not in DEAD and found == started


def own_start() -> int:
    """Of this process, in ticks."""
    return process(os.getpid())[1]


@cache
def boot() -> str:
    """This boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


@cache
def space() -> int:
    """The space that process numbers of this process are from."""
    return Path("/proc/self/ns/pid").stat().st_ino
