"""Numbers and acknowledgements, over a network that loses, repeats and mixes up."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlinf.channels.mailbox_protocol import (
    WINDOW_PIECES,
    ItemPiece,
    PieceBatch,
    ReliableReceiver,
    ReliableSender,
)
from rlinf.errors import DataError

SENDER = ["add", "add", "large", "send", "send", "answer", "answer", "restart", "clear", "drop"]
NETWORK = ["arrive", "lose", "repeat"]
PART_BYTES, MAX_BYTES = 5, 99
steps = st.lists(
    st.tuples(st.sampled_from(SENDER + NETWORK), st.integers(0, 9)),
    min_size=20,
    max_size=100,
)


def whole(item: bytes) -> ItemPiece:
    return ItemPiece(len(item), item)


@given(steps)
@example([("add", 0), ("clear", 0), ("add", 0)])
@example([("large", 9), ("send", 0), ("arrive", 0), ("drop", 0), ("send", 0), ("clear", 0)])
@settings(max_examples=300, deadline=None)
def test_every_item_arrives_once_and_in_order(steps: list[tuple[str, int]]) -> None:
    sender, receiver = ReliableSender(PART_BYTES, PART_BYTES + 2), ReliableReceiver(MAX_BYTES)
    network: list[PieceBatch] = []
    answers: list[tuple[int, int, int | None]] = [(0, 0, None)]
    added = done = 0
    got: list[int] = []
    ends: list[int] = []
    due: dict[int, int] = {}
    """Items that must arrive, and for each the number after its last piece."""

    def arrive(part: PieceBatch) -> None:
        for end, item in receiver.accept(part):
            number, _, rest = bytes(item).partition(b" ")
            assert rest == b"x" * len(rest), "pieces were mixed up"
            got.append(int(number))
            ends.append(end)
        answers.append((receiver.expected, done, receiver.gap))

    def last() -> int:
        return sender._base + len(sender)

    for step, which in steps:
        if step in ("add", "large"):
            sender.add(b"%d %s" % (added, b"x" * (4 * which if step == "large" else 0)))
            due[added] = last()
            added += 1
        elif step == "send":
            network.append(sender.next_batch())
        elif step == "answer":
            sender.acknowledge(*answers[-1 - which % len(answers)])
            done = max([done, *(end for end in ends if end <= receiver.expected - which)])
        elif step == "clear":
            due = {item: end for item, end in due.items() if end <= sender._base}
            sender.clear()
        elif step == "drop":
            receiver.drop_partial()
        elif step == "restart":
            # Words carry the receiver's token: none to or from the former one counts.
            receiver, network, answers, done = ReliableReceiver(MAX_BYTES), [], [(0, 0, None)], 0
            got, ends = [], []
            sender.restart()
            due = {item: end for item, end in due.items() if end > sender._base}
        elif network:
            place = which % len(network)
            part = network[place] if step == "repeat" else network.pop(place)
            if step != "lose":
                arrive(part)
    for _ in range(2 * last() + 4):
        arrive(sender.next_batch())
        sender.acknowledge(receiver.expected, receiver.complete, receiver.gap)
    assert got == sorted(set(got)), "an item was repeated or overtook another"
    assert set(due) <= set(got), "an item was lost"
    assert len(sender) == sender.size == 0


def test_a_large_item_goes_in_pieces_that_are_acknowledged_as_they_come() -> None:
    sender, receiver = ReliableSender(10, 10), ReliableReceiver(MAX_BYTES)
    sender.add(b"x" * 25)
    sender.add(b"yz")
    parts = [sender.next_batch() for _ in range(3)]
    assert [[piece.remaining for piece in part.pieces] for part in parts] == [[25], [15], [5, 2]]
    assert [receiver.accept(part) for part in parts[:2]] == [[], []]
    assert (receiver.expected, receiver.complete) == (2, 0)
    assert [(end, bytes(item)) for end, item in receiver.accept(parts[2])] == [
        (3, b"x" * 25),
        (4, b"yz"),
    ]


def test_only_what_is_missing_of_a_large_item_is_sent_again() -> None:
    sender, receiver = ReliableSender(10, 10), ReliableReceiver(MAX_BYTES)
    sender.add(b"x" * 50)
    parts = [sender.next_batch() for _ in range(5)]
    receiver.accept(parts[0])
    receiver.accept(parts[1])
    receiver.accept(parts[4])
    sender.acknowledge(receiver.expected, receiver.complete, receiver.gap)
    assert sender.next_batch().first == 2


def test_what_was_under_way_when_it_is_sent_again_asks_for_nothing_more() -> None:
    """On a slow wire that is much, and each of it shows the same gap."""
    sender, receiver = ReliableSender(1, 1), ReliableReceiver(MAX_BYTES)
    for _ in range(5):
        sender.add(b"a")
    sender.next_batch()
    late = [sender.next_batch() for _ in range(4)]
    receiver.accept(late[0])
    sender.acknowledge(receiver.expected, receiver.complete, receiver.gap)
    assert sender.next_batch().first == 0
    for part in late[1:]:
        receiver.accept(part)
        sender.acknowledge(receiver.expected, receiver.complete, receiver.gap)
    assert sender.next_batch().first == 1
    sender.next_batch()  # lost as well
    receiver.accept(sender.next_batch())
    sender.acknowledge(receiver.expected, receiver.complete, receiver.gap)
    assert sender.next_batch().first == 0, "in another turn it is"


def test_what_takes_long_on_its_way_is_not_sent_twice() -> None:
    """Connections keep the order: what comes after it would show that it is missing."""
    sender, receiver = ReliableSender(10, 10), ReliableReceiver(MAX_BYTES)
    sender.add(b"a")
    sender.next_batch()
    sender.acknowledge(0, 0, receiver.gap)
    assert sender.next_batch().pieces == []
    receiver.accept(sender.next_batch())
    assert receiver.gap is not None
    sender.acknowledge(0, 0, receiver.gap)
    assert sender.next_batch().pieces == [whole(b"a")]


def test_what_could_not_be_sent_is_taken_again() -> None:
    sender = ReliableSender(10, 10)
    sender.add(b"a")
    sender.requeue(sender.next_batch())
    assert sender.next_batch() == PieceBatch(0, 0, 0, [whole(b"a")])


def test_what_arrived_is_kept_until_it_is_done_with_but_not_sent_again() -> None:
    sender = ReliableSender(10, 10)
    sender.add(b"a")
    sender.next_batch()
    sender.acknowledge(1, 0, None)
    sender.acknowledge(1, 0, 0)
    assert sender.next_batch().pieces == []
    assert len(sender) == 1
    sender.restart()
    part = sender.next_batch()
    assert (part.first, part.pieces) == (0, [whole(b"a")])
    sender.acknowledge(1, 1, None)
    assert len(sender) == 0


def test_a_receiver_may_forget_an_item_of_which_it_has_but_a_part() -> None:
    sender, receiver = ReliableSender(10, 10), ReliableReceiver(MAX_BYTES)
    sender.add(b"x" * 25)
    for _ in range(2):
        receiver.accept(sender.next_batch())
        sender.acknowledge(receiver.expected, receiver.complete, receiver.gap)
    receiver.drop_partial()
    receiver.accept(sender.next_batch())
    sender.acknowledge(receiver.expected, receiver.complete, receiver.gap)
    found = [receiver.accept(sender.next_batch()) for _ in range(3)]
    assert [bytes(item) for _, item in found[2]] == [b"x" * 25]


def test_a_receiver_that_does_not_answer_is_not_flooded() -> None:
    sender = ReliableSender(10, 10)
    for _ in range(3 * WINDOW_PIECES):
        sender.add(b"x" * 10)
    assert sum(len(sender.next_batch().pieces) for _ in range(9 * WINDOW_PIECES)) == WINDOW_PIECES


def test_numbers_that_make_no_sense_are_refused() -> None:
    sender = ReliableSender(10, 10)
    sender.add(b"a")
    for received, done in [(2, 0), (0, 1), (-1, -1)]:
        with pytest.raises(DataError):
            sender.acknowledge(received, done, None)
    receiver = ReliableReceiver(MAX_BYTES)
    for base, first in [(-1, 0), (2, 1)]:
        with pytest.raises(DataError):
            receiver.accept(PieceBatch(base, first, 0, [whole(b"a")]))
    assert receiver.expected == 0


def test_pieces_that_make_no_sense_are_refused() -> None:
    receiver = ReliableReceiver(MAX_BYTES)
    with pytest.raises(DataError, match="too large"):
        receiver.accept(PieceBatch(0, 0, 0, [ItemPiece(MAX_BYTES + 1, b"a")]))
    receiver.accept(PieceBatch(0, 0, 0, [ItemPiece(4, b"ab")]))
    for left in (1, 3, 4):
        with pytest.raises(DataError, match="not the rest"):
            receiver.accept(PieceBatch(0, 1, 0, [ItemPiece(left, b"c")]))
    assert [
        bytes(item) for _, item in receiver.accept(PieceBatch(0, 1, 0, [ItemPiece(2, b"cd")]))
    ] == [b"abcd"]
