"""Shared memory: records in place, memory used again, peers that die, nothing left behind."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlinf.channels import record_streams
from rlinf.channels.channel import ChannelFailed
from rlinf.channels.record_streams import (
    RING_DATA_START,
    RingReader,
    RingWriter,
    SharedMemorySink,
    SocketSink,
    SocketSource,
)
from rlinf.channels.wire_format import encode_record
from rlinf.data.record import Record, RecordId
from rlinf.errors import DataError, InputError, StorageError
from rlinf.shared_memory import (
    SHM_FOLDER,
    attach_segment,
    create_segment,
    new_segment_name,
    remove_segment,
)

PRELUDE = """
import os, sys, time
from pathlib import Path
import numpy as np
from rlinf.channels.record_streams import SharedMemorySink
from rlinf.channels.record_streams import SocketSource
from rlinf.data.record import RecordId, Record
folder = Path(sys.argv[1])
"""
HOST = """
    c = SocketSource(folder, "c", interface="127.0.0.1", timeout_s=2)
    print("in", flush=True)
    for line in sys.stdin:
        print(c.get().identity.sample, flush=True)
"""


def process(folder: Path, body: str) -> subprocess.Popen[str]:
    """Another process that runs ``body`` and says a line when it is where the test wants it."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()


def record(sample: int, size: int = 8) -> Record:
    return Record(RecordId(0, sample), {"x": np.full(size, sample, np.int64)})


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SocketSource]:
    channel = SocketSource(tmp_path, "c", interface="127.0.0.1", timeout_s=2)
    yield channel
    channel.close()


def test_a_record_is_read_in_place_and_only_until_the_next_is_taken(
    tmp_path: Path, source: SocketSource
) -> None:
    sink = SharedMemorySink(tmp_path, "c", size=1 << 16)
    sink.put(record(7))
    array = source.get().steps["x"]
    assert source.is_borrowed
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    for i in range(20):
        sink.put(record(i))
        assert array.tolist() == [7] * 8
    plain = SocketSink(tmp_path, "c")
    for _ in range(20):
        source.get()
    plain.put(record(30))
    assert source.get().identity.sample == 30
    assert not source.is_borrowed
    plain.close()
    sink.close()


def ring(size: int) -> tuple[RingWriter, RingReader]:
    memory = mmap.mmap(-1, RING_DATA_START + size)
    return RingWriter(memory), RingReader(memory)


def test_a_record_lies_where_one_was_read_a_moment_ago() -> None:
    writes, reads = ring(1 << 20)
    places = set()
    for i in range(20):
        assert writes.put(encode_record(record(i, 500 + i % 3)))
        places.add(reads.get().steps["x"].ctypes.data)
        reads.release()
    assert len(places) <= 2


def test_only_so_much_is_ahead_of_the_reader() -> None:
    """What was written long before it is read is in no cache any more."""
    writes, reads = ring(64 << 20)
    large = encode_record(record(0, 1 << 20))
    assert [writes.put(large) for _ in range(3)] == [True, True, False]
    reads.get()
    assert not writes.put(large)
    reads.release()
    assert writes.put(large)


def test_random_use_keeps_every_record_whole() -> None:
    writes, reads = ring(1 << 18)
    random = np.random.default_rng(0)
    waiting: list[int] = []
    refused = 0
    for i in range(5000):
        if not waiting or random.random() < 0.52:
            if writes.put(encode_record(record(i, int(random.integers(1, 4000))))):
                waiting.append(i)
            else:
                refused += 1
        else:
            sample = waiting.pop(0)
            chosen = reads.get()
            assert chosen.identity.sample == sample
            assert (chosen.steps["x"] == sample).all()
            reads.release()
    assert refused
    while waiting:
        assert reads.get().identity.sample == waiting.pop(0)
        reads.release()
    assert not reads.has_record


def test_a_record_larger_than_the_segment_is_refused(tmp_path: Path, source: SocketSource) -> None:
    sink = SharedMemorySink(tmp_path, "c", size=1 << 12)
    with pytest.raises(DataError, match="the shared memory for"):
        sink.put(record(0, 4096))
    sink.close()


def test_what_a_writer_put_before_it_died_is_there_and_what_it_was_writing_is_not(
    tmp_path: Path, source: SocketSource
) -> None:
    child = process(
        tmp_path,
        """
        c = SharedMemorySink(folder, "c")
        for i in range(3):
            c.put(Record(RecordId(0, i), {"x": np.full(8, i)}))
        c.flush()
        # Dies between finding room and saying that a record is there.
        c._ring._data[4096:8192] = 1
        print("writing", flush=True)
        time.sleep(60)
        """,
    )
    assert line(child) == "writing"
    assert source.get().identity.sample == 0
    kill(child)
    other = SharedMemorySink(tmp_path, "c")
    other.put(record(9))
    time.sleep(3)  # the dead one is lost by now
    assert {source.get().identity.sample for _ in range(3)} == {1, 2, 9}
    other.put(record(10))
    assert source.get().identity.sample == 10
    other.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_writer_that_waits_for_room_is_told_that_the_reader_died(
    tmp_path: Path, stopped: bool
) -> None:
    child = process(tmp_path, HOST)
    assert line(child) == "in"
    sink = SharedMemorySink(tmp_path, "c", size=1 << 12)
    if stopped:
        child.send_signal(signal.SIGSTOP)
    threading.Timer(0.3, child.kill).start()
    start = time.monotonic()
    with pytest.raises(ChannelFailed, match="dead, stopped or cut off"):
        for sample in range(100):
            sink.put(record(sample))
    assert time.monotonic() - start < 6
    child.wait()
    sink.close()


def test_a_writer_gives_up_on_a_reader_that_makes_no_room(
    tmp_path: Path, source: SocketSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_streams, "FULL_TIMEOUT_S", 0.3)
    sink = SharedMemorySink(tmp_path, "c", size=1 << 12)
    with pytest.raises(ChannelFailed, match="its reader hangs"):
        for sample in range(100):
            sink.put(record(sample))
    assert [source.get().identity.sample for _ in range(3)] == [0, 1, 2]
    sink.close()


def test_a_stopped_writer_goes_on_where_it_was(tmp_path: Path, source: SocketSource) -> None:
    child = process(
        tmp_path,
        """
        c = SharedMemorySink(folder, "c", size=1 << 14)
        print("in", flush=True)
        for i in range(400):
            c.put(Record(RecordId(0, i), {"x": np.full(100, i)}))
        c.flush()
        c.close()
        """,
    )
    assert line(child) == "in"
    got = [source.get().identity.sample for _ in range(10)]
    child.send_signal(signal.SIGSTOP)
    waiting = threading.Timer(3.5, child.send_signal, [signal.SIGCONT])
    waiting.start()  # it counts as lost meanwhile
    got += [source.get().identity.sample for _ in range(390)]
    assert got == list(range(400))
    assert child.wait(20) == 0


STOPS = """
    c = SharedMemorySink(folder, "c", size=1 << 20)
    c.put(Record(RecordId(0, 0), {"x": np.full(100, 0)}))
    c.flush()
    print("in", flush=True)
    sys.stdin.readline()
    for i in range(1, int(sys.stdin.readline())):
        c.put(Record(RecordId(0, i), {"x": np.full(100, i)}))
    c.flush()
    c.close()
    print("left", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("count", [6, 1])
def test_what_a_writer_puts_after_it_was_stopped_arrives_though_it_leaves_at_once(
    tmp_path: Path, source: SocketSource, count: int
) -> None:
    """Before it can be heard again; and its memory is given back, also where it put nothing."""
    child = process(tmp_path, STOPS)
    assert line(child) == "in"
    got: list[int] = []
    reading = threading.Thread(
        target=lambda: got.extend(record.identity.sample for record in source), daemon=True
    )
    reading.start()
    assert child.stdin is not None
    child.send_signal(signal.SIGSTOP)
    time.sleep(3.5)
    child.stdin.write(f"\n{count}\n")
    child.stdin.flush()
    assert source._rings, "it counts as lost, and its memory stays"
    child.send_signal(signal.SIGCONT)
    assert line(child) == "left"
    deadline = time.monotonic() + 5
    while (len(got) < count or source._rings) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert got == list(range(count))
    assert (source._rings, source._segments, source._silent_peers) == ({}, {}, set())
    kill(child)


def test_memory_of_a_writer_that_was_killed_is_given_back(
    tmp_path: Path, source: SocketSource
) -> None:
    child = process(tmp_path, STOPS)
    assert line(child) == "in"
    assert source.get().identity.sample == 0
    kill(child)
    reading = threading.Thread(target=lambda: list(source), daemon=True)
    reading.start()
    deadline = time.monotonic() + 8
    while source._rings and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (source._rings, source._segments, source._silent_peers) == ({}, {}, set())


def test_what_was_put_can_be_read_after_its_writer_left(
    tmp_path: Path, source: SocketSource
) -> None:
    before = set(SHM_FOLDER.glob("rlinf-*"))
    sink = SharedMemorySink(tmp_path, "c")
    path = SHM_FOLDER / sink._segment
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for i in range(5):
        sink.put(record(i))
    sink.flush()
    sink.close()
    assert not path.exists()
    assert [source.get().identity.sample for _ in range(5)] == list(range(5))
    assert set(SHM_FOLDER.glob("rlinf-*")) <= before


def test_memory_of_writers_that_left_is_given_back(tmp_path: Path, source: SocketSource) -> None:
    for i in range(3):
        sink = SharedMemorySink(tmp_path, "c")
        sink.put(record(i))
        sink.close()
        source.get()
    plain = SocketSink(tmp_path, "c")
    time.sleep(0.5)
    plain.put(record(9))
    source.get()
    plain.close()
    del sink
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert f"rlinf-{os.getuid()}" not in maps


def test_a_channel_of_another_node_is_not_opened(
    tmp_path: Path, source: SocketSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_streams, "shared_memory_id", lambda: "another")
    with pytest.raises(InputError, match="no such channel on this node"):
        SharedMemorySink(tmp_path, "c")


def test_too_little_shared_memory_is_said(tmp_path: Path, source: SocketSource) -> None:
    before = set(SHM_FOLDER.iterdir())
    with pytest.raises(StorageError, match="no segment of"):
        SharedMemorySink(tmp_path, "c", size=1 << 45)
    assert set(SHM_FOLDER.glob("rlinf-*")) <= before


@pytest.mark.parametrize("name", ["../etc/passwd", "rlinf-x", "", "/dev/shm/x"])
def test_other_names_are_not_opened(name: str) -> None:
    with pytest.raises(InputError, match="no name of shared memory"):
        attach_segment(name)


def test_memory_that_others_may_read_is_refused() -> None:
    name = new_segment_name()
    create_segment(name, 4096)
    (SHM_FOLDER / name).chmod(0o644)
    try:
        with pytest.raises(InputError, match="other users can access"):
            attach_segment(name)
    finally:
        remove_segment(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_memory_of_another_user_is_refused() -> None:
    name = new_segment_name()
    create_segment(name, 4096)
    os.chown(SHM_FOLDER / name, 12345, 12345)
    try:
        with pytest.raises(InputError, match="other users can access"):
            attach_segment(name)
    finally:
        remove_segment(name)
