"""Workers are asked for by hand or as the load has it; what a wish cannot mean is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.commands.experiment import prepare
from pipeline.plan import Plan, parse_plan
from pipeline.pools.scaling import GAIN, LOSS, Load, automatic, put_down, scale, wished
from pipeline.run import Run
from rlinf.errors import PlanError, RlinfError

Compose = Callable[..., dict[str, Any]]
TRAIN = {"stages": ["reward", "inference", "train"], "gpus": {"local": 1}}


def elastic(workers: int | None, *stages: str, **more: int) -> dict[str, Any]:
    pool = {"stages": list(stages or ("rollout",)), "gpus": {"local": 1}, "workers": workers}
    pool |= more
    return {"grain": "segment", "pools": [pool, TRAIN]}


SECONDS = st.floats(0.0, 1e4)
LOADS = st.builds(Load, SECONDS, SECONDS, SECONDS, st.booleans())


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
        ({"grain": "segment", "pools": elastic(2)["pools"][:1]}, "no pool holds train"),
        ({**elastic(2), "stages": {"rollout": {"processes": 2}}}, "rollout asks for 1 x 2"),
        (elastic(3, max_workers=2), "max_workers: needs workers, and no more of them"),
        (elastic(None, max_workers=2), "max_workers: needs workers"),
        (elastic(0), r"pools\.0\.workers|workers"),
    ],
)
def test_a_plan_with_workers_that_cannot_work_is_refused(plan: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_plan(plan, "plan")


@given(LOADS, st.integers(1, 40), st.integers(1, 20), st.integers(0, 20))
def test_the_number_of_workers_settles_within_its_bounds(
    load: Load, workers: int, least: int, more: int
) -> None:
    """A worker that comes and goes costs a start each time and gains nothing."""
    most = least + more
    seen = [workers]
    for _ in range(50):
        seen.append(load.best(seen[-1], least, most))
    assert least <= seen[-1] <= most
    assert seen[-1] == seen[-2]
    turns = [b - a for a, b in pairwise(seen) if a != b]
    assert all(turn > 0 for turn in turns) or all(turn < 0 for turn in turns)


@given(SECONDS, SECONDS, SECONDS, st.integers(1, 20))
def test_each_worker_pays_for_itself(
    fixed: float, shared: float, rest: float, workers: int
) -> None:
    load = Load(fixed, shared, rest, overlap=False)
    best = load.best(workers, 1, 1000)
    now, later = load.iteration_s(workers), load.iteration_s(best)
    if best > workers:
        assert load.iteration_s(best - 1) - later > GAIN * load.iteration_s(best - 1)
        assert best <= 2 * workers
    elif best < workers:
        assert later <= now * (1 - LOSS) ** (best - workers) * (1 + 1e-9)


def test_generating_beside_training_needs_no_more_workers_than_keep_up() -> None:
    beside = Load(0.0, 100.0, 25.0, overlap=True)
    assert beside.best(2, 1, 16) == 4
    assert beside.best(4, 1, 16) == 4
    assert beside.best(16, 1, 16) == 4


def test_what_a_person_asks_for_holds_until_they_leave_it_to_the_load(compose: Compose) -> None:
    run = made(compose, elastic(2, max_workers=8))
    plan = Plan.read(run.folder)
    assert automatic(run.folder, plan, 0)
    put_down(run.folder, 0, 5, by_hand=False)
    assert automatic(run.folder, plan, 0)
    assert wished(run.folder, plan, 0) == 5
    assert scale(run, "rollout-2") == 3
    assert not automatic(run.folder, plan, 0)
    assert scale(run, "rollout=auto") == 3
    assert automatic(run.folder, plan, 0)


def test_only_a_pool_with_a_bound_scales_by_itself(compose: Compose) -> None:
    run = made(compose, elastic(2))
    assert not automatic(run.folder, Plan.read(run.folder), 0)
    with pytest.raises(PlanError, match="max_workers"):
        scale(run, "rollout=auto")
