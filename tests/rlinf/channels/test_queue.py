"""Order, weights, batches and duplicates, as all live transports share them."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from rlinf.channels.queue import Batch, Entry, KeyedQueue, Seen
from rlinf.data.record import Identity

weights = st.lists(st.integers(0, 20), min_size=1, max_size=30)


def batches(values: list[int], target: int) -> list[list[int]]:
    """The batches that a reader of a closed channel gets."""
    queue = KeyedQueue()
    for value in values:
        queue.push("", value, value)
    out = []
    while queue.depth(""):
        batch = Batch(target)
        while not batch.full and (entry := queue.take("", batch.takes)):
            batch.add(entry.item, entry.weight)
        out.append(batch.items)
    return out


@given(weights, st.integers(1, 30))
def test_batches_are_a_partition_in_order_and_never_over_the_target(
    values: list[int], target: int
) -> None:
    found = batches(values, target)
    assert [value for batch in found for value in batch] == values
    assert all(batch and (sum(batch) <= target or len(batch) == 1) for batch in found)
    for batch, after in zip(found, found[1:], strict=False):
        assert sum(batch) + after[0] > target or sum(batch) == target, "a batch ended early"


@given(st.lists(st.integers(0, 9), min_size=1, unique=True), st.randoms())
def test_what_is_given_back_returns_to_its_place(taken: list[int], random: object) -> None:
    queue = KeyedQueue()
    for i in range(10):
        queue.push("k", i, 1)
    entries: list[Entry] = []
    while entry := queue.take("k", lambda _: True):
        entries.append(entry)
    queue.give_back(entries[i] for i in taken)
    back = []
    while entry := queue.take("k", lambda _: True):
        back.append(entry.item)
    assert back == sorted(taken)


def test_queues_that_are_empty_take_no_memory() -> None:
    queue = KeyedQueue(capacity=1)
    for i in range(100):
        queue.push(str(i), i, 1)
        assert queue.full(str(i))
        queue.take(str(i), lambda _: True)
    assert queue.depths() == {}


@given(st.lists(st.tuples(st.integers(-3, 50), st.integers(-(2**40), 2**40)), max_size=200))
@example([(-1, 0), (0, 0), (-1, 0)])
def test_an_identity_is_new_once(keys: list[tuple[int, int]]) -> None:
    seen, known = Seen(), set()
    for attempt, key in enumerate(keys):
        assert seen.add(Identity(*key, attempt)) == (key not in known)
        known.add(key)


def test_old_iterations_are_forgotten_before_new_ones() -> None:
    seen = Seen(np.zeros((512, 2), np.int64))
    for iteration in range(20):
        for sample in range(100):
            assert seen.add(Identity(iteration, sample))
    assert sum(seen.add(Identity(19, sample)) for sample in range(100)) == 0
    assert sum(seen.add(Identity(0, sample)) for sample in range(100)) == 100
