"""``rlinf scale`` asks for workers; what it cannot mean is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.experiment import prepare
from pipeline.generators import scale, wished
from pipeline.plan import Plan, parse_plan
from pipeline.run import Run
from rlinf.errors import PlanError, RlinfError

Compose = Callable[..., dict[str, Any]]
TRAIN = {"stages": ["reward", "inference", "train"], "gpus": {"local": 1}}


def elastic(workers: int | None, *stages: str) -> dict[str, Any]:
    pool = {"stages": list(stages or ("rollout",)), "gpus": {"local": 1}, "workers": workers}
    return {"grain": "segment", "pools": [pool, TRAIN]}


def made(compose: Compose, plan: dict[str, Any] | None) -> Run:
    values = compose("cluster=local")
    values["plan"] = plan
    return prepare(values)


def test_wishes_add_up_and_outlive_the_driver(compose: Compose) -> None:
    run = made(compose, elastic(2))
    plan = Plan.read(run.folder)
    assert wished(run.folder, plan, 0) == 2
    assert scale(run, "rollout+2") == 4
    assert scale(run, "rollout-1") == 3
    assert wished(run.folder, plan, 0) == 3
    assert scale(run, "rollout=1") == 1
    assert wished(run.folder, plan, 0) == 1


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("rollout-2", "at least one worker, and there are 2"),
        ("rollout=0", "at least one"),
        ("two more", r"expected rollout\+2"),
        ("rolout+1", "no pool of its plan holds 'rolout'"),
        ("train+1", "pool of train is not elastic"),
    ],
)
def test_a_wish_that_cannot_be_granted_is_refused(compose: Compose, wish: str, words: str) -> None:
    run = made(compose, elastic(2))
    with pytest.raises(RlinfError, match=words):
        scale(run, wish)
    assert wished(run.folder, Plan.read(run.folder), 0) == 2


def test_a_run_without_pools_has_nothing_to_scale(compose: Compose) -> None:
    with pytest.raises(PlanError, match="of grain stage; only pools"):
        scale(made(compose, None), "rollout+1")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"grain": "segment", "pools": [{**TRAIN, "workers": 2}]}, "can be elastic"),
        ({"grain": "segment", "pools": elastic(2)["pools"][:1]}, "another pool that holds train"),
        ({**elastic(2), "stages": {"rollout": {"processes": 2}}}, "rollout asks for 1 x 2"),
        (elastic(0), r"pools\.0\.workers|workers"),
    ],
)
def test_a_plan_with_workers_that_cannot_work_is_refused(plan: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_plan(plan, "plan")
