"""Whatever a member that went wrong sends, no thread ends, and others are served on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import DistStoreError

from rlinf.channels.control_link import Controller, WorkerLink
from rlinf.channels.curve_sockets import client_socket, read_pointer, routing_id, run_keys
from rlinf.channels.rendezvous import RendezvousClient, RendezvousHost
from rlinf.channels.requests import RequestClient, RequestRejected, RequestServer
from rlinf.data.record import Record, RecordId
from stages.live_store import LiveStore
from stages.worker.record_transfer import RecordServer

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
VERBS = ("set", "value", "missing", "add", "compare_set", "delete", "count")


class Ends(NamedTuple):
    """A server of each kind, and a member's bare socket to each."""

    controller: Controller
    rank: RendezvousHost
    member: RendezvousClient
    raw: dict[str, zmq.Socket[bytes]]
    tokens: dict[str, str]
    folder: Path


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    folder = tmp_path_factory.mktemp("run")
    with ExitStack() as stack:
        keys = run_keys(folder)
        controller = stack.enter_context(closing(Controller(folder, interface="127.0.0.1")))
        rank = stack.enter_context(closing(RendezvousHost(folder / "group.json")))
        member = stack.enter_context(closing(member_of(rank, folder)))
        context = stack.enter_context(zmq.Context())
        raw, tokens = {}, {}
        for name, file in {"control": "control.json", "rank": "group.json"}.items():
            about = read_pointer(folder / file)
            assert about is not None
            raw[name] = client_socket(context, keys, routing_id(), timeout_s=9)
            raw[name].linger = 0
            raw[name].connect(about.addresses[-1])
            stack.callback(raw[name].close)
            tokens[name] = about.token
        yield Ends(controller, rank, member, raw, tokens, folder)


def member_of(rank: RendezvousHost, folder: Path) -> RendezvousClient:
    about = read_pointer(folder / "group.json")
    assert about is not None
    return RendezvousClient(folder / "group.json", "rank 1", about, rank.server.addresses[-1])


def pack(message: Any) -> bytes:
    packed: bytes = msgpack.packb(message)
    return packed


METHODS = st.sampled_from(["exchange", "leave", "ping", "?", *VERBS])
NAMES = (
    *("worker", "process", "description", "status", "session", "arrived", "read", "first"),
    *("rank", "number"),
)
ARGUMENTS = st.dictionaries(st.sampled_from(NAMES), VALUES)


@settings(max_examples=150)
@given(
    st.sampled_from(["control", "rank"]),
    METHODS,
    ARGUMENTS | VALUES,
    st.lists(st.integers(-2, 90) | VALUES, max_size=2),
    st.lists(st.binary(max_size=80), max_size=2),
    st.binary(max_size=40),
)
def test_a_server_goes_on(
    ends: Ends,
    which: str,
    method: str,
    arguments: Any,
    sizes: list[Any],
    data: list[bytes],
    noise: bytes,
) -> None:
    ends.raw[which].send_multipart([pack([ends.tokens[which], 1, method, arguments, sizes]), *data])
    blocks = [len(block) for block in data]
    message = pack([ends.tokens[which], 2, method, arguments, blocks])
    ends.raw[which].send_multipart([message, *data])
    ends.raw[which].send_multipart([noise, *data])


def test_a_controller_serves_workers_afterwards(ends: Ends) -> None:
    link = WorkerLink(ends.folder, "w", {})
    ends.controller.send_order("w", {"i": 1})
    assert link.receive_orders(20) == [{"i": 1}]
    assert ends.controller.malformed > 0
    link.close()


def test_and_numbers_that_do_not_fit_end_nothing(ends: Ends) -> None:
    ends.member.execute("set", "n", b"0")
    ends.member.execute("add", "n", 2**62)
    with pytest.raises(DistStoreError, match="64 bits"):
        ends.member.execute("add", "n", 2**62)
    with pytest.raises(DistStoreError, match="keys are text"):
        ends.member.execute("add", 5, 1)
    assert ends.member.execute("value", "n") == b"%d" % 2**62


NUMBERS = st.integers(-(2**63), 2**63 - 1)  # a message with larger ones is never sent


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(["output", "channel", "stream", "position", "received"]),
        st.text() | NUMBERS | VALUES,
    )
)
def test_a_server_of_records_goes_on(
    server: tuple[RequestClient, LiveStore], arguments: Any
) -> None:
    client, store = server
    store.output("it/0").stream("trajectories").put(Record(RecordId(0, 4)))
    client.send("records", arguments)
    good = client.send("records", {"output": "it/0", "channel": "trajectories"})
    number = 0
    while number != good:
        with suppress(RequestRejected):
            number, reply = client.receive()
    assert len(reply.blocks) == 1


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RequestClient, LiveStore]]:
    folder, store = tmp_path_factory.mktemp("server"), LiveStore()
    server = RequestServer(folder / "a.json", RecordServer(store).handle)
    client = RequestClient(folder / "a.json")
    yield client, store
    client.close()
    server.close()
