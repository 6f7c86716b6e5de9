"""The chart of a plan hides no stage behind another."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.planner.plan_command import assign_lanes
from pipeline.planning.planner.recommendations import PlanRow

ROWS = st.lists(
    st.builds(
        lambda name, place, start, seconds: PlanRow(
            name, place, "1x1", 1, start, seconds, seconds, seconds, {"work": seconds}, "work"
        ),
        st.sampled_from(["rollout", "reward", "inference", "train", "sync"]),
        st.sampled_from(["a100", "h100"]),
        st.integers(0, 20),
        st.integers(1, 10),
    ),
    max_size=6,
    unique_by=lambda row: row.stage,
)


@given(ROWS)
def test_stages_side_by_side_have_lanes_of_their_own(rows: list[PlanRow]) -> None:
    rows = sorted(rows, key=lambda row: row.start_s)
    lanes = assign_lanes(rows)
    assert sorted(row.stage for lane in lanes for row in lane) == sorted(row.stage for row in rows)
    for lane in lanes:
        assert len({(row.place, row.size) for row in lane}) == 1
        for before, after in pairwise(lane):
            assert before.start_s + before.seconds <= after.start_s
