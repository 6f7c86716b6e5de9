"""Hosts are found on whichever network the other end has: nodes have several, or hardly any."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

from pipeline.plan import StagePlan
from pipeline.resources import ClusterConfig, job_resources
from rlinf.channels import INTERFACE_VARIABLE
from rlinf.channels.control_link import Controller, PeerJoined
from rlinf.channels.curve_sockets import (
    first_reachable,
    interface_address,
    interface_towards,
    local_addresses,
)
from rlinf.channels.requests import RequestClient, RequestServer
from rlinf.errors import ConfigError

NODE = """
import sys
from pathlib import Path
from rlinf.channels.control_link import WorkerLink
from rlinf.channels.requests import RequestClient, RequestServer
folder = Path(sys.argv[1])
outside = RequestClient(folder / "outside.json")
mine = RequestServer(folder / "node.json", lambda r: r.reply(outside.request("any").arguments))
link = WorkerLink(folder, "w", {})
while not link.receive_orders(0.2):
    pass
link.close()
mine.close()
outside.close()
"""
RANK = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from rlinf.channels.process_group import ProcessGroupInfo
os.environ.pop("GLOO_SOCKET_IFNAME", None)
file = Path(sys.argv[1]) / "group-t.json"
ProcessGroupInfo(int(sys.argv[2]), 3, rendezvous_file=file).init_process_group("cpu", 60)
total = torch.ones(())
dist.all_reduce(total)
assert total == 3
"""


@contextmanager
def listening(ip: str = "127.0.0.1") -> Iterator[str]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as host:
        host.bind(f"tcp://{ip}:*")
        yield host.getsockopt_string(zmq.LAST_ENDPOINT)


@contextmanager
def silent() -> Iterator[str]:
    """Takes connections, as some firewalls do for everybody, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def closed() -> str:
    with listening() as address:
        return address


def test_the_first_address_that_answers_is_taken() -> None:
    with listening() as one, listening() as other, silent() as firewall:
        assert first_reachable([one, other], 5) == one
        assert first_reachable([closed(), other], 5) == other
        assert first_reachable([firewall, one], 0.3) == one


def test_nobody_there_is_told_and_a_single_address_is_not_tried() -> None:
    assert first_reachable([closed(), closed()], 5) is None
    with silent() as firewall:
        assert first_reachable([firewall, closed()], 0.3) is None
    assert first_reachable([gone := closed()]) == gone


def test_addresses_of_this_node_come_last() -> None:
    """127.0.0.1 of another node is not this one's."""
    assert local_addresses()[-1] == "127.0.0.1"
    with listening() as mine, listening("127.0.0.2") as other:
        assert first_reachable([mine, other], 5) == other


def test_a_node_without_a_way_out_serves_and_is_served(tmp_path: Path) -> None:
    with namespace() as name, closing(Controller(tmp_path)) as controller:
        outside = RequestServer(tmp_path / "outside.json", lambda r: r.reply({"from": "outside"}))
        command = ["ip", "netns", "exec", name, sys.executable, "-c", NODE, str(tmp_path)]
        with subprocess.Popen(command) as node:
            events = []
            while not events and node.poll() is None:
                events = controller.poll_events(1)
            assert isinstance(events[0], PeerJoined)
            with closing(RequestClient(tmp_path / "node.json")) as inside:
                assert inside.request("any").arguments == {"from": "outside"}
            controller.send_order("w", {"do": "leave"})
            assert node.wait(30) == 0
        outside.close()


def test_the_interface_is_the_one_that_leads_there(tmp_path: Path) -> None:
    assert interface_towards("127.0.0.1") == interface_towards("127.9.9.9") == "lo"
    with namespace() as name:
        assert interface_towards("10.213.7.1") == interface_towards("10.213.7.2") == f"{name}a"


def test_ranks_on_nodes_of_which_one_has_no_way_out_form_a_group(tmp_path: Path) -> None:
    """The network that rank 0 calls its first is not the one they share."""
    with namespace() as name:
        inside = ["ip", "netns", "exec", name]
        ranks = [
            subprocess.Popen([*where, sys.executable, "-c", RANK, str(tmp_path), str(rank)])
            for rank, where in enumerate(([], inside, []))
        ]
        assert [rank.wait(120) for rank in ranks] == [0, 0, 0]


@contextmanager
def namespace() -> Iterator[str]:
    """A network with this machine and nothing else in it, as compute nodes have."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    name = f"rlt{os.getpid()}"
    pair = [f"{name}a", f"{name}b"]
    steps = [
        f"ip netns add {name}",
        f"ip link add {pair[0]} type veth peer name {pair[1]} netns {name}",
        f"ip addr add 10.213.7.1/24 dev {pair[0]}",
        f"ip link set {pair[0]} up",
        f"ip -n {name} addr add 10.213.7.2/24 dev {pair[1]}",
        f"ip -n {name} link set {pair[1]} up",
        f"ip -n {name} link set lo up",
    ]
    try:
        for step in steps:
            done = subprocess.run(step.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{step}: {done.stderr.strip()}")
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", pair[0]], capture_output=True, check=False)


def test_hosts_listen_where_they_are_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for values in ("lo", "127.0.0.0/8", "127.0.0.1"):
        monkeypatch.setenv(INTERFACE_VARIABLE, values)
        with closing(Controller(tmp_path)):
            pointer = json.loads((tmp_path / "control.json").read_text())
            assert [a.rpartition(":")[0] for a in pointer["addresses"]] == ["tcp://127.0.0.1"]


def test_a_network_that_is_not_here_is_refused_with_the_nearest() -> None:
    message = r"cluster\.network_interface: .* 'lo0'; did you mean 'lo'"
    with pytest.raises(ConfigError, match=message):
        interface_address("lo0")


def test_local_runs_listen_on_the_loopback_alone() -> None:
    assert ClusterConfig(launcher="local").bind_interface == "127.0.0.1"
    assert ClusterConfig(launcher="slurm").bind_interface is None
    needs = job_resources(StagePlan(), ClusterConfig(launcher="local"))
    assert needs.env[INTERFACE_VARIABLE] == "127.0.0.1"
