"""Comparing runs and starting drivers as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rlinf import tree


def contents(run: Path) -> dict[str, str]:
    """Content digest of every committed stage of a run."""
    return {
        str(path.relative_to(run).parent): json.loads(path.read_text())["content"]
        for path in sorted(run.rglob("manifest.json"))
    }


def start_driver(
    words: list[str], log: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """``python -m rlinf.launch`` as a process of its own."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "rlinf.launch", *words],
            cwd=tree.ROOT,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
