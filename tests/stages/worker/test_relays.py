"""What one rank got, the others of its pool have too: all of it, once, whenever they ask."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlinf.data.record import Record, RecordId
from stages.live_store import LiveStore, RecordStream
from stages.worker.record_transfer import (
    SHARED_MEMORY,
    SOCKET,
    RecordForwarder,
    RecordReceiver,
    RecordSender,
)

FOLDER, CHANNEL = "it/0000/rollout", "trajectories"
TO = f"{FOLDER}:{CHANNEL}"


class Rank:
    """What a worker has of its own to take and pass on records."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.store = name, LiveStore()
        self.cut: list[str] = []
        self.record_sender = RecordSender(folder, self.cut.append, name)
        self.relays = RecordForwarder(self.record_sender)
        self.receiver = RecordReceiver(folder, name, self.store, forward=self._passing)
        self.passed: list[int] = []

    def _passing(self, to: str, maker: str, record: Record) -> None:
        self.passed.append(record.identity.sample)
        self.relays.forward(to, maker, record)

    @property
    def stream(self) -> RecordStream:
        return self.store.output(FOLDER).stream(CHANNEL)

    def close(self) -> None:
        self.relays.close()
        self.record_sender.close()
        self.receiver.close()


def until(there: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not there() and time.monotonic() < deadline:
        time.sleep(0.01)
    return there()


def records(samples: range) -> list[Record]:
    return [Record(RecordId(0, s), {"x": np.array([s])}, info={"group": 7}) for s in samples]


def test_records_and_their_end_reach_all_by_way_of_one(tmp_path: Path) -> None:
    maker, ranks = Rank(tmp_path, "m"), [Rank(tmp_path, f"r{i}") for i in range(4)]
    ranks[0].relays.subscribe(TO, "m", {"r1": SOCKET, "r2": SOCKET})
    sender = maker.record_sender.stream_to(TO, ["r0"], 0, 1)
    for record in records(range(5)):
        sender.put(record)
    assert until(lambda: all(len(rank.stream) == 5 for rank in ranks[:3]))
    assert not ranks[1].stream.is_complete(range(6)), "there is no end yet"
    # One that is told of late gets what came before.
    ranks[1].relays.subscribe(TO, "m", {"r3": SOCKET})
    assert until(lambda: len(ranks[3].stream) == 5)
    sender.close()
    assert until(lambda: all(rank.stream.is_complete(range(9)) for rank in ranks))
    for rank in ranks:
        chosen = rank.stream.read(range(9))
        assert [int(record.steps["x"][0]) for record in chosen] == list(range(5))
        assert {str(record.info) for record in chosen} == {"{'group': 7}"}
    for rank in [maker, *ranks]:
        rank.close()


def test_only_what_that_worker_made_is_passed_on_and_nothing_twice(tmp_path: Path) -> None:
    makers = [Rank(tmp_path, "m0"), Rank(tmp_path, "m1")]
    ranks = [Rank(tmp_path, f"r{i}") for i in range(2)]
    ranks[0].relays.subscribe(TO, "m0", {"r1": SOCKET})
    ranks[1].relays.subscribe(TO, "m1", {"r0": SOCKET})
    senders = [maker.record_sender.stream_to(TO, [f"r{i}"], i, 2) for i, maker in enumerate(makers)]
    first, second = records(range(2)), records(range(2, 5))
    for record in [*first, *first]:
        senders[0].put(record)
    for record in second:
        senders[1].put(record)
    for sender in senders:
        sender.close()
    assert until(lambda: all(rank.stream.is_complete(range(9)) for rank in ranks))
    assert until(lambda: [len(rank.passed) for rank in ranks] == [5 + 4, 4 + 3])
    time.sleep(0.3)
    assert sorted(ranks[0].passed) == [-1, -1, 0, 0, 1, 1, 2, 3, 4]
    assert sorted(ranks[1].passed) == [-1, -1, 0, 1, 2, 3, 4], "what comes again is not passed on"
    for rank in [*makers, *ranks]:
        rank.close()


def test_who_missed_a_record_does_not_take_the_rest_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A record that comes by socket may be too large for the shared memory of the next rank."""
    monkeypatch.setattr("stages.worker.record_transfer.SHARED_MEMORY_BYTES", 1 << 20)
    maker, head, behind = Rank(tmp_path, "m"), Rank(tmp_path, "r0"), Rank(tmp_path, "r1")
    head.relays.subscribe(TO, "m", {"r1": SHARED_MEMORY})
    sender = maker.record_sender.stream_to(TO, ["r0"], 0, 1)
    small, large = records(range(1))[0], Record(RecordId(0, 1), {"x": np.zeros(1 << 19)})
    for record in (small, large, records(range(2, 3))[0]):
        sender.put(record)
    sender.close()
    assert until(lambda: head.stream.is_complete(range(9)))
    assert until(lambda: len(behind.stream) == 2)
    assert until(lambda: "it is read from disk instead" in caplog.text)
    time.sleep(0.3)
    assert not behind.stream.is_complete(range(9)), "it would go on with fewer records than others"
    for rank in (maker, head, behind):
        rank.close()


def test_what_is_on_disk_is_not_kept_and_all_else_is(tmp_path: Path) -> None:
    head, late = Rank(tmp_path, "r0"), Rank(tmp_path, "r1")
    for iteration in range(100):
        head.relays.forward(f"it/{iteration:04d}/rollout:{CHANNEL}", "m", records(range(1))[0])
    head.relays.drop_outputs({"it/0000/rollout"})
    for to in ("it/0000/rollout", "it/0001/rollout"):
        head.relays.subscribe(f"{to}:{CHANNEL}", "m", {"r1": SOCKET})
    kept = late.store.output("it/0001/rollout").stream(CHANNEL)
    assert until(lambda: len(kept) == 1)
    assert not len(late.store.output("it/0000/rollout").stream(CHANNEL))
    head.relays.close()
    head.relays.forward(TO, "m", records(range(1))[0])
    for rank in (head, late):
        rank.close()


def test_a_rank_that_is_gone_does_not_keep_the_others_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    maker, head, there = Rank(tmp_path, "m"), Rank(tmp_path, "r0"), Rank(tmp_path, "r2")
    head.relays.subscribe(TO, "m", {"r1": SOCKET, "r2": SOCKET})
    sender = maker.record_sender.stream_to(TO, ["r0"], 0, 1)
    for record in records(range(3)):
        sender.put(record)
    sender.close()
    assert until(lambda: there.stream.is_complete(range(9)))
    assert until(lambda: head.cut == ["r1"]), "the driver is told"
    for rank in (maker, head, there):
        rank.close()
