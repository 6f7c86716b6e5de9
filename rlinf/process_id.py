"""Process identity: a process id together with the process's start time.

Process ids are reused, so they are stored with the start time of the process (field 22 of
``/proc/PID/stat``, in clock ticks since boot, see proc(5)). Both are valid for one boot of one
machine and, with containers, one PID namespace.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

DEAD_STATES = "ZX"
"""State letters of ended processes."""


def process_state_and_start(pid: int) -> tuple[str, int]:
    """Return the state letter and start time in ticks; ``("X", 0)`` if there is no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X", 0
    # The process name before these fields may contain anything, also brackets.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def is_alive(pid: int, start_time: int) -> bool:
    """Return whether the process with this id and start time runs."""
    state, start = process_state_and_start(pid)
    return state not in DEAD_STATES and start == start_time


def own_start_time() -> int:
    """Return the start time of this process in ticks."""
    return process_state_and_start(os.getpid())[1]


@cache
def boot_id() -> str:
    """Return the id of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


@cache
def pid_namespace() -> int:
    """Return the id of the PID namespace of this process."""
    return Path("/proc/self/ns/pid").stat().st_ino
