"""Programs that tests run in several processes at once, one for each rank."""

from __future__ import annotations

import subprocess
import sys

from rlinf import package_paths


def run_ranks(program: str, size: int, *words: object, python: str = sys.executable) -> None:
    """Run a program as ``size`` processes and wait for them; the last line of each must be "ok".

    Args:
        words: first arguments of the program; its rank and ``size`` follow them.
        python: the interpreter.
    """
    first = [python, "-c", program, *map(str, words)]
    processes = [
        subprocess.Popen(
            [*first, str(rank), str(size)],
            cwd=package_paths.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    ended = [process.communicate(timeout=560) for process in processes]
    # DeepSpeed prints what it runs on, too.
    assert all(out.endswith("ok\n") for out, _ in ended), "\n".join(e[-3000:] for _, e in ended)
    assert not any(process.returncode for process in processes), ended
