"""Workers are asked for by hand or as the load has it; what a wish cannot mean is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.commands.experiment import prepare_run
from pipeline.plan import Plan, parse_plan
from pipeline.pools.autoscaler import (
    MAX_LOSS,
    MIN_GAIN,
    IterationLoad,
    is_autoscaled,
    request_scale,
    save_target,
    target_size,
)
from pipeline.run import Run
from rlinf.errors import PlanError, RlinfError

Compose = Callable[..., dict[str, Any]]
TRAIN = {"stages": ["reward", "inference", "train"], "devices": {"local": 1}}


def elastic(workers: int | None, *stages: str, **more: int) -> dict[str, Any]:
    pool = {"stages": list(stages or ("rollout",)), "devices": {"local": 1}, "workers": workers}
    pool |= more
    return {"pools": [pool, TRAIN]}


SECONDS = st.floats(0.0, 1e4)
LOADS = st.builds(IterationLoad, SECONDS, SECONDS, SECONDS, st.booleans())


def made(compose: Compose, plan: dict[str, Any] | None) -> Run:
    values = compose("cluster=local")
    values["plan"] = plan
    return prepare_run(values)


def test_wishes_add_up_and_outlive_the_driver(compose: Compose) -> None:
    run = made(compose, elastic(2))
    plan = Plan.from_run(run.folder)
    assert target_size(run.folder, plan, 0) == 2
    assert request_scale(run, "rollout+2") == 4
    assert request_scale(run, "rollout-1") == 3
    assert target_size(run.folder, plan, 0) == 3
    assert request_scale(run, "rollout=1") == 1
    assert target_size(run.folder, plan, 0) == 1


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("rollout-2", "at least one worker, and has 2"),
        ("rollout=0", "at least one"),
        ("two more", r"expected rollout\+2"),
        ("rolout+1", "no pool of its plan has the stage 'rolout'"),
        ("train+1", "pool of train is not elastic"),
    ],
)
def test_a_wish_that_cannot_be_granted_is_refused(compose: Compose, wish: str, words: str) -> None:
    run = made(compose, elastic(2))
    with pytest.raises(RlinfError, match=words):
        request_scale(run, wish)
    assert target_size(run.folder, Plan.from_run(run.folder), 0) == 2


def test_a_run_without_pools_has_nothing_to_scale(compose: Compose) -> None:
    with pytest.raises(PlanError, match="has no pools; only pools"):
        request_scale(made(compose, None), "rollout+1")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"pools": [{**TRAIN, "workers": 2}]}, "can be elastic"),
        ({"pools": elastic(2)["pools"][:1]}, "no pool holds train"),
        ({**elastic(2), "stages": {"rollout": {"processes": 2}}}, "rollout requests 1 x 2"),
        (elastic(3, max_workers=2), "max_workers: set workers too, and no more"),
        (elastic(None, max_workers=2), "max_workers: set workers"),
        (elastic(0), r"pools\.0\.workers|workers"),
    ],
)
def test_a_plan_with_workers_that_cannot_work_is_refused(plan: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_plan(plan, "plan")


@given(LOADS, st.integers(1, 40), st.integers(1, 20), st.integers(0, 20))
def test_the_number_of_workers_settles_within_its_bounds(
    load: IterationLoad, workers: int, least: int, more: int
) -> None:
    """A worker that comes and goes costs a start each time and gains nothing."""
    most = least + more
    seen = [workers]
    for _ in range(50):
        seen.append(load.target_workers(seen[-1], least, most))
    assert least <= seen[-1] <= most
    assert seen[-1] == seen[-2]
    turns = [b - a for a, b in pairwise(seen) if a != b]
    assert all(turn > 0 for turn in turns) or all(turn < 0 for turn in turns)


@given(SECONDS, SECONDS, SECONDS, st.integers(1, 20))
def test_each_worker_pays_for_itself(
    fixed: float, shared: float, rest: float, workers: int
) -> None:
    load = IterationLoad(fixed, shared, rest, overlaps=False)
    best = load.target_workers(workers, 1, 1000)
    now, later = load.iteration_s(workers), load.iteration_s(best)
    if best > workers:
        assert load.iteration_s(best - 1) - later > MIN_GAIN * load.iteration_s(best - 1)
        assert best <= 2 * workers
    elif best < workers:
        assert later <= now * (1 - MAX_LOSS) ** (best - workers) * (1 + 1e-9)


def test_generating_beside_training_needs_no_more_workers_than_keep_up() -> None:
    beside = IterationLoad(0.0, 100.0, 25.0, overlaps=True)
    assert beside.target_workers(2, 1, 16) == 4
    assert beside.target_workers(4, 1, 16) == 4
    assert beside.target_workers(16, 1, 16) == 4


def test_what_a_person_asks_for_holds_until_they_leave_it_to_the_load(compose: Compose) -> None:
    run = made(compose, elastic(2, max_workers=8))
    plan = Plan.from_run(run.folder)
    assert is_autoscaled(run.folder, plan, 0)
    save_target(run.folder, 0, 5, by_hand=False)
    assert is_autoscaled(run.folder, plan, 0)
    assert target_size(run.folder, plan, 0) == 5
    assert request_scale(run, "rollout-2") == 3
    assert not is_autoscaled(run.folder, plan, 0)
    assert request_scale(run, "rollout=auto") == 3
    assert is_autoscaled(run.folder, plan, 0)


def test_only_a_pool_with_a_bound_scales_by_itself(compose: Compose) -> None:
    run = made(compose, elastic(2))
    assert not is_autoscaled(run.folder, Plan.from_run(run.folder), 0)
    with pytest.raises(PlanError, match="max_workers"):
        request_scale(run, "rollout=auto")
