"""What a worker tells of the stages it has under way."""

from __future__ import annotations

from rlinf.data.record import RecordId
from rlinf.data.trajectory import PolicyOutputs
from stages.live_store import LiveStore
from stages.worker_state import ActivityTracker


def test_a_stage_waits_for_its_turn_computes_and_commits() -> None:
    activity, doing = ActivityTracker(), ["computes"]
    activity.add("rollout/1", "rollout")
    (row,) = activity.rows()
    assert (row["node"], row["doing"], row["took_s"]) == ("rollout/1", "waits for its turn", None)
    activity.start("rollout/1", lambda: doing[0])
    doing[0] = "waits for weights"
    assert activity.rows()[0]["doing"] == "waits for weights"
    activity.mark_computed("rollout/1")
    (row,) = activity.rows()
    assert row["doing"] == "commits"
    assert row["took_s"] >= 0
    activity.remove("rollout/1")
    assert activity.rows() == []


def test_progress_belongs_to_the_instance_that_computes() -> None:
    activity = ActivityTracker()
    for node in ("rollout/1", "rollout/2"):
        activity.add(node, "rollout")
    activity.mark_computed("rollout/1")
    activity.update("rollout", 3, 8, "samples")
    assert [row["done"] for row in activity.rows()] == [0, 3]


def test_records_wait_until_a_stage_takes_them() -> None:
    board = LiveStore()
    stream = board.output("it/0000/rollout").stream("trajectories")
    for sample in range(4):
        stream.put_remote(PolicyOutputs(identity=RecordId(0, sample, 0)))
    stream.put_remote(PolicyOutputs(identity=RecordId(0, 0, 1)))
    stream.put(PolicyOutputs(identity=RecordId(0, 4, 0)))  # made here
    assert board.num_unread == 4
    stream.read(range(3))
    stream.put_remote(PolicyOutputs(identity=RecordId(0, 0, 2)))
    assert board.num_unread == 1
