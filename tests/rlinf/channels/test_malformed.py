"""Whatever a member that went wrong sends, no thread ends, and others are served on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.channels.control import Controller, Link
from rlinf.channels.curve import client_socket, routing_id
from rlinf.channels.keys import run_keys
from rlinf.channels.rendezvous import Guest, Host
from rlinf.channels.shared_memory import SharedMemoryChannel
from rlinf.channels.socket import SocketChannel
from rlinf.data.record import Identity, Record
from stages.board import Board
from stages.worker.inbox import COUNT, FROM, RANK, RANKS, TO, Inbox

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.just("x" * 5000)
    | st.just(msgpack.Timestamp(1, 2)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
KINDS = ("put", "get", "ping", "close", "leave")
"""Not ``fail``: a member may fail the channel."""
COMMANDS = st.tuples(st.sampled_from(KINDS), st.lists(VALUES, max_size=7))
VERBS = ("set", "value", "missing", "add", "compare_set", "delete", "count")


class Ends(NamedTuple):
    """Hosts of each kind on a run, and a member's bare socket to each."""

    hub: SocketChannel
    controller: Controller
    rank: Host
    raw: dict[str, zmq.Socket[bytes]]
    token: str
    folder: Path


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    folder = tmp_path_factory.mktemp("run")
    with ExitStack() as stack:
        keys = run_keys(folder)
        hub = SocketChannel.create(folder, "c", interface="127.0.0.1")
        stack.callback(hub.leave)
        controller = stack.enter_context(closing(Controller(folder, interface="127.0.0.1")))
        rank = stack.enter_context(closing(Host(keys)))
        pointer = json.loads((folder / "control.json").read_text())
        channel = json.loads((folder / "c.socket.json").read_text())
        context = stack.enter_context(zmq.Context())
        raw = {}
        addresses = {"hub": channel["addresses"], "control": pointer["addresses"]}
        for name, found in (addresses | {"rank": rank.addresses[-1:]}).items():
            raw[name] = client_socket(context, keys, routing_id(), timeout_s=9, max_bytes=1 << 30)
            raw[name].linger = 0
            raw[name].connect(found[0])
            stack.callback(raw[name].close)
        yield Ends(hub, controller, rank, raw, pointer["token"], folder)


def pack(message: Any) -> bytes:
    packed: bytes = msgpack.packb(message)
    return packed


@settings(max_examples=150)
@given(COMMANDS, st.lists(st.binary(max_size=80), max_size=2), st.binary(max_size=40))
def test_a_hub_goes_on(
    ends: Ends, command: tuple[str, list[Any]], data: list[bytes], noise: bytes
) -> None:
    kind, values = command
    ends.raw["hub"].send_multipart([pack([kind, *values]), *data])
    ends.raw["hub"].send_multipart([noise, *data])
    # What the types allow is where the threads used to end.
    ends.raw["hub"].send(pack(["get", 0, "k", 0, 9, values[:1], []]))


def test_and_serves_afterwards(ends: Ends) -> None:
    assert ends.hub.hub is not None
    ends.raw["hub"].send(pack(["get", 1, "k2", 0, 5, [], []]))
    other = SocketChannel.open(ends.folder, "c")
    other.put(Record(Identity(0, 7), {"x": np.arange(3)}), key="k2")
    other.flush()
    assert ends.hub.hub._thread.is_alive()
    other.leave()


@settings(max_examples=150)
@given(st.sampled_from(["hello", "word", "bye", "?"]), st.lists(VALUES, max_size=6), st.binary())
def test_a_controller_goes_on(ends: Ends, kind: str, values: list[Any], noise: bytes) -> None:
    ends.raw["control"].send(pack([kind, ends.token, *values]))
    ends.raw["control"].send(noise)


def test_and_hears_workers_afterwards(ends: Ends) -> None:
    link = Link(ends.folder, "w", {})
    ends.controller.send("w", {"i": 1})
    assert link.orders(20) == [{"i": 1}]
    assert ends.controller.malformed > 0
    link.close()


@settings(max_examples=150)
@given(st.integers(), st.sampled_from(VERBS), st.lists(VALUES, max_size=3), st.binary())
def test_a_rendezvous_goes_on(
    ends: Ends, number: int, verb: str, values: list[Any], noise: bytes
) -> None:
    number %= 2**63
    ends.raw["rank"].send(pack([number, verb, *values]))
    ends.raw["rank"].send(noise)


def test_and_numbers_that_do_not_fit_end_nothing(ends: Ends) -> None:
    with closing(Guest(run_keys(ends.folder), ends.rank.addresses[-1])) as member:
        member.do("add", "n", 2**62)
        before = ends.rank.malformed
        ends.raw["rank"].send(pack([2**63, "add", "n", 2**62]))
        ends.raw["rank"].send(pack([2**63 + 1, "set", "n", "text"]))
        while ends.rank.malformed < before + 2:
            assert member.do("value", "n") == b"%d" % 2**62


NUMBERS = st.integers(-(2**63), 2**63 - 1)  # a record with larger ones is never sent


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from([TO, FROM, RANK, RANKS, COUNT]), st.text() | NUMBERS))
def test_an_inbox_goes_on(inbox: tuple[Inbox, SocketChannel, Board], info: dict[str, Any]) -> None:
    inbox[1].put(Record(Identity(0, 0), info=info))


def test_and_takes_records_afterwards(inbox: tuple[Inbox, SocketChannel, Board]) -> None:
    box, member, board = inbox
    member.put(Record(Identity(0, 3), info={"no": "address"}))
    member.put(Record(Identity(0, 4), info={TO: "it/0:trajectories", FROM: "w"}))
    member.flush()
    deadline = time.monotonic() + 20
    while not board.output("it/0").arrived("trajectories"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert box.malformed > 0
    assert box.failure is None


@pytest.fixture(scope="module")
def inbox(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Inbox, SocketChannel, Board]]:
    folder, board = tmp_path_factory.mktemp("inbox"), Board()
    box = Inbox(folder, "a", board)
    member = SocketChannel.open(folder, "a")
    yield box, member, board
    member.leave()
    box.close()


@settings(max_examples=60)
@given(st.binary(min_size=1, max_size=300), st.sampled_from(["start", "size"]), st.integers())
def test_a_ring_drops_what_a_writer_that_went_wrong_left(
    ring: SharedMemoryChannel, noise: bytes, column: str, value: int
) -> None:
    before = ring.malformed
    slot = ring._wait(lambda: ring._reserve(0, 1, len(noise)))
    start = int(ring._slots["start"][slot])
    ring._data[start : start + len(noise)] = np.frombuffer(noise, np.uint8)
    ring._slots["key"][slot] = ring_key()
    ring._slots[column][slot] = value % 2**62
    ring._state[slot] = 2
    ring.put(Record(Identity(0, 5)))
    assert ring.get().identity.sample == 5
    assert ring.malformed == before + 1
    # Its room is no longer to be trusted.
    ring._slots["room"][slot] = ring._slots["size"][slot] = 0


def ring_key() -> int:
    from rlinf.channels.shared_memory import _digest

    return _digest("")


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedMemoryChannel]:
    channel = SharedMemoryChannel.create(tmp_path_factory.mktemp("ring"), "r", size=1 << 20)
    yield channel
    channel.leave()
