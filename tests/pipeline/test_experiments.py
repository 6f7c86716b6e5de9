"""The experiments that are there do what their names say."""

from __future__ import annotations

import re

import pytest

from pipeline.commands.experiment import compose
from rlinf import package_paths
from rlinf.algorithms import algorithms

NAMES = sorted(path.stem for path in (package_paths.ROOT / "configs/experiment").glob("*.yaml"))
NAMED = {
    experiment: algorithm
    for experiment in NAMES
    for algorithm in algorithms.names()
    if re.search(rf"(^|_){algorithm}(_|$)", experiment)
}


def test_most_experiments_have_the_name_of_an_algorithm() -> None:
    assert {"jsonl_grpo", "arithmetic_dapo", "cartpole_ppo", "pendulum_bc"} <= NAMED.keys()


@pytest.mark.parametrize("experiment", NAMED)
def test_an_experiment_that_is_named_after_an_algorithm_uses_it(experiment: str) -> None:
    given = [
        f"++{key}=given"
        for key in ("algorithm.offline_data", "task.train", "task.test", "model.path")
    ]
    values = compose([f"experiment={experiment}", *given])
    assert values["algorithm"]["name"] == NAMED[experiment]
