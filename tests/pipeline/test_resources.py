"""The job of a pool has what each of its stages asks for, in whatever order the plan names them."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from pipeline.plan import Plan, StagePlan, parse_plan
from pipeline.resources import ClusterConfig, job_resources, pool_resources
from rlinf.errors import PlanError
from stages.progress_watchdog import TIMEOUT_VARIABLE

STAGES = ("rollout", "reward", "inference", "train")


def pooled(
    held: dict[str, int], *order: str, stages: dict[str, Any] | None = None, **defaults: Any
) -> Plan:
    """A plan of one pool."""
    pool = {"stages": list(order or STAGES), "devices": held}
    values = {"defaults": defaults, "stages": stages or {}, "pools": [pool]}
    return parse_plan(values, "plan")


def test_a_pool_has_the_most_that_any_of_its_stages_needs_in_any_order() -> None:
    stages = {
        "rollout": {"mem_mb": 1000, "time_limit_min": 600, "cpus": 2},
        "train": {"mem_mb": 900000, "time_limit_min": 30, "cpus": 16, "constraint": "80gb"},
        "inference": {"processes": 4, "speed_weights": [1.0, 1.0, 2.0, 2.0], "gpu_type": "big"},
    }
    found = [
        pool_resources(pooled({"a100": 4}, *order, stages=stages, processes=4, gpus=4), 0)
        for order in permutations(STAGES)
    ]
    (needs,) = found[0]
    assert (needs.mem_mb, needs.time_limit_min, needs.cpus) == (900000, 600, 16)
    assert (needs.constraint, needs.gpu_type) == ("80gb", "big")
    assert needs.speed_weights == (1.0, 1.0, 2.0, 2.0)
    assert (needs.nodes, needs.processes, needs.gpus) == (1, 4, 4)
    assert all(parts == (needs,) for parts in found)


def test_the_most_holds_on_each_kind_and_for_each_worker() -> None:
    stages = {"rollout": {"mem_mb": 1000}, "train": {"mem_mb": 9000}, "reward": {"cpus": 3}}
    parts = pool_resources(pooled({"a100": 2, "h100": 1}, stages=stages), 0)
    assert [(part.partition, part.mem_mb, part.cpus) for part in parts] == [
        ("a100", 9000, 3),
        ("h100", 9000, 3),
    ]
    pools = [
        {"stages": ["rollout", "evaluate"], "workers": 2, "devices": {"spot": 1}},
        {"stages": list(STAGES[1:]), "devices": {"h100": 1}},
    ]
    stages = {"rollout": {"mem_mb": 1000}, "evaluate": {"mem_mb": 9000}}
    plan = parse_plan({"stages": stages, "pools": pools}, "plan")
    assert pool_resources(plan, 0, 1)[0].mem_mb == 9000


def test_what_no_stage_says_is_left_to_the_cluster() -> None:
    (needs,) = pool_resources(pooled({"a100": 1}), 0)
    assert needs == StagePlan(partition="a100")


@pytest.mark.parametrize(
    ("rollout", "train", "words"),
    [
        ({"constraint": "ib"}, {"constraint": "80gb"}, r"rollout\.constraint: ib, but .*: 80gb"),
        ({"gpu_type": "a"}, {"gpu_type": "b"}, r"rollout\.gpu_type: a, but .*train\.gpu_type: b"),
        (
            {"processes": 2, "speed_weights": [1, 2]},
            {"processes": 2, "speed_weights": [2, 1]},
            r"rollout\.speed_weights: .* but plan\.stages\.train\.speed_weights",
        ),
        ({"nodes": 2}, {"processes": 2}, r"rollout\.nodes: 2, but .*train\.nodes: 1"),
    ],
)
def test_stages_that_say_what_no_job_can_have_at_once_are_refused(
    rollout: dict[str, Any], train: dict[str, Any], words: str
) -> None:
    plan = pooled({"a100": 2}, stages={"rollout": rollout, "train": train})
    with pytest.raises(PlanError, match=words):
        pool_resources(plan, 0)


KINDS = {"gpu:a100": 2, "gpu:h100": 2}
BOTH: dict[str, Any] = {"constraint": "[a100*1&h100*1]", "processes": 2, "gpus": 2}


def test_a_constraint_that_counts_nodes_gives_one_job_with_enough_nodes() -> None:
    (needs,) = pool_resources(pooled(KINDS, **BOTH), 0)
    assert (needs.partition, needs.gpu_type) == ("gpu", None)
    assert (needs.nodes, needs.processes, needs.gpus) == (2, 2, 2)


def test_a_constraint_without_counts_holds_for_every_kind() -> None:
    parts = pool_resources(pooled({"a100": 2, "h100": 1}, constraint="ib"), 0)
    assert [(part.partition, part.nodes, part.constraint) for part in parts] == [
        ("a100", 2, "ib"),
        ("h100", 1, "ib"),
    ]


@pytest.mark.parametrize(
    ("held", "expected", "words"),
    [
        ({"a100": 4}, {"gpus": 4}, "4 a100, but its stages ask for 4 GPUs and 1 processes per"),
        ({"a100": 4, "h100": 4}, {"gpus": 2}, "4 a100 and 4 h100, but .* 2 GPUs and 1 processes"),
        ({"a100": 3}, {"processes": 2}, "3 a100, but its stages ask for 1 x 2"),
        ({"a100": 3, "h100": 2}, {"processes": 2}, "3 a100 do not fill whole nodes of 2"),
        (KINDS | {"gpu:h100": 8}, BOTH, "fill 5 nodes, with 2 processes on each, .* counts 2"),
        (KINDS | {"gpu:h100": 8}, {**BOTH, "nodes": 2}, "8 gpu:h100, but its stages ask for 2 x 2"),
        ({"gpu": 2}, BOTH, "fill 1 nodes, with 2 processes on each, but constraint .* counts 2"),
        ({"a100": 2, "h100": 2}, BOTH, r"are of several partitions, but .* \(gpu:a100\)"),
        (
            {"a100": 2, "h100": 2},
            {"speed_weights": [1.0]},
            "2 a100 and 2 h100, but .* speed_weights for 1 proc",
        ),
    ],
)
def test_devices_that_are_not_one_for_each_process_are_refused(
    held: dict[str, int], expected: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=rf"plan\.pools\[0\]\.devices: .*{words}"):
        pool_resources(pooled(held, **expected), 0)


def test_fewer_gpus_than_processes_are_shared_as_the_stages_say() -> None:
    """Nodes of a cluster of CPUs have none, and the devices of a plan for it are processes."""
    (needs,) = pool_resources(pooled({"cpu": 4}, processes=2), 0)
    assert (needs.nodes, needs.processes, needs.gpus) == (2, 2, 0)
    constraint = "rack1*1"
    assert pool_resources(pooled({"gpu": 4}, constraint=constraint), 0)[0].constraint == constraint


@pytest.mark.parametrize(
    ("stage", "own", "held", "words"),
    [
        ("train", {"partition": "h100"}, {"a100": 2}, r"stages\.train\.partition: h100, but"),
        ("train", {"gpu_type": "h100"}, {"gpu:a100": 2}, r"stages\.train\.gpu_type: h100, but"),
        # No pool names it: it runs with rollout.
        ("evaluate", {"partition": "h100"}, {"a100": 2}, r"stages\.evaluate\.partition: h100"),
    ],
)
def test_a_stage_of_a_pool_that_says_it_runs_elsewhere_is_refused(
    stage: str, own: dict[str, str], held: dict[str, int], words: str
) -> None:
    with pytest.raises(
        PlanError, match=words + r".* plan\.pools\[0\]\.devices: 2 .*pool of its own"
    ):
        pool_resources(pooled(held, stages={stage: own}, processes=2), 0)


def test_a_stage_may_say_where_its_pool_is_and_the_defaults_hold_for_others() -> None:
    own = {"train": {"partition": "gpu", "gpu_type": "a100"}}
    (needs,) = pool_resources(pooled({"gpu": 2}, stages=own, processes=2, partition="cpu"), 0)
    assert (needs.partition, needs.gpu_type) == ("gpu", "a100")
    (needs,) = pool_resources(pooled({"gpu:a100": 2}, stages=own, processes=2), 0)
    assert (needs.partition, needs.gpu_type) == ("gpu", "a100")


def test_stages_that_no_pool_names_have_the_memory_they_ask_for() -> None:
    own = {"evaluate": {"mem_mb": 9000, "time_limit_min": 60}, "rollout": {"mem_mb": 1000}}
    (needs,) = pool_resources(pooled({"a100": 1}, stages=own), 0)
    assert (needs.mem_mb, needs.time_limit_min, needs.cpus) == (9000, 60, 1)


@pytest.mark.parametrize(
    ("minutes", "variables"),
    [(60.0, {}), (1.5, {TIMEOUT_VARIABLE: "1.5"}), (None, {TIMEOUT_VARIABLE: "0"})],
)
def test_jobs_have_the_deadline_of_progress_of_the_cluster_section(
    minutes: float | None, variables: dict[str, str]
) -> None:
    cluster = ClusterConfig(launcher="slurm", progress_timeout_min=minutes)
    assert job_resources(StagePlan(), cluster).env == variables
