"""Tuning of a process to its machine: few threads that do not spin, and retained memory.

Small models become several times slower when threads spin at barriers on busy cores. A stage sets
how many threads it uses from the configuration (``engine.threads``, ``trainer.cpu_threads``).

Every step frees and allocates the same large blocks. glibc returns such blocks to the system, which
zeroes each page when it is next touched; for small models this takes about as long as the
arithmetic. Blocks of at least 32 MiB, as large models have, are still mapped one by one and
returned. In the heap they would leave gaps that blocks of other sizes do not fill: a test with 32
blocks of 33 to 64 MiB, each freed before the next, took 1.5 GiB in the heap and 64 MiB mapped.

Each stage of each iteration runs in its own thread, and glibc gives threads up to eight arenas per
core, none of which uses memory that is free in another. A run of small models in two pools on two
cores was measured with one arena. In the 200 iterations after the 150th, its workers grew by 0.1 to
0.8 MiB instead of 1.0 to 2.4, and they used 6 to 16 MiB less. An iteration took 1 % less time and
1 % more processor time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal

DEFAULT_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, ARENA_MAX = -1, -2, -3, -8
"""Parameters of glibc's ``mallopt``, from its malloc.h."""
MALLOC_SETTINGS = {
    MMAP_THRESHOLD: 32 << 20,
    TRIM_THRESHOLD: 2**31 - 1,
    TOP_PAD: 64 << 20,
    ARENA_MAX: 1,
}
"""Blocks come from one heap, which grows in large steps and does not shrink. Blocks of at least
32 MiB, the highest possible threshold, come from the system."""


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def child_environment() -> dict[str, str]:
    """Return the variables for a child process; values that the user set are kept."""
    return {name: os.environ.get(name, value) for name, value in DEFAULT_ENVIRONMENT.items()}


def tune_process() -> None:
    """Set the variables in this process before torch is imported, and retain freed memory."""
    os.environ.update(child_environment())
    retain_freed_memory()
    raise_open_file_limit()


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files to the hard one.

    The soft limit is usually 1024, because ``select`` cannot handle higher file numbers. A run
    needs several open files for each connected process, worker and block of shared memory.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def retain_freed_memory() -> None:
    """Let glibc reuse freed memory; other C libraries are not changed."""
    try:
        mallopt = _LIBC.mallopt
    except AttributeError:
        return
    for parameter, value in MALLOC_SETTINGS.items():
        mallopt(parameter, value)


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this child process when its parent thread ends, for whatever reason.

    Args:
        parent: the parent's process id, if it may end before this call.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
