"""What a worker tells of the stages it has under way."""

from __future__ import annotations

from rlinf.data.record import Identity, Record
from stages.activity import Activity
from stages.board import Board


def test_a_stage_waits_for_its_turn_computes_and_commits() -> None:
    activity, doing = Activity(), ["computes"]
    activity.ordered("rollout/1", "rollout")
    (row,) = activity.rows()
    assert (row["node"], row["doing"], row["took_s"]) == ("rollout/1", "waits for its turn", None)
    activity.begins("rollout/1", lambda: doing[0])
    doing[0] = "waits for weights"
    assert activity.rows()[0]["doing"] == "waits for weights"
    activity.computed("rollout/1")
    (row,) = activity.rows()
    assert row["doing"] == "commits"
    assert row["took_s"] >= 0
    activity.ended("rollout/1")
    assert activity.rows() == []


def test_progress_belongs_to_the_instance_that_computes() -> None:
    activity = Activity()
    for node in ("rollout/1", "rollout/2"):
        activity.ordered(node, "rollout")
    activity.computed("rollout/1")
    activity.progress("rollout", 3, 8, "samples")
    assert [row["done"] for row in activity.rows()] == [0, 3]


def test_records_wait_until_a_stage_takes_them() -> None:
    board = Board()
    stream = board.output("it/0000/rollout").stream("trajectories")
    for sample in range(4):
        stream.arrived(Record(Identity(0, sample, 0)))
    stream.arrived(Record(Identity(0, 0, 1)))
    stream.put(Record(Identity(0, 4, 0)))  # made here
    assert board.waiting == 4
    stream.take(range(3))
    stream.arrived(Record(Identity(0, 0, 2)))
    assert board.waiting == 1
