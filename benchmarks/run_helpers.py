"""Helpers that start a driver process, or run single stages in this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.executors import InProcessExecutor, stage_call
from pipeline.graph import Graph, StageNode
from pipeline.run import Run
from rlinf import package_paths

LOG = "log"


def start_driver(
    root: Path, plan: Mapping[str, Any], words: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start a run with its folder in ``root``; the driver writes its output to ``root/log``."""
    (root / "plan.yaml").write_text(yaml.safe_dump(dict(plan)))
    locations = [f"run.root={root}", f"plan={root}/plan.yaml"]
    with (root / LOG).open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "rlinf.launch", *words, *locations],
            cwd=package_paths.ROOT,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


def run_node(run: Run, graph: Graph, executor: InProcessExecutor, node: StageNode) -> Path:
    """Run one node of the graph; returns the folder of its output."""
    call = stage_call(run, graph, node)
    executor.start(node, call)
    (outcome,) = executor.poll().values()
    if outcome.error:
        raise outcome.error
    return call.output_folder
