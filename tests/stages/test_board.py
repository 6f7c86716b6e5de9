"""What stages hand each other in memory arrives whole and once, or is known not to come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.record import Identity, Record
from rlinf.errors import InputFailed, RequeueRequested
from stages.board import Board, Output


def record(sample: int, value: int = 0) -> Record:
    return Record(Identity(0, sample, 0), {"actions": np.array([value])})


def never() -> bool:
    return False


def values(records: list[Record] | None) -> list[tuple[int, int]]:
    assert records is not None
    return [(r.identity.sample, int(r.steps["actions"][0])) for r in records]


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 9), st.integers(0, 9))
def test_a_range_is_complete_once_each_sample_is_there_in_whatever_order(
    arrivals: list[int], start: int, count: int
) -> None:
    stream, there = Output().stream("x"), set[int]()
    samples = range(start, start + count)
    for number, sample in enumerate(arrivals):
        stream.put(record(sample, number))
        there.add(sample)
        assert stream.complete(samples) == (set(samples) <= there)
    first = {sample: arrivals.index(sample) for sample in there}
    assert values(stream.take(samples)) == [(s, first[s]) for s in samples if s in there]
    assert len(stream) == len(there), "what came twice counts once"
    stream.end(len(there) + 1)
    assert stream.complete(samples) == (set(samples) <= there), "one is still on its way"
    stream.end(len(there))
    assert stream.complete(samples), "nothing more comes"


def test_a_stream_ends_when_all_ranks_have_ended() -> None:
    stream = Output().stream("x")
    stream.end(0, 1, 2)
    stream.end(0, 1, 2)
    assert not stream.complete(range(1))
    stream.end(0, 0, 2)
    assert stream.complete(range(1))


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
    board = Board()
    output = board.output("it/0000/train")
    work = (
        (lambda: output.attempt(never)) if whole else (lambda: output.records("x", range(2), never))
    )
    thread, errors = waiting(work)
    output.fail("train/0 failed: no memory")
    thread.join(5)
    assert isinstance(errors[0], InputFailed)
    assert "no memory" in str(errors[0])


def test_another_attempt_adds_to_what_is_there() -> None:
    output = Output()
    output.stream("x").put(record(0, 1))
    output.done("data-a")
    output.fail("killed")
    output.retried()
    output.stream("x").put(record(0, 2))
    output.stream("x").put(record(1, 2))
    assert values(output.records("x", range(2), never)) == [(0, 1), (1, 2)]
    asked = iter([False, True])
    with pytest.raises(RequeueRequested):
        output.attempt(lambda: next(asked))
    output.done("data-b")
    assert output.attempt(never) == "data-b"


def test_whoever_waits_in_vain_sees_that_it_was_committed_meanwhile() -> None:
    """The worker that made the records was lost after its commit, some of them with it."""
    output = Output()
    output.stream("x").put(record(0))
    looks = iter([False, True])
    assert output.records("x", range(2), never, lambda: next(looks)) is None
    assert output.attempt(never, lambda: True) is None
    assert values(output.records("x", range(1), never, lambda: True)) == [(0, 0)]


def test_a_board_keeps_the_weights_of_the_last_two_outputs() -> None:
    board = Board()
    for number in range(9):
        board.output(str(number)).objects["weights"] = number
        board.trim(2)
    assert [n for n in range(9) if board.output(str(n)).objects] == [7, 8]


def test_what_is_under_way_stays_however_many_stages_are_ordered_at_once() -> None:
    """As many as a rollout far behind has: whoever waits for records holds on to their output."""
    board = Board()
    first = board.output("0")
    for number in range(400):
        board.hold(f"rollout/{number}", [str(number)])
        board.output(str(number))
    assert not board.let_go(lambda _: False)
    assert not board.let_go(lambda _: True), "what a stage is at stays even if there is a commit"
    assert board.output("0") is first


def test_what_is_committed_goes_once_no_stage_here_is_to_read_it() -> None:
    board, committed = Board(), {"rollout"}
    board.hold("rollout/0", ["rollout"])
    board.hold("train/0", ["train", "rollout"])
    for folder in ("rollout", "train", "early"):
        board.output(folder)
    board.release("rollout/0")
    assert not board.let_go(committed.__contains__), "train is still to read it"
    board.release("train/0")
    assert board.let_go(committed.__contains__) == {"rollout"}
    assert "rollout" not in board
    assert "train" in board, "its stage failed: another attempt adds to it"
    assert "early" in board, "the order to read it may still come"
    committed |= {"train", "early"}
    assert board.let_go(committed.__contains__) == {"train", "early"}


def test_weights_of_the_last_versions_stay_though_they_are_committed() -> None:
    """Claims come when they come; older versions lose them by number."""
    board = Board()
    board.output("sync").bring("data-a", "weights", 1)
    board.output("older")
    assert board.let_go(lambda _: True) == {"older"}
    assert board.output("sync").held("weights", "data-a") == 1


def test_what_came_to_memory_is_compared_with_what_was_committed() -> None:
    output = Output()
    output.stream("x").put(record(0))
    output.compare("x", [record(0), record(1)])
    with pytest.raises(InputFailed, match="sample 0 was committed by another attempt"):
        output.compare("x", [record(0, 1), record(1)])


def test_what_was_made_of_an_attempt_that_was_not_committed_is_spoilt() -> None:
    """Who has it gives up; those who ask for it then begin with nothing."""
    board = Board()
    output = board.output("rollout")
    for number, attempt in enumerate(("data-a", "data-b")):
        output.made_of(attempt)
        output.stream("x").put(record(number))
    with pytest.raises(InputFailed, match="never committed"):
        next(output.arriving("x", 2, never, made_of="data-a"))
    again = board.output("rollout")
    assert again is not output
    again.made_of("data-a")
    again.stream("x").put(record(0))
    assert values(list(again.arriving("x", 1, never, made_of="data-a"))) == [(0, 0)]


def test_an_object_is_held_only_for_the_attempt_it_is_of() -> None:
    output = Output()
    output.bring("data-a", "weights", 1)
    assert (output.held("weights", "data-a"), output.held("weights", "data-b")) == (1, None)
    output.retried()
    assert output.held("weights", "data-a") is None, "it is being made again"
