"""What a profiling job does next, and what is kept of one that died."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.profile.measurement import (
    MIN_REPEATS,
    ProfileCase,
    RunningCase,
    Trial,
    load_trial,
)
from rlinf.errors import PlanError

CASES = [
    ProfileCase(starts=8, token_budget=64),
    ProfileCase(starts=4, token_budget=64),
    ProfileCase(starts=8, token_budget=128),
]


def blank(**more: object) -> Trial:
    return Trial(key="k", nodes=1, processes=2, **more)


def running(case: ProfileCase) -> RunningCase:
    return RunningCase(stage="train", case=case, samples=16, token_budget=case.token_budget)


def test_the_runs_own_size_comes_first_and_most_often() -> None:
    """A pass that has little time must at least know what the run itself does."""
    trial, order = blank(), []
    for turn in range(15):
        case = trial.next_case(CASES)
        assert case is not None
        order.append(case)
        trial = trial.with_repeat(case, 1.0 + turn)  # never settled
    assert order[:3] == [CASES[0]] * 3
    assert [order.count(case) for case in CASES] == [9, 3, 3]


def test_every_case_has_its_turn_and_unsettled_ones_go_on() -> None:
    trial, order = blank(), []
    for turn in range(12):
        case = trial.next_case(CASES)
        if case is None:
            break
        order.append(case)
        # The second case is never of one length, the others always are.
        trial = trial.with_repeat(case, 1.0 + (turn if case == CASES[1] else 0))
    assert list(dict.fromkeys(order)) == CASES
    assert [order.count(case) for case in CASES] == [MIN_REPEATS, 12 - 2 * MIN_REPEATS, MIN_REPEATS]


@given(st.floats(0.1, 100), st.integers(MIN_REPEATS, 20))
def test_a_case_is_settled_once_its_interval_is_narrow(seconds: float, count: int) -> None:
    equal, wide = blank(), blank()
    for number in range(count):
        equal = equal.with_repeat(CASES[0], seconds)
        wide = wide.with_repeat(CASES[0], seconds * (1 + number % 2))
    assert equal.next_case(CASES[:1]) is None
    assert wide.next_case(CASES[:1]) == CASES[0]


def test_the_case_a_job_died_of_is_a_failure_and_larger_ones_are_not_tried() -> None:
    dead = blank(running=running(CASES[0])).with_crash("CUDA out of memory")
    assert dead.running is None
    assert dead.samples[-1].failure == "CUDA out of memory"
    assert (dead.samples[-1].stage, dead.samples[-1].token_budget) == ("train", 64)
    # Less work goes on; more of it would fail too.
    assert dead.next_case(CASES) == CASES[1]
    assert dead.next_case([CASES[0], CASES[2]]) is None


def test_a_job_that_was_between_cases_died_of_nothing() -> None:
    assert blank().with_crash("out of memory") == blank()


def test_a_trial_is_read_back_as_it_was(tmp_path: Path) -> None:
    trial = blank(running=running(CASES[1])).with_repeat(CASES[0], 1.5)
    trial.save(tmp_path / "trial.json")
    assert load_trial(tmp_path / "trial.json") == trial
    assert load_trial(tmp_path / "none.json") is None


def test_a_damaged_trial_is_named_and_fresh_offered(tmp_path: Path) -> None:
    path = tmp_path / "trial.json"
    path.write_text('{"key": "k", "nodes": -1, "processes": 1}')
    with pytest.raises(PlanError, match=r"trial\.json: nodes: .*--fresh"):
        load_trial(path)
