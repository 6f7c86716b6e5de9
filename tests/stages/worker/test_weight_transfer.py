"""Weights from the worker that made them to the stores of others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf.artifacts import Manifest, commit_output, content_digest
from rlinf.data.record import Record, RecordId
from rlinf.errors import RequeueRequested
from rlinf.weights.buckets import BucketLayout, TensorEntry, bucket_checksum
from stages.context import StageInput
from stages.factory import WEIGHTS
from stages.live_store import LiveStore
from stages.worker.messages import GroupFormed
from stages.worker.record_transfer import SOCKET
from stages.worker.weight_links import WeightLinks, WeightMessageReceiver
from stages.worker.weight_transfer import PAYLOAD, WeightPublisher, WeightReceiver

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


@dataclass
class Wire:
    """An sender whose records a test delivers itself."""

    records: list[Record] = field(default_factory=list)

    def stream_to(self, target: str, workers: list[str], rank: int, ranks: int) -> Wire:
        return self

    def put(self, record: Record, weight: int = 1) -> None:
        self.records.append(record)


def sent(way: str, out: str = OUT, attempt: str = "data-a", number: int = 3) -> list[Record]:
    """What a publisher sends of one version."""
    wire = Wire()
    publisher = WeightPublisher(wire)  # type: ignore[arg-type]
    publisher.subscribe(out, {"w": way})
    publisher.publish(out, attempt, number, {WEIGHTS: state(number)})
    publisher.close()
    return wire.records


def test_the_first_of_very_many_versions_goes_to_those_who_want_it() -> None:
    """As many as the driver orders at once of rollouts far behind."""
    wire = Wire()
    publisher = WeightPublisher(wire)  # type: ignore[arg-type]
    for number in range(100):
        publisher.subscribe(f"it/{number:04d}/sync", {"w": "socket"})
    publisher.drop_subscribers({"it/0001/sync"})
    for number in range(2):
        publisher.publish(f"it/{number:04d}/sync", "data-a", number, {WEIGHTS: state(number)})
    publisher.close()
    assert {record.identity.iteration for record in wire.records} == {0}


class Worker:
    """What a worker_state worker has to send and take weights."""

    def __init__(self, folder: Path, name: str, dtype: torch.dtype | None = None) -> None:
        self.store, self.links = LiveStore(), WeightLinks(folder, name)
        self.publisher = WeightPublisher(self.links, dtype)
        handle = WeightReceiver(self.store, self.publisher).handle_record
        self.receiver = WeightMessageReceiver(folder, name, handle)

    def close(self) -> None:
        self.publisher.close()
        self.links.close()
        self.receiver.close()

    def holds(self, number: int, out: str = OUT) -> bool:
        held = self.store.output(out).objects.get(WEIGHTS)
        return held is not None and same(held, state(number))


@pytest.fixture
def workers(worker: Callable[[str], Worker]) -> tuple[WeightPublisher, LiveStore]:
    return worker("here").publisher, worker("there").store


def arrivals(store: LiveStore, behind: int = 0) -> WeightReceiver:
    """Of a worker that nobody asks for anything."""
    return WeightReceiver(store, WeightPublisher(Wire()), behind)  # type: ignore[arg-type]


def soon(met: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not met() and time.monotonic() < deadline:
        time.sleep(0.01)
    return met()


@pytest.mark.parametrize("way", ["socket", "shared_memory"])
@pytest.mark.parametrize("early", [True, False])
def test_weights_arrive_as_they_were_with_the_name_of_their_attempt(
    workers: tuple[WeightPublisher, LiveStore], way: str, early: bool
) -> None:
    publisher, store = workers
    for number in (3, 4, 5):
        out = f"it/{number:04d}/sync"
        if early:
            publisher.subscribe(out, {"there": way})
        publisher.publish(out, f"data-{number}", number, {WEIGHTS: state(number)})
        if not early:
            publisher.subscribe(out, {"there": way})
        entry = StageInput(Path(out), None, store.output(out))
        assert entry.content_id == f"{out}/data-{number}"
        assert same(entry.live_object(WEIGHTS), state(number))
        assert entry.live_object(WEIGHTS)["tied"] is entry.live_object(WEIGHTS)["big"]
    # The oldest made room: it is on disk.
    assert not store.output("it/0003/sync").objects


@pytest.mark.parametrize("way", ["socket", "shared_memory", "gloo"])
def test_weights_are_sent_in_the_type_that_engines_take(
    worker: Callable[..., Worker], way: str
) -> None:
    """Statistics and counts keep their own."""
    source, there = worker("here", torch.bfloat16), worker("there")
    made = {**state(3), "mean": torch.ones(3, dtype=torch.float64)}
    source.publisher.subscribe(OUT, {"there": way})
    source.publisher.publish(OUT, "data-a", 3, {WEIGHTS: made})
    assert soon(lambda: WEIGHTS in there.store.output(OUT).objects)
    cast = {n: t.bfloat16() if t.dtype == torch.float32 else t for n, t in made.items()}
    held = there.store.output(OUT).objects[WEIGHTS]
    assert {n: t.dtype for n, t in held.items()} == {n: t.dtype for n, t in cast.items()}
    assert same(held, cast)


@pytest.mark.parametrize("late", [False, True])
def test_who_gets_weights_passes_them_on(worker: Callable[[str], Worker], late: bool) -> None:
    """To another node bucket by bucket, on its own through shared memory; late ones too."""
    source, relay, far, near = (worker(name) for name in ("source", "relay", "far", "near"))
    ways = {"far": "socket", "near": "shared_memory"}
    if not late:
        relay.publisher.subscribe(OUT, ways)
    source.publisher.subscribe(OUT, {"relay": "socket"})
    source.publisher.publish(OUT, "data-a", 3, {WEIGHTS: state(3)})
    if late:
        assert soon(lambda: relay.holds(3))
        relay.publisher.subscribe(OUT, ways)
    for taker in (relay, far, near):
        assert soon(lambda taker=taker: taker.holds(3))  # type: ignore[misc]
        entry = StageInput(Path(OUT), None, taker.store.output(OUT))
        assert entry.content_id == f"{OUT}/data-a"


def test_another_attempt_reaches_those_who_got_a_part_of_the_first() -> None:
    wire, store = Wire(), LiveStore()
    publisher = WeightPublisher(wire)  # type: ignore[arg-type]
    publisher.subscribe(OUT, {"far": "socket"})
    taker = WeightReceiver(store, publisher)
    first, second = sent("socket"), sent("socket", attempt="data-b")
    for record in [*first[:2], *second]:
        taker.handle_record(OUT, record)
    assert soon(lambda: len(wire.records) == 2 + len(second))
    publisher.close()
    last = LiveStore()
    end = arrivals(last)
    for record in wire.records:
        end.handle_record(OUT, record)
    assert same(last.output(OUT).objects[WEIGHTS], state(3))
    assert StageInput(Path(OUT), None, last.output(OUT)).content_id == f"{OUT}/data-b"


def test_nobody_is_sent_what_nobody_wants() -> None:
    wire = Wire()
    publisher = WeightPublisher(wire)  # type: ignore[arg-type]
    publisher.publish(OUT, "data-a", 3, {WEIGHTS: state()})
    publisher.close()
    assert not wire.records


def flip(record: Record) -> Record:
    part = record.context[PAYLOAD].copy()
    part[len(part) // 2] ^= 1
    return replace(record, context={PAYLOAD: part})


def test_a_flipped_bit_is_found_and_the_version_is_never_served() -> None:
    records = sent("socket")
    buckets = [i for i, record in enumerate(records) if record.info["type"] == "weights_bucket"]
    assert len(buckets) > 1
    for damaged in buckets:
        store = LiveStore()
        taker = arrivals(store)
        for i, record in enumerate(records):
            taker.handle_record(OUT, flip(record) if i == damaged else record)
        assert not store.output(OUT).objects


def test_a_bucket_that_is_missing_or_of_another_version_is_found() -> None:
    records, other = sent("socket"), sent("socket", number=4)
    swapped = [records[0], replace(other[1], identity=records[1].identity), *records[2:]]
    for stream in (records[:1] + records[2:], swapped, records[:-1]):
        store = LiveStore()
        taker = arrivals(store)
        for record in stream:
            taker.handle_record(OUT, record)
        assert not store.output(OUT).objects
    assert records[-1].info["type"] == "weights_end"


def test_messages_that_make_no_sense_are_dropped() -> None:
    """Of a program of another version."""
    records = sent("socket")
    without = replace(records[0], context={})
    number = replace(records[1], identity=RecordId(3, 10_000))
    short = replace(records[1], context={PAYLOAD: records[1].context[PAYLOAD][:8]})
    checksums = f"{int(bucket_checksum(torch.from_numpy(short.context[PAYLOAD].copy()))):x}"
    short = replace(short, info={**short.info, "checksum": checksums})
    huge = BucketLayout((TensorEntry("w", "float32", (1 << 50,), 0),), {}, 1 << 20).to_json()
    large = replace(records[0], context={PAYLOAD: np.frombuffer(huge.encode(), np.uint8)})
    for odd in (without, number, short, large):
        store = LiveStore()
        taker = arrivals(store)
        taker.handle_record(OUT, records[0])
        taker.handle_record(OUT, odd)
        for record in records[1:]:
            taker.handle_record(OUT, record)
        assert not store.output(OUT).objects
    group = GroupFormed(group="../x", backend="gloo", members="w,v")
    arrivals(LiveStore()).handle_record(OUT, replace(records[0], info=group.to_dict(), context={}))


def test_a_fault_of_the_program_is_no_damage() -> None:
    """Weights that wait for their commit would hide it for ever."""

    def tell(*_: object) -> None:
        raise TypeError("a fault of the program")

    taker = WeightReceiver(LiveStore(), WeightPublisher(Wire()), on_arrival=tell)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a fault of the program"):
        for record in sent("socket"):
            taker.handle_record(OUT, record)


def test_damage_in_shared_memory_is_found_and_not_served() -> None:
    wire, store = Wire(), LiveStore()
    publisher = WeightPublisher(wire)  # type: ignore[arg-type]
    publisher.subscribe(OUT, {"w": "shared_memory"})
    publisher.publish(OUT, "data-a", 3, {WEIGHTS: state(3)})
    assert soon(lambda: bool(wire.records))
    segment = wire.records[0].info["segment"]
    for slot in (0, 1):
        memory = np.memmap(f"/dev/shm/{segment}-{slot}", np.uint8, "r+")
        memory[len(memory) // 2] ^= 1
    arrivals(store).handle_record(OUT, wire.records[0])
    publisher.close()
    assert not store.output(OUT).objects
    assert not list(Path("/dev/shm").glob(f"{segment}*"))


@pytest.mark.parametrize("way", ["socket", "shared_memory"])
def test_memory_of_a_writer_that_was_replaced_is_let_go(way: str) -> None:
    def mapped() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum("/dev/shm/rlinf" in line and "(deleted)" in line for line in lines)

    store, before, wire = LiveStore(), mapped(), Wire()
    taker = arrivals(store)
    first = WeightPublisher(wire)  # type: ignore[arg-type]
    first.subscribe(OUT, {"w": "shared_memory"})
    first.publish(OUT, "data-a", 3, {WEIGHTS: state(3)})
    assert soon(lambda: bool(wire.records))
    taker.handle_record(OUT, wire.records[0])
    assert same(store.output(OUT).objects[WEIGHTS], state(3))
    first.close()
    assert mapped() > before
    later = "it/0004/sync"
    for record in sent(way, later, "data-b", 4):
        taker.handle_record(later, record)
    assert mapped() == before


def test_a_name_that_is_not_ours_is_not_opened() -> None:
    record = sent("shared_memory")[0]
    store = LiveStore()
    arrivals(store).handle_record(
        OUT, replace(record, info={**record.info, "segment": "../../etc/passwd"})
    )
    assert not store.output(OUT).objects


def test_what_a_dead_sender_left_gives_way_to_the_next_attempt() -> None:
    store = LiveStore()
    taker = arrivals(store)
    first, second = sent("socket"), sent("socket", attempt="data-b")
    for record in [*first[:2], *second[:1], *first[2:], *second[1:]]:
        taker.handle_record(OUT, record)
    assert StageInput(Path(OUT), None, store.output(OUT)).content_id == f"{OUT}/data-b"
    assert same(store.output(OUT).objects[WEIGHTS], state(3))


def test_another_attempt_that_comes_whole_replaces_the_first() -> None:
    """It is the one that will be committed; who took the first finds out then."""
    store = LiveStore()
    taker = arrivals(store)
    for attempt in ("data-a", "data-b", "data-b"):
        for record in sent("socket", attempt=attempt):
            taker.handle_record(OUT, record)
    assert StageInput(Path(OUT), None, store.output(OUT)).content_id == f"{OUT}/data-b"


def test_weights_that_came_in_part_are_freed_by_the_next(tmp_path: Path) -> None:
    store = LiveStore()
    taker = arrivals(store)
    for number in range(3):
        for record in sent("socket", f"it/{number}", f"data-{number}", number)[:2]:
            taker.handle_record(f"it/{number}", record)
    for record in sent("socket", "it/3", "data-3", 3):
        taker.handle_record("it/3", record)
    assert not taker._partial


def test_older_weights_do_not_take_the_place_of_newer_ones() -> None:
    store = LiveStore()
    taker = arrivals(store)
    for number in (5, 6, 4, 5):
        for record in sent("socket", f"it/{number}", f"data-{number}", number):
            taker.handle_record(f"it/{number}", record)
    held = [n for n in range(4, 7) if WEIGHTS in store.output(f"it/{n}").objects]
    assert held == [5, 6]


def test_stale_rollouts_find_the_versions_they_lag_behind() -> None:
    store = LiveStore()
    taker = arrivals(store, behind=2)
    for number in range(6):
        for record in sent("socket", f"it/{number}", f"data-{number}", number):
            taker.handle_record(f"it/{number}", record)
    held = [n for n in range(6) if WEIGHTS in store.output(f"it/{n}").objects]
    assert held == [2, 3, 4, 5]


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


def test_the_receiver_still_accepts_weights_after_damaged_ones(
    workers: tuple[WeightPublisher, LiveStore], tmp_path: Path
) -> None:
    publisher, store = workers
    links = WeightLinks(tmp_path)
    links.send(OUT, ["there"], Record(RecordId(3, 0), info={"odd": 1}))
    publisher.subscribe(OUT, {"there": SOCKET})
    publisher.publish(OUT, "data-a", 0, {WEIGHTS: state(0)})
    assert soon(lambda: WEIGHTS in store.output(OUT).objects)
    links.close()


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
