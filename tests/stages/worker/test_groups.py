"""Weights through a process group: what all members got whole is served, nothing else, soon."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store

from rlinf.errors import WeightTransferError
from stages.worker import weight_transfer
from stages.worker.weight_transfer import GLOO, NCCL, BroadcastSync, backend_device
from tests.stages.worker.test_weight_transfer import Make, Worker, soon


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


def publish(source: Worker, number: int, to: list[Worker], *absent: str, way: str = GLOO) -> str:
    out = f"it/{number:04d}/sync"
    members = (source.name, *(each.name for each in to), *absent)
    for each in to:
        each.fetch(source.name, out, way, members)
    source.publish(number, out)
    return out


def test_every_member_holds_each_version_by_one_group(
    worker: Make, formed: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    source, ranks = worker("s"), [worker(f"r{i}") for i in range(3)]
    for number in (3, 4, 5):
        out = publish(source, number, ranks)
        assert soon(lambda out=out, n=number: all(r.holds(n, out) for r in ranks))
        assert ranks[0].store.output(out).wait_for_attempt(lambda: True) == "data-a"
    assert sorted(formed) == [(rank, 4) for rank in range(4)], "one group serves them all"
    assert "no gloo" not in caplog.text


def test_other_members_are_another_group(
    worker: Make, formed: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    source, first, second = worker("s"), worker("r0"), worker("r1")
    for number, member in ((3, first), (4, second), (5, first)):
        out = publish(source, number, [member])
        assert soon(lambda m=member, n=number, o=out: m.holds(n, o))
    assert sorted(formed) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert "no gloo" not in caplog.text


def test_a_worker_joins_each_group_for_which_it_has_an_order(
    worker: Make, formed: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Two stages may need the same weights on different workers."""
    source, ranks = worker("s"), [worker(f"r{i}") for i in range(3)]
    out = "it/0003/sync"
    for group in (ranks[:2], ranks[1:]):
        for each in group:
            each.fetch("s", out, GLOO, ("s", *(member.name for member in group)))
    source.publish(3, out)
    assert soon(lambda: len(formed) == 6), "two groups of three members"
    assert soon(lambda: all(rank.holds(3, out) for rank in ranks))
    assert "no gloo" not in caplog.text


def test_where_one_is_missing_the_others_read_from_disk(
    worker: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rlinf")
    monkeypatch.setattr(weight_transfer, "BUCKET_TIMEOUT_S", 1.0)
    source, there = worker("s"), worker("r0")
    out = publish(source, 3, [there], "never was")
    assert soon(lambda: f"weights of {out} are read from disk" in caplog.text)
    assert "no gloo: never was do not answer" in caplog.text
    # Nobody waits for that one a second time.
    monkeypatch.setattr(weight_transfer, "BUCKET_TIMEOUT_S", 100.0)
    out = publish(source, 4, [there], "never was")
    assert soon(lambda: f"weights of {out} are read from disk" in caplog.text)
    out = publish(source, 5, [there])
    assert soon(lambda: there.holds(5, out)), "other groups work on"


def test_a_member_that_does_not_join_ends_the_group(
    worker: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_transfer, "BUCKET_TIMEOUT_S", 1.0)
    source, there, stuck = worker("s"), worker("r0"), worker("r1")
    monkeypatch.setattr(stuck.receiver, "receive", lambda *_: None)
    began = time.monotonic()
    out = publish(source, 3, [there, stuck])
    assert soon(lambda: f"weights of {out}: " in caplog.text)
    assert soon(lambda: "no gloo: " in caplog.text)
    assert time.monotonic() - began < 8
    caplog.set_level("INFO", "rlinf")
    out = publish(source, 4, [there, stuck])
    assert soon(lambda: f"weights of {out} are read from disk" in caplog.text)
    assert "an earlier broadcast has failed" in caplog.text


def test_who_has_no_gpu_reads_weights_for_nccl_from_disk(
    worker: Make, caplog: pytest.LogCaptureFixture
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    caplog.set_level("INFO", "rlinf")
    source, there = worker("s"), worker("r0")
    out = publish(source, 3, [there], way=NCCL)
    assert soon(lambda: f"weights of {out} are read from disk" in caplog.text)
    with pytest.raises(WeightTransferError, match="needs a GPU"):
        backend_device(NCCL)


def test_another_version_than_the_announced_one_is_not_served(
    worker: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, there = worker("s"), worker("r0")
    send = weight_transfer.WeightBroadcast.send

    def older(
        self: weight_transfer.WeightBroadcast, version: int, *args: object, **more: object
    ) -> str:
        return send(self, version - 1, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(weight_transfer.WeightBroadcast, "send", older)
    out = publish(source, 3, [there])
    assert soon(lambda: "version 2 is not what was sent" in caplog.text)
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
    monkeypatch.setattr(weight_transfer, "BUCKET_TIMEOUT_S", 2.0)
    source, there = worker("s"), worker("r0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(weight_transfer, "INTERFACE_VARIABLE", "RLINF_TEST_INTERFACE")
    monkeypatch.setenv("RLINF_TEST_INTERFACE", "none-such")
    out = publish(source, 3, [there])
    assert soon(lambda: f"weights of {out}: " in caplog.text), "it waits for the commit"
    assert "no network 'none-such'" in caplog.text


@pytest.mark.parametrize("name", ["group-x", "../group-0123456789abcdef", ""])
def test_a_group_whose_name_is_not_ours_is_not_joined(tmp_path: Path, name: str) -> None:
    sync = BroadcastSync(tmp_path, GLOO, ("a", "b"), "b")
    with pytest.raises(WeightTransferError, match="no name of a group"):
        sync.receive(3, {"group": name})


def test_a_worker_that_is_no_member_takes_no_part(
    worker: Make, caplog: pytest.LogCaptureFixture
) -> None:
    source, there = worker("s"), worker("r0")
    there.fetch("s", "it/x", GLOO, ("a", "r0"))
    source.publish(3, "it/x")
    assert soon(lambda: "s is no member of a, r0" in caplog.text)
    out = publish(source, 4, [there])
    assert soon(lambda: there.holds(4, out))
