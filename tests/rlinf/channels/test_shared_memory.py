"""Shared memory: views without a copy, peers that die, nothing left behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlinf.channels import segment as segments
from rlinf.channels import shared_memory
from rlinf.channels.base import ChannelFailed
from rlinf.channels.segment import SHM, sweep
from rlinf.channels.shared_memory import SharedMemorySink, SharedMemorySource
from rlinf.data.record import Identity, Record
from rlinf.errors import DataError, InputError

PRELUDE = """
import os, sys, time
from pathlib import Path
import numpy as np
from rlinf.channels.shared_memory import SharedMemorySink, SharedMemorySource
from rlinf.data.record import Identity, Record
folder = Path(sys.argv[1])
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
    return Record(Identity(0, sample), {"x": np.full(size, sample, np.int64)})


def segment(folder: Path) -> Path:
    return segments.named(folder / "c.shm.json")


class Ring:
    """A channel's reader and one writer, in this process."""

    def __init__(self, folder: Path, size: int = 64 << 20) -> None:
        self.source = SharedMemorySource(folder, "c", size=size)
        self.sink = SharedMemorySink(folder, "c")
        self.put, self.get = self.sink.put, self.source.get

    def close(self) -> None:
        self.sink.close()
        self.source.close()


def test_arrays_are_views_that_outlive_everything(tmp_path: Path) -> None:
    channel = Ring(tmp_path, size=1 << 16)
    channel.put(record(7))
    array = channel.get().steps["x"]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    part = array[2:4]
    del array
    for i in range(300):
        channel.put(record(i, 512))
        channel.get()
    assert part.tolist() == [7, 7]
    channel.close()
    assert part.tolist() == [7, 7]


def test_memory_is_used_again_in_any_order(tmp_path: Path) -> None:
    channel = Ring(tmp_path, size=1 << 16)
    channel.put(record(0))
    held = channel.get().steps["x"]
    for i in range(200):
        channel.put(record(i, 3000))
        assert channel.get().identity.sample == i
    assert held.tolist() == [0] * 8
    channel.close()


def test_a_record_lies_where_one_was_written_a_moment_ago(tmp_path: Path) -> None:
    channel = Ring(tmp_path, size=1 << 16)
    places = set()
    for i in range(20):
        channel.put(record(i, 500 + i % 3))
        places.add(channel.get().steps["x"].ctypes.data)
    # What was taken last is in hand while the next is written.
    assert len(places) <= 4
    channel.close()


def test_room_that_a_free_slot_keeps_is_given_up_when_it_is_needed(tmp_path: Path) -> None:
    channel = Ring(tmp_path, size=1 << 16)
    for i in range(3):
        channel.put(record(i, 2500))
    for i in range(3):
        assert channel.get().identity.sample == i
    channel.put(record(3, 4500))  # nowhere unless the rooms of the first two become one
    assert channel.get().identity.sample == 3
    channel.close()


def test_a_small_record_in_a_large_room_leaves_the_rest_to_others(tmp_path: Path) -> None:
    channel = Ring(tmp_path, size=1 << 16)
    channel.put(record(0, 7000))
    channel.get()
    channel.put(record(1))
    channel.get()  # the first is done
    channel.put(record(2))
    channel.put(record(3, 6500))
    assert [channel.get().identity.sample for _ in range(2)] == [2, 3]
    channel.close()


def test_random_use_keeps_every_record_whole(tmp_path: Path) -> None:
    channel = Ring(tmp_path, size=1 << 18)
    random = np.random.default_rng(0)
    waiting: list[int] = []
    held: list[tuple[int, np.ndarray]] = []
    for i in range(3000):
        room = len(waiting) + len(held) < 12
        if room and (not waiting or random.random() < 0.5):
            channel.put(record(i, int(random.integers(1, 2000))))
            waiting.append(i)
        elif waiting:
            sample = waiting.pop(0)
            held.append((sample, channel.get().steps["x"]))
        while held and random.random() < 0.4:
            sample, array = held.pop(int(random.integers(len(held))))
            assert (array == sample).all()
            del array
    channel.close()


def test_a_record_larger_than_the_channel_is_refused(tmp_path: Path) -> None:
    channel = Ring(tmp_path, size=1 << 12)
    with pytest.raises(DataError, match="make the channel larger"):
        channel.put(record(0, 4096))
    channel.close()


def test_a_dead_writer_leaves_no_hole(tmp_path: Path) -> None:
    channel = Ring(tmp_path, size=1 << 20)
    child = process(
        tmp_path,
        """
        c = SharedMemorySink(folder, "c")
        c.put(Record(Identity(0, 0), {"x": np.zeros(8)}))
        # Dies between reserving its room and filling it.
        c._wait(lambda: c._reserve(600_000))
        print("writing", flush=True)
        time.sleep(60)
        """,
    )
    assert line(child) == "writing"
    kill(child)
    channel.put(Record(Identity(0, 1), {"x": np.zeros(80_000)}))
    assert [channel.get().identity.sample for _ in range(2)] == [0, 1]
    channel.close()


HOST = """
    c = SharedMemorySource(folder, "c", size=1 << 12)
    print("in", flush=True)
    for line in sys.stdin:
        print(c.get().identity.sample, flush=True)
"""


def fill(channel: SharedMemorySink) -> None:
    """Put records that nobody reads until there is no room, and then one more."""
    for sample in range(100):
        channel.put(record(sample))


def fails_soon(work: Callable[[], object], match: str) -> None:
    start = time.monotonic()
    with pytest.raises(ChannelFailed, match=match):
        work()
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("stopped", [False, True])
def test_a_writer_who_waits_for_room_is_told_that_the_only_reader_died(
    tmp_path: Path, stopped: bool
) -> None:
    child = process(tmp_path, HOST)
    assert line(child) == "in"
    channel, path = SharedMemorySink(tmp_path, "c"), segment(tmp_path)
    if stopped:
        child.send_signal(signal.SIGSTOP)
    timer = threading.Timer(0.3, child.kill)
    timer.start()
    fails_soon(lambda: fill(channel), f"process {child.pid} died")
    child.wait()
    channel.close()
    assert not path.exists()


def test_nothing_is_put_where_the_only_reader_is_dead_though_there_is_room(tmp_path: Path) -> None:
    child = process(tmp_path, HOST)
    assert line(child) == "in"
    channel = SharedMemorySink(tmp_path, "c")
    kill(child)
    fails_soon(lambda: channel.put(record(0)), "died")
    late = SharedMemorySink(tmp_path, "c")
    fails_soon(lambda: late.put(record(0)), "died")
    late.close()
    channel.close()


def test_the_only_reader_goes_on_when_a_writer_dies_and_tells_the_others_when_it_leaves(
    tmp_path: Path,
) -> None:
    host = SharedMemorySource(tmp_path, "c", size=1 << 12)
    other = SharedMemorySink(tmp_path, "c")
    child = process(
        tmp_path,
        """
        c = SharedMemorySink(folder, "c")
        c.put(Record(Identity(0, 0), {"x": np.zeros(8)}))
        print("put", flush=True)
        time.sleep(60)
        """,
    )
    assert line(child) == "put"
    kill(child)
    time.sleep(2 * segments.CHECK_S)
    other.put(record(1))
    assert [host.get().identity.sample for _ in range(2)] == [0, 1]
    host.close()
    with pytest.raises(ChannelFailed, match="the only reader has left"):
        other.put(record(2))
    other.close()


def test_a_writer_gives_up_on_an_only_reader_that_makes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may be there to kill it. It goes on where it was when it is woken."""
    monkeypatch.setattr(shared_memory, "READER_TIMEOUT_S", 0.5)
    child = process(tmp_path, HOST)
    assert line(child) == "in"
    channel = SharedMemorySink(tmp_path, "c")
    child.send_signal(signal.SIGSTOP)
    fails_soon(lambda: fill(channel), "stopped or hangs")
    child.send_signal(signal.SIGCONT)
    assert child.stdin is not None
    child.stdin.write("\n" * 3)
    child.stdin.flush()
    assert [line(child) for _ in range(3)] == ["0", "1", "2"]
    channel.put(record(9))
    kill(child)
    channel.close()


def test_a_stopped_holder_of_the_lock_is_an_error_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "LOCK_TIMEOUT_S", 0.5)
    channel = Ring(tmp_path)
    child = process(
        tmp_path,
        """
        c = SharedMemorySink(folder, "c")
        with c._lock:
            print("locked", flush=True)
            time.sleep(60)
        """,
    )
    assert line(child) == "locked"
    with pytest.raises(ChannelFailed, match="kill it"):
        channel.put(record(0))
    kill(child)
    channel.put(record(0))
    channel.close()


def test_nothing_is_left_after_everybody_left(tmp_path: Path) -> None:
    channel = SharedMemorySource(tmp_path / "run", "c")
    path = segment(tmp_path / "run")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "run" / "c.shm.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    other = SharedMemorySink(tmp_path / "run", "c")
    channel.close()
    assert path.exists()
    other.close()
    assert not path.exists()
    assert not list((tmp_path / "run").iterdir())


def test_a_process_that_ends_leaves(tmp_path: Path) -> None:
    before = set(SHM.iterdir())
    child = process(tmp_path, 'c = SharedMemorySource(folder, "c"); c.close()')
    assert child.wait(30) == 0
    assert set(SHM.iterdir()) <= before


def test_what_a_crash_left_is_swept_and_its_name_is_free(tmp_path: Path) -> None:
    body = 'c = SharedMemorySource(folder, "c"); print("in", flush=True); time.sleep(60)'
    child = process(tmp_path, body)
    assert line(child) == "in"
    with pytest.raises(InputError, match="in use"):
        SharedMemorySource(tmp_path, "c")
    left = segment(tmp_path)
    sweep(0)
    assert left.exists()
    kill(child)
    SharedMemorySource(tmp_path, "c").close()
    assert not left.exists()

    child = process(tmp_path / "b", body)
    assert line(child) == "in"
    left = segment(tmp_path / "b")
    kill(child)
    sweep(0)
    assert not left.exists()


def test_a_channel_of_another_node_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "c.shm.json").write_text('{"node": "another", "segment": "rlinf-0-00"}')
    with pytest.raises(InputError, match="no such channel on this node"):
        SharedMemorySink(tmp_path, "c")


def test_a_foreign_segment_is_refused(tmp_path: Path) -> None:
    foreign = SHM / f"rlinf-{os.getuid()}-foreign"
    foreign.write_bytes(bytes(4096))
    foreign.chmod(0o644)
    try:
        with pytest.raises(InputError, match="not a segment of this user alone"):
            segments.End(foreign, tmp_path / "c.shm.json")
    finally:
        foreign.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_segment_of_another_user_is_refused(tmp_path: Path) -> None:
    channel = SharedMemorySource(tmp_path, "c")
    os.chown(channel._segment, 12345, 12345)
    for take_part in (SharedMemorySink, SharedMemorySource):
        with pytest.raises(InputError, match="not a segment of this user alone"):
            take_part(tmp_path, "c")
    assert channel._segment.exists()
    os.chown(channel._segment, 0, 0)
    channel.close()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"node": 1}'])
def test_a_damaged_pointer_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.shm.json").write_text(text)
    with pytest.raises(InputError, match=r"c\.shm\.json: damaged"):
        SharedMemorySink(tmp_path, "c")
