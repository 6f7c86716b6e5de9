"""The job of a pool has what each of its stages asks for, in whatever order the plan names them."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from pipeline.needs import pool_needs
from pipeline.plan import Plan, StagePlan, parse_plan
from rlinf.errors import PlanError

STAGES = ("rollout", "reward", "inference", "train")


def pooled(
    held: dict[str, int], *order: str, stages: dict[str, Any] | None = None, **defaults: Any
) -> Plan:
    """A plan of one pool."""
    pool = {"stages": list(order or STAGES), "gpus": held}
    values = {"grain": "segment", "defaults": defaults, "stages": stages or {}, "pools": [pool]}
    return parse_plan(values, "plan")


def test_a_pool_has_the_most_that_any_of_its_stages_needs_in_any_order() -> None:
    stages = {
        "rollout": {"mem_mb": 1000, "time_min": 600, "cpus": 2},
        "train": {"mem_mb": 900000, "time_min": 30, "cpus": 16, "constraint": "80gb"},
        "inference": {"processes": 4, "shares": [1.0, 1.0, 2.0, 2.0], "gpu_type": "big"},
    }
    found = [
        pool_needs(pooled({"a100": 4}, *order, stages=stages, processes=4, gpus=4), 0)
        for order in permutations(STAGES)
    ]
    (needs,) = found[0]
    assert (needs.mem_mb, needs.time_min, needs.cpus) == (900000, 600, 16)
    assert (needs.constraint, needs.gpu_type) == ("80gb", "big")
    assert needs.shares == (1.0, 1.0, 2.0, 2.0)
    assert (needs.nodes, needs.processes, needs.gpus) == (1, 4, 4)
    assert all(parts == (needs,) for parts in found)


def test_the_most_holds_on_each_kind_and_for_each_worker() -> None:
    stages = {"rollout": {"mem_mb": 1000}, "train": {"mem_mb": 9000}, "reward": {"cpus": 3}}
    parts = pool_needs(pooled({"a100": 2, "h100": 1}, stages=stages), 0)
    assert [(part.partition, part.mem_mb, part.cpus) for part in parts] == [
        ("a100", 9000, 3),
        ("h100", 9000, 3),
    ]
    pools = [
        {"stages": ["rollout", "evaluate"], "workers": 2, "gpus": {"spot": 1}},
        {"stages": list(STAGES[1:]), "gpus": {"h100": 1}},
    ]
    stages = {"rollout": {"mem_mb": 1000}, "evaluate": {"mem_mb": 9000}}
    plan = parse_plan({"grain": "segment", "stages": stages, "pools": pools}, "plan")
    assert pool_needs(plan, 0, 1)[0].mem_mb == 9000


def test_what_no_stage_says_is_left_to_the_cluster() -> None:
    (needs,) = pool_needs(pooled({"a100": 1}), 0)
    assert needs == StagePlan(partition="a100")


@pytest.mark.parametrize(
    ("rollout", "train", "words"),
    [
        ({"constraint": "ib"}, {"constraint": "80gb"}, r"rollout\.constraint: ib, but .*: 80gb"),
        ({"gpu_type": "a"}, {"gpu_type": "b"}, r"rollout\.gpu_type: a, but .*train\.gpu_type: b"),
        (
            {"processes": 2, "shares": [1, 2]},
            {"processes": 2, "shares": [2, 1]},
            r"rollout\.shares: .* but plan\.stages\.train\.shares",
        ),
        ({"nodes": 2}, {"processes": 2}, r"rollout\.nodes: 2, but .*train\.nodes: 1"),
    ],
)
def test_stages_that_say_what_no_job_can_have_at_once_are_refused(
    rollout: dict[str, Any], train: dict[str, Any], words: str
) -> None:
    plan = pooled({"a100": 2}, stages={"rollout": rollout, "train": train})
    with pytest.raises(PlanError, match=words):
        pool_needs(plan, 0)
