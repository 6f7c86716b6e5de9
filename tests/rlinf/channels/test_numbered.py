"""Numbers and acknowledgements, over a network that loses, repeats and mixes up."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlinf.channels.numbered import WINDOW, Inbox, Outbox, Part
from rlinf.errors import DataError

SENDER = ["add", "add", "send", "send", "answer", "answer", "later", "restart", "clear"]
NETWORK = ["arrive", "lose", "repeat"]
steps = st.lists(
    st.tuples(st.sampled_from(SENDER + NETWORK), st.integers(0, 9)),
    min_size=20,
    max_size=100,
)


@given(steps)
@example([("add", 0), ("clear", 0), ("add", 0)])
@settings(max_examples=300, deadline=None)
def test_every_item_arrives_once_and_in_order(steps: list[tuple[str, int]]) -> None:
    outbox, inbox = Outbox(part_bytes=5, resend_s=1.0), Inbox()
    network: list[Part] = []
    answers = [(0, 0, False)]
    added = done = now = 0
    got: list[int] = []
    due: set[int] = set()

    def arrive(part: Part) -> None:
        got.extend(int(item) for item in inbox.accept(*part))
        answers.append((inbox.expected, done, inbox.gap))

    def waiting() -> set[int]:
        return set(range(added - len(outbox), added))

    for step, which in steps:
        if step == "add":
            outbox.add(b"%d" % added)
            due.add(added)
            added += 1
        elif step == "send":
            network.append(outbox.take(now))
        elif step == "later":
            now += 2
        elif step == "answer":
            received, handled, gap = answers[-1 - which % len(answers)]
            outbox.hear(received, handled, now, gap=gap)
            done = max(done, inbox.expected - which)
        elif step == "clear":
            due -= waiting()
            outbox.clear()
        elif step == "restart":
            # Words carry the receiver's token: none to or from the former one counts.
            inbox, network, answers, got, done = Inbox(), [], [(0, 0, False)], [], 0
            outbox.restart()
            due = waiting()
        elif network:
            place = which % len(network)
            part = network[place] if step == "repeat" else network.pop(place)
            if step != "lose":
                arrive(part)
    for _ in range(2 * added + 4):
        now += 2
        arrive(outbox.take(now))
        outbox.hear(inbox.expected, inbox.expected, now, gap=inbox.gap)
    assert got == sorted(set(got)), "an item was repeated or overtook another"
    assert due <= set(got), "an item was lost"
    assert len(outbox) == 0


def test_nothing_is_sent_again_before_the_receiver_had_time_to_answer() -> None:
    outbox = Outbox(part_bytes=10, resend_s=1.0)
    outbox.add(b"a")
    assert outbox.take(0.0).items == [b"a"]
    outbox.hear(0, 0, 0.9, gap=True)
    assert outbox.take(0.9).items == []
    outbox.hear(0, 0, 1.1, gap=True)
    assert outbox.take(1.1).items == [b"a"]


def test_what_takes_long_on_its_way_is_not_sent_twice() -> None:
    """Connections keep the order: what comes after it would show that it is missing."""
    outbox, inbox = Outbox(part_bytes=10, resend_s=1.0), Inbox()
    outbox.add(b"a")
    outbox.take(0.0)
    outbox.hear(0, 0, 99.0, gap=inbox.gap)
    assert outbox.take(99.0).items == []
    inbox.accept(*outbox.take(99.5))
    assert inbox.gap
    outbox.hear(0, 0, 100.0, gap=inbox.gap)
    assert outbox.take(100.0).items == [b"a"]


def test_what_arrived_is_kept_until_it_is_done_with_but_not_sent_again() -> None:
    outbox = Outbox(part_bytes=10, resend_s=1.0)
    outbox.add(b"a")
    outbox.take(0.0)
    outbox.hear(1, 0, 0.1, gap=False)
    outbox.hear(1, 0, 9.0, gap=True)
    assert outbox.take(9.0).items == []
    assert len(outbox) == 1
    outbox.restart()
    assert outbox.take(9.0) == Part(0, 0, [b"a"])
    outbox.hear(1, 1, 9.1, gap=False)
    assert len(outbox) == 0


def test_a_receiver_that_does_not_answer_is_not_flooded() -> None:
    outbox = Outbox(part_bytes=10, resend_s=1.0)
    for _ in range(3 * WINDOW):
        outbox.add(b"x" * 10)
    assert sum(len(outbox.take(i).items) for i in range(9 * WINDOW)) == WINDOW


def test_numbers_that_make_no_sense_are_refused() -> None:
    outbox = Outbox(part_bytes=10, resend_s=1.0)
    outbox.add(b"a")
    for received, done in [(2, 0), (0, 1), (-1, -1)]:
        with pytest.raises(DataError):
            outbox.hear(received, done, 0.0, gap=False)
    inbox = Inbox()
    for base, first in [(-1, 0), (2, 1)]:
        with pytest.raises(DataError):
            inbox.accept(base, first, [b"a"])
    assert inbox.expected == 0
