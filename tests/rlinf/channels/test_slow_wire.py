"""Large records over wires that are slow and break: what comes of them is a sign of life."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlinf.channels import mailbox
from rlinf.channels.curve_sockets import FRAME_BYTES, HANDSHAKE_MS
from rlinf.channels.record_streams import SocketSink, SocketSource
from rlinf.data.record import Record, RecordId
from tests.rlinf.channels.proxy import Proxy

MB = 10**6
WRITER = """
import sys
from pathlib import Path
import numpy as np
from rlinf.channels.record_streams import SocketSink
from rlinf.data.record import RecordId, Record
sink = SocketSink(Path(sys.argv[1]), "c")
sink.put(Record(RecordId(0, 0), {"x": np.arange(4_000_000, dtype=np.uint8)}))
print("put", flush=True)
sink.close()
"""


@pytest.fixture
def host(tmp_path: Path) -> SocketSource:
    return SocketSource(tmp_path, "c", interface="127.0.0.1", timeout_s=2)


def between(folder: Path, **wire: float) -> Proxy:
    """A wire by which others reach the host."""
    pointer = folder / "c.socket.json"
    values = json.loads(pointer.read_text())
    ip, port = values["addresses"][0].removeprefix("tcp://").split(":")
    proxy = Proxy((ip, int(port)), **wire)  # type: ignore[arg-type]
    pointer.write_text(json.dumps({**values, "addresses": [f"tcp://127.0.0.1:{proxy.port}"]}))
    return proxy


def large(sample: int, size: int) -> Record:
    return Record(RecordId(0, sample), {"x": np.arange(size, dtype=np.uint8)})


def puts(folder: Path, *records: Record) -> threading.Thread:
    def put() -> None:
        sink = SocketSink(folder, "c")
        for record in records:
            sink.put(record)
        sink.close()

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    return thread


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def took_whole(host: SocketSource, sample: int, size: int) -> bool:
    record = host.get()
    wanted = np.arange(size, dtype=np.uint8)
    return record.identity.sample == sample and np.array_equal(record.steps["x"], wanted)


def test_a_record_may_take_far_longer_than_silence_is_borne(
    tmp_path: Path, host: SocketSource
) -> None:
    proxy = between(tmp_path, bytes_per_s=1 * MB)
    start = time.monotonic()
    writer = puts(tmp_path, large(0, 8 * MB), large(1, 100))
    assert took_whole(host, 0, 8 * MB)
    assert time.monotonic() - start > 6, "several times its timeout_s"
    assert took_whole(host, 1, 100)
    writer.join(20)
    assert not writer.is_alive()
    assert proxy.passed < 12 * MB, "it was not sent twice"
    host.close()
    proxy.close()


def test_a_connection_that_breaks_within_a_record_repeats_only_pieces_in_flight(
    tmp_path: Path, host: SocketSource
) -> None:
    proxy = between(tmp_path, cut_after=3 * MB)
    writer = puts(tmp_path, large(0, 20 * MB), large(1, 100))
    assert took_whole(host, 0, 20 * MB)
    assert took_whole(host, 1, 100)
    writer.join(20)
    assert not writer.is_alive()
    assert proxy.cuts >= 6
    # Of what a connection has passed all but a piece, or what acknowledgements were late for.
    assert proxy.passed < 40 * MB
    host.close()
    proxy.close()


def test_the_beginning_of_a_record_is_not_kept_for_ever(
    tmp_path: Path, host: SocketSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "PARTIAL_ITEM_TIMEOUT_S", 1.5)
    proxy = between(tmp_path, bytes_per_s=1 * MB)
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    begun = lambda: any(s.receiver._partial is not None for s in host._sessions.values())  # noqa: E731
    assert eventually(begun)
    child.send_signal(signal.SIGSTOP)
    # What the wire holds still comes.
    assert eventually(lambda: not begun())
    child.send_signal(signal.SIGCONT)
    assert took_whole(host, 0, 4 * MB), "it is sent again from there"
    assert child.wait(20) == 0
    host.close()
    proxy.close()


def test_a_stranger_makes_a_host_hold_no_more_than_a_frame(
    tmp_path: Path, host: SocketSource
) -> None:
    ip, port = host.addresses[0].removeprefix("tcp://").split(":")
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
    writer = puts(tmp_path, large(0, 2 * MB))
    assert took_whole(host, 0, 2 * MB)
    writer.join(20)
    for stranger in (*over, *within):
        stranger.close()
    host.close()
