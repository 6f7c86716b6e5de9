"""What a worker tells of the stages it has under way."""

from __future__ import annotations

from rlinf.data.record import RecordId
from rlinf.data.trajectory import PolicyOutputs
from stages.live_store import LiveStore
from stages.worker_state import ActivityTracker


def test_a_stage_waits_for_its_turn_computes_and_commits() -> None:
    activity, now = ActivityTracker(), ["computing"]
    activity.add("rollout/1", "rollout")
    (row,) = activity.rows()
    assert row["node"] == "rollout/1"
    assert (row["activity"], row["compute_s"]) == ("waiting for the device", None)
    activity.start("rollout/1", lambda: now[0])
    now[0] = "waiting for weights"
    assert activity.rows()[0]["activity"] == "waiting for weights"
    activity.mark_computed("rollout/1")
    (row,) = activity.rows()
    assert row["activity"] == "committing"
    assert row["compute_s"] >= 0
    activity.remove("rollout/1")
    assert activity.rows() == []


def test_progress_belongs_to_the_instance_that_computes() -> None:
    activity = ActivityTracker()
    for node in ("rollout/1", "rollout/2"):
        activity.add(node, "rollout")
    activity.mark_computed("rollout/1")
    activity.update("rollout", 3, 8, "samples", "loss 0.5")
    first, second = activity.rows()
    assert first["done"] == 0
    assert [second[key] for key in ("done", "total", "unit", "note")] == [
        3,
        8,
        "samples",
        "loss 0.5",
    ]


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
