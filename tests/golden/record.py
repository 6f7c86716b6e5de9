"""Record the digests anew: ``python -m tests.golden.record [RUN ...]``.

For a change that is meant to change bytes. The commit says which values changed, and why.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.golden.runs import DIGESTS, PORTABLE, RUNS, command, recorded, save
from tests.pipeline.helpers import contents, start_driver


def record(name: str) -> dict[str, str]:
    """Content digests of one run in one process: stage folder, then digest."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        log = root / "log"
        if start_driver(command(name, "process", root), log, PORTABLE).wait() != 0:
            raise SystemExit(log.read_text())
        return contents(root / "run")


def main(names: list[str]) -> None:
    """Record the named runs, or all, and keep the digests of the others."""
    known = recorded() if DIGESTS.exists() else {}
    runs = known | {name: record(name) for name in names or RUNS}
    save(runs)


if __name__ == "__main__":
    main(sys.argv[1:])
