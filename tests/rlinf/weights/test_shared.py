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
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from rlinf.errors import TransferError
from rlinf.weights import shared
from rlinf.weights.buckets import Entry, Layout
from rlinf.weights.handles import Handle, finish
from rlinf.weights.shared import SharedReader, SharedView, SharedWriter
from tests.rlinf.weights.states import bits, same, states

SIZE = 50_000


def serve(asked: Connection) -> None:
    """Readers and the views they hold, at the wish of :class:`Reader`; of test after test."""
    readers: list[SharedReader] = []
    views: list[SharedView] = []
    while (request := asked.recv()) is not None:
        verb, *words = request
        try:
            answer: object = None
            if verb == "forget":
                for view in views:
                    view.release()
                readers, views = [], []
            elif verb == "open":
                readers.append(SharedReader(*words))
                answer = len(readers) - 1
            elif verb == "newest":
                if (found := readers[words[0]].newest(words[1])) is not None:
                    views.append(found)
                    answer = (len(views) - 1, found.version)
            elif verb == "read":
                answer = {name: bits(tensor) for name, tensor in views[words[0]].tensors.items()}
            else:
                views[words[0]].release()
            asked.send(answer)
        except TransferError as error:
            asked.send(error)


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Connection]:
    """Another process: a handle of a GPU's memory cannot be opened where it was made."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    yield ours
    ours.send(None)
    process.join()


class View:
    """What a :class:`Reader` holds."""

    def __init__(self, process: Connection, number: int, version: int) -> None:
        self._process, self._number, self.version = process, number, version

    def holds(self, state: dict[str, Tensor]) -> bool:
        """Whether its tensors, as they are now, are these to the bit."""
        read = ask(self._process, "read", self._number)
        return read == {name: bits(tensor) for name, tensor in state.items()}

    def release(self) -> None:
        ask(self._process, "release", self._number)

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Reader:
    """A :class:`SharedReader` in another process."""

    def __init__(self, process: Connection, name: str) -> None:
        self._process, self._number = process, ask(process, "open", name)

    def newest(self, after: int = -1) -> View | None:
        found = ask(self._process, "newest", self._number, after)
        return None if found is None else View(self._process, *found)


def ask(process: Connection, *words: object) -> Any:
    process.send(words)
    assert process.poll(60)
    answer = process.recv()
    if isinstance(answer, TransferError):
        raise answer
    return answer


@pytest.fixture
def reader_of(elsewhere: Connection) -> Iterator[Callable[[str], Reader]]:
    yield partial(Reader, elsewhere)
    ask(elsewhere, "forget")


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Where the flat states are: the contract is the same."""
    return str(request.param)


@pytest.fixture
def name() -> Iterator[str]:
    made = f"rlinf-test-{secrets.token_hex(4)}"
    yield made
    gc.collect()
    assert not list(Path("/dev/shm").glob(f"{made}*")), "memory was left behind"


def uniform(version: int) -> dict[str, Tensor]:
    """A state in which every number tells the version: a mixture shows."""
    return {"w": torch.full((SIZE,), float(version)), "n": torch.full((17,), version)}


def writer_of(name: str, device: str, timeout_s: float = 60) -> SharedWriter:
    layout = Layout.of(uniform(0), bucket_bytes=4096)
    return SharedWriter(name, layout, timeout_s=timeout_s, device=device)


def damage(writer: SharedWriter, version: int) -> None:
    """Flip a bit of a slot behind the writer's back."""
    _, flat = writer._slots[version % 2].parts(writer._layout)
    flat[-1000] ^= 4
    finish(flat.device)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None
)
@given(states())
def test_any_state_is_read_to_the_bit(
    name: str, device: str, reader_of: Callable[[str], Reader], state: dict[str, Tensor]
) -> None:
    writer = SharedWriter(name, Layout.of(state, bucket_bytes=64), device=device)
    try:
        writer.publish(3, state)
        view = reader_of(name).newest()
        assert view is not None
        with view:
            assert (view.version, view.holds(state)) == (3, True)
    finally:
        writer.close()


def test_float32_is_read_in_the_type_of_the_layout(
    name: str, device: str, reader_of: Callable[[str], Reader]
) -> None:
    state = {"w": torch.randn(1000)}
    writer = SharedWriter(name, Layout.of(state, dtype=torch.bfloat16), device=device)
    writer.publish(0, state)
    view = reader_of(name).newest()
    assert view is not None
    with view:
        assert view.holds({"w": state["w"].to(torch.bfloat16)})
    writer.close()


def test_only_what_is_newer_is_read(
    name: str, device: str, reader_of: Callable[[str], Reader]
) -> None:
    writer = writer_of(name, device)
    reader = reader_of(name)
    assert reader.newest() is None
    for version in (0, 1, 4):
        writer.publish(version, uniform(version))
        view = reader.newest(after=version - 1)
        assert view is not None
        with view:
            assert view.version == version
            assert view.holds(uniform(version))
        assert reader.newest(after=version) is None
    with pytest.raises(TransferError, match="not newer than 4"):
        writer.publish(4, uniform(4))
    writer.close()


def test_a_version_in_use_is_not_overwritten(
    name: str, device: str, reader_of: Callable[[str], Reader]
) -> None:
    writer, reader = writer_of(name, device, timeout_s=0.2), reader_of(name)
    writer.publish(0, uniform(0))
    view = reader.newest()
    assert view is not None
    writer.publish(1, uniform(1))
    with pytest.raises(TransferError, match="still uses version 0"):
        writer.publish(2, uniform(2))
    assert view.holds(uniform(0))
    view.release()
    writer.publish(2, uniform(2))
    newest = reader.newest()
    assert newest is not None
    with newest:
        assert newest.holds(uniform(2))
    writer.close()


def test_damage_is_seen_and_not_served(
    name: str, device: str, reader_of: Callable[[str], Reader]
) -> None:
    writer, reader = writer_of(name, device), reader_of(name)
    writer.publish(0, uniform(0))
    damage(writer, 0)
    with pytest.raises(TransferError, match="damaged; it is not served"):
        reader.newest()
    # The failed look let go of the slot, and new versions heal both.
    for version in (1, 2):
        writer.publish(version, uniform(version))
        view = reader.newest()
        assert view is not None
        with view:
            assert view.holds(uniform(version))
    writer.close()


def test_memory_of_others_is_refused(name: str) -> None:
    with pytest.raises(TransferError, match="is their writer on this node"):
        SharedReader(name)
    path = Path(f"/dev/shm/{name}-0")
    path.touch(mode=0o600)
    path.write_bytes(b"x" * 100)
    try:
        with pytest.raises(TransferError, match="holds no weights"):
            SharedReader(name)
    finally:
        path.unlink()


def header(handle: bytes) -> bytes:
    """What the segment of a slot begins with whose flat state, of 64 bytes, is elsewhere."""
    layout = Layout.of({"w": torch.zeros(16)}).to_json().encode()
    head = shared._HEADER.pack(shared._MAGIC, 0, 0, 1, len(layout), len(handle))
    return (head + layout + handle).ljust(4096, b"\0")


def test_memory_of_a_gpu_that_is_not_here_is_refused(name: str) -> None:
    handle = Handle("00000000-1111-2222-3333-444444444444", b"memory", 0, 64).to_json().encode()
    path = Path(f"/dev/shm/{name}-0")
    reasons = {
        header(handle): "Slurm hides the GPUs",
        header(handle.replace(b'"offset": 0', b'"offset": 8')): "damaged handle",
        header(handle)[:4000]: "smaller than its layout",
    }
    path.touch(mode=0o600)
    try:
        for written, reason in reasons.items():
            path.write_bytes(written)
            with pytest.raises(TransferError, match=reason):
                SharedReader(name)
    finally:
        path.unlink()


def test_a_writer_without_its_gpu_leaves_nothing(name: str) -> None:
    with pytest.raises(TransferError, match="memory on cuda:99"):
        writer_of(name, "cuda:99")


def test_what_a_reader_holds_outlasts_the_end_of_writing(
    name: str, device: str, reader_of: Callable[[str], Reader]
) -> None:
    writer, reader = writer_of(name, device, timeout_s=0.2), reader_of(name)
    writer.publish(0, uniform(0))
    view = reader.newest()
    assert view is not None
    if device == "cpu":
        writer.close()
        with pytest.raises(TransferError, match="closed it, or ended"):
            reader.newest()
    else:
        # Memory of a GPU would be used again at once.
        with pytest.raises(TransferError, match="still uses version 0"):
            writer.close()
    with view:
        assert view.holds(uniform(0))
    writer.close()


def test_a_state_of_another_layout_is_refused_and_the_last_stays(
    name: str, device: str, reader_of: Callable[[str], Reader]
) -> None:
    writer, reader = writer_of(name, device), reader_of(name)
    writer.publish(0, uniform(0))
    for wrong in ({"w": torch.zeros(SIZE)}, {**uniform(1), "n": torch.zeros(3)}):
        with pytest.raises(TransferError, match="'n' is missing or not of shape"):
            writer.publish(1, wrong)
    view = reader.newest()
    assert view is not None
    with view:
        assert view.version == 0
    writer.close()


def test_more_than_the_node_has_is_refused_at_once(name: str, device: str) -> None:
    memory = torch.cuda.mem_get_info if device == "cuda" else partial(shutil.disk_usage, "/dev/shm")
    layout = Layout((Entry("w", "float16", (max(memory()),), 0),), {}, 1 << 30)
    with pytest.raises(TransferError, match="cannot make"):
        SharedWriter(name, layout, device=device)


def test_strangers_cannot_read_it(name: str, device: str) -> None:
    writer = writer_of(name, device)
    modes = [path.stat().st_mode & 0o777 for path in Path("/dev/shm").glob(f"{name}*")]
    assert modes == [0o600, 0o600]
    writer.close()


def follow(name: str, until: int, result: Connection) -> None:
    """Read as fast as possible and report torn versions and how many were seen."""
    reader, last, seen, torn = SharedReader(name), -1, 0, 0
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


def test_readers_beside_a_busy_writer_see_no_torn_version(name: str, device: str) -> None:
    # CUDA does not work in forks of a process that has used it.
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    writer, last = writer_of(name, device), 300
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
from rlinf.weights.shared import SharedReader
view = SharedReader(sys.argv[1]).newest()
print(view.version, flush=True)
time.sleep(60)
"""


def test_a_reader_that_is_killed_stops_nobody(
    name: str, device: str, reader_of: Callable[[str], Reader]
) -> None:
    writer = writer_of(name, device, timeout_s=20)
    writer.publish(0, uniform(0))
    reader = subprocess.Popen([sys.executable, "-c", HOLD, name], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "0\n"
    writer.publish(1, uniform(1))
    reader.send_signal(signal.SIGKILL)
    reader.wait()
    reader.stdout.close()
    writer.publish(2, uniform(2))
    view = reader_of(name).newest()
    assert view is not None
    with view:
        assert view.holds(uniform(2))
    writer.close()


WRITE = """
import sys, time, torch
from rlinf.weights import shared
from rlinf.weights.buckets import Layout
state = {"w": torch.zeros(100_000)}
layout = Layout.of(state, bucket_bytes=4096)
writer = shared.SharedWriter(sys.argv[1], layout, device=sys.argv[2])
writer.publish(0, state)
pack, count = Layout.pack, 0
def slow(self, bucket, tensors, out):
    pack(self, bucket, tensors, out)
    if bucket == 50:
        print("half", flush=True)
        time.sleep(60)
Layout.pack = slow
writer.publish(1, {"w": torch.ones(100_000)})
"""


def test_what_a_killed_writer_left_half_written_is_not_served(
    name: str, device: str, reader_of: Callable[[str], Reader]
) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE, name, device],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "half\n"
    reader, before = reader_of(name), {"w": torch.zeros(100_000)}
    view = reader.newest()
    assert view is not None
    with view:
        assert (view.version, view.holds(before)) == (0, True)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    # The version before may be gone too: memory of a GPU is at once, the node's soon after.
    with suppress(TransferError):
        view = reader.newest()
        assert view is not None
        with view:
            assert (view.version, view.holds(before)) == (0, True)
    writer.communicate()
    deadline = time.monotonic() + 20
    while list(Path("/dev/shm").glob(f"{name}*")) and time.monotonic() < deadline:
        time.sleep(0.05)
