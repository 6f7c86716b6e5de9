"""What a profiling job does next, and what is kept of one that died."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.profile.measurement import (
    MIN_REPEATS,
    RunningStage,
    Trial,
    load_trial,
)
from rlinf.errors import PlanError

SIZES = [8, 4, 2]


def blank(**more: object) -> Trial:
    return Trial(key="k", nodes=1, processes=2, **more)


def running(size: int) -> RunningStage:
    return RunningStage(stage="train", batch_size=size, samples=2 * size)


def test_the_runs_own_size_comes_first_and_most_often() -> None:
    """A pass that has little time must at least know what the run itself does."""
    trial, order = blank(), []
    for turn in range(15):
        size = trial.next_batch_size(SIZES)
        assert size is not None
        order.append(size)
        trial = trial.with_repeat(size, 1.0 + turn)  # never settled
    assert order[:3] == [SIZES[0]] * 3
    assert [order.count(size) for size in SIZES] == [9, 3, 3]


def test_every_size_has_its_turn_and_unsettled_ones_go_on() -> None:
    trial, order = blank(), []
    for turn in range(12):
        size = trial.next_batch_size(SIZES)
        if size is None:
            break
        order.append(size)
        # The second size never takes as long again, the others always are.
        trial = trial.with_repeat(size, 1.0 + (turn if size == SIZES[1] else 0))
    assert list(dict.fromkeys(order)) == SIZES
    assert [order.count(size) for size in SIZES] == [MIN_REPEATS, 12 - 2 * MIN_REPEATS, MIN_REPEATS]


@given(st.floats(0.1, 100), st.integers(MIN_REPEATS, 20))
def test_a_size_is_settled_once_its_interval_is_narrow(seconds: float, count: int) -> None:
    equal, wide = blank(), blank()
    for number in range(count):
        equal = equal.with_repeat(SIZES[0], seconds)
        wide = wide.with_repeat(SIZES[0], seconds * (1 + number % 2))
    assert equal.next_batch_size(SIZES[:1]) is None
    assert wide.next_batch_size(SIZES[:1]) == SIZES[0]


def test_the_size_a_job_died_of_is_a_failure_and_larger_ones_are_not_tried() -> None:
    dead = blank(running=running(SIZES[0])).with_crash("CUDA out of memory")
    assert dead.running is None
    assert dead.samples[-1].failure == "CUDA out of memory"
    assert (dead.samples[-1].stage, dead.samples[-1].samples) == ("train", 16)
    # Less work goes on; more of it would fail too.
    assert dead.next_batch_size(SIZES) == SIZES[1]
    assert dead.next_batch_size([16, 8]) is None


def test_a_job_that_was_between_stages_died_of_nothing() -> None:
    assert blank().with_crash("out of memory") == blank()


def test_a_trial_is_read_back_as_it_was(tmp_path: Path) -> None:
    trial = blank(running=running(SIZES[1])).with_repeat(SIZES[0], 1.5)
    trial.save(tmp_path / "trial.json")
    assert load_trial(tmp_path / "trial.json") == trial
    assert load_trial(tmp_path / "none.json") is None


def test_a_damaged_trial_is_named_and_fresh_offered(tmp_path: Path) -> None:
    path = tmp_path / "trial.json"
    path.write_text('{"key": "k", "nodes": -1, "processes": 1}')
    with pytest.raises(PlanError, match=r"trial\.json: nodes: .*--fresh"):
        load_trial(path)
