"""When workers computed and when they waited."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.report.data import (
    StageSpan,
    iteration_windows,
    sort_lanes,
    timeline_segments,
    worker_idle_times,
)


def span(
    stage: str, start: float, end: float, name: str = "", it: int = 0, lane: str = "a"
) -> StageSpan:
    return StageSpan(stage, name or stage, it, lane, start, end)


def test_a_stage_is_cut_where_it_waited() -> None:
    waits = [span("train", 5, 7, "wait"), span("train", 2, 3, "wait")]
    found = timeline_segments([span("train", 0, 10), *waits])
    assert [(p.start, p.end, p.is_computing) for p in found] == [
        (0, 2, True),
        (2, 3, False),
        (3, 5, True),
        (5, 7, False),
        (7, 10, True),
    ]


def test_a_stage_that_moves_what_it_keeps_does_not_compute() -> None:
    moves = [span("train", 0, 1, "onload"), span("train", 4, 5, "offload")]
    computed = [p for p in timeline_segments([span("train", 0, 10), *moves]) if p.is_computing]
    assert [(p.start, p.end) for p in computed] == [(1, 4), (5, 10)]


def test_waits_that_overlap_or_reach_out_of_the_stage_count_once() -> None:
    waits = [span("train", s, e, "wait") for s, e in ((-1, 2), (1, 3), (9, 12), (20, 30))]
    found = timeline_segments([span("train", 0, 10), *waits])
    assert sum(p.seconds for p in found if not p.is_computing) == 4
    assert sum(p.seconds for p in found) == 10


def test_waits_of_other_ranks_and_iterations_are_not_taken() -> None:
    others = [span("train", 2, 3, "wait", lane="b"), span("train", 2, 3, "wait", it=1)]
    assert all(p.is_computing for p in timeline_segments([span("train", 0, 10), *others]))


def test_a_claim_computes_while_its_worker_waits_for_samples_of_others() -> None:
    gathers = [span("rollout", 0, 10), span("rollout", 0, 10, "wait")]
    claim = [
        replace(span("rollout", 2, 6), work_item=3),
        replace(span("rollout", 2, 3, "wait"), work_item=3),
    ]
    computed = [p for p in timeline_segments([*gathers, *claim]) if p.is_computing]
    assert [(p.start, p.end) for p in computed] == [(3, 6)]


def test_an_iteration_ends_when_its_weights_are_out() -> None:
    spans = [span("rollout", 1, 3), span("sync", 4, 5), span("sync", 4, 6, lane="b")]
    spans += [span("rollout", 5, 8, it=1), span("sync", 9, 10, it=1)]
    assert iteration_windows(spans) == {0: (1, 6), 1: (6, 10)}


def test_a_worker_is_idle_while_no_stage_computes_on_it() -> None:
    spans = [
        span("rollout", 0, 4),
        span("train", 0, 10, lane="b"),
        span("train", 0, 4, "wait", lane="b"),
        span("inference", 3, 9, lane="b"),
        span("sync", 10, 10.0, lane="b"),
    ]
    a, b = worker_idle_times(spans)
    assert (a.lane, b.lane) == ("a", "b")
    assert a.idle_share == pytest.approx(0.6)
    assert b.idle_share == pytest.approx(0.3)  # two stages at once count once
    assert a.stages == {"rollout": (4, 0)}
    assert b.stages == {"train": (6, 4), "inference": (6, 0)}


def test_the_first_iteration_is_left_out_and_seconds_are_of_one_iteration() -> None:
    spans = [span("rollout", 0, 90), span("sync", 99, 100)]
    for it in (1, 2):
        spans += [
            span("rollout", 90 + 10 * it, 94 + 10 * it, it=it),
            span("sync", 99 + 10 * it, 100 + 10 * it, it=it),
        ]
    (only,) = worker_idle_times(spans)
    assert only.idle_share == pytest.approx(0.5)
    assert only.stages == {"rollout": (4, 0), "sync": (1, 0)}


def test_nothing_finished_is_nothing_to_tell() -> None:
    assert worker_idle_times([]) == []
    assert worker_idle_times([span("rollout", 0, 4)]) == []


def test_lanes_are_in_the_order_of_their_numbers() -> None:
    assert sort_lanes(["rank 10", "rank 9", "rank 9"]) == ["rank 9", "rank 10"]
