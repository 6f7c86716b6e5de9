"""Requests reach the server of their run, and a reply comes in time or the call fails."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from rlinf.channels import requests
from rlinf.channels.channel import ChannelFailed
from rlinf.channels.reply_buffers import join
from rlinf.channels.requests import Request, RequestClient, RequestRejected, RequestServer


@contextlib.contextmanager
def serving(path: Path, handle: Callable[[Request], None]) -> Iterator[RequestServer]:
    server = RequestServer(path, handle, interface="lo")
    try:
        yield server
    finally:
        server.close()


def echo(request: Request) -> None:
    if request.method == "fail":
        raise ValueError("no such thing")
    if request.method == "never":
        return
    request.reply({"method": request.method, **request.arguments}, request.blocks)


@pytest.fixture
def pointer(tmp_path: Path) -> Path:
    return tmp_path / "channels" / "one.json"


@pytest.fixture
def server(pointer: Path) -> Iterator[RequestServer]:
    with serving(pointer, echo) as found:
        yield found


@pytest.fixture
def client(pointer: Path, server: RequestServer) -> Iterator[RequestClient]:
    with contextlib.closing(RequestClient(pointer)) as found:
        yield found


@pytest.mark.parametrize("sizes", [[], [0], [1], [3, 0, 700_000], [5 << 20, 512 << 10, 7]])
def test_arguments_and_blocks_come_back(client: RequestClient, sizes: list[int]) -> None:
    random = np.random.default_rng(0)
    blocks = [random.bytes(size) for size in sizes]
    reply = client.request("echo", {"a": [1, "x", None]}, blocks)
    assert reply.arguments == {"method": "echo", "a": [1, "x", None]}
    assert [bytes(join(block)) for block in reply.blocks] == blocks


def test_an_error_of_the_handler_reaches_the_client(client: RequestClient) -> None:
    with pytest.raises(RequestRejected, match=r"one\.json: ValueError: no such thing"):
        client.request("fail")
    assert client.request("echo").arguments == {"method": "echo"}


def test_another_thread_may_reply_later(pointer: Path) -> None:
    def later(request: Request) -> None:
        threading.Timer(0.3, request.reply, [{"late": True}]).start()

    with serving(pointer, later), contextlib.closing(RequestClient(pointer)) as client:
        assert client.request("any").arguments == {"late": True}


def test_replies_come_in_any_order(pointer: Path) -> None:
    kept: list[Request] = []

    def reversed_pairs(request: Request) -> None:
        kept.append(request)
        if len(kept) == 2:
            while kept:
                last = kept.pop()
                last.reply(last.arguments)

    with serving(pointer, reversed_pairs), contextlib.closing(RequestClient(pointer)) as client:
        numbers = [client.send("any", {"n": n}) for n in (10, 11)]
        replies = [client.receive() for _ in numbers]
        assert [number for number, _ in replies] == numbers[::-1]
        assert [reply.arguments["n"] for _, reply in replies] == [11, 10]


def test_a_client_that_was_busy_elsewhere_does_not_blame_the_server(
    pointer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "SERVER_TIMEOUT_S", 0.6)
    monkeypatch.setattr(requests, "PING_S", 0.2)

    def slow(request: Request) -> None:
        threading.Timer(request.arguments["delay_s"], request.reply).start()

    with serving(pointer, slow), contextlib.closing(RequestClient(pointer)) as client:
        for delay_s in (0.1, 2.5):
            client.send("any", {"delay_s": delay_s})
            time.sleep(1.5)
            client.receive()


def test_a_server_that_dies_is_noticed_while_a_slow_one_is_waited_for(
    pointer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "SERVER_TIMEOUT_S", 1.5)
    monkeypatch.setattr(requests, "PING_S", 0.3)

    def slow(request: Request) -> None:
        threading.Timer(4, request.reply).start()

    with serving(pointer, slow) as server, contextlib.closing(RequestClient(pointer)) as client:
        began = time.monotonic()
        client.request("any")
        assert time.monotonic() - began > 3.5
        client.send("any")
        time.sleep(0.3)
        server.close()
        with pytest.raises(ChannelFailed, match="the server has closed"):
            client.receive()
        client.send("any")
        with pytest.raises(ChannelFailed, match="its process has ended"):
            client.receive()


def test_a_lost_request_is_sent_again_and_handled_once(
    pointer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "PING_S", 0.2)
    seen: list[str] = []

    def count(request: Request) -> None:
        seen.append(request.method)
        threading.Timer(1.0, request.reply).start()

    with serving(pointer, count), contextlib.closing(RequestClient(pointer)) as client:
        with monkeypatch.context() as patch:
            patch.setattr(RequestClient, "_send", staticmethod(lambda *_: None))
            client.send("lost")
        client.send("arrives")
        assert {client.receive()[0] for _ in range(2)} == {1, 2}
        assert sorted(seen) == ["arrives", "lost"]


def test_a_stop_ends_the_wait(pointer: Path) -> None:
    stopping = threading.Event()
    with (
        serving(pointer, echo),
        contextlib.closing(RequestClient(pointer, stopping.is_set)) as client,
    ):
        threading.Timer(0.2, stopping.set).start()
        with pytest.raises(ChannelFailed, match="this process stops"):
            client.request("never")


def test_a_client_finds_the_successor_of_its_server_after_a_pause(
    pointer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "PING_S", 0.0)
    with contextlib.closing(RequestClient(pointer)) as client:
        with pytest.raises(ChannelFailed, match="there is no server"):
            client.request("echo")
        for _ in range(2):
            with serving(pointer, echo):
                assert client.request("echo").arguments == {"method": "echo"}
        assert not pointer.exists()


def test_a_waiting_client_can_be_woken(client: RequestClient) -> None:
    number = client.send("never")
    threading.Timer(0.1, client.wake).start()
    assert client.receive() == (0, requests.Message({}))
    assert client.send("echo") == number + 1
    assert client.receive()[0] == number + 1, "the open requests are kept"


@pytest.mark.parametrize("sizes", [[1] * 5000, [0, 1 << 20, 0, 7], [1 << 19, (1 << 19) - 1, 2]])
def test_blocks_of_all_sizes_arrive_whole(client: RequestClient, sizes: list[int]) -> None:
    blocks = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    assert [bytes(join(b)) for b in client.request("echo", {}, blocks).blocks] == blocks


def test_many_clients_at_once(pointer: Path, server: RequestServer) -> None:
    def work(number: int) -> None:
        with contextlib.closing(RequestClient(pointer)) as client:
            for turn in range(20):
                block = bytes([number]) * (1000 * turn)
                reply = client.request("echo", {"n": number}, [block])
                results.append(reply.arguments["n"] == number and bytes(reply.blocks[0]) == block)

    results: list[bool] = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 160
    assert all(results)


def test_who_has_no_key_gets_no_reply(server: RequestServer, pointer: Path) -> None:
    address = requests.read_pointer(pointer).addresses[0]  # type: ignore[union-attr]
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.connect(address)
    stranger.send_multipart([b"\x95", b"x"])
    assert not stranger.poll(700)
    public, secret = zmq.curve_keypair()
    other = context.socket(zmq.DEALER)
    other.linger = 0
    other.curve_serverkey = requests.run_keys(pointer.parent).host_public.encode()
    other.curve_publickey, other.curve_secretkey = public, secret
    other.connect(address)
    other.send_multipart([b"\x95", b"x"])
    assert not other.poll(700)
    assert server.rejected >= 1
    context.destroy(linger=0)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [b"\x90"],
        [b"\x96\xa1t\x01\xa4echo\x80\x91\x05\xc0"],
        [b"\x96\xa1t\x01\xa4echo\x80\x90\xc0", b"more"],
        [b"\x96\xa1t\x01\xa4echo\x80\x90\x07"],
    ],
)
def test_malformed_requests_are_dropped(
    client: RequestClient, server: RequestServer, frames: list[bytes]
) -> None:
    socket, _ = client._connect()
    socket.send_multipart(frames)
    assert client.request("echo").arguments == {"method": "echo"}
    assert server.malformed == 1


def test_files_of_a_channel_are_the_owners_alone(pointer: Path, server: RequestServer) -> None:
    assert all(path.stat().st_mode & 0o077 == 0 for path in pointer.parent.iterdir())
    assert pointer.exists()
