"""Large replies over wires that are slow and break, and strangers who send much."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from rlinf.channels import requests
from rlinf.channels.curve_sockets import FRAME_BYTES, HANDSHAKE_MS, read_pointer
from rlinf.channels.reply_buffers import join
from rlinf.channels.requests import Request, RequestClient, RequestServer
from tests.rlinf.channels.proxy import Proxy

MB = 10**6


def reply_with_bytes(request: Request) -> None:
    request.reply({}, [bytes([request.arguments["value"]]) * request.arguments["size"]])


@pytest.fixture
def pointer(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "one.json"
    with closing(RequestServer(path, reply_with_bytes, interface="127.0.0.1")):
        yield path


def between(pointer: Path, **wire: float) -> Proxy:
    """A wire by which others reach the server."""
    values = json.loads(pointer.read_text())
    ip, port = values["addresses"][0].removeprefix("tcp://").split(":")
    proxy = Proxy((ip, int(port)), **wire)  # type: ignore[arg-type]
    pointer.write_text(json.dumps({**values, "addresses": [f"tcp://127.0.0.1:{proxy.port}"]}))
    return proxy


def test_a_reply_may_take_some_seconds(pointer: Path) -> None:
    proxy = between(pointer, bytes_per_s=1 * MB)
    with closing(RequestClient(pointer)) as client:
        start = time.monotonic()
        (block,) = client.request("any", {"value": 5, "size": 5 * MB}).blocks
        assert time.monotonic() - start > 4
        assert bytes(join(block)) == b"\5" * (5 * MB)
    proxy.close()


def test_what_is_lost_with_a_connection_is_sent_again(
    pointer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "PING_S", 0.3)
    proxy = between(pointer, cut_after=100_000)
    with closing(RequestClient(pointer)) as client:
        for value in range(100):
            (block,) = client.request("any", {"value": value, "size": 20_000}).blocks
            assert bytes(join(block)) == bytes([value]) * 20_000
    assert proxy.cuts >= 4
    proxy.close()


def test_a_stranger_makes_a_server_hold_no_more_than_a_frame(pointer: Path) -> None:
    about = read_pointer(pointer)
    assert about is not None
    ip, port = about.addresses[0].removeprefix("tcp://").split(":")
    greeting = bytes.fromhex("ff00000000000000007f0300") + b"CURVE".ljust(52, b"\0")

    def command(size: int) -> socket.socket:
        stranger = socket.create_connection((ip, int(port)))
        stranger.sendall(greeting + b"\x06" + size.to_bytes(8, "big"))
        return stranger

    before = psutil.Process().memory_info().rss
    start = time.monotonic()
    over = [command(size) for size in (FRAME_BYTES + 1, 100 * MB, 1 << 29)]
    for stranger in over:
        stranger.settimeout(HANDSHAKE_MS / 1000)
        try:
            while stranger.recv(1000):
                pass
        except ConnectionError:
            pass
    assert time.monotonic() - start < HANDSHAKE_MS / 2000, "they were cut off unread"
    within = [command(FRAME_BYTES) for _ in range(40)]
    for stranger in within:
        stranger.sendall(bytes(FRAME_BYTES - 1))
    time.sleep(0.5)
    assert psutil.Process().memory_info().rss - before < 41 * FRAME_BYTES + 8 * MB
    with closing(RequestClient(pointer)) as client:
        assert client.request("any", {"value": 1, "size": 1}).blocks
    for stranger in (*over, *within):
        stranger.close()
