"""Stages of a run one after the other in this process, for measurements of their own loops."""

from __future__ import annotations

from pathlib import Path

from pipeline.driver import InProcess, call_of
from pipeline.flow import Graph, Node
from pipeline.run import Run


def run_node(run: Run, graph: Graph, executor: InProcess, node: Node) -> Path:
    """Run a stage instance; returns the folder of its output."""
    call = call_of(run, graph, node)
    executor.start(node, call)
    (outcome,) = executor.ended().values()
    if outcome.error:
        raise outcome.error
    return call.out
