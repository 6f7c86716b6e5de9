"""Weights from the worker that publishes them to the stores of others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf.artifacts import Manifest, commit_output, content_digest
from rlinf.channels.requests import Message, RequestClient, RequestRejected, RequestServer
from rlinf.errors import RequeueRequested, WeightTransferError
from stages.context import StageInput
from stages.factory import WEIGHTS
from stages.layout import worker_pointer
from stages.live_store import LiveStore
from stages.worker import weight_transfer
from stages.worker.messages import FetchWeights
from stages.worker.record_transfer import SHARED_MEMORY, Fetcher
from stages.worker.weight_transfer import (
    SharedMemorySync,
    WeightPublisher,
    WeightReceiver,
    WeightVersion,
)

OUT = "it/0003/sync"


def state(seed: int = 0) -> dict[str, Tensor]:
    """Weights of several buckets, two names tied."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "big": torch.randn(1200, 1000, generator=generator),
        "half": torch.randn(7, 3, generator=generator).bfloat16(),
        "count": torch.tensor(seed),
    }
    return tensors | {"tied": tensors["big"]}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


class Worker:
    """The parts of a worker that publish and fetch weights."""

    def __init__(self, folder: Path, name: str, dtype: torch.dtype | None, behind: int) -> None:
        self.name, self.store = name, LiveStore()
        self.arrived: list[tuple[str, str, int]] = []
        self.publisher = WeightPublisher(folder, name, dtype)
        self.receiver = WeightReceiver(folder, name, self.store, behind, self._note)
        self.fetcher = Fetcher(folder)
        self.server = RequestServer(worker_pointer(folder, name), self.publisher.handle)

    def _note(self, *arrival: Any) -> None:
        self.arrived.append(arrival)

    def fetch(
        self, producer: str, out: str = OUT, way: str = SHARED_MEMORY, members: tuple[str, ...] = ()
    ) -> None:
        order = FetchWeights(output=out, producer=producer, transport=way, members=members)
        self.fetcher.add(producer, self.receiver.create_fetch(order))

    def publish(self, number: int, out: str = OUT, attempt: str = "data-a") -> None:
        self.publisher.publish(out, attempt, number, {WEIGHTS: state(number)})

    def holds(self, number: int, out: str = OUT) -> bool:
        held = self.store.output(out).objects.get(WEIGHTS)
        return held is not None and same(held, state(number))

    def close(self) -> None:
        self.fetcher.close()
        self.server.close()
        self.publisher.close()
        self.receiver.close()


Make = Callable[..., Worker]


def soon(met: Callable[[], bool], timeout_s: float = 10) -> bool:
    deadline = time.monotonic() + timeout_s
    while not met() and time.monotonic() < deadline:
        time.sleep(0.01)
    return met()


@pytest.mark.parametrize("early", [True, False])
def test_weights_arrive_as_they_were_with_the_name_of_their_attempt(
    worker: Make, early: bool
) -> None:
    source, there = worker("here"), worker("there")
    for number in (3, 4, 5):
        out = f"it/{number:04d}/sync"
        if early:
            there.fetch("here", out)
        source.publish(number, out, f"data-{number}")
        if not early:
            there.fetch("here", out)
        entry = StageInput(Path(out), None, there.store.output(out))
        assert entry.content_id == f"{out}/data-{number}"
        assert same(entry.live_object(WEIGHTS), state(number))
        assert entry.live_object(WEIGHTS)["tied"] is entry.live_object(WEIGHTS)["big"]
        assert soon(lambda n=number, o=out: there.arrived[-1] == (o, f"data-{n}", n))
    # The oldest made room: it is on disk.
    assert not there.store.output("it/0003/sync").objects


@pytest.mark.parametrize("way", ["shared_memory", "gloo"])
def test_weights_are_sent_in_the_type_that_engines_take(worker: Make, way: str) -> None:
    """Statistics and counts keep their own."""
    source, there = worker("here", torch.bfloat16), worker("there")
    made = {**state(3), "mean": torch.ones(3, dtype=torch.float64)}
    there.fetch("here", way=way, members=("here", "there"))
    source.publisher.publish(OUT, "data-a", 3, {WEIGHTS: made})
    assert soon(lambda: WEIGHTS in there.store.output(OUT).objects)
    cast = {n: t.bfloat16() if t.dtype == torch.float32 else t for n, t in made.items()}
    held = there.store.output(OUT).objects[WEIGHTS]
    assert {n: t.dtype for n, t in held.items()} == {n: t.dtype for n, t in cast.items()}
    assert same(held, cast)


def test_the_first_of_very_many_versions_goes_to_those_who_want_it(worker: Make) -> None:
    """As many as the driver orders at once of rollouts far behind."""
    source, there = worker("here"), worker("there")
    for number in range(60):
        there.fetch("here", f"it/{number:04d}/sync")
    for number in range(2):
        source.publish(number, f"it/{number:04d}/sync")
        assert soon(lambda n=number: there.holds(n, f"it/{n:04d}/sync"))


def test_another_attempt_that_is_published_reaches_those_who_have_the_first(worker: Make) -> None:
    """It is the one that will be committed; who used the first finds out then."""
    source, there = worker("here"), worker("there")
    there.fetch("here")
    for attempt in ("data-a", "data-b"):
        source.publish(3, attempt=attempt)
        assert soon(lambda a=attempt: (OUT, a, 3) in there.arrived)
    assert StageInput(Path(OUT), None, there.store.output(OUT)).content_id == f"{OUT}/data-b"
    there.fetch("here")
    time.sleep(0.2)
    assert len(there.arrived) == 2, "each attempt is sent once"


def test_older_weights_do_not_take_the_place_of_newer_ones(worker: Make) -> None:
    source, there = worker("here"), worker("there")
    for number in (5, 6, 4):
        out = f"it/{number}"
        there.fetch("here", out)
        source.publish(number, out)
        assert number == 4 or soon(lambda n=number, o=out: there.holds(n, o))
    time.sleep(0.3)
    assert [n for n in range(4, 7) if there.holds(n, f"it/{n}")] == [5, 6]


def test_stale_rollouts_find_the_versions_they_lag_behind(worker: Make) -> None:
    source, there = worker("here"), worker("there", behind=2)
    for number in range(6):
        there.fetch("here", f"it/{number}")
        source.publish(number, f"it/{number}")
        assert soon(lambda n=number: there.holds(n, f"it/{n}"))
    assert [n for n in range(6) if there.holds(n, f"it/{n}")] == [2, 3, 4, 5]


def test_requests_for_outputs_on_disk_are_dropped(worker: Make) -> None:
    source, there = worker("here"), worker("there")
    there.fetch("here")
    assert soon(lambda: OUT in source.publisher._waiting)
    source.publisher.drop_outputs({OUT})
    there.fetcher.drop_outputs({OUT})
    source.publish(3)
    time.sleep(0.2)
    assert not there.arrived


@pytest.mark.parametrize("is_crowded", [False, True])
def test_a_request_that_is_dropped_is_rejected(
    worker: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_crowded: bool
) -> None:
    """Its worker would wait for a reply that never comes."""
    monkeypatch.setattr(weight_transfer, "MAX_WAITING", 2)
    source = worker("here")
    client = RequestClient(worker_pointer(tmp_path, "here"))
    arguments = {"worker": "there", "transport": SHARED_MEMORY, "members": ()}
    first = client.send(WEIGHTS, {**arguments, "output": OUT})
    assert soon(lambda: OUT in source.publisher._waiting)
    if is_crowded:
        for number in range(2):
            client.send(WEIGHTS, {**arguments, "output": f"it/{number}"})
    else:
        source.publisher.drop_outputs({OUT})
    with pytest.raises(RequestRejected, match="committed") as rejected:
        client.receive(10)
    assert rejected.value.number == first
    client.close()


def test_workers_on_other_machines_read_from_disk(
    worker: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rlinf")
    source, there = worker("here"), worker("there")
    monkeypatch.setattr("stages.worker.weight_transfer._WeightRequest.is_local", False)
    there.fetch("here")
    source.publish(3)
    assert soon(lambda: f"weights of {OUT} are read from disk" in caplog.text)
    assert not there.store.output(OUT).objects


def published(number: int = 3) -> tuple[SharedMemorySync, str]:
    """A sender with a version in shared memory, and the name of its segment."""
    sync, details = SharedMemorySync(), list[Any]()
    sync.send(WeightVersion(OUT, "data-a", number, state(number)), details.append)
    return sync, details[0]["segment"]


def test_damage_in_shared_memory_is_found_and_not_served() -> None:
    sync, segment = published()
    for slot in (0, 1):
        memory = np.memmap(f"/dev/shm/{segment}-{slot}", np.uint8, "r+")
        memory[len(memory) // 2] ^= 1
    with pytest.raises(WeightTransferError, match="damaged"):
        SharedMemorySync().receive(3, {"segment": segment})
    sync.close()
    assert not list(Path("/dev/shm").glob(f"{segment}*"))


def test_a_version_that_was_replaced_in_shared_memory_is_not_served() -> None:
    sync, segment = published()
    with pytest.raises(WeightTransferError, match="no longer in shared memory"):
        SharedMemorySync().receive(4, {"segment": segment})
    for number in (4, 5):
        sync.send(WeightVersion("it/next", "data-a", number, state(number)), lambda _: None)
    with pytest.raises(WeightTransferError, match="replaced by 5"):
        SharedMemorySync().receive(3, {"segment": segment})
    sync.close()


def test_memory_of_a_writer_that_was_replaced_is_let_go() -> None:
    def mapped() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum("/dev/shm/rlinf" in line and "(deleted)" in line for line in lines)

    before, reader = mapped(), SharedMemorySync()
    first, segment = published(3)
    assert same(reader.receive(3, {"segment": segment}), state(3))
    first.close()
    assert mapped() > before
    second, segment = published(4)
    assert same(reader.receive(4, {"segment": segment}), state(4))
    assert mapped() == before
    second.close()


@pytest.mark.parametrize("name", ["../../etc/passwd", "rlinf-none", ""])
def test_a_name_that_is_not_ours_is_not_opened(name: str) -> None:
    with pytest.raises(WeightTransferError):
        SharedMemorySync().receive(3, {"segment": name})


def test_a_reply_that_cannot_be_used_is_left_to_the_disk(
    worker: Make, caplog: pytest.LogCaptureFixture
) -> None:
    source, there = worker("here"), worker("there")
    order = FetchWeights(output=OUT, producer="here", transport=SHARED_MEMORY)
    reply = Message({"number": 3, "details": {"segment": "rlinf-none"}})
    there.receiver.receive(order, "data-a", reply)
    assert soon(lambda: "waiting for its commit" in caplog.text)
    there.fetch("here")
    source.publish(3)
    assert soon(lambda: there.holds(3))


@pytest.mark.parametrize("arguments", [{}, {"output": OUT, "transport": "gloo", "members": 3}])
def test_requests_that_make_no_sense_are_rejected(
    worker: Make, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    source, there = worker("here"), worker("there")
    client = RequestClient(worker_pointer(tmp_path, "here"))
    with pytest.raises(Exception, match=r"Error"):
        client.request(WEIGHTS, arguments)
    client.close()
    there.fetch("here")
    source.publish(3)
    assert soon(lambda: there.holds(3))


def test_who_waits_for_weights_that_never_come_goes_on_when_they_are_committed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "sync"
    (folder / "data-x").mkdir(parents=True)
    entry = StageInput(folder, None, LiveStore().output("sync"))
    timer = threading.Timer(0.2, lambda: commit_output(folder, manifest("data-x")))
    timer.start()
    assert entry.content_id == f"{folder}/data-x"
    assert entry.live_object(WEIGHTS) is None
    # What came from memory is checked against the commit; nothing did.
    assert entry.live_output is None
    timer.join()


def test_who_waits_for_weights_can_be_asked_to_stop(tmp_path: Path) -> None:
    entry = StageInput(tmp_path, None, LiveStore().output("sync"), should_stop=lambda: True)
    with pytest.raises(RequeueRequested):
        _ = entry.content_id


def manifest(data: str) -> Manifest:
    return Manifest(
        stage="sync",
        iteration=0,
        key="k",
        content=content_digest({}, {}),
        data=data,
        files={},
        inputs={},
        metrics={},
        timing={},
        host="",
        job="",
        world=1,
        extra={},
    )
