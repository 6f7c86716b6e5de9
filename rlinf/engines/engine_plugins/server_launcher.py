"""Run a module as a server that exits when its parent process exits.

    python server_launcher.py FD MODULE ARGUMENT...

This file runs under the server's interpreter and uses only the standard library. ``FD`` is the read
end of a pipe; nothing is written to the other end. The pipe closes when the parent exits, for any
reason. (A parent-death signal would be sent when the *thread* that started the server exits.)
"""

import contextlib
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

SHM = Path("/dev/shm")


def kill_group(pgid: int) -> None:
    """Kill a process group and delete its shared memory, which would remain otherwise."""
    for path in shared_memory(pgid):
        with contextlib.suppress(OSError):
            path.unlink()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)


def shared_memory(pgid: int) -> set[Path]:
    """Return the files in ``/dev/shm`` that a process group has mapped, except served weights."""
    mapped: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # State, parent and group follow the process name, which may contain any character.
            status = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(status[2]) == pgid:
                lines = (process / "maps").read_text(errors="replace").splitlines()
                paths = (Path(line.split(maxsplit=5)[-1]) for line in lines)
                mapped |= {path for path in paths if path.parent == SHM}
    return {path for path in mapped if not path.name.startswith("rlinf-")}


def watch_parent(pipe: int) -> None:
    """Kill this process and its group when the pipe closes."""
    os.read(pipe, 1)
    kill_group(os.getpgrp())


if __name__ == "__main__":
    pipe, module = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(pipe, False)
    threading.Thread(target=watch_parent, args=(pipe,), daemon=True).start()
    # This file's folder must not be on the module search path; PYTHONPATH has the other folders.
    sys.path[0:1] = []
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
