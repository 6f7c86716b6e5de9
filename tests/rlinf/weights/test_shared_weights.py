"""Readers of shared memory see whole versions, the newest, without copying them."""

from __future__ import annotations

import gc
import multiprocessing
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from rlinf.errors import WeightTransferError
from rlinf.weights import shared_weights
from rlinf.weights.buckets import BucketLayout, TensorEntry
from rlinf.weights.shared_weights import SharedWeightsReader, SharedWeightsWriter
from tests.rlinf.weights.states import same, states

SIZE = 50_000


@pytest.fixture
def name() -> Iterator[str]:
    made = f"rlinf-test-{secrets.token_hex(4)}"
    yield made
    gc.collect()
    assert not list(Path("/dev/shm").glob(f"{made}*")), "memory was left behind"


def uniform(version: int) -> dict[str, Tensor]:
    """A state in which every number tells the version: a mixture shows."""
    return {"w": torch.full((SIZE,), float(version)), "n": torch.full((17,), version)}


def writer_of(name: str, timeout_s: float = 60) -> SharedWeightsWriter:
    return SharedWeightsWriter(
        name, BucketLayout.from_tensors(uniform(0), bucket_bytes=4096), timeout_s=timeout_s
    )


def damage(writer: SharedWeightsWriter, version: int) -> None:
    """Flip a bit of a slot behind the writer's back."""
    _, flat = shared_weights._slot_views(
        shared_weights._buffer(writer._slots[version % 2]), writer._layout
    )
    flat[-1000] ^= 4


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None
)
@given(states())
def test_any_state_is_read_to_the_bit(name: str, state: dict[str, Tensor]) -> None:
    writer = SharedWeightsWriter(name, BucketLayout.from_tensors(state, bucket_bytes=64))
    try:
        writer.publish(3, state)
        view = SharedWeightsReader(name).newest()
        assert view is not None
        with view:
            assert (view.version, same(view.tensors, state)) == (3, True)
    finally:
        writer.close()


def test_float32_is_read_in_the_type_of_the_layout(name: str) -> None:
    state = {"w": torch.randn(1000)}
    writer = SharedWeightsWriter(name, BucketLayout.from_tensors(state, dtype=torch.bfloat16))
    writer.publish(0, state)
    view = SharedWeightsReader(name).newest()
    assert view is not None
    with view:
        assert same(view.tensors, {"w": state["w"].to(torch.bfloat16)})
    writer.close()


def test_only_what_is_newer_is_read(name: str) -> None:
    writer = writer_of(name)
    reader = SharedWeightsReader(name)
    assert reader.newest() is None
    for version in (0, 1, 4):
        writer.publish(version, uniform(version))
        view = reader.newest(after=version - 1)
        assert view is not None
        with view:
            assert view.version == version
            assert same(view.tensors, uniform(version))
        assert reader.newest(after=version) is None
    with pytest.raises(WeightTransferError, match="not newer than 4"):
        writer.publish(4, uniform(4))
    writer.close()


def test_a_version_in_use_is_not_overwritten(name: str) -> None:
    writer, reader = writer_of(name, timeout_s=0.2), SharedWeightsReader(name)
    writer.publish(0, uniform(0))
    view = reader.newest()
    assert view is not None
    writer.publish(1, uniform(1))
    with pytest.raises(WeightTransferError, match="still uses version 0"):
        writer.publish(2, uniform(2))
    assert same(view.tensors, uniform(0))
    view.release()
    writer.publish(2, uniform(2))
    newest = reader.newest()
    assert newest is not None
    with newest:
        assert same(newest.tensors, uniform(2))
    writer.close()


def test_damage_is_seen_and_not_served(name: str) -> None:
    writer, reader = writer_of(name), SharedWeightsReader(name)
    writer.publish(0, uniform(0))
    damage(writer, 0)
    with pytest.raises(WeightTransferError, match="damaged; it is not served"):
        reader.newest()
    # The failed look let go of the slot, and new versions heal both.
    for version in (1, 2):
        writer.publish(version, uniform(version))
        view = reader.newest()
        assert view is not None
        with view:
            assert same(view.tensors, uniform(version))
    writer.close()


def test_memory_of_others_is_refused(name: str) -> None:
    with pytest.raises(WeightTransferError, match="is their writer on this node"):
        SharedWeightsReader(name)
    path = Path(f"/dev/shm/{name}-0")
    path.touch(mode=0o600)
    path.write_bytes(b"x" * 100)
    try:
        with pytest.raises(WeightTransferError, match="holds no weights"):
            SharedWeightsReader(name)
    finally:
        path.unlink()


def test_what_a_reader_holds_outlasts_the_end_of_writing(name: str) -> None:
    writer, reader = writer_of(name, timeout_s=0.2), SharedWeightsReader(name)
    writer.publish(0, uniform(0))
    view = reader.newest()
    assert view is not None
    writer.close()
    with pytest.raises(WeightTransferError, match="closed it, or ended"):
        reader.newest()
    with view:
        assert same(view.tensors, uniform(0))
    writer.close()


def test_a_state_of_another_layout_is_refused_and_the_last_stays(name: str) -> None:
    writer, reader = writer_of(name), SharedWeightsReader(name)
    writer.publish(0, uniform(0))
    for wrong in ({"w": torch.zeros(SIZE)}, {**uniform(1), "n": torch.zeros(3)}):
        with pytest.raises(WeightTransferError, match="'n' is missing or not of shape"):
            writer.publish(1, wrong)
    view = reader.newest()
    assert view is not None
    with view:
        assert view.version == 0
    writer.close()


def test_more_than_the_node_has_is_refused_at_once(name: str) -> None:
    free = max(shutil.disk_usage("/dev/shm"))
    layout = BucketLayout((TensorEntry("w", "float16", (free,), 0),), {}, 1 << 30)
    with pytest.raises(WeightTransferError, match="cannot make"):
        SharedWeightsWriter(name, layout)


def test_strangers_cannot_read_it(name: str) -> None:
    writer = writer_of(name)
    modes = [path.stat().st_mode & 0o777 for path in Path("/dev/shm").glob(f"{name}*")]
    assert modes == [0o600, 0o600]
    writer.close()


def follow(name: str, until: int, result: Connection) -> None:
    """Read as fast as possible and report torn versions and how many were seen."""
    reader, last, seen, torn = SharedWeightsReader(name), -1, 0, 0
    result.send("ready")
    deadline = time.monotonic() + 60
    while last < until and time.monotonic() < deadline:
        view = reader.newest(after=last)
        if view is None:
            continue
        with view:
            torn += not same(view.tensors, uniform(view.version)) or view.version <= last
            last, seen = view.version, seen + 1
    result.send((seen, torn, last))


def test_readers_beside_a_busy_writer_see_no_torn_version(name: str) -> None:
    context = multiprocessing.get_context("fork")
    writer, last = writer_of(name), 300
    ends = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=follow, args=(name, last, theirs))
        process.start()
        ends.append((process, ours))
    for _, ours in ends:
        assert ours.poll(60)
        assert ours.recv() == "ready"
    for version in range(last + 1):
        writer.publish(version, uniform(version))
    for process, ours in ends:
        assert ours.poll(60)
        seen, torn, end = ours.recv()
        process.join()
        assert (torn, end) == (0, last)
        assert seen > 1
    writer.close()


HOLD = """
import sys, time
from rlinf.weights.shared_weights import SharedWeightsReader
view = SharedWeightsReader(sys.argv[1]).newest()
print(view.version, flush=True)
time.sleep(60)
"""


def test_a_reader_that_is_killed_stops_nobody(name: str) -> None:
    writer = writer_of(name, timeout_s=20)
    writer.publish(0, uniform(0))
    reader = subprocess.Popen([sys.executable, "-c", HOLD, name], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "0\n"
    writer.publish(1, uniform(1))
    reader.send_signal(signal.SIGKILL)
    reader.wait()
    reader.stdout.close()
    writer.publish(2, uniform(2))
    view = SharedWeightsReader(name).newest()
    assert view is not None
    with view:
        assert same(view.tensors, uniform(2))
    writer.close()


WRITE = """
import sys, time, torch
from rlinf.weights import shared_weights
from rlinf.weights.buckets import BucketLayout
state = {"w": torch.zeros(100_000)}
layout = BucketLayout.from_tensors(state, bucket_bytes=4096)
writer = shared_weights.SharedWeightsWriter(sys.argv[1], layout)
writer.publish(0, state)
pack, count = BucketLayout.pack_bucket, 0
def slow(self, bucket, tensors, out):
    pack(self, bucket, tensors, out)
    if bucket == 50:
        print("half", flush=True)
        time.sleep(60)
BucketLayout.pack_bucket = slow
writer.publish(1, {"w": torch.ones(100_000)})
"""


def test_what_a_killed_writer_left_half_written_is_not_served(name: str) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE, name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "half\n"
    reader, before = SharedWeightsReader(name), {"w": torch.zeros(100_000)}
    view = reader.newest()
    assert view is not None
    with view:
        assert (view.version, same(view.tensors, before)) == (0, True)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    # The version before may be gone too, soon after.
    with suppress(WeightTransferError):
        view = reader.newest()
        assert view is not None
        with view:
            assert (view.version, same(view.tensors, before)) == (0, True)
    writer.communicate()
    deadline = time.monotonic() + 20
    while list(Path("/dev/shm").glob(f"{name}*")) and time.monotonic() < deadline:
        time.sleep(0.05)
