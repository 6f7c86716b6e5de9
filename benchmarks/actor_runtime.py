"""What PyTorch Monarch does when a process of a run is lost, or when a stranger connects.

``python -m benchmarks.actor_runtime PYTHON`` prints one JSON object. ``PYTHON`` is an interpreter
with torchmonarch 0.7.0 (and torch). docs/explanation/decisions.md has the results and what follows
from them. A *host* is Monarch's server on a node; it starts a process for each actor. A *driver*
attaches to hosts and owns the actors that it spawns there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlinf.artifacts import write_user_file

LIMIT_S = 180.0
"""Longest wait for each event."""
PORT = 45011
HOST = """
import sys
from monarch.actor import enable_transport, run_worker_loop_forever
enable_transport(sys.argv[1])
run_worker_loop_forever(ca="trust_all_connections", address=sys.argv[2])
"""
DRIVER = """
import json, os, sys, time
import monarch.actor
from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint

monarch.actor.unhandled_fault_hook = lambda failure: None  # by default a lost actor ends the driver
enable_transport(sys.argv[1])

class Counter(Actor):
    def __init__(self):
        self.count = 0

    @endpoint
    def add(self):
        self.count += 1
        return os.getpid(), self.count

def only(values):
    return [value for _, value in values.items()][0]

start = time.time()
hosts = attach_to_workers(ca="trust_all_connections", workers=[sys.argv[2]])
actor = hosts.spawn_procs({"processes": 1}).spawn("counter", Counter)
pid, _ = only(actor.add.call().get(timeout=30))
attached = time.time()
times = []
for _ in range(200):
    before = time.time()
    actor.add.call().get()
    times.append(time.time() - before)
print(json.dumps({"pid": pid, "attach_s": attached - start, "calls_s": times}), flush=True)
for line in sys.stdin:  # each line is one call, with its time limit in seconds
    before = time.time()
    try:
        answer = only(actor.add.call().get(timeout=float(line)))[1]
    except BaseException as error:
        answer = type(error).__name__
    print(json.dumps({"answer": answer, "seconds": time.time() - before}), flush=True)
"""


class Scripts:
    """Starts hosts and drivers under an interpreter; all processes end with the context.

    Args:
        tls: certificate, key and CA; None: plain TCP.
    """

    def __init__(self, python: str, folder: Path, tls: tuple[Path, Path, Path] | None) -> None:
        self._python, self._folder = python, folder
        self._scheme = "tcp://127.0.0.1" if tls is None else "tls://localhost"
        names = ("HYPERACTOR_TLS_CERT", "HYPERACTOR_TLS_KEY", "HYPERACTOR_TLS_CA")
        self._env = {} if tls is None else dict(zip(names, map(str, tls), strict=True))
        self._ports = iter(range(PORT + (100 if tls else 0), PORT + 200))
        self.address = f"{self._scheme}:{next(self._ports)}"

    def start(self, script: str, **env: str) -> subprocess.Popen[str]:
        """Start a host or a driver of the host at ``address``."""
        path = self._folder / "script.py"
        write_user_file(path, script)
        own = f"{self._scheme}:{next(self._ports)}"
        return subprocess.Popen(
            [self._python, str(path), own, self.address],
            env=os.environ | self._env | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )


@contextlib.contextmanager
def running_host(scripts: Scripts) -> Iterator[subprocess.Popen[str]]:
    """Run a host; kill it and its actors afterwards."""
    host = scripts.start(HOST)
    time.sleep(8)
    try:
        yield host
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(host.pid, signal.SIGKILL)
        host.wait()


def read_line(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    """Return the next line of JSON; None if the process ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            values: dict[str, Any] = json.loads(line)
            return values
    return None


def call(driver: subprocess.Popen[str], limit_s: float) -> dict[str, Any] | None:
    """Let a driver call its actor; None if the driver ended."""
    assert driver.stdin is not None
    driver.stdin.write(f"{limit_s}\n")
    driver.stdin.flush()
    return read_line(driver)


def seconds_until_gone(pid: int) -> float | None:
    """Return the seconds until a process has ended; None if it outlives the limit."""
    start = time.monotonic()
    while time.monotonic() - start < LIMIT_S:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            state = "Z"
        if state == "Z":
            return round(time.monotonic() - start, 1)
        time.sleep(0.2)
    return None


def certificates(folder: Path) -> tuple[tuple[Path, Path, Path], tuple[Path, Path, Path]]:
    """Create certificate, key and CA of a run, and those of a stranger, with ``openssl``.

    The stranger trusts the run's CA, but its own certificate is self-signed.
    """

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

    new_key = ("req", "-newkey", "rsa:2048", "-nodes")
    for name in ("ca", "stranger"):
        openssl(
            *new_key, "-x509", "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", "/CN=c"
        )
    openssl(*new_key, "-keyout", "run.key", "-out", "run.csr", "-subj", "/CN=localhost")
    write_user_file(folder / "names", "subjectAltName=DNS:localhost")
    signed_by = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-in", "run.csr", *signed_by, "-out", "run.crt")
    ca = folder / "ca.crt"
    run, stranger = ((folder / f"{n}.crt", folder / f"{n}.key", ca) for n in ("run", "stranger"))
    return run, stranger


def measure(python: str) -> dict[str, Any]:
    """Lose the actor's process, the driver and the host, and let strangers connect."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = Scripts(python, folder, None)
        with running_host(plain) as host:
            driver = plain.start(DRIVER)
            ready = read_line(driver)
            assert ready is not None
            found["attach_s"] = round(ready["attach_s"], 2)
            found["call_ms"] = round(1e3 * statistics.median(ready["calls_s"]), 2)
            found["stranger_runs_code_over_tcp"] = read_line(plain.start(DRIVER)) is not None
            os.kill(ready["pid"], signal.SIGKILL)
            time.sleep(5)
            found["call_after_loss_of_the_actor"] = call(driver, 30)
            driver.kill()

            driver = plain.start(DRIVER)
            ready = read_line(driver)
            assert ready is not None
            driver.kill()
            found["actor_outlives_driver_s"] = seconds_until_gone(ready["pid"])

            driver = plain.start(DRIVER)
            assert read_line(driver) is not None
            host.kill()
            found["call_after_loss_of_the_host"] = call(driver, LIMIT_S)
            driver.kill()
        run, stranger = certificates(folder)
        with running_host(encrypted := Scripts(python, folder, run)):
            driver = encrypted.start(DRIVER)
            found["member_runs_code_over_tls"] = read_line(driver) is not None
            other = dict(zip(("CERT", "KEY", "CA"), map(str, stranger), strict=True))
            env = {f"HYPERACTOR_TLS_{key}": value for key, value in other.items()}
            found["stranger_runs_code_over_tls"] = (
                read_line(encrypted.start(DRIVER, **env)) is not None
            )
            driver.kill()
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1]), indent=2))
