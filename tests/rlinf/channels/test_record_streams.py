"""Sockets: strangers, garbage, lost connections, and processes that die or stop."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq

from rlinf.channels import wire_format
from rlinf.channels.channel import ChannelFailed
from rlinf.channels.curve_sockets import run_keys
from rlinf.channels.mailbox_protocol import WINDOW_PIECES
from rlinf.channels.record_streams import SocketSink, SocketSource
from rlinf.channels.wire_format import encode_record
from rlinf.data.record import Record, RecordId
from rlinf.errors import DataError, InputError
from tests.rlinf.channels.proxy import Proxy

PRELUDE = """
import os, sys, time
from pathlib import Path
import numpy as np
from rlinf.channels.record_streams import SocketSink, SocketSource
from rlinf.channels.wire_format import encode_record
from rlinf.data.record import RecordId, Record
folder = Path(sys.argv[1])
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SocketSource]:
    channel = SocketSource(tmp_path, "c", interface="127.0.0.1", timeout_s=2)
    yield channel
    channel.close()


def process(folder: Path, body: str) -> subprocess.Popen[str]:
    """Another process that runs ``body`` and says a line when it is where the test wants it."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def record(sample: int) -> Record:
    return Record(RecordId(0, sample), {"x": np.full(8, sample)})


def samples(channel: SocketSource, count: int) -> list[int]:
    return [channel.get().identity.sample for _ in range(count)]


def address(folder: Path) -> str:
    return str(json.loads((folder / "c.socket.json").read_text())["addresses"][0])


def stranger(folder: Path, **options: bytes) -> zmq.Socket[bytes]:
    outside = zmq.Context.instance().socket(zmq.DEALER)
    outside.linger = 0
    for name, value in options.items():
        setattr(outside, name, value)
    outside.connect(address(folder))
    return outside


def member(run: Path) -> zmq.Socket[bytes]:
    """A bare socket with the run's keys, to speak the protocol wrongly with."""
    keys = run_keys(run)
    return stranger(
        run,
        curve_serverkey=keys.host_public.encode(),
        curve_publickey=keys.client_public.encode(),
        curve_secretkey=keys.client_secret.encode(),
    )


def test_records_cross_between_processes_in_order(tmp_path: Path, host: SocketSource) -> None:
    child = process(
        tmp_path,
        """
        c = SocketSink(folder, "c")
        for i in range(2000):
            c.put(Record(RecordId(0, i), {"x": np.full(8, i)}))
        c.put(Record(RecordId(0, 2000), {"x": np.arange(3_000_000)}))
        c.close()
        """,
    )
    records = [host.get() for _ in range(2001)]
    assert [r.identity.sample for r in records] == list(range(2001))
    assert all((r.steps["x"] == r.identity.sample).all() for r in records[:2000])
    assert (records[2000].steps["x"] == np.arange(3_000_000)).all()
    assert child.wait(30) == 0


def test_strangers_get_nothing_and_stop_nothing(tmp_path: Path, host: SocketSource) -> None:
    friend = SocketSink(tmp_path, "c")
    public, secret = zmq.curve_keypair()
    outsiders = [
        stranger(tmp_path),
        stranger(
            tmp_path,
            curve_serverkey=run_keys(tmp_path).host_public.encode(),
            curve_publickey=public,
            curve_secretkey=secret,
        ),
        stranger(tmp_path, curve_serverkey=public, curve_publickey=public, curve_secretkey=secret),
    ]
    ip, port = address(tmp_path).removeprefix("tcp://").split(":")
    raw = [socket.create_connection((ip, int(port))) for _ in range(20)]
    randomness = random.Random(0)
    for connection in raw:
        connection.sendall(randomness.randbytes(2000))
    for outsider in outsiders:
        for kind in (("hello", "0", "w", b"\x80", b"\x80"), ("bye", "0")):
            with contextlib.suppress(zmq.Again):  # refused already: nobody there to send to
                outsider.send(msgpack.packb(kind), zmq.NOBLOCK)
    for i in range(200):
        friend.put(record(i))
    friend.flush()
    time.sleep(1)
    assert samples(host, 200) == list(range(200))
    assert not any(outsider.poll(0) for outsider in outsiders)
    assert host.rejected > 0
    assert host.malformed == 0
    for connection in raw:
        connection.close()
    for outsider in outsiders:
        outsider.close()
    friend.close()


def test_a_record_that_cannot_be_read_is_dropped_and_counted(
    tmp_path: Path, host: SocketSource
) -> None:
    broken, friend = member(tmp_path), SocketSink(tmp_path, "c")
    token, empty = json.loads((tmp_path / "c.socket.json").read_text())["token"], b"\x80"
    broken.send(msgpack.packb(("hello", token, "broken", empty, empty)))
    assert broken.poll(5000)
    good = wire_format.encode_record(record(7)).to_bytes()
    message = ("data", token, 0, None, 0, 0, 0, None, [4, len(good)])
    broken.send_multipart([msgpack.packb(message), b"four" + good])
    assert samples(host, 1) == [7], "what comes with it is taken"
    friend.put(record(1))
    assert samples(host, 1) == [1]
    assert host.malformed == 1
    broken.close()
    friend.close()


def test_a_message_over_the_limit_is_refused(tmp_path: Path) -> None:
    host = SocketSource(tmp_path, "c", interface="127.0.0.1", max_bytes=1 << 16)
    other = SocketSink(tmp_path, "c")
    with pytest.raises(DataError, match="raise max_bytes"):
        other.put(Record(RecordId(0, 0), {"x": np.zeros(1 << 16)}))
    for i in range(100):
        other.put(Record(RecordId(0, i), {"x": np.zeros(1 << 10)}))
    assert samples(host, 100) == list(range(100))
    other.close()
    host.close()


def test_a_record_as_large_as_a_message_may_be_arrives(tmp_path: Path) -> None:
    """Its encryption takes some bytes more, and the connection must not end at them."""
    most = 17 << 20
    host = SocketSource(tmp_path, "c", interface="127.0.0.1", max_bytes=most)
    around = encode_record(Record(RecordId(0, 1), {"x": np.zeros(0, np.uint8)})).size
    # From the next multiple of the arrays' alignment on.
    wide = Record(RecordId(0, 1), {"x": np.zeros(most - -(-around // 64) * 64, np.uint8)})
    excess = encode_record(wide).size - most
    wide = Record(RecordId(0, 1), {"x": wide.steps["x"][: len(wide) - max(0, excess)]})
    assert encode_record(wide).size == most
    sink = SocketSink(tmp_path, "c")
    sink.put(wide)
    sink.put(record(2))
    assert samples(host, 2) == [1, 2]
    sink.close()
    host.close()


def test_a_dead_host_is_noticed_in_seconds(tmp_path: Path) -> None:
    child = process(
        tmp_path,
        """
        c = SocketSource(folder, "c", interface="127.0.0.1", timeout_s=2)
        print("in", flush=True)
        time.sleep(60)
        """,
    )
    assert line(child) == "in"
    other = SocketSink(tmp_path, "c")
    other.put(record(0))
    other.flush()
    child.kill()
    child.wait()
    start = time.monotonic()
    with pytest.raises(ChannelFailed, match="nothing heard from the host"):
        while True:
            other.put(record(0))
            time.sleep(0.01)
    assert time.monotonic() - start < 20
    other.close()


def test_a_host_that_leaves_says_so(tmp_path: Path) -> None:
    host = SocketSource(tmp_path, "c", interface="127.0.0.1")
    other = SocketSink(tmp_path, "c")
    other.put(record(0))
    other.flush()
    host.close()  # it has been heard when this returns
    with pytest.raises(ChannelFailed, match="its host has left it"):
        other.put(record(0))
    other.close()
    with pytest.raises(InputError, match="no such channel"):
        SocketSink(tmp_path, "c")


def test_cut_connections_lose_and_repeat_nothing(tmp_path: Path) -> None:
    host = SocketSource(tmp_path, "c", interface="127.0.0.1")
    ip, port = address(tmp_path).removeprefix("tcp://").split(":")
    proxy = Proxy((ip, int(port)), cut_after=150_000)
    pointer = tmp_path / "c.socket.json"
    values = json.loads(pointer.read_text())
    pointer.write_text(json.dumps({**values, "addresses": [f"tcp://127.0.0.1:{proxy.port}"]}))
    sink = SocketSink(tmp_path, "c")

    def produce() -> None:
        for i in range(6000):
            sink.put(record(i))
        sink.close()

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    assert samples(host, 6000) == list(range(6000))
    producer.join(20)
    assert proxy.cuts >= 4
    host.close()
    proxy.close()


def test_a_stopped_writer_goes_on_where_it_was(tmp_path: Path, host: SocketSource) -> None:
    child = process(
        tmp_path,
        """
        c = SocketSink(folder, "c")
        for i in range(100):
            c.put(Record(RecordId(0, i), {"x": np.full(8, i)}))
            time.sleep(0.005)
        c.close()
        """,
    )
    assert samples(host, 20) == list(range(20))
    child.send_signal(signal.SIGSTOP)
    time.sleep(3)  # longer than the host waits for a sign of life
    child.send_signal(signal.SIGCONT)
    assert samples(host, 80) == list(range(20, 100))
    assert child.wait(20) == 0


def test_what_was_put_arrives_though_the_writer_leaves_at_once(
    tmp_path: Path, host: SocketSource
) -> None:
    sink = SocketSink(tmp_path, "c")
    for i in range(3):
        sink.put(Record(RecordId(0, i), {"x": np.zeros(1 << 20)}))
    sink.close()
    assert samples(host, 3) == [0, 1, 2]


def test_what_was_put_arrives_though_the_process_ends_without_a_word(
    tmp_path: Path, host: SocketSource
) -> None:
    child = process(
        tmp_path,
        """
        c = SocketSink(folder, "c")
        for i in range(9):
            c.put(Record(RecordId(0, i), {"x": np.zeros(1 << 17)}))
        """,
    )
    assert samples(host, 9) == list(range(9))
    assert child.wait(20) == 0


def test_a_writer_waits_while_much_is_under_way(tmp_path: Path, host: SocketSource) -> None:
    sink, put = SocketSink(tmp_path, "c"), []

    def produce() -> None:
        for i in range(6 * WINDOW_PIECES):
            sink.put(record(i))
            put.append(i)

    with host._changed:  # the host neither hears nor answers
        producer = threading.Thread(target=produce, daemon=True)
        producer.start()
        time.sleep(1)
        assert len(put) <= WINDOW_PIECES
    assert samples(host, 6 * WINDOW_PIECES) == list(range(6 * WINDOW_PIECES))
    sink.close()


def test_files_of_a_channel_are_the_owners_alone(tmp_path: Path, host: SocketSource) -> None:
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    assert (tmp_path / "c.socket.json").exists()
