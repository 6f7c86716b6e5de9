"""From trials to a profile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.profile.build_profile import (
    MAX_LENGTHS,
    build_queue_wait,
    lengths,
    memory_location,
    overheads,
    points,
)
from pipeline.planning.profile.measurement import StageTiming, Trial


def trial(*samples: StageTiming, processes: int = 1, **more: object) -> Trial:
    return Trial(key="k", nodes=1, processes=processes, samples=samples, **more)


def sample(seconds: float, stage: str = "train", **more: object) -> StageTiming:
    values = {
        "samples": 8,
        "peak_memory_bytes": 5,
        **more,
    }
    return StageTiming(stage=stage, seconds=seconds, **values)


def test_the_first_of_a_process_counts_apart() -> None:
    (point,) = points(trial(sample(9, cold=True), sample(1), sample(3), sample(8, cold=True)))
    assert point.time is not None
    assert point.cold is not None
    assert point.time.seconds == (1, 3)
    assert point.cold.seconds == (9, 8)


def test_a_stage_that_ran_once_has_its_only_time() -> None:
    (point,) = points(trial(sample(9, cold=True)))
    assert point.time == point.cold
    assert point.time is not None


def test_sizes_are_points_of_their_own() -> None:
    found = points(trial(sample(1), sample(2, samples=4), sample(3)))
    assert [(p.samples, p.time and p.time.seconds) for p in found] == [(8, (1, 3)), (4, (2,))]


def test_a_failure_is_a_point_unless_it_ran_too() -> None:
    failed = sample(0, failure="out of memory")
    (point,) = points(trial(failed))
    assert (point.succeeded, point.failure) == (False, "out of memory")
    (point,) = points(trial(failed, sample(1)))
    assert point.succeeded


def test_a_stage_of_one_process_is_measured_on_one() -> None:
    assert not points(trial(sample(1, stage="reward"), processes=2))
    assert points(trial(sample(1, stage="reward"), processes=1))


def test_of_submissions_the_quickest_counts_for_the_rest_is_queue() -> None:
    values = {"submission": (7.0, 1.0), "imports": (2.0, 3.0)}
    found = {entry.name: entry.seconds for entry in overheads([trial(overheads_s=values)])}
    assert found == {"submission": (1.0,), "imports": (2.0, 3.0)}


def test_a_profile_keeps_whose_memory_was_measured() -> None:
    values = [trial(), trial(memory="host"), trial(memory="device")]
    assert [memory_location(values[:n]) for n in (1, 2, 3)] == [None, "host", "device"]


@given(st.lists(st.integers(0, 900), min_size=1, max_size=3 * MAX_LENGTHS))
def test_kept_lengths_have_the_tail_of_all(values: list[int]) -> None:
    found = lengths([trial(lengths=(tuple(sorted(values)),))])
    assert len(found) <= MAX_LENGTHS
    assert (found[0], found[-1]) == (min(values), max(values))
    assert set(found) <= set(values)


def test_waits_are_those_of_jobs_of_like_size() -> None:
    past = [(1, 10.0), (2, 20.0), (8, 80.0)]
    assert build_queue_wait(1, None, past).expected_s == 15.0
    assert build_queue_wait(8, None, past).expected_s == 80.0
    assert build_queue_wait(8, 5.0, past).expected_s == 5.0
    assert build_queue_wait(32, None, past).expected_s == 0.0
