"""What every live transport of records promises; the same tests run over each."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlinf.channels.channel import (
    ChannelClosed,
    ChannelFailed,
    LocalChannel,
    RecordSink,
    RecordSource,
)
from rlinf.channels.record_streams import SharedMemorySink, SocketSink, SocketSource
from rlinf.data.record import Record, RecordId


class Transport:
    """Makes a channel's end that reads, and ends that write."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder = kind, folder
        self.source = self._source()
        self._sinks: list[RecordSink] = []

    def _source(self) -> LocalChannel | SocketSource:
        if self._kind == "local":
            return LocalChannel()
        return SocketSource(self._folder, "c", interface="127.0.0.1")

    def sink(self) -> RecordSink:
        """An end as another process would have it."""
        if isinstance(self.source, LocalChannel):
            return self.source
        kind = SocketSink if self._kind == "socket" else SharedMemorySink
        self._sinks.append(kind(self._folder, "c"))
        return self._sinks[-1]

    def close(self) -> None:
        self.source.close()
        for sink in self._sinks:
            sink.close()


@pytest.fixture(params=["local", "shared_memory", "socket"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Transport]:
    transport = Transport(request.param, tmp_path)
    yield transport
    transport.close()


def record(sample: int, size: int = 3) -> Record:
    return Record(
        RecordId(0, sample),
        {"tokens": np.full(size, sample)},
        {"prompt": np.arange(2.0)},
        {"group": sample // 4, "reason": "stop"},
    )


def samples(source: RecordSource, count: int) -> list[int]:
    return [source.get().identity.sample for _ in range(count)]


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_a_record_arrives_as_it_was_put(transport: Transport) -> None:
    transport.sink().put(record(5))
    back = transport.source.get()
    assert back.identity == RecordId(0, 5)
    assert back.steps["tokens"].tolist() == [5, 5, 5]
    assert back.context["prompt"].dtype == np.float64
    assert back.info == {"group": 1, "reason": "stop"}


def test_order_is_first_in_first_out(transport: Transport) -> None:
    sink = transport.sink()
    for i in range(200):
        sink.put(record(i, size=1 + i % 7))
    assert samples(transport.source, 200) == list(range(200))


def test_a_reader_that_waits_is_woken_by_a_record_and_by_the_end(transport: Transport) -> None:
    sink, got = transport.sink(), []
    reader = in_thread(lambda: got.extend(r.identity.sample for r in transport.source))
    time.sleep(0.05)
    sink.put(record(3))
    deadline = time.monotonic() + 10
    while got != [3]:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    transport.source.close()
    reader.join(10)
    assert not reader.is_alive()
    with pytest.raises(ChannelClosed):
        transport.source.get()


def test_nothing_is_put_into_a_channel_that_ended(transport: Transport) -> None:
    sink = transport.sink()
    sink.put(record(0))
    sink.flush()
    transport.source.close()
    with pytest.raises((ChannelClosed, ChannelFailed)):
        for i in range(1000):
            sink.put(record(i))
            time.sleep(0.01)


def test_waiting_costs_next_to_nothing(transport: Transport) -> None:
    sink = transport.sink()
    waiting = in_thread(transport.source.get)
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1)
    spent = time.process_time() - before
    sink.put(record(0))
    waiting.join(10)
    assert spent < 0.2


def test_records_of_several_writers_are_all_there_and_those_of_each_in_order(
    transport: Transport,
) -> None:
    def produce(start: int) -> None:
        sink = transport.sink()
        for i in range(start, start + 100):
            sink.put(record(i))
        sink.flush()

    writers = [in_thread(lambda s=s: produce(s)) for s in (0, 1000, 2000)]  # type: ignore[misc]
    got = samples(transport.source, 300)
    for writer in writers:
        writer.join(30)
    for start in (0, 1000, 2000):
        assert [s for s in got if start <= s < start + 100] == list(range(start, start + 100))


def test_memory_is_flat_over_ten_thousand_operations(transport: Transport) -> None:
    sink = transport.sink()

    def move(start: int) -> int:
        for part in range(start, start + 5000, 50):
            for i in range(part, part + 50):
                sink.put(record(i, size=64))
            assert samples(transport.source, 50) == list(range(part, part + 50))
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
