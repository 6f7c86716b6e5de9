"""Run a module as a server that ends with the process that started it.

    python start.py FD MODULE ARGUMENT...

Run under the server's own interpreter; the standard library alone. ``FD`` is the reading end of a
pipe whose other end nobody writes to: it ends when the process that holds it does, however that
happens. (A signal at the death of the parent would come when the *thread* ends that started this.)
"""

import os
import runpy
import signal
import sys
import threading


def watch(pipe: int) -> None:
    """Kill this process and its group once the pipe ends."""
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    pipe, module = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(pipe, False)
    threading.Thread(target=watch, args=(pipe,), daemon=True).start()
    # The folder of this file is no place to import from; what else is there says PYTHONPATH.
    sys.path[0:1] = []
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
