"""Stages of a worker take turns in an order that depends on nothing but their positions."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.errors import RequeueRequested
from stages.device_schedule import DeviceSchedule, DeviceSlot, Position

STAGES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), min_size=1, max_size=6
)
"""Of each stage: iteration, parts it goes through, whether it fails in the last of them."""
TIMEOUT_S = 10.0


def run(stages: list[tuple[int, int, bool]], reverse: bool = False) -> list[Position]:
    """The positions at which the stages computed; checks that it was one at a time."""
    turns, order, computing = DeviceSchedule(), list[Position](), threading.Lock()

    def work(turn: DeviceSlot, parts: int, fails: bool) -> None:
        try:
            with turn:
                for number in range(parts + 1):
                    turn.start_chunk(number)
                    assert computing.acquire(blocking=False), "two compute at once"
                    order.append(turns.position(turn))
                    time.sleep(0)
                    computing.release()
                if fails:
                    raise ArithmeticError
        except ArithmeticError:
            pass

    threads = []
    for place, (iteration, parts, fails) in enumerate(stages):
        turn = turns.add((iteration, 0, place))
        threads.append(threading.Thread(target=work, args=(turn, parts, fails), daemon=True))
    for thread in reversed(threads) if reverse else threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "a stage never had its turn"
    return order


@settings(max_examples=40, deadline=None)
@given(STAGES)
def test_the_lowest_goes_first_and_all_ranks_take_the_same_turns(
    stages: list[tuple[int, int, bool]],
) -> None:
    order = run(stages)
    assert order == sorted(
        (iteration, part, place)
        for place, (iteration, parts, _) in enumerate(stages)
        for part in range(parts + 1)
    )
    assert run(stages, reverse=True) == order


def test_a_stage_never_goes_back_to_an_earlier_part() -> None:
    turns = DeviceSchedule()
    with turns.add((0, 2, 0)) as turn:
        turn.start_chunk(1)
        assert turns.position(turn) == (0, 2, 0)
        turn.start_chunk(3)
        assert turns.position(turn) == (0, 3, 0)


def test_a_stage_that_waits_for_an_input_lets_the_one_go_that_makes_it() -> None:
    """It was ordered late: another attempt, say. Until the first one waits, it computes alone."""
    turns, made, seen = DeviceSchedule(), threading.Event(), list[str]()
    first = turns.add((0, 0, 1))
    began = threading.Event()

    def consume() -> None:
        with first:
            began.set()
            time.sleep(0.2)
            seen.append("computed")
            with first.released():
                assert made.wait(TIMEOUT_S)
            seen.append("has its turn again")

    waiting = threading.Thread(target=consume)
    waiting.start()
    assert began.wait(TIMEOUT_S)
    with turns.add((0, 0, 0)):
        made.set()
        time.sleep(0.2)
        seen.append("made")
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()
    assert seen == ["computed", "made", "has its turn again"]


def test_a_wait_that_fails_or_comes_after_the_last_turn_needs_none() -> None:
    turns = DeviceSchedule()
    with pytest.raises(ArithmeticError), turns.add((0, 0, 1)) as turn:
        before = turns.add((0, 0, 0))
        with turn.released():
            raise ArithmeticError
    with turn.released():
        pass
    with before:
        pass


def test_who_waits_for_a_turn_holds_up_no_process_that_ends() -> None:
    turns, calls = DeviceSchedule(), list[str]()
    with turns.add((0, 0, 0)):

        def wait() -> None:
            try:
                with turns.add((0, 0, 1)):
                    calls.append("computed")
            except RequeueRequested:
                calls.append("ended")

        thread = threading.Thread(target=wait)
        thread.start()
        turns.close()
        thread.join(TIMEOUT_S)
    assert calls == ["ended"]


def test_spare_time_is_when_all_stages_that_may_go_on_wait() -> None:
    turns, order = DeviceSchedule(), list[str]()

    def fill() -> None:
        with turns.idle_time():
            order.append("spare")
            time.sleep(0.05)

    thread = threading.Thread(target=fill)
    late = turns.add((0, 0, 1))

    def stage() -> None:
        with late:
            order.append("late")

    other = threading.Thread(target=stage)
    with turns.add((0, 0, 0)) as first:
        thread.start()
        other.start()
        order.append("first")
        with first.released():
            thread.join(TIMEOUT_S)
        order.append("first again")
    other.join(TIMEOUT_S)
    assert order == ["first", "spare", "first again", "late"], "the later stage is not its turn"
    assert not turns.is_busy


def test_a_stage_that_is_ready_goes_before_what_fills_spare_time() -> None:
    turns, order = DeviceSchedule(), list[str]()

    def fill() -> None:
        with turns.idle_time():
            order.append("spare")

    def stage() -> None:
        with turns.add((0, 0, 1)):
            order.append("stage")

    with turns.add((0, 0, 0)):
        threads = [threading.Thread(target=work) for work in (fill, stage)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert order == ["stage", "spare"]
