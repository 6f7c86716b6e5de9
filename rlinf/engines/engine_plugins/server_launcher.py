"""Run a module as a server that ends with the process that started it.

    python start.py FD MODULE ARGUMENT...

Run under the server's own interpreter; the standard library alone. ``FD`` is the reading end of a
pipe whose other end nobody writes to: it ends when the process that holds it does, however that
happens. (A signal at the death of the parent would come when the *thread* ends that started this.)
"""

import contextlib
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

SHM = Path("/dev/shm")


def kill_group(group: int) -> None:
    """Kill a process group, and free its shared memory, which killed processes leave."""
    for path in shared_memory(group):
        with contextlib.suppress(OSError):
            path.unlink()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def shared_memory(group: int) -> set[Path]:
    """Files in ``/dev/shm`` that processes of a group have mapped; not the weights they serve."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # State, parent and group, after a name that may hold anything.
            status = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(status[2]) == group:
                lines = (process / "maps").read_text(errors="replace").splitlines()
                paths = (Path(line.split(maxsplit=5)[-1]) for line in lines)
                found |= {path for path in paths if path.parent == SHM}
    return {path for path in found if not path.name.startswith("rlinf-")}


def watch_parent(pipe: int) -> None:
    """End this process and its group once the pipe ends."""
    os.read(pipe, 1)
    kill_group(os.getpgrp())


if __name__ == "__main__":
    pipe, module = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(pipe, False)
    threading.Thread(target=watch_parent, args=(pipe,), daemon=True).start()
    # The folder of this file is no place to import from; what else is there says PYTHONPATH.
    sys.path[0:1] = []
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
