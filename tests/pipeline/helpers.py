"""Comparing runs and starting drivers as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from rlinf import tree


def contents(run: Path) -> dict[str, str]:
    """Content digest of every committed stage of a run."""
    return {
        str(path.relative_to(run).parent): json.loads(path.read_text())["content"]
        for path in sorted(run.rglob("manifest.json"))
    }


def moves(run: Path) -> Counter[str]:
    """How often stages of iterations after the first, and evaluations, moved what they keep."""
    names: Counter[str] = Counter()
    for pattern in ("it/000[1-9]/*/manifest.json", "evaluate/000[1-9]/manifest.json"):
        for path in run.glob(pattern):
            names.update(span["name"] for span in json.loads(path.read_text())["timing"]["spans"])
    return Counter({name: names[name] for name in ("offload", "onload")})


def budget_gib(run: Path, models: float) -> float:
    """As large as so many copies of the weights of a run."""
    weights = next((run / "warm_start").glob("data-*/weights/model.safetensors"))
    return models * weights.stat().st_size / (1 << 30)


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
