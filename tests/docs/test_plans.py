"""The plans that the pages show are valid and become the jobs that the pages describe."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from pipeline.commands.experiment import run_experiment
from pipeline.graph import Graph
from pipeline.plan import Plan, parse_plan
from pipeline.resources import ClusterConfig, job_resources, pool_resources, with_default_gpus
from rlinf.config import RunConfig, validate
from slurm.inventory import NodeGroup, PartitionInventory
from tests.docs.figures import handwritten

Compose = Callable[..., dict[str, Any]]
NO_PLANS = {"kinds", "sbatch", "account", "dataset_path"}
"""Keys of other YAML on the pages: problems of the simulator, site files, tasks of lm-eval."""
EXAMPLES = {"own-parts", "environment"}
"""Pages whose YAML are files of the examples, which tests/test_extending.py runs."""
PARTITIONS = {
    name: PartitionInventory(
        name=name,
        groups=(
            NodeGroup(
                count=8,
                gpu_type=gpu,
                gpus_per_node=4 * bool(gpu),
                cpus_per_node=64,
                mem_mb_per_node=10**6,
            ),
        ),
        time_limit_min=None,
    )
    for name, gpu in {"cpu": "", "spot": "a100", "a100": "a100", "h100": "h100"}.items()
}


def blocks() -> dict[str, dict[str, Any]]:
    """Return the plans by page and place on it."""
    found = {}
    for page in [page for page in handwritten() if page.stem not in EXAMPLES]:
        for number, text in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S)):
            if not any(re.search(rf"\b{key}:", text) for key in NO_PLANS):
                found[f"{page.stem}-{number}"] = yaml.safe_load(text)
    return found


PLANS = blocks()
JOBS: dict[str, list[tuple[str, int, int]]] = {
    "elastic-pools-0": [("spot", 1, 1)] * 4 + [("h100", 1, 1)],
    "elastic-pools-1": [("spot", 1, 1)] * 2 + [("h100", 1, 1)],
    "elastic-pools-2": [("a100", 1, 1)] * 4 + [("h100", 1, 1)] * 3,
    "elastic-pools-3": [("a100", 1, 1)] * 2 + [("h100", 1, 1)],
    "pools-0": [("local", 1, 0)],
    "pools-1": [("local", 1, 0)] * 4,
    "pools-2": [("local", 1, 0)] * 2,
    "pools-3": [("a100", 1, 4), ("h100", 1, 4)],
    "pools-4": [("h100", 1, 1), ("h100", 2, 2), ("a100", 1, 2)],
    "pools-5": [("a100", 1, 2), ("h100", 1, 2)],
    "pools-6": [("local", 1, 0)] * 2,
    "pools-7": [("a100", 1, 4)],
}
"""Partition, nodes and GPUs per node of the jobs of the plans with pools."""


def jobs(plan: Plan) -> list[tuple[str | None, int, int]]:
    plan = with_default_gpus(plan, PARTITIONS)
    requests = []
    for number, pool in enumerate(plan.pools):
        for slot in range(pool.workers or 1):
            for part in pool_resources(plan, number, slot):
                needs = job_resources(part, ClusterConfig())
                requests.append((needs.partition, needs.nodes, needs.gpus_per_node))
    return requests


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_on_a_page_becomes_the_jobs_that_the_page_describes(
    name: str, compose: Compose
) -> None:
    plan = parse_plan(PLANS[name], name)
    plan.check_transports(Graph(validate(RunConfig, compose())).edges())
    assert jobs(plan) == JOBS.get(name, [])


def test_no_page_lost_its_plan() -> None:
    assert JOBS.keys() <= PLANS.keys()
    train = parse_plan(PLANS["cluster-0"], "cluster").stage_plan("train")
    assert (train.partition, train.nodes, train.processes, train.gpus) == ("h100", 2, 4, 4)


@pytest.mark.parametrize(
    "name", ["pools-0", pytest.param("pools-1", marks=pytest.mark.slow), "pools-2"]
)
@pytest.mark.usefixtures("undrawn")
def test_the_plans_for_one_machine_run_on_it(name: str, compose: Compose) -> None:
    values = compose("cluster=local", "iterations=1", f"run.name={name}")
    run_experiment({**values, "plan": PLANS[name]})
