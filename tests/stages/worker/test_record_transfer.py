"""A worker fetches the records of others; one that vanishes holds nobody up."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf.channels import reply_buffers, requests
from rlinf.channels.channel import ChannelFailed
from rlinf.channels.requests import Request, RequestClient, RequestServer
from rlinf.data.record import Record, RecordId
from rlinf.errors import StorageError, UpstreamFailed
from rlinf.shared_memory import SHM_FOLDER
from stages.layout import work_item_channel, worker_pointer
from stages.live_store import FetchProgress, LiveStore, RecordStream, StreamEnd
from stages.worker import record_transfer
from stages.worker.messages import FetchOutput
from stages.worker.record_transfer import (
    MAX_OPEN_REQUESTS,
    RECORDS,
    SHARED_MEMORY,
    SOCKET,
    Fetcher,
    RecordFetch,
    RecordReader,
    RecordServer,
    fetch_stream,
)
from tests.rlinf.channels.proxy import Proxy

OUT, CHANNEL = "it/0000/rollout", "trajectories"
PRODUCER = """
import sys, time
from pathlib import Path
from tests.stages.worker.test_record_transfer import Worker, number
from stages.live_store import StreamEnd
folder, name, rank, ranks, has_end = sys.argv[1:]
worker = Worker(Path(folder), name)
for sample in range(int(rank), 6, int(ranks)):
    worker.stream.put(number(sample, rank=int(rank)))
if has_end == "end":
    worker.stream.finish(StreamEnd(6 // int(ranks), int(rank), int(ranks)))
print("ready", flush=True)
time.sleep(60)
"""


class Worker:
    """The parts of a worker that serve and fetch records."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.store = name, LiveStore()
        self.served = RecordServer(self.store)
        self.server = RequestServer(worker_pointer(folder, name), self.served.handle)
        self.fetcher = Fetcher(folder)

    @property
    def stream(self) -> RecordStream:
        return self.store.output(OUT).stream(CHANNEL)

    def fetch(self, *producers: str, transport: str = SOCKET, work_item: str = "") -> None:
        order = FetchOutput(
            output=OUT,
            channel=CHANNEL,
            producers=producers,
            transport=transport,
            work_item=work_item,
            source_attempt="data-a" if work_item else None,
        )
        self.fetch_order(order)

    def fetch_order(self, order: FetchOutput) -> None:
        for producer in order.producers:
            self.fetcher.add(producer, RecordFetch(order, producer, self.store))

    def samples(self) -> list[int]:
        return [r.identity.sample for r in self.store.output(OUT).available_records(CHANNEL)]

    def close(self) -> None:
        self.fetcher.close()
        self.server.close()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[str], Worker]]:
    made: list[Worker] = []

    def make(name: str) -> Worker:
        made.append(Worker(tmp_path, name))
        return made[-1]

    yield make
    for each in made:
        each.close()


def number(sample: int, rank: int = 0) -> Record:
    return Record(RecordId(0, sample, 0), {"actions": np.array([sample])}, info={"group": rank})


def until(there: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not there() and time.monotonic() < deadline:
        time.sleep(0.01)
    return there()


def segments() -> set[str]:
    return {path.name for path in SHM_FOLDER.glob(f"rlinf-*-{os.getpid()}-*")}


def start_producer(folder: Path, name: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PRODUCER, str(folder), name, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_records_and_ends_of_other_processes_arrive_in_the_live_store(
    tmp_path: Path, worker: Callable[[str], Worker]
) -> None:
    consumer = worker("c")
    consumer.fetch("r0", "r1")
    ranks = [start_producer(tmp_path, "r0", "0", "2", "end")]
    assert until(lambda: len(consumer.stream) == 3), (
        "a fetch waits for a producer that has not started"
    )
    assert not consumer.stream.is_complete(range(6)), "the other rank has not ended"
    ranks.append(start_producer(tmp_path, "r1", "1", "2", "end"))
    assert until(lambda: consumer.stream.is_complete(range(9)))
    records = consumer.stream.read(range(9))
    assert [record.identity.sample for record in records] == list(range(6))
    assert records[3].info == {"group": 1}
    assert int(records[3].steps["actions"][0]) == 3
    for process in ranks:
        process.kill()
        process.wait()


@pytest.mark.parametrize("transport", [SOCKET, SHARED_MEMORY])
def test_who_asks_late_gets_what_was_made_and_what_comes(
    worker: Callable[[str], Worker], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that is started again while its input is still being made need not wait for all."""
    monkeypatch.setattr(reply_buffers, "MIN_BUFFERED_BYTES", 0)
    before = segments()
    producer, early, late, last = (worker(name) for name in ("p", "e", "l", "x"))
    early.fetch("p", transport=transport)
    for sample in range(2000):
        producer.stream.put(number(sample))
        if sample == 1000:
            late.fetch("p", transport=transport)
    for consumer in (early, late):
        assert until(lambda consumer=consumer: consumer.stream.is_complete(range(2000)))
        assert not consumer.stream.is_complete(range(2001))
    producer.stream.finish(StreamEnd(2000))
    last.fetch("p", transport=transport)
    for consumer in (early, late, last):
        assert until(lambda consumer=consumer: consumer.stream.is_complete(range(2001)))
        assert consumer.samples() == list(range(2000)), "each once"
        consumer.fetcher.close()
    assert segments() == before, "shared memory goes with its client"


def test_records_are_fetched_once_although_several_stages_need_them(
    worker: Callable[[str], Worker],
) -> None:
    producer, consumer = worker("p"), worker("c")
    cursors: list[int] = []
    handle = producer.served.handle
    producer.server._handle = lambda r: (cursors.append(r.arguments["position"][0]), handle(r))[1]
    consumer.fetch("p")
    consumer.fetch("p")
    producer.stream.put(number(0))
    assert until(lambda: cursors == [0, 1])
    producer.stream.finish(StreamEnd(1))
    assert until(lambda: consumer.stream.is_complete(range(99)))
    consumer.fetch("p")
    time.sleep(0.2)
    # The second request was sent before the record was read, so the end takes a third one.
    assert cursors == [0, 1, 1], "neither while the first fetch goes on nor afterwards"


def test_a_rank_serves_only_what_it_has_produced(worker: Callable[[str], Worker]) -> None:
    """Each rank fetches from all others; nothing goes in circles."""
    ranks = [worker(f"r{rank}") for rank in range(3)]
    for rank, each in enumerate(ranks):
        each.fetch(*(other.name for other in ranks if other is not each))
        for sample in range(rank, 9, 3):
            each.stream.put(number(sample))
        each.stream.finish(StreamEnd(3, rank, 3))
    for each in ranks:
        assert until(lambda each=each: each.stream.is_complete(range(99)))
        assert sorted(each.samples()) == list(range(9))
        own = each.stream.read_own(0, 99, (0, 0), lambda: None)
        assert own is not None
        assert len(own.records) == 3


@pytest.mark.parametrize("transport", [SOCKET, SHARED_MEMORY])
def test_large_records_arrive_whole_and_outlive_what_brought_them(
    worker: Callable[[str], Worker], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_transfer, "MAX_REPLY_BYTES", 1 << 20)
    monkeypatch.setattr(record_transfer, "MAX_LOCAL_REPLY_BYTES", 1 << 19)
    before = segments()
    producer, consumer = worker("p"), worker("c")
    consumer.fetch("p", transport=transport)
    for sample in range(12):
        image = np.full(3 << 19, sample, np.uint8)
        producer.stream.put(Record(RecordId(0, sample), {"actions": np.zeros(1)}, {"image": image}))
    producer.stream.finish(StreamEnd(12))
    assert until(lambda: consumer.stream.is_complete(range(99)))
    assert len(segments() - before) <= MAX_OPEN_REQUESTS + 1, "shared memory is used again"
    consumer.fetcher.close()
    assert segments() == before
    for record in consumer.stream.read(range(12)):
        image = record.context["image"]
        assert image[0] == image[-1] == record.identity.sample


@pytest.mark.parametrize("error", [StorageError("no room"), OSError(24, "no room")])
def test_records_come_by_socket_where_shared_memory_is_full(
    worker: Callable[[str], Worker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    def create(name: str, size: int) -> None:
        raise error

    monkeypatch.setattr(reply_buffers, "MIN_BUFFERED_BYTES", 0)
    monkeypatch.setattr(reply_buffers, "create_segment", create)
    producer, consumer, other = worker("p"), worker("c"), worker("d")
    for each in (consumer, other):
        each.fetch("p", transport=SHARED_MEMORY)
    assert until(lambda: len(producer.stream._callbacks) == 2)
    producer.stream.put(number(0))  # answers both, in this thread
    for each in (consumer, other):
        assert until(lambda each=each: each.samples() == [0])
    assert "replies come by socket" in caplog.text
    assert "no room" in caplog.text


@pytest.mark.parametrize("size", [1, 100_000])
def test_records_keep_no_shared_memory(worker: Callable[[str], Worker], size: int) -> None:
    """Their arrays would keep a mapping each, of which a process can have only so many."""

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("/rlinf-")

    before, (producer, consumer) = mappings(), (worker("p"), worker("c"))
    consumer.fetch("p", transport=SHARED_MEMORY)
    for sample in range(50):
        producer.stream.put(Record(RecordId(0, sample), {"actions": np.full(size, sample)}))
        assert until(lambda sample=sample: len(consumer.samples()) == sample + 1)
    assert mappings() <= before + 2 * (MAX_OPEN_REQUESTS + 1)


def test_a_reply_that_makes_no_sense_is_left_to_the_disk(
    worker: Callable[[str], Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """Another version of rlinf may send it; the other fetches of this worker go on."""
    producer, consumer = worker("p"), worker("c")
    handle = producer.served.handle

    def answer(request: Request) -> None:
        if request.arguments["channel"] == CHANNEL:
            request.reply({"stream": "x", "end": 5})
        else:
            handle(request)

    producer.server._handle = answer
    consumer.fetch("p")
    assert until(lambda: "read from disk instead" in caplog.text)
    producer.store.output(OUT).stream(work_item_channel("one")).put(number(1))
    consumer.fetch("p", work_item="one")
    assert until(lambda: consumer.samples() == [1])


def test_a_record_that_could_not_be_read_counts_as_missing(
    worker: Callable[[str], Worker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next order fetches it, and its producer does not count it as fetched."""
    producer, consumer = worker("p"), worker("c")
    consumer.fetch("p")
    producer.stream.put(number(0))
    assert until(lambda: consumer.samples() == [0])
    with monkeypatch.context() as patch:
        patch.setattr(record_transfer, "decode_record", lambda block: block[0].nothing)
        producer.stream.put(number(1))
        assert until(lambda: "read from disk instead" in caplog.text)
    producer.stream.finish(StreamEnd(2))
    assert not producer.stream.wait_until_fetched(lambda: False, 0.3)
    consumer.fetch("p")
    assert until(lambda: consumer.samples() == [0, 1])
    assert producer.stream.wait_until_fetched(lambda: False, 20)


def test_a_thread_without_fetches_ends_and_another_one_starts(
    worker: Callable[[str], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_transfer, "IDLE_S", 0.2)
    producer, consumer = worker("p"), worker("c")

    def is_running() -> bool:
        return any(thread.name == "data of p" for thread in threading.enumerate())

    consumer.fetch("p")
    producer.stream.put(number(0))
    producer.stream.finish(StreamEnd(1))
    assert until(lambda: consumer.stream.is_complete(range(9)))
    assert until(lambda: not is_running())
    item = producer.store.output(OUT).stream(work_item_channel("one"))
    item.put(number(1))
    consumer.fetch("p", work_item="one")
    assert until(lambda: consumer.samples() == [0, 1])


@pytest.mark.parametrize("replaced", [False, True])
def test_a_slow_large_record_goes_on_where_it_was_interrupted(
    tmp_path: Path,
    worker: Callable[[str], Worker],
    monkeypatch: pytest.MonkeyPatch,
    replaced: bool,
) -> None:
    """Unless the stream is another one: then it starts with the first record."""
    monkeypatch.setattr(record_transfer, "MAX_REPLY_BYTES", 1 << 10)
    record = Record(RecordId(0, 7), {"actions": np.arange(1 << 10)})
    stream = worker("p").stream
    other = worker("q").stream
    for each in (stream, other):
        each.put(record)
    progress = FetchProgress()
    reader = RecordReader(OUT, CHANNEL, progress)
    found: list[Record] = []

    def request(client: RequestClient) -> dict[str, Any]:
        arguments = reader.next_request()
        assert arguments is not None
        reply = client.request(RECORDS, arguments)
        if reader.advance(reply):
            found.extend(reader.read(reply))
        return reply.arguments

    with contextlib.closing(RequestClient(worker_pointer(tmp_path, "p"))) as first:
        for _ in range(3):
            request(first)
    reader.restart()
    with contextlib.closing(
        RequestClient(worker_pointer(tmp_path, "q" if replaced else "p"))
    ) as second:
        assert request(second)["position"] == [0, 0 if replaced else 3 << 10]
        while not found:
            request(second)
    assert progress.cursor == 1
    np.testing.assert_array_equal(found[0].steps["actions"], record.steps["actions"])


def test_a_record_that_cannot_be_sent_is_left_to_the_disk(
    worker: Callable[[str], Worker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither the stage that produces it nor the other streams of its worker suffer."""
    producer, consumer = worker("p"), worker("c")
    consumer.fetch("p")
    assert until(lambda: bool(producer.stream._callbacks))
    producer.stream.put(Record(RecordId(0, 0), {"actions": np.array([object()])}))
    assert until(lambda: "read from disk instead" in caplog.text)
    other = producer.store.output(OUT).stream(work_item_channel("one"))
    other.put(number(1))
    consumer.fetch("p", work_item="one")
    assert until(lambda: consumer.samples() == [1])


def test_a_producer_that_was_replaced_is_cursors_for_everything_again(
    tmp_path: Path,
    worker: Callable[[str], Worker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new process may have the records in another order."""
    monkeypatch.setattr(requests, "SERVER_TIMEOUT_S", 1.0)
    monkeypatch.setattr(requests, "PING_S", 0.3)
    monkeypatch.setattr(record_transfer, "RETRY_S", 0.05)
    consumer, first = worker("c"), start_producer(tmp_path, "p", "0", "2", "open")
    consumer.fetch("p")
    assert until(lambda: len(consumer.stream) == 3)
    first.kill()
    first.wait()
    second = worker("p")
    for sample in (5, 4, 3, 2, 1, 0):
        second.stream.put(number(sample))
    second.stream.finish(StreamEnd(6))
    assert until(lambda: consumer.stream.is_complete(range(99)))
    assert sorted(consumer.samples()) == list(range(6))


def test_a_worker_that_stays_silent_is_given_up(
    tmp_path: Path,
    worker: Callable[[str], Worker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(record_transfer, "RETRY_S", 0.05)
    monkeypatch.setattr(record_transfer, "GIVE_UP_S", 0.2)
    consumer, there = worker("c"), worker("there")
    consumer.fetch("never was", "there")
    there.stream.put(number(0))
    assert until(lambda: consumer.samples() == [0]), "others are not kept waiting"
    assert until(lambda: "from never was: never was.json: there is no server" in caplog.text)
    with pytest.raises(ChannelFailed, match="no server"):
        fetch_stream(tmp_path, "never was", OUT, CHANNEL, lambda: False)


def test_the_trajectories_of_a_work_item_join_those_of_the_rollout(
    worker: Callable[[str], Worker],
) -> None:
    """The end of a work item is not that of the rollout; its weights are noted."""
    generator, collector = worker("g"), worker("c")
    collector.fetch("g", work_item="one")
    item = generator.store.output(OUT).stream(work_item_channel("one"))
    item.put(number(4))
    item.finish(StreamEnd(1))
    assert item.wait_until_fetched(lambda: False, 20)
    assert collector.samples() == [4]
    assert not collector.stream.is_complete(range(9))
    arriving = collector.store.output(OUT).iter_records(CHANNEL, 1, lambda: False, "data-b")
    with pytest.raises(UpstreamFailed, match="never committed"):
        next(arriving)


def test_a_work_item_is_over_only_once_somebody_has_all_of_it(
    worker: Callable[[str], Worker],
) -> None:
    item = worker("g").store.output(OUT).stream("x")
    item.put(number(0))
    item.finish(StreamEnd(1))
    assert item.read_own(0, 9, (0, 0), lambda: None) is not None, (
        "cursors for, but perhaps not arrived"
    )
    assert not item.wait_until_fetched(lambda: True, 20)
    assert not item.wait_until_fetched(lambda: False, 0.1)
    assert item.read_own(1, 9, (0, 0), lambda: None) == ([], False, None), "asked ahead"
    assert not item.wait_until_fetched(lambda: False, 0.1)
    assert item.read_own(1, 9, (1, 0), lambda: None) == ([], True, StreamEnd(1))
    assert item.wait_until_fetched(lambda: False, 0.1)


def test_all_records_of_a_stream_can_be_fetched_at_once(
    tmp_path: Path, worker: Callable[[str], Worker]
) -> None:
    producer = worker("p")
    got: list[list[Record]] = []
    thread = threading.Thread(
        target=lambda: got.append(fetch_stream(tmp_path, "p", OUT, CHANNEL, lambda: False))
    )
    thread.start()
    for sample in range(3):
        producer.stream.put(number(sample))
        time.sleep(0.05)
    assert not got
    producer.stream.finish(StreamEnd(3))
    thread.join(20)
    assert [record.identity.sample for record in got[0]] == [0, 1, 2]
    producer.store.output(OUT).close()
    with pytest.raises(ChannelFailed, match="no longer has trajectories"):
        fetch_stream(tmp_path, "p", OUT, CHANNEL, lambda: False)


def test_records_of_outputs_on_disk_are_let_go_by_both_sides(
    worker: Callable[[str], Worker],
) -> None:
    producer, consumer = worker("p"), worker("c")
    consumer.fetch("p")
    producer.stream.put(number(0))
    assert until(lambda: len(consumer.stream) == 1)
    assert until(lambda: bool(producer.stream._callbacks)), "it has asked for more"
    held = weakref.ref(producer.store.output(OUT).available_records(CHANNEL)[0])
    (thread,) = consumer.fetcher._threads.values()
    assert thread._fetches
    producer.store.release_committed(lambda _: True)
    assert until(lambda: held() is None)
    assert until(lambda: not thread._fetches), "the consumer knows that no more comes"
    consumer.fetch("p")
    consumer.fetcher.drop_outputs({OUT})
    assert not thread._fetches


def test_an_invalid_output_is_no_longer_served(worker: Callable[[str], Worker]) -> None:
    producer, consumer = worker("p"), worker("c")
    producer.stream.put(number(0))
    consumer.fetch("p")
    assert until(lambda: len(consumer.stream) == 1)
    producer.store.output(OUT).invalidated = True
    producer.stream.put(number(1))
    (thread,) = consumer.fetcher._threads.values()
    assert until(lambda: not thread._fetches)
    assert consumer.samples() == [0]


def test_an_output_that_is_produced_again_is_fetched_again(worker: Callable[[str], Worker]) -> None:
    """The worker may have dropped the output before another attempt produced it."""
    producer, consumer = worker("p"), worker("c")
    consumer.fetch("p")
    assert until(lambda: bool(producer.stream._callbacks))
    producer.store.release_committed(lambda _: True)
    (thread,) = consumer.fetcher._threads.values()
    assert until(lambda: not thread._fetches)
    producer.stream.put(number(3))
    consumer.fetch("p")
    assert until(lambda: consumer.samples() == [3])


def test_parts_of_a_large_record_may_arrive_in_another_order(
    tmp_path: Path, worker: Callable[[str], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose reply was lost is sent again, behind later ones."""
    monkeypatch.setattr(record_transfer, "MAX_REPLY_BYTES", 1 << 10)
    record = Record(RecordId(0, 7), {"actions": np.arange(1 << 10)})
    worker("p").stream.put(record)
    reader = RecordReader(OUT, CHANNEL, FetchProgress())
    found: list[Record] = []
    with contextlib.closing(RequestClient(worker_pointer(tmp_path, "p"))) as client:
        while not found:
            requests = list(iter(reader.next_request, None))
            replies = [
                client.request(RECORDS, each) for each in requests if each["position"][0] == 0
            ]
            for reply in reversed(replies):
                if reader.advance(reply):
                    found += reader.read(reply)
    np.testing.assert_array_equal(found[0].steps["actions"], record.steps["actions"])


def test_a_large_record_on_a_slow_network_goes_on_where_the_connection_broke(
    tmp_path: Path, worker: Callable[[str], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "PING_S", 0.2)
    monkeypatch.setattr(record_transfer, "MAX_REPLY_BYTES", 1 << 16)
    monkeypatch.setattr(record_transfer, "RETRY_S", 0.05)
    producer, consumer = worker("p"), worker("c")
    positions: list[int] = []
    handle = producer.served.handle
    producer.server._handle = lambda r: (positions.append(r.arguments["position"][1]), handle(r))[1]
    pointer = worker_pointer(tmp_path, "p")
    values = json.loads(pointer.read_text())
    ip, port = values["addresses"][0].removeprefix("tcp://").split(":")
    wire = Proxy((ip, int(port)), cut_after=300_000, bytes_per_s=2e6)
    pointer.write_text(json.dumps({**values, "addresses": [f"tcp://127.0.0.1:{wire.port}"]}))
    image = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)
    producer.stream.put(Record(RecordId(0, 0), context={"image": image}))
    consumer.fetch("p")
    assert until(lambda: consumer.samples() == [0], 30)
    (record,) = consumer.stream.read(range(1))
    np.testing.assert_array_equal(record.context["image"], image)
    assert wire.cuts >= 2
    assert positions.count(0) <= 2, "the first part was sent once, or again after the first cut"
    wire.close()
