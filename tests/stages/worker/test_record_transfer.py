"""Records go to the stores of other workers; a worker that vanished holds nobody up."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlinf.data.record import Record, RecordId
from rlinf.errors import DataError
from stages.live_store import LiveStore
from stages.worker.record_transfer import (
    SHARED_MEMORY,
    SHARED_MEMORY_BYTES,
    SOCKET,
    RecordReceiver,
    RecordSender,
)

TO = "it/0000/rollout:trajectories"
SENDER = """
import sys
from pathlib import Path
import numpy as np
from rlinf.data.record import Record, RecordId
from stages.worker.record_transfer import RecordSender
record_sender = RecordSender(Path(sys.argv[1]))
rank = int(sys.argv[2])
writer = record_sender.stream_to("it/0000/rollout:trajectories", ["a"], rank, 2)
for sample in range(rank, 6, 2):
    steps = {"actions": np.array([sample])}
    writer.put(Record(RecordId(0, sample, 0), steps, info={"group": rank}))
writer.close()
record_sender.close()
"""


def test_the_driver_is_told_once_of_a_worker_that_many_records_do_not_reach(
    tmp_path: Path,
) -> None:
    cut: list[str] = []
    record_sender = RecordSender(tmp_path, cut.append)
    for sample in range(20):
        record_sender.stream_to(TO, ["never was"], 0, 1).put(Record(RecordId(0, sample)))
    assert until(lambda: bool(cut))
    time.sleep(1)
    assert cut == ["never was"]
    record_sender.stream_to(TO, ["never was"], 0, 1)
    assert until(lambda: len(cut) == 2), "and once more when it happens again"
    record_sender.close()


def until(there: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not there() and time.monotonic() < deadline:
        time.sleep(0.01)
    return there()


def test_records_and_ends_of_other_processes_arrive_in_the_live_store(tmp_path: Path) -> None:
    store = LiveStore()
    receiver = RecordReceiver(tmp_path, "a", store)
    stream = store.output("it/0000/rollout").stream("trajectories")
    done = [
        subprocess.run([sys.executable, "-c", SENDER, str(tmp_path), "0"], check=False),
    ]
    assert until(lambda: len(stream) == 3)
    assert not stream.is_complete(range(6)), "the other rank has not ended"
    done.append(subprocess.run([sys.executable, "-c", SENDER, str(tmp_path), "1"], check=False))
    assert until(lambda: stream.is_complete(range(9)))
    assert [process.returncode for process in done] == [0, 0]
    records = stream.read(range(9))
    assert [record.identity.sample for record in records] == list(range(6))
    assert records[3].info == {"group": 1}, "what the way needed is not part of the record"
    assert int(records[3].steps["actions"][0]) == 3
    receiver.close()


def test_a_sender_goes_on_when_a_receiver_is_missing_or_vanishes(tmp_path: Path) -> None:
    store = LiveStore()
    stays, goes = (
        RecordReceiver(tmp_path, "stays", store),
        RecordReceiver(tmp_path, "goes", LiveStore()),
    )
    record_sender = RecordSender(tmp_path)
    writer = record_sender.stream_to(TO, ["stays", "goes", "never was"], 0, 1)
    writer.put(Record(RecordId(0, 0, 0), {"actions": np.array([0])}))
    goes.close()
    began = time.monotonic()
    for sample in range(1, 2000):
        writer.put(Record(RecordId(0, sample, 0), {"actions": np.array([sample])}))
    writer.close()
    assert time.monotonic() - began < 30
    stream = store.output("it/0000/rollout").stream("trajectories")
    assert until(lambda: stream.is_complete(range(2000)))
    assert len(stream) == 2000
    record_sender.close()
    stays.close()


def number(sample: int) -> Record:
    return Record(RecordId(0, sample, 0), {"actions": np.array([sample])})


@pytest.mark.parametrize("way", [SOCKET, SHARED_MEMORY])
def test_who_asks_late_is_sent_what_was_made_and_what_comes(tmp_path: Path, way: str) -> None:
    """A stage that is started again while its input is still being made need not wait for all."""
    mine, stores = (
        LiveStore().output("it/0000/rollout").stream("trajectories"),
        [LiveStore(), LiveStore()],
    )
    receivers = [RecordReceiver(tmp_path, n, b) for n, b in zip("ab", stores, strict=True)]
    streams = [store.output("it/0000/rollout").stream("trajectories") for store in stores]
    record_sender = RecordSender(tmp_path)
    record_sender.subscribe(TO, {"a": way})
    writer = record_sender.open_stream(TO, 0, 1, mine.all_records)
    for sample in range(100):
        mine.put(number(sample))
        writer.put(number(sample))
        if sample == 50:
            record_sender.subscribe(TO, {"b": way})
    for stream in streams:
        assert until(lambda stream=stream: stream.is_complete(range(100)))
        assert not stream.is_complete(range(101))
    writer.close()
    late = LiveStore()
    receivers.append(RecordReceiver(tmp_path, "c", late))
    streams.append(late.output("it/0000/rollout").stream("trajectories"))
    record_sender.subscribe(TO, {"c": way})
    for stream in streams:
        assert until(lambda stream=stream: stream.is_complete(range(101))), "the end comes too"
        assert [r.identity.sample for r in stream.read(range(101))] == list(range(100))
    record_sender.close()
    for receiver in receivers:
        receiver.close()


HOST = """
import sys, time
from pathlib import Path
from stages.worker.record_transfer import RecordReceiver
from stages.live_store import LiveStore
taken = RecordReceiver(Path(sys.argv[1]), "a", LiveStore())
print("in", flush=True)
time.sleep(60)
"""


def test_another_takes_over_from_one_that_was_killed_with_its_shared_memory_full(
    tmp_path: Path,
) -> None:
    """The stage that makes the records waits for room, and who comes anew for the stage."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOST, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "in\n"
    cut: list[str] = []
    mine = LiveStore().output("it/0000/rollout").stream("trajectories")
    record_sender = RecordSender(tmp_path, cut.append)
    record_sender.subscribe(TO, {"a": SHARED_MEMORY})
    sender, count = record_sender.open_stream(TO, 0, 1, mine.all_records), 3000

    def make() -> None:
        for sample in range(count):
            mine.put(number(sample))
            sender.put(number(sample))
        sender.close()

    child.send_signal(signal.SIGSTOP)
    stage = threading.Thread(target=make, daemon=True)
    stage.start()
    made, still = 0, 0
    while stage.is_alive() and still < 10:
        # On a busy machine a stage that has room may not run for a while.
        time.sleep(0.2)
        still = still + 1 if 0 < len(mine) == made else 0
        made = len(mine)
    assert len(mine) < count, "it waits for room"
    store = LiveStore()
    other = RecordReceiver(tmp_path, "b", store)
    record_sender.subscribe(TO, {"b": SHARED_MEMORY})
    child.kill()
    stream = store.output("it/0000/rollout").stream("trajectories")
    assert until(lambda: stream.is_complete(range(count + 1)), 10)
    assert len(stream) == count
    stage.join(10)
    assert not stage.is_alive()
    assert until(lambda: cut == ["a"]), "the driver is told"
    child.wait()
    record_sender.close()
    other.close()


def test_records_of_outputs_on_disk_are_let_go_and_not_sent_to_who_asks_late(
    tmp_path: Path,
) -> None:
    store, late = LiveStore(), LiveStore()
    receiver, record_sender = RecordReceiver(tmp_path, "late", late), RecordSender(tmp_path)
    output, other = store.output("it/0000/rollout"), "it/0001/rollout:trajectories"
    stream = output.stream("trajectories")
    stream.put(number(0))
    held = weakref.ref(stream.all_records()[0])
    record_sender.open_stream(TO, 0, 1, stream.all_records).put(held())
    record_sender.open_stream(other, 0, 1, lambda: [number(1)])
    del output, stream
    store.release_committed(lambda _: True)
    assert held() is not None, "who asks now is sent it"
    record_sender.drop_outputs({"it/0000/rollout"})
    assert held() is None
    record_sender.subscribe(TO, {"late": SOCKET})
    record_sender.subscribe(other, {"late": SOCKET})
    assert until(lambda: len(late.output("it/0001/rollout").stream("trajectories")) == 1)
    assert not len(late.output("it/0000/rollout").stream("trajectories"))
    record_sender.close()
    receiver.close()


@pytest.mark.parametrize("way", [SOCKET, SHARED_MEMORY])
def test_a_connection_that_broke_is_told_and_can_be_made_again(tmp_path: Path, way: str) -> None:
    mine, store = LiveStore().output("it/0000/rollout").stream("trajectories"), LiveStore()
    stream = store.output("it/0000/rollout").stream("trajectories")
    cut: list[str] = []
    record_sender = RecordSender(tmp_path, cut.append)
    first = RecordReceiver(tmp_path, "a", LiveStore())
    record_sender.subscribe(TO, {"a": way})
    writer = record_sender.open_stream(TO, 0, 1, mine.all_records)
    mine.put(number(0))
    writer.put(number(0))
    first.close()
    sample = 1
    while not cut and sample < 5000:
        mine.put(number(sample))
        writer.put(number(sample))
        sample += 1
        time.sleep(0.01)
    assert cut == ["a"]
    again = RecordReceiver(tmp_path, "a", store)
    record_sender.subscribe(TO, {"a": way})
    writer.close()
    assert until(lambda: stream.is_complete(range(sample)))
    assert len(stream) == sample, "what went to the other connection is sent again"
    record_sender.close()
    again.close()


def test_what_came_through_shared_memory_outlives_it(tmp_path: Path) -> None:
    """The store keeps records for iterations; their place in shared memory is used again."""
    store = LiveStore()
    receiver, record_sender = RecordReceiver(tmp_path, "a", store), RecordSender(tmp_path)
    stream = store.output("it/0000/rollout").stream("trajectories")
    record_sender.subscribe(TO, {"a": SHARED_MEMORY})
    writer = record_sender.open_stream(TO, 0, 1, list)
    count, size = 12, SHARED_MEMORY_BYTES // 8
    for sample in range(count):
        image = np.full(size, sample, np.uint8)
        writer.put(Record(RecordId(0, sample, 0), {"actions": np.zeros(1)}, {"image": image}))
    writer.close()
    assert until(lambda: stream.is_complete(range(count + 1)))
    for record in stream.read(range(count)):
        image = record.context["image"]
        assert image[0] == image[-1] == record.identity.sample
    record_sender.close()
    receiver.close()


def test_records_come_by_socket_where_a_worker_has_no_shared_memory(tmp_path: Path) -> None:
    """As on a node of its own. The connection others use goes on."""
    store = LiveStore()
    receiver, record_sender = RecordReceiver(tmp_path, "a", store), RecordSender(tmp_path)
    record_sender.subscribe(TO, {"a": SHARED_MEMORY})
    writer = record_sender.open_stream(TO, 0, 1, list)
    writer.put(number(0))
    writer.close()
    assert until(
        lambda: store.output("it/0000/rollout").stream("trajectories").is_complete(range(1))
    )
    record_sender.close()
    receiver.close()


def test_a_record_too_large_for_shared_memory_is_an_error_that_says_what_to_do(
    tmp_path: Path,
) -> None:
    receiver, record_sender = RecordReceiver(tmp_path, "a", LiveStore()), RecordSender(tmp_path)
    record_sender.subscribe(TO, {"a": SHARED_MEMORY})
    writer = record_sender.open_stream(TO, 0, 1, list)
    image = {"image": np.zeros(SHARED_MEMORY_BYTES, np.uint8)}
    with pytest.raises(DataError, match="leave shared_memory out of the plan's transports"):
        writer.put(Record(RecordId(0, 0, 0), {"actions": np.zeros(1)}, image))
    record_sender.close()
    receiver.close()
