"""How ranks find each other: all of a group, nobody else, and nobody of a former attempt."""

from __future__ import annotations

import json
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch.distributed as dist
import zmq
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from rlinf.channels import rendezvous, requests
from rlinf.channels.curve_sockets import CurveKeys, read_pointer, run_keys
from rlinf.channels.process_group import GROUP_VARIABLE, ProcessGroupInfo
from rlinf.channels.rendezvous import (
    MAX_BYTES,
    MAX_VALUE_BYTES,
    KeyValueTable,
    RendezvousClient,
    RendezvousHost,
    RendezvousStore,
    join_rendezvous,
)
from rlinf.errors import ConfigError, StageError
from tests.rlinf.channels.proxy import Proxy

KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.sampled_from(["", "1", "2", "17"])
OPERATIONS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("add"), KEYS, st.integers(-3, 3)),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("check"), st.lists(KEYS, min_size=1)),
    st.tuples(st.just("num_keys")),
)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[RendezvousHost]:
    host = RendezvousHost(tmp_path / "group.json")
    yield host
    host.close()


def guest_of(host: RendezvousHost, pointer: Path, address: str = "") -> RendezvousClient:
    """Rank 1, by an address that the host does not know of if one is given."""
    about = read_pointer(pointer)
    assert about is not None
    return RendezvousClient(pointer, "rank 1", about, address or host.server.addresses[-1])


@pytest.fixture
def guest(tmp_path: Path, host: RendezvousHost) -> Iterator[RendezvousClient]:
    guest = guest_of(host, tmp_path / "group.json")
    yield guest
    guest.close()


@given(st.lists(OPERATIONS, max_size=30))
def test_it_does_what_the_stores_of_torch_do(operations: list[tuple[Any, ...]]) -> None:
    ours, theirs = RendezvousStore(KeyValueTable().execute, 1.0), HashStore()
    for name, *arguments in operations:
        if name == "add" and theirs.check([arguments[0]]) and not theirs.get(arguments[0]):
            continue  # not a number
        assert getattr(ours, name)(*arguments) == getattr(theirs, name)(*arguments)
        for key in "abc":
            assert ours.check([key]) == theirs.check([key])
            if ours.check([key]):
                assert ours.get(key) == theirs.get(key)


def test_each_rank_sees_what_another_has_set(host: RendezvousHost, guest: RendezvousClient) -> None:
    here, there = RendezvousStore(host.execute, 5.0), RendezvousStore(guest.execute, 5.0)
    threading.Timer(0.2, there.set, ("late", b"\0\xff")).start()
    assert here.get("late") == b"\0\xff"
    assert (there.add("n", 2), here.add("n", 3), there.get("n")) == (2, 5, b"5")
    with pytest.raises(dist.DistStoreError, match="no rank has set x, y for"):
        there.wait(["late", "x", "y"], timedelta(seconds=0.05))


def test_threads_share_the_end_of_a_rank(host: RendezvousHost, guest: RendezvousClient) -> None:
    store = RendezvousStore(guest.execute, 5.0)
    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(lambda _: store.add("n", 1), range(200))) == list(range(1, 201))


def test_a_network_that_breaks_costs_repetitions_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request or an answer that was lost does not count twice."""
    monkeypatch.setattr(requests, "PING_S", 0.1)
    host = RendezvousHost(tmp_path / "group.json")
    ip, port = host.server.addresses[-1].removeprefix("tcp://").split(":")
    proxy = Proxy((ip, int(port)), cut_after=3000)
    address = f"tcp://127.0.0.1:{proxy.port}"
    with closing(guest_of(host, tmp_path / "group.json", address)) as guest:
        assert [guest.execute("add", "n", 1) for _ in range(100)] == list(range(1, 101))
    host.close()
    assert proxy.cuts > 1


@pytest.mark.parametrize(
    ("verb", "block"),
    [("no verb", []), ("add", ["n"]), ("set", [1, 2]), ("count", 7), ("count", {"a": 1})],
)
def test_what_makes_no_sense_is_rejected(
    tmp_path: Path, host: RendezvousHost, guest: RendezvousClient, verb: str, block: object
) -> None:
    with closing(requests.RequestClient(tmp_path / "group.json")) as client:
        arguments = {"rank": "rank 2", "number": 1}
        with pytest.raises(requests.RequestRejected):
            client.request(verb, arguments, [msgpack.packb(block)])
    with pytest.raises(dist.DistStoreError, match=r"no verb: .*KeyError"):
        guest.execute("no verb")
    assert guest.execute("count") == 0


def test_a_request_whose_reply_was_lost_counts_once(
    tmp_path: Path, host: RendezvousHost, guest: RendezvousClient
) -> None:
    with closing(requests.RequestClient(tmp_path / "group.json")) as client:
        for _ in range(3):
            arguments, block = {"rank": "rank 2", "number": 7}, msgpack.packb(("n", 1))
            assert bytes(client.request("add", arguments, [block]).blocks[0]) == msgpack.packb(1)
    assert guest.execute("value", "n") == b"1"


def test_what_is_too_large_is_refused_and_all_else_is_carried(
    host: RendezvousHost, guest: RendezvousClient
) -> None:
    """What never got through would be sent again for ever, and nothing after it."""
    for end in (host, guest):
        # The second would get through, and its answer would not.
        for size in (MAX_BYTES, MAX_VALUE_BYTES):
            with pytest.raises(ValueError, match="'k': keys and values have at most"):
                end.execute("set", "k", bytes(size))
            with pytest.raises(ValueError, match="'k': keys and values have at most"):
                end.execute("compare_set", "k", b"", bytes(size))
    with pytest.raises(dist.DistStoreError, match=r"compare_set of 16777[0-9]{3} bytes"):
        guest.execute("compare_set", "k", *[bytes(MAX_BYTES // 2)] * 2)
    largest = bytes(MAX_VALUE_BYTES - 1)
    guest.execute("set", "k", largest)
    assert guest.execute("value", "k") == largest
    assert guest.execute("count") == 1


def test_a_rank_is_told_that_rank_0_has_left(
    tmp_path: Path, host: RendezvousHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "REQUEST_TIMEOUT_S", 1.0)
    with closing(guest_of(host, tmp_path / "group.json")) as guest:
        assert guest.execute("count") == 0
        host.close()
        with pytest.raises(
            dist.DistStoreError, match=r"rank 0 at tcp://.* does not answer .*nothing heard for 1 s"
        ):
            guest.execute("count")
    with pytest.raises(dist.DistStoreError, match="has left the rendezvous"):
        guest.execute("count")


def test_a_stranger_gets_nothing_and_stops_nothing(
    tmp_path: Path, host: RendezvousHost, guest: RendezvousClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest.execute("set", "secret", b"1")
    own, other = run_keys(tmp_path), run_keys(tmp_path / "other")
    monkeypatch.setattr(rendezvous, "REQUEST_TIMEOUT_S", 1.0)
    # The host's public key alone, should it be known, opens nothing.
    known = CurveKeys(own.host_public, "", *other[2:])
    monkeypatch.setattr(requests, "run_keys", lambda folder: known)
    stranger = guest_of(host, tmp_path / "group.json")
    with pytest.raises(dist.DistStoreError, match="does not answer"):
        stranger.execute("value", "secret")
    stranger.close()
    assert host.server.rejected > 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(host.server.addresses[-1])
        plain.send(msgpack.packb(("token", 1, "set", {}, [])))
        assert not plain.poll(500)
    ip, port = host.server.addresses[-1].removeprefix("tcp://").split(":")
    with socket.create_connection((ip, int(port))) as noise:
        noise.sendall(b"GET / HTTP/1.0\r\n\r\n" * 100)
    assert guest.execute("value", "secret") == b"1"


def both(first: Path, second: Path, timeout_s: float = 20.0) -> list[RendezvousStore]:
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(join_rendezvous, p, r, 2, timeout_s) for r, p in enumerate((first, second))
        ]
        return [end.result()[0] for end in ends]


def test_the_file_is_private_and_gone_once_all_are_there(tmp_path: Path) -> None:
    folder, modes = tmp_path / "channels", list[int]()
    pointer = folder / "group-7.0-0.json"

    def look() -> None:
        while not pointer.exists():
            time.sleep(0.005)
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in (folder, pointer))

    with ThreadPoolExecutor(2) as pool:
        first, looked = pool.submit(join_rendezvous, pointer, 0, 2, 20.0), pool.submit(look)
        looked.result()
        join_rendezvous(pointer, 1, 2, 20.0)
        first.result()
    assert modes == [0o700, 0o600]
    assert not pointer.exists()


def test_any_rank_may_come_first(tmp_path: Path) -> None:
    pointer = tmp_path / "channels" / "group-7.0-0.json"
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(join_rendezvous, pointer, 1, 2, 20.0)
        while not pointer.parent.exists():
            time.sleep(0.005)
        join_rendezvous(pointer, 0, 2, 20.0)
        second.result()


def test_a_restarted_group_sees_no_key_of_the_former_one(tmp_path: Path) -> None:
    before = both(*[tmp_path / "group-7.0-0.json"] * 2)
    before[0].set("key", "of the former")
    after = both(*[tmp_path / "group-7.0-1.json"] * 2)
    assert not any(end.check(["key"]) for end in after)
    after[1].set("key", "new")
    assert (before[1].get("key"), after[0].get("key")) == (b"of the former", b"new")


def test_ranks_of_two_attempts_do_not_meet(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"rank \d waited 1 s"):
        both(tmp_path / "group-7.0-0.json", tmp_path / "group-7.0-1.json", 1.0)


def test_who_never_came_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rank 0, which alone knows; the others may have to say that it left before it told them."""
    monkeypatch.setattr(rendezvous, "REQUEST_TIMEOUT_S", 3.0)
    pointer = tmp_path / "group-x.json"
    with ThreadPoolExecutor(2) as pool:
        first, third = (pool.submit(join_rendezvous, pointer, rank, 4, 2.0) for rank in (0, 2))
        with pytest.raises(
            StageError, match=r"rank 0 waited 2 s for all 4 .* never joined: 1,.* 3"
        ):
            first.result()
        with pytest.raises(StageError, match=r"rank 2 waited .* never joined: 1, 3|lost rank 0"):
            third.result()
    assert not pointer.exists()
    with pytest.raises(StageError, match=rf"rank 1 waited 0.5 s for rank 0.*no {pointer}"):
        join_rendezvous(pointer, 1, 4, 0.5)


def test_where_rank_0_is_gone_the_addresses_are_named(tmp_path: Path) -> None:
    pointer = tmp_path / "group-x.json"
    addresses = ["tcp://127.0.0.1:9", "tcp://127.0.0.2:9"]
    values = {"addresses": addresses, "token": "t", "timeout_s": 1, "max_bytes": 1, "memory": ""}
    pointer.write_text(json.dumps(values))
    with pytest.raises(StageError, match=r"answers at none of tcp://127\.0\.0\.1:9, tcp"):
        join_rendezvous(pointer, 1, 2, 0.5)


def test_a_world_of_several_without_a_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(GROUP_VARIABLE, raising=False)
    assert ProcessGroupInfo.from_environment() == ProcessGroupInfo(1, 2)
    with pytest.raises(ConfigError, match=GROUP_VARIABLE):
        ProcessGroupInfo.from_environment(tmp_path)
    monkeypatch.setenv(GROUP_VARIABLE, "7.0-1")
    assert (
        ProcessGroupInfo.from_environment(tmp_path).rendezvous_file == tmp_path / "group-7.0-1.json"
    )


TOGETHER = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from rlinf.channels.process_group import ProcessGroupInfo

class NoStore:
    def __init__(self, *arguments, **options):
        raise AssertionError("a store that is open to strangers")

sys.modules["torch.distributed.rendezvous"].TCPStore = NoStore
rank, size = int(sys.argv[2]), int(sys.argv[3])
file = Path(sys.argv[1]) / "group-t.json"
ProcessGroupInfo(rank, size, rendezvous_file=file).init_process_group("cpu", 60)
halves = [dist.new_group([i for i in range(size) if i % 2 == odd]) for odd in (0, 1)]
total = torch.tensor([float(rank)])
dist.all_reduce(total, group=halves[rank % 2])
dist.barrier()
dist.monitored_barrier()
print(os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"], float(total), flush=True)
"""


def test_processes_form_groups_without_an_open_store(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(TOGETHER))
    processes = [
        subprocess.Popen(
            [sys.executable, tmp_path / "program.py", tmp_path, str(rank), "3"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [out for out, _ in outputs] == ["0 2.0\n", "0 1.0\n", "0 2.0\n"], outputs
    assert [process.returncode for process in processes] == [0, 0, 0]
