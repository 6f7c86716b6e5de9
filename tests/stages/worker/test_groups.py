"""Weights through a process group: what all members got whole is served, nothing else, soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil
import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store

from rlinf.data.record import Record, RecordId
from stages.factory import WEIGHTS
from stages.worker import weight_transfer
from stages.worker.messages import GroupFormed, GroupMessage, GroupSendDone
from stages.worker.weight_transfer import GLOO, NCCL, WeightsCallback, backend_device
from tests.stages.worker.test_weight_transfer import OUT, Worker, soon, state

Make = Callable[[str], Worker]


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rank and size of every end of a group that was formed."""
    found: list[tuple[int, int]] = []
    form = weight_transfer.create_process_group

    def noted(backend: str, store: Store, rank: int, size: int) -> weight_transfer.BroadcastGroup:
        group = form(backend, store, rank, size)
        found.append((rank, size))
        return group

    monkeypatch.setattr(weight_transfer, "create_process_group", noted)
    return found


def publish(source: Worker, number: int, to: list[str], way: str = GLOO) -> str:
    out = f"it/{number:04d}/sync"
    source.publisher.subscribe(out, dict.fromkeys(to, way))
    source.publisher.publish(out, "data-a", number, {WEIGHTS: state(number)})
    return out


def test_every_member_holds_each_version_by_one_group(
    worker: Make, formed: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    source, ranks = worker("s"), [worker(f"r{i}") for i in range(3)]
    for number in (3, 4, 5):
        out = publish(source, number, ["r0", "r1", "r2"])
        assert soon(lambda out=out, n=number: all(r.holds(n, out) for r in ranks))
        assert ranks[0].store.output(out).wait_for_attempt(lambda: True) == "data-a"
    assert sorted(formed) == [(rank, 4) for rank in range(4)], "one group serves them all"
    assert "no gloo" not in caplog.text


def test_other_members_are_another_group(
    worker: Make, formed: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    source, first, second = worker("s"), worker("r0"), worker("r1")
    out = publish(source, 3, ["r0"])
    assert soon(lambda: first.holds(3, out))
    out = publish(source, 4, ["r1"])
    assert soon(lambda: second.holds(4, out))
    out = publish(source, 5, ["r0"])
    assert soon(lambda: first.holds(5, out))
    assert sorted(formed) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert "no gloo" not in caplog.text


def test_where_one_is_missing_the_others_get_them_by_socket(
    worker: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_transfer, "BUCKET_TIMEOUT_S", 1.0)
    source, there = worker("s"), worker("r0")
    began = time.monotonic()
    out = publish(source, 3, ["r0", "never was"])
    assert soon(lambda: there.holds(3, out))
    assert time.monotonic() - began < 8
    assert "no gloo with r0, never was" in caplog.text
    # Nobody waits for that one a second time.
    monkeypatch.setattr(weight_transfer, "BUCKET_TIMEOUT_S", 100.0)
    out = publish(source, 4, ["r0", "never was"])
    assert soon(lambda: there.holds(4, out))


def test_who_has_no_gpu_gets_weights_for_nccl_by_socket(worker: Make) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    source, there = worker("s"), worker("r0")
    out = publish(source, 3, ["r0"], NCCL)
    assert soon(lambda: there.holds(3, out))
    with pytest.raises(weight_transfer.WeightTransferError, match="needs a GPU"):
        backend_device(NCCL)


def test_weights_that_are_not_those_announced_are_not_served(
    worker: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What comes by the group must be what the receiver says."""
    source, there = worker("s"), worker("r0")
    take = there.publisher.groups.handle_message

    def forged(out: str, number: int, message: GroupMessage, ready: WeightsCallback) -> None:
        if isinstance(message, GroupSendDone):
            message = message.model_copy(update={"digest": "0" * 32})
        take(out, number, message, ready)

    monkeypatch.setattr(there.publisher.groups, "handle_message", forged)
    out = publish(source, 3, ["r0"])
    assert soon(lambda: "not what was sent" in caplog.text)
    assert not there.holds(3, out)


def test_gloo_takes_the_interfaces_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    form = weight_transfer.create_process_group(GLOO, HashStore(), 0, 1)
    assert form.size() == 1
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    with pytest.raises(RuntimeError):
        weight_transfer.create_process_group(GLOO, HashStore(), 0, 1)


def test_gloo_listens_where_the_cluster_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("RLINF_INTERFACE", "127.0.0.1")
    monkeypatch.setattr(weight_transfer, "local_addresses", lambda: ["192.0.2.1"])
    before = {c.laddr for c in psutil.Process().net_connections("tcp")}
    store, made = HashStore(), list[weight_transfer.BroadcastGroup]()
    threads = [
        threading.Thread(
            target=lambda rank=rank: made.append(
                weight_transfer.create_process_group(GLOO, store, rank, 2)
            )
        )
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    new = {c.laddr for c in psutil.Process().net_connections("tcp")} - before
    assert len(made) == 2
    assert {address.ip for address in new} == {"127.0.0.1"}


def test_a_network_that_is_not_there_ends_the_group(
    worker: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, there = worker("s"), worker("r0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(weight_transfer, "INTERFACE_VARIABLE", "RLINF_TEST_INTERFACE")
    monkeypatch.setenv("RLINF_TEST_INTERFACE", "none-such")
    out = publish(source, 3, ["r0"])
    assert soon(lambda: there.holds(3, out)), "they go by socket"
    assert "no network 'none-such'" in caplog.text


def test_records_about_groups_that_make_no_sense_are_dropped(worker: Make) -> None:
    there = worker("r0")
    stranger = GroupFormed(group="group-x", members="a,b", backend=GLOO)
    elsewhere = GroupFormed(group="../group-0123456789abcdef", members="r0,b", backend=GLOO)
    for info in (
        GroupSendDone(group="group-none", digest="0").to_dict(),
        stranger.to_dict(),
        elsewhere.to_dict(),
        {"type": "group_formed"},
        {"type": "nothing known"},
        {},
    ):
        worker_out = there.sender.stream_to(f"{OUT}:{WEIGHTS}", ["r0"], 0, 1)
        worker_out.put(Record(RecordId(3, 0), info=dict(info)))
    source = worker("s")
    out = publish(source, 4, ["r0"])
    assert soon(lambda: there.holds(4, out)), "the receiver works on"
