"""What every live transport promises; the same tests run over each."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlinf.channels.base import Channel, ChannelClosed, ChannelFailed
from rlinf.channels.reference import ReferenceChannel
from rlinf.channels.shared_memory import SharedMemoryChannel
from rlinf.channels.socket import SocketChannel
from rlinf.data.record import Identity, Record


class Transport:
    """Makes a channel and further ends of it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder = kind, folder
        self._ends: list[Channel] = []

    def create(self, capacity: int = 0, unique: bool = False) -> Channel:
        return self._keep(self._create(capacity, unique))

    def _create(self, capacity: int, unique: bool) -> Channel:
        if self._kind == "reference":
            return ReferenceChannel(capacity, unique=unique)
        if self._kind == "socket":
            return SocketChannel.create(
                self._folder, "c", capacity=capacity, unique=unique, interface="127.0.0.1"
            )
        return SharedMemoryChannel.create(
            self._folder, "c", size=4 << 20, capacity=capacity, unique=unique
        )

    def other(self) -> Channel:
        """Another end, as another process would have."""
        if self._kind == "reference":
            return self._ends[0]
        cls = SocketChannel if self._kind == "socket" else SharedMemoryChannel
        return self._keep(cls.open(self._folder, "c"))

    def leave(self) -> None:
        for end in reversed(self._ends):
            end.leave()

    def _keep(self, end: Channel) -> Channel:
        self._ends.append(end)
        return end


@pytest.fixture(params=["reference", "shared_memory", "socket"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Transport]:
    transport = Transport(request.param, tmp_path)
    yield transport
    transport.leave()


def record(sample: int, attempt: int = 0, size: int = 3) -> Record:
    return Record(
        Identity(0, sample, attempt),
        {"tokens": np.full(size, sample)},
        {"prompt": np.arange(2.0)},
        {"group": sample // 4, "reason": "stop"},
    )


def samples(records: list[Record]) -> list[int]:
    return [r.identity.sample for r in records]


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


def test_a_record_arrives_as_it_was_put(transport: Transport) -> None:
    source = transport.create()
    sink = transport.other()
    source.put(record(5))
    back = sink.get()
    assert back.identity == Identity(0, 5)
    assert back.steps["tokens"].tolist() == [5, 5, 5]
    assert back.context["prompt"].dtype == np.float64
    assert back.info == {"group": 1, "reason": "stop"}


def test_order_is_first_in_first_out_per_key(transport: Transport) -> None:
    source = transport.create()
    sink = transport.other()
    for i in range(30):
        source.put(record(i), key=f"k{i % 3}")
    source.close()
    for k in (2, 0, 1):
        assert samples([sink.get(key=f"k{k}") for _ in range(10)]) == list(range(k, 30, 3))


def test_iteration_ends_when_closed_and_drained(transport: Transport) -> None:
    source = transport.create()
    sink = transport.other()
    source.put(record(1))
    source.close()
    assert samples(list(sink)) == [1]
    with pytest.raises(ChannelClosed):
        sink.get()
    with pytest.raises(ChannelClosed):
        source.put(record(2))
        source.flush()


def test_a_reader_that_waits_is_woken_by_a_record_and_by_the_end(transport: Transport) -> None:
    source = transport.create()
    sink = transport.other()
    got: list[int] = []
    reader = in_thread(lambda: got.extend(samples(list(sink))))
    time.sleep(0.05)
    source.put(record(3))
    eventually(lambda: (got == [] and not reader.is_alive()) or len(got) == 0)
    source.close()
    reader.join(10)
    assert got == [3]


def test_a_full_channel_holds_its_producer_back(transport: Transport) -> None:
    source = transport.create(capacity=2)
    sink = transport.other()
    put: list[int] = []

    def produce() -> None:
        for i in range(6):
            source.put(record(i))
            source.flush()
            put.append(i)

    thread = in_thread(produce)
    eventually(lambda: put == [0, 1])
    thread.join(0.2)
    assert put == [0, 1]
    assert samples([sink.get() for _ in range(6)]) == list(range(6))
    thread.join(10)
    assert not thread.is_alive()


def test_a_full_key_does_not_hold_another_back(transport: Transport) -> None:
    source = transport.create(capacity=1)
    sink = transport.other()
    source.put(record(0), key="a")
    in_thread(lambda: source.put(record(1), key="a"))
    transport.other().put(record(2), key="b")
    assert sink.get(key="b").identity.sample == 2
    assert samples([sink.get(key="a"), sink.get(key="a")]) == [0, 1]


def test_batches_stop_at_the_target_weight(transport: Transport) -> None:
    source = transport.create()
    sink = transport.other()
    for i, weight in enumerate([3, 3, 5, 20, 1]):
        source.put(record(i), weight)
    source.close()
    batches = [samples(sink.get_batch(8)) for _ in range(4)]
    assert batches == [[0, 1], [2], [3], [4]], "a record over the target comes alone, never lost"
    with pytest.raises(ChannelClosed):
        sink.get_batch(8)


def test_a_batch_waits_until_it_is_full(transport: Transport) -> None:
    source = transport.create()
    sink = transport.other()
    source.put(record(0), 4)
    handle = ThreadPoolExecutor(1).submit(sink.get_batch, 8)
    time.sleep(0.1)
    assert not handle.done()
    source.put(record(1), 4)
    assert samples(handle.result(10)) == [0, 1]


def test_a_batch_larger_than_the_channel_does_not_starve(transport: Transport) -> None:
    source = transport.create(capacity=2)
    sink = transport.other()
    in_thread(lambda: [source.put(record(i)) for i in range(10)])
    assert samples(sink.get_batch(10)) == list(range(10))


def test_waiting_for_a_batch_costs_next_to_nothing(transport: Transport) -> None:
    source = transport.create()
    sink = transport.other()
    source.put(record(0))
    handle = ThreadPoolExecutor(1).submit(sink.get_batch, 2)
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1)
    spent = time.process_time() - before
    source.put(record(1))
    handle.result(10)
    assert spent < 0.2


def test_a_retried_record_is_accepted_once(transport: Transport) -> None:
    first = transport.create(unique=True)
    second = transport.other()
    for i in range(6):
        first.put(record(i))
    first.flush()
    for i in range(4, 9):
        second.put(record(i, attempt=1))
    second.flush()
    first.close()
    assert samples(list(transport.other())) == list(range(9))


def test_asynchronous_puts_and_gets_keep_their_order(transport: Transport) -> None:
    source = transport.create()
    sink = transport.other()
    takes = [sink.get_async() for _ in range(20)]
    for handle in [source.put_async(record(i)) for i in range(20)]:
        handle.result(10)
    assert samples([handle.result(10) for handle in takes]) == list(range(20))


def test_several_producers_and_consumers_lose_and_repeat_nothing(transport: Transport) -> None:
    first = transport.create(capacity=8)
    got: list[tuple[int, int]] = []

    def produce(start: int) -> None:
        end = transport.other()
        for i in range(start, start + 100):
            end.put(record(i), key=str(i % 2))
        end.flush()

    def consume(number: int) -> None:
        end = transport.other()
        try:
            while True:
                got.append((number, end.get(key=str(number % 2)).identity.sample))
        except ChannelClosed:
            return

    producers = [in_thread(lambda s=s: produce(s)) for s in (0, 1000, 2000)]
    consumers = [in_thread(lambda n=n: consume(n)) for n in range(4)]
    for thread in producers:
        thread.join(30)
    first.close()
    for thread in consumers:
        thread.join(30)
    expected = [s + i for s in (0, 1000, 2000) for i in range(100)]
    assert Counter(sample for _, sample in got) == Counter(expected)
    for number in range(4):
        for start in (0, 1000, 2000):
            mine = [s for n, s in got if n == number and start <= s < start + 100]
            assert mine == sorted(mine)


def test_a_failure_reaches_everybody_with_its_reason(transport: Transport) -> None:
    source = transport.create()
    sink = transport.other()
    waiting = ThreadPoolExecutor(1).submit(sink.get)
    time.sleep(0.05)
    source.fail("rank 3: loss is NaN")
    with pytest.raises(ChannelFailed, match="rank 3: loss is NaN"):
        waiting.result(10)
    with pytest.raises(ChannelFailed, match="rank 3"):
        source.put(record(1))
        source.flush()
    with pytest.raises(ChannelFailed, match="rank 3"):
        sink.get_batch(4)


def test_a_failure_frees_a_producer_that_waits(transport: Transport) -> None:
    source = transport.create(capacity=1)
    sink = transport.other()
    source.put(record(0))

    def put_one_more() -> None:
        source.put(record(1))
        source.flush()

    waiting = ThreadPoolExecutor(1).submit(put_one_more)
    time.sleep(0.05)
    sink.fail("reward crashed")
    with pytest.raises(ChannelFailed, match="reward crashed"):
        waiting.result(10)


def test_memory_is_flat_over_ten_thousand_operations(transport: Transport) -> None:
    source = transport.create(capacity=64, unique=True)
    sink = transport.other()

    def move(start: int) -> int:
        def produce() -> None:
            for i in range(start, start + 5000):
                source.put(record(i, size=64), key=str(i // 100))

        thread = in_thread(produce)
        for i in range(start, start + 5000):
            assert sink.get(key=str(i // 100)).identity.sample == i
        thread.join(10)
        gc.collect()
        return psutil.Process().memory_info().rss

    before = move(0)
    assert move(5000) - before < 3 << 20
