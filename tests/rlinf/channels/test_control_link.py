"""The control link: drivers and workers that die, stop, come back or are replaced."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from rlinf.artifacts import write_atomic
from rlinf.channels import requests
from rlinf.channels.channel import ChannelClosed, ChannelFailed
from rlinf.channels.control_link import (
    CONTROL_POINTER,
    MAX_BYTES,
    MAX_STATUS_BYTES,
    Controller,
    PeerEvent,
    PeerJoined,
    PeerLost,
    PeerReport,
    WorkerLink,
)
from rlinf.channels.curve_sockets import client_socket, routing_id, run_keys
from rlinf.channels.requests import Message, RequestClient, RequestRejected
from rlinf.errors import ConfigError
from tests.rlinf.channels.proxy import Proxy

PRELUDE = """
import sys, time
from contextlib import closing
from pathlib import Path
from rlinf.channels.control_link import Controller, WorkerLink
folder = Path(sys.argv[1])
"""
WAIT_S = 15.0


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    controller = Controller(tmp_path, interface="127.0.0.1", timeout_s=1)
    yield controller
    controller.close()


@contextlib.contextmanager
def process(folder: Path, body: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs ``body`` and says a line when it is where the test wants it."""
    child = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


WORKER = """
    link = WorkerLink(folder, "w", {"gpu": "a100"})
    while True:
        for order in link.receive_orders(60):
            print(order["i"], flush=True)
"""


def events(controller: Controller, count: int) -> list[PeerEvent]:
    """The next ``count`` events, and what came with them."""
    found: list[PeerEvent] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < count and time.monotonic() < deadline:
        found += controller.poll_events(1)
    return found


def numbers(link: WorkerLink, count: int) -> list[int]:
    found: list[int] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < count and time.monotonic() < deadline:
        found += [order["i"] for order in link.receive_orders(1)]
    return found


def reports(found: list[PeerEvent]) -> list[dict[str, Any]]:
    return [event.content for event in found if isinstance(event, PeerReport)]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def pointer(folder: Path) -> dict[str, str]:
    values: dict[str, str] = json.loads((folder / CONTROL_POINTER).read_text())
    return values


def member(folder: Path) -> zmq.Socket[bytes]:
    """A bare socket with the run's keys, to speak the protocol wrongly with."""
    socket = client_socket(zmq.Context.instance(), run_keys(folder), routing_id(), timeout_s=5)
    socket.linger = 0
    socket.connect(pointer(folder)["addresses"][0])
    return socket


def test_orders_and_reports_cross_in_order(tmp_path: Path, controller: Controller) -> None:
    link = WorkerLink(tmp_path, "w", {"gpu": "a100"})
    assert events(controller, 1) == [PeerJoined("w", {"gpu": "a100"}, link.incarnation)]
    for i in range(300):
        controller.send_order("w", {"i": i, "deep": [{"x": None}, 1.5, "ü"]})
    names: list[dict[str, Any]] = []
    while len(names) < 300:
        names += link.receive_orders(WAIT_S)
        assert names
    assert names == [{"i": i, "deep": [{"x": None}, 1.5, "ü"]} for i in range(300)]
    for i in range(300):
        link.send_report({"i": i})
    assert events(controller, 300) == [PeerReport("w", {"i": i}) for i in range(300)]
    assert link.silent_s < 1
    assert link.receive_orders(0) == []
    assert controller.poll_events(0) == []
    link.close()


def test_orders_answer_orders_while_both_are_idle(tmp_path: Path, controller: Controller) -> None:
    link = WorkerLink(tmp_path, "w", {})
    events(controller, 1)
    for i in range(50):
        controller.send_order("w", {"i": i})
        assert link.receive_orders(WAIT_S) == [{"i": i}]
        link.send_report({"i": i})
        assert controller.poll_events(WAIT_S) == [PeerReport("w", {"i": i})]
    controller.poll_events(0)
    link.close()


def test_cut_connections_lose_and_repeat_nothing(tmp_path: Path, controller: Controller) -> None:
    values = pointer(tmp_path)
    host, port = values["addresses"][0].removeprefix("tcp://").split(":")
    proxy = Proxy((host, int(port)), cut_after=200_000)
    address = f"tcp://127.0.0.1:{proxy.port}"
    write_atomic(tmp_path / CONTROL_POINTER, json.dumps({**values, "addresses": [address]}))
    link = WorkerLink(tmp_path, "w", {})
    for i in range(600):
        controller.send_order("w", {"i": i, "fill": "x" * 1000})
        link.send_report({"i": i, "fill": "x" * 1000})
    assert numbers(link, 600) == list(range(600))
    assert [content["i"] for content in reports(events(controller, 601))] == list(range(600))
    assert proxy.cuts >= 2
    controller.poll_events(0)
    link.close()
    proxy.close()


def test_orders_wait_for_a_worker_that_is_not_there(tmp_path: Path, controller: Controller) -> None:
    controller.send_order("w", {"i": 0})
    controller.send_order("other", {"i": 1})
    link = WorkerLink(tmp_path, "w", {})
    assert numbers(link, 1) == [0]
    assert link.receive_orders(0.05) == []
    link.close()


def test_a_new_controller_takes_over_the_workers_and_what_was_not_handled(tmp_path: Path) -> None:
    driver = """
        controller = Controller(folder, interface="127.0.0.1")
        while True:
            for event in controller.poll_events(60):
                print(type(event).__name__, flush=True)
                if getattr(event, "content", None) == {"i": 0}:
                    controller.send_order("w", {"i": 0})
                    controller.send_order("w", {"i": 1})
                if getattr(event, "content", None) == {"i": 1}:
                    time.sleep(60)
    """
    with process(tmp_path, driver) as child:
        link = WorkerLink(tmp_path, "w", {"gpu": "a100"})
        link.send_status({"busy": True})
        assert line(child) == "PeerJoined"
        link.send_report({"i": 0})
        assert numbers(link, 1)[:1] == [0]
        assert eventually(lambda: len(link._reports) == 0), "the first report was handled"
        link.send_report({"i": 1})
        assert [line(child), line(child)] == ["PeerReport", "PeerReport"]
        old = pointer(tmp_path)
    link.send_report({"i": 2})
    with closing(Controller(tmp_path, interface="127.0.0.1")) as controller:
        assert pointer(tmp_path)["token"] != old["token"]
        found = events(controller, 3)
        assert found[0] == PeerJoined("w", {"gpu": "a100"}, link.incarnation)
        assert reports(found) == [{"i": 1}, {"i": 2}]
        assert controller.known_peers()["w"].status == {"busy": True}
        link.receive_orders(0)
        for i in range(10, 20):
            controller.send_order("w", {"i": i})
        assert numbers(link, 10) == list(range(10, 20))
        controller.poll_events(0)
        link.close()


def test_a_report_in_hand_when_its_driver_ends_goes_to_the_next(tmp_path: Path) -> None:
    link = WorkerLink(tmp_path, "w", {})
    link.send_report({"i": 0})
    with closing(Controller(tmp_path, interface="127.0.0.1")) as first:
        assert reports(events(first, 2)) == [{"i": 0}]
    with closing(Controller(tmp_path, interface="127.0.0.1")) as second:
        assert reports(events(second, 2)) == [{"i": 0}]
        assert second.poll_events(0) == []
        link.send_report({"i": 1})
        assert events(second, 1) == [PeerReport("w", {"i": 1})]
        second.poll_events(0)
        link.close()


def test_orders_not_taken_go_with_their_driver(tmp_path: Path) -> None:
    link = WorkerLink(tmp_path, "w", {})
    with closing(Controller(tmp_path, interface="127.0.0.1")) as first:
        events(first, 1)
        first.send_order("w", {"i": 0})
        assert eventually(lambda: len(link._orders) == 1)
    with closing(Controller(tmp_path, interface="127.0.0.1")) as second:
        second.send_order("w", {"i": 1})
        assert len(events(second, 1)) == 1
        assert numbers(link, 1) == [1]
        link.close()


def test_a_replacement_does_not_get_the_orders_of_the_dead(
    tmp_path: Path, controller: Controller
) -> None:
    with process(tmp_path, WORKER) as child:
        assert isinstance(events(controller, 1)[0], PeerJoined)
        controller.send_order("w", {"i": 0})
        assert line(child) == "0"
        child.send_signal(signal.SIGSTOP)
        controller.send_order("w", {"i": 1})
        link = WorkerLink(tmp_path, "w", {"gpu": "h100"})
        assert eventually(lambda: controller.known_peers()["w"].description == {"gpu": "h100"})
        controller.send_order("w", {"i": 2})  # the driver does not know yet: it is for the dead
        assert events(controller, 2) == [
            PeerLost("w", "replaced"),
            PeerJoined("w", {"gpu": "h100"}, link.incarnation),
        ]
        controller.send_order("w", {"i": 3})
        assert numbers(link, 1) == [3]
    link.close()


def test_a_worker_whose_name_was_taken_is_told(tmp_path: Path, controller: Controller) -> None:
    first = WorkerLink(tmp_path, "w", {})
    events(controller, 1)
    second = WorkerLink(tmp_path, "w", {})
    events(controller, 2)
    with pytest.raises(ChannelFailed, match="another process has joined as w"):
        first.receive_orders(WAIT_S)
    with pytest.raises(ChannelFailed, match="another process has joined as w"):
        first.send_report({})
    assert controller.known_peers()["w"].incarnation == second.incarnation
    assert controller.poll_events(0.2) == []
    first.close()
    second.close()


def test_a_stopped_worker_is_lost_and_joins_again(tmp_path: Path, controller: Controller) -> None:
    with process(tmp_path, WORKER) as child:
        joined = events(controller, 1)
        controller.send_order("w", {"i": 0})
        assert line(child) == "0"
        child.send_signal(signal.SIGSTOP)
        controller.send_order("w", {"i": 1})
        assert events(controller, 1) == [PeerLost("w", "silent for 1 s")]
        assert not controller.known_peers()["w"].alive
        controller.send_order("w", {"i": 2})
        time.sleep(1)
        child.send_signal(signal.SIGCONT)
        assert events(controller, 1) == joined
        controller.send_order("w", {"i": 3})
        assert [line(child) for _ in range(3)] == ["1", "2", "3"]
        assert controller.known_peers()["w"].alive


def test_a_stopped_controller_does_not_take_workers_for_lost(tmp_path: Path) -> None:
    driver = """
        controller = Controller(folder, interface="127.0.0.1", timeout_s=1)
        while True:
            for event in controller.poll_events(60):
                print(event, flush=True)
    """
    with process(tmp_path, driver) as child:
        link = WorkerLink(tmp_path, "w", {})
        assert line(child).startswith("PeerJoined")
        child.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        assert link.silent_s > 1
        link.send_report({"i": 0})
        child.send_signal(signal.SIGCONT)
        assert line(child).startswith("PeerReport")
        assert eventually(lambda: link.silent_s < 1)
        link.close()


def test_the_time_a_thread_was_stopped_is_not_silence(tmp_path: Path) -> None:
    with closing(Controller(tmp_path, interface="127.0.0.1", timeout_s=2)) as controller:
        link, alone = WorkerLink(tmp_path, "w", {}), WorkerLink(tmp_path / "nobody", "w", {})
        events(controller, 1)
        time.sleep(0.1)
        with link._changed:
            with controller._changed, alone._changed:
                time.sleep(3)
            time.sleep(0.4)
            assert controller.poll_events(0) == []
            assert alone.silent_s < 2
        assert controller.poll_events(0.3) == []
        assert 0 <= controller.known_peers()["w"].age_s < 1
        link.close()
        alone.close()


def test_only_the_last_status_counts(tmp_path: Path, controller: Controller) -> None:
    link = WorkerLink(tmp_path, "w", {})
    events(controller, 1)
    status: dict[str, Any] = {}
    for i in range(1000):
        status["i"] = i
        link.send_status(status)
    status["i"] = -1  # what was said before is not changed
    assert eventually(lambda: controller.known_peers()["w"].status == {"i": 999})
    assert controller.poll_events(0) == []
    link.close()


def test_forgotten_orders_do_not_arrive_and_later_ones_do(
    tmp_path: Path, controller: Controller
) -> None:
    with process(tmp_path, WORKER) as child:
        events(controller, 1)
        controller.send_order("w", {"i": 0})
        assert line(child) == "0"
        child.send_signal(signal.SIGSTOP)
        events(controller, 1)
        controller.send_order("w", {"i": 1})
        controller.forget_peer("w")
        assert controller.known_peers() == {}
        controller.send_order("w", {"i": 2})
        child.send_signal(signal.SIGCONT)
        assert isinstance(events(controller, 1)[0], PeerJoined)
        controller.send_order("w", {"i": 3})
        assert [line(child), line(child)] == ["2", "3"]


def test_a_worker_that_leaves_without_a_driver_reads_the_pointer_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers of a lost driver do so at the same time, on a shared file system."""
    Controller(tmp_path, interface="127.0.0.1").close()
    reads: list[Path] = []

    def read(pointer: Path) -> None:
        reads.append(pointer)

    link = WorkerLink(tmp_path, "w", {})
    link.send_report({"kind": "any"})
    monkeypatch.setattr(requests, "read_pointer", read)
    link.close()
    assert 1 <= len(reads) <= 40


def test_a_leaving_worker_waits_until_its_reports_were_handled(
    tmp_path: Path, controller: Controller
) -> None:
    link = WorkerLink(tmp_path, "w", {})
    for i in range(100):
        link.send_report({"i": i})
    closing = threading.Thread(target=link.close)
    closing.start()
    found = events(controller, 102)
    closing.join(WAIT_S)
    assert reports(found) == [{"i": i} for i in range(100)]
    assert found[-1] == PeerLost("w", "left")
    with pytest.raises(ChannelClosed):
        link.send_report({})


def test_strangers_get_nothing_and_stop_nothing(tmp_path: Path, controller: Controller) -> None:
    link = WorkerLink(tmp_path, "w", {})
    events(controller, 1)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    keys = run_keys(tmp_path)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    plain = context.socket(zmq.DEALER)
    plain.linger = 0
    outsiders = [plain]
    for pair in (
        keys._replace(client_public=public, client_secret=secret),
        keys._replace(host_public=public, client_public=public, client_secret=secret),
    ):
        outsiders.append(client_socket(context, pair, routing_id(), timeout_s=5))
    values = pointer(tmp_path)
    for outsider in outsiders:
        outsider.connect(values["addresses"][0])
        message = msgpack.packb((values["token"], 1, "leave", {"worker": "w"}, []))
        with contextlib.suppress(zmq.Again):
            outsider.send(message, zmq.NOBLOCK)
    assert eventually(lambda: controller.rejected > 0)
    controller.send_order("w", {"i": 0})
    assert numbers(link, 1) == [0]
    assert not any(outsider.poll(100) for outsider in outsiders)
    assert controller.poll_events(0) == []
    assert controller.malformed == 0
    for outsider in outsiders:
        outsider.close(linger=0)
    link.close()


EXCHANGE_ARGUMENTS = {
    "worker": "b",
    "process": "p",
    "description": {},
    "status": {},
    "session": "",
    "arrived": 0,
    "read": 0,
    "first": 1,
}


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({"worker": ""}, []),
        ({"worker": 5}, []),
        ({"worker": "b" * 1000}, []),
        ({"process": None}, []),
        ({"description": 7}, []),
        ({"status": "text"}, []),
        ({"arrived": "x"}, []),
        ({"read": None}, []),
        ({"first": []}, []),
        ({}, [b"\xc1"]),
        ({}, [msgpack.packb([])]),
    ],
)
def test_exchanges_that_make_no_sense_are_rejected(
    tmp_path: Path, controller: Controller, changes: dict[str, Any], blocks: list[bytes]
) -> None:
    with closing(RequestClient(tmp_path / CONTROL_POINTER)) as client:
        with pytest.raises(RequestRejected):
            client.request("exchange", EXCHANGE_ARGUMENTS | changes, blocks)
        with pytest.raises(RequestRejected):
            client.request("dance", EXCHANGE_ARGUMENTS)
        assert controller.poll_events(0) == []
        client.send("exchange", EXCHANGE_ARGUMENTS, [msgpack.packb({"i": 0})])
        assert reports(events(controller, 2)) == [{"i": 0}]


def test_noise_ends_nothing(tmp_path: Path, controller: Controller) -> None:
    link = WorkerLink(tmp_path, "w", {})
    events(controller, 1)
    broken = member(tmp_path)
    token, packed, empty = pointer(tmp_path)["token"], msgpack.packb, msgpack.packb({})
    for frames in ([b""], [b"\xc1"], [packed(7)], [packed((token, 1, "exchange", {}, [3])), empty]):
        broken.send_multipart(frames)
    assert eventually(lambda: controller.malformed == 4)
    randomness = random.Random(0)
    for _ in range(300):
        noise = bytearray(packed((token, 1, "exchange", EXCHANGE_ARGUMENTS, [1])))
        noise[randomness.randrange(len(noise))] = randomness.randrange(256)
        broken.send_multipart([bytes(noise), empty])
    controller.send_order("w", {"i": 0})
    assert numbers(link, 1) == [0]
    link.send_report({"i": 0})
    assert eventually(lambda: PeerReport("w", {"i": 0}) in controller.poll_events(0.1))
    controller.poll_events(0)
    broken.close()
    link.close()


def test_orders_that_nobody_reads_yet_are_sent_once(tmp_path: Path, controller: Controller) -> None:
    link = WorkerLink(tmp_path, "w", {})
    events(controller, 1)
    controller.send_order("w", {"i": 0})
    assert eventually(lambda: len(link._orders) == 1)
    start, before = time.monotonic(), link._client._number
    time.sleep(2)
    assert link._client._number - before < 5 * (time.monotonic() - start), "only signs of life"
    assert numbers(link, 1) == [0]
    link.close()


def test_reports_keep_their_numbers_after_earlier_ones_were_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply may be older than what is on its way, and the next one newer."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(WorkerLink, "_run", lambda self: None)
    link = WorkerLink(tmp_path, "w", {})
    for i in range(2):
        link.send_report({"i": i})
    monkeypatch.setattr(
        link._client, "send", lambda _, about, blocks: sent.append((about["first"], len(blocks)))
    )
    link._send_exchange()
    state = {"session": "s", "first": 1}
    link._handle(Message({**state, "received": 1, "handled": 0}))
    link._handle(Message({**state, "received": 2, "handled": 2}))
    link.send_report({"i": 2})
    link._send_exchange()
    assert sent == [(1, 2), (3, 1)]
    link._client.close()


def test_what_comes_again_is_taken_once(tmp_path: Path, controller: Controller) -> None:
    """A request that was lost with its connection may arrive after later ones."""
    packed = [msgpack.packb({"i": i}) for i in range(1, 6)]
    with closing(RequestClient(tmp_path / CONTROL_POINTER)) as client:
        for first, blocks in ((1, packed[:2]), (4, packed[3:]), (1, packed[:3]), (2, packed[1:])):
            client.send("exchange", {**EXCHANGE_ARGUMENTS, "first": first}, blocks)
        found = events(controller, 6)
    assert reports(found) == [{"i": i} for i in range(1, 6)]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"x": "x" * MAX_BYTES}, "at most"),
        ({"x": object()}, "only str"),
        ({"x": {1, 2}}, "only str"),
        ({"x": 1 << 70}, "only str"),
        ({"x": {1: 2}}, "only str"),
        ({"x": "\ud800"}, "only str"),
    ],
)
def test_what_cannot_be_sent_is_refused_at_once(
    tmp_path: Path, controller: Controller, content: Mapping[str, Any], reason: str
) -> None:
    link = WorkerLink(tmp_path, "w", {})
    for say in (lambda c: controller.send_order("w", c), link.send_report, link.send_status):
        with pytest.raises(ValueError, match=reason):
            say(content)
    with pytest.raises(ValueError, match=reason):
        WorkerLink(tmp_path, "v", content)
    link.close()


def test_the_largest_messages_arrive(tmp_path: Path, controller: Controller) -> None:
    link = WorkerLink(tmp_path, "w", {"x": "x" * (MAX_STATUS_BYTES - 10)})
    link.send_status({"x": "x" * (MAX_STATUS_BYTES - 10)})
    large = {"x": "x" * (MAX_BYTES - 10)}
    for _ in range(3):
        controller.send_order("w", large)
        link.send_report(large)
    assert len(events(controller, 4)) == 4
    names: list[dict[str, Any]] = []
    while len(names) < 3:
        names += link.receive_orders(WAIT_S)
    assert names == [large] * 3
    assert controller.malformed == 0
    controller.poll_events(0)
    link.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"addr',
        "[]",
        "null",
        '{"addresses": 5, "token": "x"}',
        '{"addresses": [], "token": "x"}',
        '{"addresses": ["nonsense"], "token": "x"}',
        '{"addresses": ["nonsense", "tcp://more:x"], "token": "x"}',
        '{"addresses": ["tcp://127.0.0.1:9"], "token": "dead"}',
    ],
)
def test_a_worker_waits_for_a_pointer_that_leads_to_a_driver(tmp_path: Path, text: str) -> None:
    run_keys(tmp_path)
    (tmp_path / CONTROL_POINTER).write_text(text)
    link = WorkerLink(tmp_path, "w", {})
    assert link.receive_orders(0.05) == []
    with closing(Controller(tmp_path, interface="127.0.0.1")) as controller:
        assert isinstance(events(controller, 1)[0], PeerJoined)
        link.close()


def test_the_pointer_is_the_owners_alone_and_goes_with_its_controller(tmp_path: Path) -> None:
    first = Controller(tmp_path, interface="127.0.0.1")
    assert stat.S_IMODE((tmp_path / CONTROL_POINTER).stat().st_mode) == 0o600
    second = Controller(tmp_path, interface="127.0.0.1")
    first.close()
    assert (tmp_path / CONTROL_POINTER).exists()
    second.close()
    second.close()
    assert not (tmp_path / CONTROL_POINTER).exists()
    with pytest.raises(ChannelClosed):
        second.send_order("w", {})


def test_an_address_that_is_not_here_is_an_error_and_no_hang(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.network_interface: .* has no network"):
        Controller(tmp_path, interface="198.51.100.1")
    assert not (tmp_path / CONTROL_POINTER).exists()


def test_open_ends_do_not_keep_a_process_alive(tmp_path: Path) -> None:
    body = """
        controller = Controller(folder, interface="127.0.0.1")
        link, alone = WorkerLink(folder, "w", {}), WorkerLink(folder / "nobody", "w", {})
        controller.poll_events(10)
    """
    with process(tmp_path, body) as child:
        assert child.wait(WAIT_S) == 0
    assert not (tmp_path / CONTROL_POINTER).exists()
