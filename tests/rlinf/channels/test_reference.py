"""The reference channel keeps order, bounds, weights and identities."""

from __future__ import annotations

import threading

import pytest

from rlinf.channels.base import ChannelClosed
from rlinf.channels.reference import ReferenceChannel
from rlinf.data.record import Identity, Record


def record(sample: int, attempt: int = 0) -> Record:
    return Record(Identity(0, sample, attempt))


def test_order_is_first_in_first_out_per_key() -> None:
    channel = ReferenceChannel()
    for i in range(6):
        channel.put(record(i), key="even" if i % 2 == 0 else "odd")
    channel.close()
    even = [channel.get(key="even").identity.sample for _ in range(3)]
    odd = [channel.get(key="odd").identity.sample for _ in range(3)]
    assert (even, odd) == ([0, 2, 4], [1, 3, 5])


def test_iteration_ends_when_closed_and_drained() -> None:
    channel = ReferenceChannel()
    channel.put(record(1))
    channel.close()
    assert [r.identity.sample for r in channel] == [1]
    with pytest.raises(ChannelClosed):
        channel.get()
    with pytest.raises(ChannelClosed):
        channel.put(record(2))


def test_a_full_channel_holds_its_producer_back() -> None:
    channel = ReferenceChannel(capacity=2)
    put: list[int] = []

    def produce() -> None:
        for i in range(5):
            channel.put(record(i))
            put.append(i)

    thread = threading.Thread(target=produce)
    thread.start()
    thread.join(0.2)
    assert put == [0, 1]
    assert [channel.get().identity.sample for _ in range(5)] == [0, 1, 2, 3, 4]
    thread.join(5)
    assert not thread.is_alive()


def test_batches_stop_at_the_target_weight() -> None:
    channel = ReferenceChannel()
    for i, weight in enumerate([3, 3, 5, 20, 1]):
        channel.put(record(i), weight)
    channel.close()
    batches = [[r.identity.sample for r in channel.get_batch(8)] for _ in range(4)]
    assert batches == [[0, 1], [2], [3], [4]], "a record over the target comes alone, never lost"


def test_a_retried_record_is_accepted_once() -> None:
    channel = ReferenceChannel(unique=True)
    channel.put(record(7, attempt=0))
    channel.put(record(7, attempt=1))
    channel.close()
    assert len(list(channel)) == 1


def test_asynchronous_puts_keep_their_order() -> None:
    channel = ReferenceChannel()
    handles = [channel.put_async(record(i)) for i in range(20)]
    for handle in handles:
        handle.result(5)
    channel.close()
    assert [r.identity.sample for r in channel] == list(range(20))
