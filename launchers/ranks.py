"""``python -m launchers.ranks N MODULE ARGS``: run a module as N processes of this machine."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from launchers.base import Job, tail
from launchers.local import LocalLauncher
from slurm.jobs import Resources


def main(argv: list[str]) -> int:
    """Start the processes, wait, print their logs; returns the exit code."""
    count, module, *rest = argv
    launcher = LocalLauncher()
    with tempfile.TemporaryDirectory() as logs:
        resources = Resources(tasks_per_node=int(count))
        job = Job(module, tuple(rest), Path(logs), Path(logs), resources, module)
        identity = launcher.submit(job)
        try:
            while (status := launcher.poll([identity])[identity]).state.active:
                time.sleep(launcher.poll_s)
        finally:
            launcher.close()
        for path in sorted(Path(logs).glob("*.log")):
            print(tail(path, 1000), file=sys.stderr)
    return status.exit_code or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
