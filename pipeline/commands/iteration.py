"""The stages of an iteration in one process: ``python -m pipeline.commands.iteration --run F ...``.

This avoids many short jobs in a workflow. Engine and trainer stay loaded between stages. Every
stage commits its output, and a committed stage is not computed again.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.executors import InProcessExecutor, stage_call
from pipeline.graph import Graph, StageNode
from pipeline.run import Run
from rlinf import process_tuning
from rlinf.errors import RlinfError
from slurm.stop_signals import StopFlag


def run_iteration(run: Run, iteration: int) -> int:
    """Run the stages of an iteration in order; returns the exit code of the first failure, or 0."""
    graph = Graph(run.config)
    with StopFlag() as stop:
        executor = InProcessExecutor(run, should_stop=stop.is_set)
        try:
            for stage in graph.flow.stages:
                node = StageNode(stage, iteration)
                executor.start(node, stage_call(run, graph, node))
                outcome = executor.poll()[node]
                if outcome.exit_code:
                    print(f"error: {node.name}: {outcome.reason}", file=sys.stderr)
                    return outcome.exit_code
        finally:
            executor.stop()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code (see ``rlinf.errors``)."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.commands.iteration", description=__doc__
    )
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("--iteration", type=int, required=True)
    arguments = parser.parse_args(argv)
    process_tuning.tune_process()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        return run_iteration(Run.open(arguments.run), arguments.iteration)
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
