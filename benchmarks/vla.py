"""A vision-language-action policy that acts by tokens, imitated and then learning from rewards: the
share of 200 held-out starts of Meta-World's drawer-close-v3 that it solves before and after.

Needs ``make env NAME=metaworld``.
"""

from __future__ import annotations

from benchmarks.gain import RUNS, gain, rlinf
from benchmarks.row import Row
from pipeline.commands.results import Results


def measure() -> list[Row]:
    """See the module."""
    return measured("vla", "metaworld_vla")


def measured(prefix: str, experiment: str) -> list[Row]:
    """The same of an experiment, on two processes of simulators."""
    name = f"{experiment}_200"
    words = ("evaluate.samples=200", "++task.processes=2", f"run.root={RUNS}", f"run.name={name}")
    rlinf("run", f"experiment={experiment}", *words)
    return gain(prefix, Results.of(RUNS / name), 15)
