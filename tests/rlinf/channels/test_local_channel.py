"""What the channel between threads promises."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest

from rlinf.channels.channel import ChannelClosed, LocalChannel
from rlinf.data.record import Record, RecordId


def record(sample: int, size: int = 3) -> Record:
    return Record(RecordId(0, sample), {"tokens": np.full(size, sample)}, info={"group": 1})


def samples(channel: LocalChannel, count: int) -> list[int]:
    return [channel.get().identity.sample for _ in range(count)]


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_order_is_first_in_first_out() -> None:
    channel = LocalChannel()
    for i in range(200):
        channel.put(record(i, size=1 + i % 7))
    assert samples(channel, 200) == list(range(200))


def test_a_reader_that_waits_is_woken_by_a_record_and_by_the_end() -> None:
    channel, got = LocalChannel(), list[int]()
    reader = in_thread(lambda: got.extend(r.identity.sample for r in channel))
    time.sleep(0.05)
    channel.put(record(3))
    deadline = time.monotonic() + 10
    while got != [3]:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    channel.close()
    reader.join(10)
    assert not reader.is_alive()
    with pytest.raises(ChannelClosed):
        channel.get()
    with pytest.raises(ChannelClosed):
        channel.put(record(0))


def test_waiting_costs_next_to_nothing() -> None:
    channel = LocalChannel()
    waiting = in_thread(channel.get)
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1)
    spent = time.process_time() - before
    channel.put(record(0))
    waiting.join(10)
    assert spent < 0.2


def test_records_of_several_writers_are_all_there_and_those_of_each_in_order() -> None:
    channel = LocalChannel()

    def produce(start: int) -> None:
        for i in range(start, start + 100):
            channel.put(record(i))

    writers = [in_thread(lambda s=s: produce(s)) for s in (0, 1000, 2000)]  # type: ignore[misc]
    got = samples(channel, 300)
    for writer in writers:
        writer.join(30)
    for start in (0, 1000, 2000):
        assert [s for s in got if start <= s < start + 100] == list(range(start, start + 100))


def test_memory_is_flat_over_ten_thousand_operations() -> None:
    channel = LocalChannel()

    def move(start: int) -> int:
        for part in range(start, start + 5000, 50):
            for i in range(part, part + 50):
                channel.put(record(i, size=64))
            assert samples(channel, 50) == list(range(part, part + 50))
        gc.collect()
        return psutil.Process().memory_info().rss

    before = move(0)
    assert move(5000) - before < 3 << 20


def test_a_full_local_channel_holds_its_producer_back() -> None:
    channel, put = LocalChannel(capacity=2), []

    def produce() -> None:
        for i in range(5):
            channel.put(record(i))
            put.append(i)

    thread = in_thread(produce)
    thread.join(0.2)
    assert put == [0, 1]
    assert samples(channel, 5) == [0, 1, 2, 3, 4]
    thread.join(5)
    assert not thread.is_alive()


def test_a_local_channel_is_drained_after_it_was_closed() -> None:
    channel = LocalChannel()
    channel.put(record(1))
    channel.close()
    assert [r.identity.sample for r in channel] == [1]
