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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq

from rlinf.channels.base import ChannelFailed
from rlinf.channels.keys import run_keys
from rlinf.channels.socket import SocketChannel
from rlinf.data.record import Identity, Record
from rlinf.errors import DataError, InputError
from tests.rlinf.channels.proxy import Proxy

PRELUDE = """
import os, sys, time
from pathlib import Path
import numpy as np
from rlinf.channels.socket import SocketChannel
from rlinf.data.record import Identity, Record
folder = Path(sys.argv[1])
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SocketChannel]:
    channel = SocketChannel.create(tmp_path, "c", unique=True, interface="127.0.0.1", timeout_s=2)
    yield channel
    channel.leave()


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


def record(sample: int, attempt: int = 0) -> Record:
    return Record(Identity(0, sample, attempt), {"x": np.full(8, sample)})


def samples(channel: SocketChannel, count: int, key: str = "") -> list[int]:
    return [channel.get(key=key).identity.sample for _ in range(count)]


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


def test_records_cross_between_processes_in_order(tmp_path: Path, host: SocketChannel) -> None:
    child = process(
        tmp_path,
        """
        c = SocketChannel.open(folder, "c")
        for i in range(2000):
            c.put(Record(Identity(0, i), {"x": np.full(8, i)}))
        c.put(Record(Identity(0, 2000), {"x": np.arange(3_000_000)}))
        c.close()
        c.leave()
        """,
    )
    records = list(host)
    assert [r.identity.sample for r in records] == list(range(2001))
    assert all((r.steps["x"] == r.identity.sample).all() for r in records[:2000])
    assert (records[2000].steps["x"] == np.arange(3_000_000)).all()
    assert child.wait(30) == 0


def test_strangers_get_nothing_and_stop_nothing(tmp_path: Path, host: SocketChannel) -> None:
    friend = SocketChannel.open(tmp_path, "c")
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
        for kind in (("get", 0, "", 1, 0, None, ()), ("fail", "stop"), ("close", -1)):
            with contextlib.suppress(zmq.Again):  # refused already: nobody there to send to
                outsider.send(msgpack.packb(kind), zmq.NOBLOCK)
    for i in range(200):
        friend.put(record(i))
    friend.flush()
    time.sleep(1)
    assert samples(host, 200) == list(range(200))
    assert not any(outsider.poll(0) for outsider in outsiders)
    assert host.hub is not None
    assert host.hub.refused > 0
    assert host.hub.malformed == 0
    for connection in raw:
        connection.close()
    for outsider in outsiders:
        outsider.close()
    friend.leave()


def test_messages_of_a_broken_client_are_dropped_and_counted(
    tmp_path: Path, host: SocketChannel
) -> None:
    broken = member(tmp_path)
    good = ("put", 0, [("", 1, (0, 0, 0), 4)])
    bad: list[list[bytes]] = [
        [b""],
        [b"\xc1"],
        [msgpack.packb(("unknown",))],
        [msgpack.packb(("put", 0, [("", 1, (0, 0, 0), 5)])), b"four"],
        [msgpack.packb(("put", 0, [("", 1, (0, 0, 0), -1), ("", 1, (0, 1, 0), 5)])), b"four"],
        [msgpack.packb(("put", 0, [("", "1", (0, 0, 0), 4)])), b"four"],
        [msgpack.packb(("put", 0, [("", 1, (0, 0), 4)])), b"four"],
        [msgpack.packb(("put", 0, [("", 1, (2**63, 0, 0), 4)])), b"four"],
        [msgpack.packb(good)],
        [msgpack.packb(good), b"four", b"more"],
        [msgpack.packb(good), b"fo", b"ur"],
        [msgpack.packb(("get", 0, "", 1, 0, None))],
        [msgpack.packb(("get", 0, 7, 1, 0, None, ()))],
        [msgpack.packb(("leave", [(0,)]))],
        [msgpack.packb({"put": 1})],
        [msgpack.packb(7)],
        [b"\xdd\xff\xff\xff\xff"],
        [b"x" * (2 << 20)],
    ]
    randomness = random.Random(1)
    for _ in range(300):
        noise = bytearray(msgpack.packb(good))
        noise[randomness.randrange(len(noise))] = randomness.randrange(256)
        bad.append([bytes(noise), randomness.randbytes(randomness.randrange(9))])
    for frames in bad:
        broken.send_multipart(frames)
    friend = SocketChannel.open(tmp_path, "c")
    friend.put(record(1), key="mine")
    assert samples(host, 1, "mine") == [1]
    assert host.hub is not None
    deadline = time.monotonic() + 10
    while host.hub.malformed < 250 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert host.hub.malformed >= 250
    friend.leave()
    broken.close()


def test_a_record_that_cannot_be_read_is_dropped_and_counted(
    tmp_path: Path, host: SocketChannel
) -> None:
    broken = member(tmp_path)
    broken.send_multipart([msgpack.packb(("put", 0, [("", 1, (0, 0, 0), 4)])), b"four"])
    broken.poll(5000)
    host.put(record(1))
    assert samples(host, 1) == [1]
    assert host.malformed == 1
    broken.close()


def test_a_message_over_the_limit_is_refused(tmp_path: Path) -> None:
    host = SocketChannel.create(tmp_path, "c", interface="127.0.0.1", max_bytes=1 << 16)
    other = SocketChannel.open(tmp_path, "c")
    with pytest.raises(DataError, match="raise max_bytes"):
        other.put(Record(Identity(0, 0), {"x": np.zeros(1 << 16)}))
    for i in range(100):
        other.put(Record(Identity(0, i), {"x": np.zeros(1 << 10)}))
    assert samples(host, 100) == list(range(100))
    other.leave()
    host.leave()


def test_work_redone_after_a_producer_died_arrives_once(
    tmp_path: Path, host: SocketChannel
) -> None:
    child = process(
        tmp_path,
        """
        c = SocketChannel.open(folder, "c")
        for i in range(100):
            c.put(Record(Identity(0, i), {"x": np.full(8, i)}))
            if i == 50:
                c.flush()
                print("half", flush=True)
        time.sleep(60)
        """,
    )
    assert line(child) == "half"
    child.kill()
    child.wait()
    again = SocketChannel.open(tmp_path, "c")
    for i in range(100):
        again.put(record(i, attempt=1))
    again.close()
    assert sorted(r.identity.sample for r in host) == list(range(100))
    again.leave()


def test_what_a_dead_consumer_had_in_hand_goes_to_another(
    tmp_path: Path, host: SocketChannel
) -> None:
    for i in range(40):
        host.put(record(i))
    child = process(
        tmp_path,
        """
        c = SocketChannel.open(folder, "c")
        print([c.get().identity.sample for _ in range(3)], flush=True)
        time.sleep(60)
        """,
    )
    assert line(child) == "[0, 1, 2]"
    child.kill()
    child.wait()
    start = time.monotonic()
    got = samples(host, 38)
    assert time.monotonic() - start < 6
    assert sorted(got) == list(range(2, 40))


def test_a_stopped_consumer_loses_its_records_and_goes_on_later(
    tmp_path: Path, host: SocketChannel
) -> None:
    child = process(
        tmp_path,
        """
        c = SocketChannel.open(folder, "c")
        print("in", flush=True)
        for record in c:
            print(record.identity.sample, flush=True)
        """,
    )
    assert line(child) == "in"
    host.put(record(0))
    assert line(child) == "0"
    time.sleep(0.2)
    child.send_signal(signal.SIGSTOP)
    for i in range(1, 6):
        host.put(record(i))
    start = time.monotonic()
    got = samples(host, 5)
    assert time.monotonic() - start < 6
    assert sorted(got) == [1, 2, 3, 4, 5]
    child.send_signal(signal.SIGCONT)
    time.sleep(1)
    host.put(record(6))
    assert line(child) == "6"
    host.close()
    assert child.wait(20) == 0


def test_a_silent_participant_can_end_the_channel(tmp_path: Path) -> None:
    host = SocketChannel.create(
        tmp_path, "c", fail_on_death=True, interface="127.0.0.1", timeout_s=1
    )
    child = process(
        tmp_path, 'c = SocketChannel.open(folder, "c"); print("in", flush=True); c.get()'
    )
    assert line(child) == "in"
    time.sleep(1)
    child.send_signal(signal.SIGSTOP)
    with pytest.raises(ChannelFailed, match=f"process {child.pid} .* silent"):
        host.get()
    child.kill()
    child.wait()
    host.leave()


def test_a_dead_host_is_noticed_in_seconds(tmp_path: Path) -> None:
    child = process(
        tmp_path,
        """
        c = SocketChannel.create(folder, "c", interface="127.0.0.1", timeout_s=2)
        print("in", flush=True)
        time.sleep(60)
        """,
    )
    assert line(child) == "in"
    other = SocketChannel.open(tmp_path, "c")
    other.put(record(0))
    other.flush()
    child.kill()
    child.wait()
    start = time.monotonic()
    with pytest.raises(ChannelFailed, match="nothing heard from the host"):
        other.get(key="never")
    assert time.monotonic() - start < 5
    other.leave()


def test_a_host_that_leaves_says_so(tmp_path: Path) -> None:
    host = SocketChannel.create(tmp_path, "c", interface="127.0.0.1")
    other = SocketChannel.open(tmp_path, "c")
    other.put(record(0))
    other.flush()
    host.leave()
    with pytest.raises(ChannelFailed, match="host of the channel has left"):
        other.get(key="never")
    other.leave()
    with pytest.raises(InputError, match="no such channel"):
        SocketChannel.open(tmp_path, "c")


def test_cut_connections_lose_and_repeat_nothing(tmp_path: Path) -> None:
    host = SocketChannel.create(tmp_path, "c", capacity=2000, interface="127.0.0.1")
    ip, port = address(tmp_path).removeprefix("tcp://").split(":")
    proxy = Proxy((ip, int(port)), cut_after=300_000)
    pointer = tmp_path / "c.socket.json"
    values = json.loads(pointer.read_text())
    pointer.write_text(json.dumps({**values, "addresses": [f"tcp://127.0.0.1:{proxy.port}"]}))
    source, sink = SocketChannel.open(tmp_path, "c"), SocketChannel.open(tmp_path, "c")

    def produce() -> None:
        for i in range(6000):
            source.put(record(i))
        source.close()

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    assert [r.identity.sample for r in sink] == list(range(6000))
    producer.join(20)
    assert proxy.cuts >= 4
    for end in (source, sink, host):
        end.leave()
    proxy.close()


def test_a_slow_consumer_holds_no_records_back(tmp_path: Path, host: SocketChannel) -> None:
    slow, quick = SocketChannel.open(tmp_path, "c"), SocketChannel.open(tmp_path, "c")
    for i in range(60):
        host.put(record(i))
    got: list[str] = []

    def consume(channel: SocketChannel, name: str, pause_s: float) -> None:
        for _ in channel:
            got.append(name)
            time.sleep(pause_s)

    threads = [
        threading.Thread(target=consume, args=args, daemon=True)
        for args in ((slow, "slow", 0.5), (quick, "quick", 0.01))
    ]
    for thread in threads:
        thread.start()
    start = time.monotonic()
    while len(got) < 60:
        assert time.monotonic() - start < 5
        time.sleep(0.01)
    assert Counter(got)["quick"] > 50
    host.close()
    for thread in threads:
        thread.join(10)
    slow.leave()
    quick.leave()


def test_a_leaving_consumer_returns_what_it_did_not_hand_out(
    tmp_path: Path, host: SocketChannel
) -> None:
    other = SocketChannel.open(tmp_path, "c")
    for i in range(300):
        host.put(record(i))
    host.flush()
    other._pace_s = 0.0  # as one that takes records at once: fetches many ahead
    first = samples(other, 3)
    assert len(other._ahead[""]) > 10
    other.leave()
    assert first + samples(host, 297) == list(range(300))


def test_keys_that_are_used_up_take_no_memory(tmp_path: Path, host: SocketChannel) -> None:
    for i in range(50):
        host.put(record(i), key=str(i))
        assert samples(host, 1, key=str(i)) == [i]
    assert host.hub is not None
    assert not host._ahead
    assert host.hub.depths() == {}
    assert len(host.hub._askers) <= 1
    assert len(host.hub._requests) <= 1


def test_files_of_a_channel_are_the_owners_alone(tmp_path: Path, host: SocketChannel) -> None:
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    assert (tmp_path / "c.socket.json").exists()
