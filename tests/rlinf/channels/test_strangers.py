"""Many connections without the run's key stop nothing, in a process that may open few files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FLOOD = 1100
SAYS = {
    "nothing": b"",
    # A greeting as a client's, and the beginning of a long command.
    "junk": bytes.fromhex("ff00000000000000007f0300")
    + b"CURVE".ljust(52, b"\0")
    + b"\x06"
    + (1 << 19).to_bytes(8, "big")
    + b"x" * 600,
}
"""What a stranger says on each connection."""
PRELUDE = f"""
FLOOD = {FLOOD}
import json, os, resource, socket, subprocess, sys, time
from pathlib import Path
STRANGER = '''
import socket, sys
port = int(sys.stdin.readline())
held = []
for _ in range(%d):
    held.append(socket.create_connection(("127.0.0.1", port)))
    held[-1].sendall(bytes.fromhex(sys.argv[1]))
print(len(held), flush=True)
sys.stdin.read()
''' % FLOOD
stranger = subprocess.Popen(
    [sys.executable, "-c", STRANGER, sys.argv[2]],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
)
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
os.environ["RLINF_INTERFACE"] = "127.0.0.1"
folder = Path(sys.argv[1])
def flood(address):
    assert address.startswith("tcp://127.0.0.1:"), address
    stranger.stdin.write(address.rpartition(":")[2] + "\\n")
    stranger.stdin.flush()
    assert stranger.stdout.readline().strip() == str(FLOOD)
def pointed(name):
    return json.loads((folder / name).read_text())["addresses"][0]
def files():
    return len(os.listdir("/proc/self/fd"))
"""
CHANNEL = """
from rlinf.channels.requests import RequestClient, RequestServer
host = RequestServer(folder / "c.json", lambda request: request.reply(request.arguments))
address = pointed("c.json")
def exchange():
    other = RequestClient(folder / "c.json")
    assert other.request("any", {"i": 1}).arguments == {"i": 1}
    other.close()
"""
CONTROL = """
from rlinf.channels.control_link import Controller, WorkerLink
host = Controller(folder)
address = pointed("control.json")
def exchange():
    link = WorkerLink(folder, "w", {})
    deadline = time.monotonic() + 30
    while not host.poll_events(0.1):
        assert time.monotonic() < deadline
    host.send_order("w", {"i": 1})
    assert link.receive_orders(30) == [{"i": 1}]
    link.close()
"""
RENDEZVOUS = """
from rlinf.channels.curve_sockets import read_pointer
from rlinf.channels.rendezvous import RendezvousClient, RendezvousHost
host = RendezvousHost(folder / "group.json")
address = host.server.addresses[0]
def exchange():
    pointer = folder / "group.json"
    guest = RendezvousClient(pointer, "rank 1", read_pointer(pointer), address)
    assert guest.execute("add", "n", 1) == 1
    guest.close()
"""
REST = """
before = files()
flood(address)
exchange()
(folder / "file").write_text("files can be opened")
assert files() - before < 150, files()
server = getattr(host, "server", None) or getattr(host, "_server", host)
assert server._authenticator.dropped >= 900, server._authenticator.dropped
print("done")
stranger.kill()
os._exit(0)
"""


@pytest.mark.parametrize("part", [CHANNEL, CONTROL, RENDEZVOUS], ids=["channel", "control", "rank"])
@pytest.mark.parametrize("says", SAYS)
def test_a_thousand_idle_connections_stop_nothing(tmp_path: Path, part: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + part + REST, str(tmp_path), SAYS[says].hex()],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "done", done.stderr[-2000:]


def test_who_shows_no_key_is_cut_off_in_time(tmp_path: Path) -> None:
    body = (
        PRELUDE
        + CHANNEL
        + """
outside = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
outside.settimeout(15)
while outside.recv(100):
    pass
exchange()
print("done")
stranger.kill()
os._exit(0)
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", body, str(tmp_path), ""],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "done", done.stderr[-2000:]
