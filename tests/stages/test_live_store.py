"""What stages hand each other in memory arrives whole and once, or is known not to come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.record import Record, RecordId
from rlinf.errors import RequeueRequested, UpstreamFailed
from stages.live_store import LiveOutput, LiveStore


def record(sample: int, value: int = 0) -> Record:
    return Record(RecordId(0, sample, 0), {"actions": np.array([value])})


def never() -> bool:
    return False


def values(records: list[Record] | None) -> list[tuple[int, int]]:
    assert records is not None
    return [(r.identity.sample, int(r.steps["actions"][0])) for r in records]


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 9), st.integers(0, 9))
def test_a_range_is_complete_once_each_sample_is_there_in_whatever_order(
    arrivals: list[int], start: int, count: int
) -> None:
    stream, there = LiveOutput().stream("x"), set[int]()
    samples = range(start, start + count)
    for number, sample in enumerate(arrivals):
        stream.put(record(sample, number))
        there.add(sample)
        assert stream.is_complete(samples) == (set(samples) <= there)
    first = {sample: arrivals.index(sample) for sample in there}
    assert values(stream.read(samples)) == [(s, first[s]) for s in samples if s in there]
    assert len(stream) == len(there), "what came twice counts once"
    stream.finish_rank(len(there) + 1)
    assert stream.is_complete(samples) == (set(samples) <= there), "one is still on its way"
    stream.finish_rank(len(there))
    assert stream.is_complete(samples), "nothing more comes"


def test_a_stream_ends_when_all_ranks_have_ended() -> None:
    stream = LiveOutput().stream("x")
    stream.finish_rank(0, 1, 2)
    stream.finish_rank(0, 1, 2)
    assert not stream.is_complete(range(1))
    stream.finish_rank(0, 0, 2)
    assert stream.is_complete(range(1))


def waiting(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(0.05)
    return thread, errors


@pytest.mark.parametrize("whole", [False, True])
def test_a_failure_wakes_whoever_waits(whole: bool) -> None:
    store = LiveStore()
    output = store.output("it/0000/train")
    work = (
        (lambda: output.wait_for_attempt(never))
        if whole
        else (lambda: output.wait_for_records("x", range(2), never))
    )
    thread, errors = waiting(work)
    output.fail("train/0 failed: no memory")
    thread.join(5)
    assert isinstance(errors[0], UpstreamFailed)
    assert "no memory" in str(errors[0])


def test_another_attempt_adds_to_what_is_there() -> None:
    output = LiveOutput()
    output.stream("x").put(record(0, 1))
    output.mark_complete("data-a")
    output.fail("killed")
    output.reset()
    output.stream("x").put(record(0, 2))
    output.stream("x").put(record(1, 2))
    assert values(output.wait_for_records("x", range(2), never)) == [(0, 1), (1, 2)]
    request = iter([False, True])
    with pytest.raises(RequeueRequested):
        output.wait_for_attempt(lambda: next(request))
    output.mark_complete("data-b")
    assert output.wait_for_attempt(never) == "data-b"


def test_whoever_waits_in_vain_sees_that_it_was_committed_meanwhile() -> None:
    """The worker that made the records was lost after its commit, some of them with it."""
    output = LiveOutput()
    output.stream("x").put(record(0))
    looks = iter([False, True])
    assert output.wait_for_records("x", range(2), never, lambda: next(looks)) is None
    assert output.wait_for_attempt(never, lambda: True) is None
    assert values(output.wait_for_records("x", range(1), never, lambda: True)) == [(0, 0)]


def test_a_live_store_keeps_the_weights_of_the_last_two_outputs() -> None:
    store = LiveStore()
    for number in range(9):
        store.output(str(number)).objects["weights"] = number
        store.evict_objects(2)
    assert [n for n in range(9) if store.output(str(n)).objects] == [7, 8]


def test_what_is_under_way_stays_however_many_stages_are_ordered_at_once() -> None:
    """As many as a rollout far behind has: whoever waits for records holds on to their output."""
    store = LiveStore()
    first = store.output("0")
    for number in range(400):
        store.pin(f"rollout/{number}", [str(number)])
        store.output(str(number))
    assert not store.release_committed(lambda _: False)
    assert not store.release_committed(lambda _: True), (
        "what a stage is at stays even if there is a commit"
    )
    assert store.output("0") is first


def test_what_is_committed_goes_once_no_stage_here_is_to_read_it() -> None:
    store, committed = LiveStore(), {"rollout"}
    store.pin("rollout/0", ["rollout"])
    store.pin("train/0", ["train", "rollout"])
    for folder in ("rollout", "train", "early"):
        store.output(folder)
    store.unpin("rollout/0")
    assert not store.release_committed(committed.__contains__), "train is still to read it"
    store.unpin("train/0")
    assert store.release_committed(committed.__contains__) == {"rollout"}
    assert "rollout" not in store
    assert "train" in store, "its stage failed: another attempt adds to it"
    assert "early" in store, "the order to read it may still come"
    committed |= {"train", "early"}
    assert store.release_committed(committed.__contains__) == {"train", "early"}


def test_weights_of_the_last_versions_stay_though_they_are_committed() -> None:
    """Claims come when they come; older versions lose them by number."""
    store = LiveStore()
    store.output("sync").put_object("data-a", "weights", 1)
    store.output("older")
    assert store.release_committed(lambda _: True) == {"older"}
    assert store.output("sync").get_object("weights", "data-a") == 1


def test_what_came_to_memory_is_compared_with_what_was_committed() -> None:
    output = LiveOutput()
    output.stream("x").put(record(0))
    output.compare_with_commit("x", [record(0), record(1)])
    with pytest.raises(UpstreamFailed, match="sample 0 was committed by another attempt"):
        output.compare_with_commit("x", [record(0, 1), record(1)])


def test_records_of_an_uncommitted_attempt_are_invalidated() -> None:
    """Who has it gives up; those who ask for it then begin with nothing."""
    store = LiveStore()
    output = store.output("rollout")
    for number, attempt in enumerate(("data-a", "data-b")):
        output.add_source_attempt(attempt)
        output.stream("x").put(record(number))
    with pytest.raises(UpstreamFailed, match="never committed"):
        next(output.iter_records("x", 2, never, source_attempt="data-a"))
    again = store.output("rollout")
    assert again is not output
    again.add_source_attempt("data-a")
    again.stream("x").put(record(0))
    assert values(list(again.iter_records("x", 1, never, source_attempt="data-a"))) == [(0, 0)]


def test_an_object_is_held_only_for_the_attempt_it_is_of() -> None:
    output = LiveOutput()
    output.put_object("data-a", "weights", 1)
    assert (output.get_object("weights", "data-a"), output.get_object("weights", "data-b")) == (
        1,
        None,
    )
    output.reset()
    assert output.get_object("weights", "data-a") is None, "it is being made again"
