"""Minutes from a clone to the first trained iteration, by the commands of docs/start/own-data.md.

A new clone of this checkout, a new environment and a new cache of packages; packages come from the
index that pip is configured for.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.row import BenchmarkRow, median_row
from rlinf import package_paths
from tests.docs.commands import commands_of

PAGE = package_paths.ROOT / "docs" / "start" / "own-data.md"


def measure() -> list[BenchmarkRow]:
    """Measure both rows."""
    commands = commands_of(PAGE.read_text())
    last = next(i for i, command in enumerate(commands) if command.startswith("rlinf run"))
    commands = commands[: last + 1]
    with tempfile.TemporaryDirectory() as name:
        script = "\n".join(commands).replace("URL", str(package_paths.ROOT))
        env = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        env |= {"XDG_CACHE_HOME": f"{name}/cache", "PIP_CACHE_DIR": f"{name}/cache/pip"}
        start = time.monotonic()
        subprocess.run(["bash", "-ec", script], cwd=name, env=env, check=True)
        minutes = (time.monotonic() - start) / 60
        if not (Path(name) / "rlinf/runs/first/it/0000/sync/manifest.json").exists():
            raise RuntimeError("the run did not finish its first iteration")
    return [
        median_row("first_iteration_minutes", [minutes], "min", 10.0, "lower"),
        median_row("first_iteration_commands", [float(len(commands))], "commands", 6.0, "lower"),
    ]
