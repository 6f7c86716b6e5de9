"""A vision-language-action policy that acts by tokens, imitated and then learning from rewards: the
share of 200 held-out starts of Meta-World's drawer-close-v3 that it solves before and after.

Needs ``make env NAME=metaworld``.
"""

from __future__ import annotations

from benchmarks.row import BenchmarkRow
from benchmarks.score_gain import RUNS, gain_rows, run_rlinf
from pipeline.commands.results import RunResults


def measure() -> list[BenchmarkRow]:
    """See the module."""
    return measured("vla", "metaworld_vla")


def measured(prefix: str, experiment: str) -> list[BenchmarkRow]:
    """The same of an experiment, on two processes of simulators."""
    name = f"{experiment}_200"
    words = (
        "evaluate.samples=200",
        "++task.num_processes=2",
        f"run.root={RUNS}",
        f"run.name={name}",
    )
    run_rlinf("run", f"experiment={experiment}", *words)
    return gain_rows(prefix, RunResults.open(RUNS / name), 15)
