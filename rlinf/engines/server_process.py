"""A server process of an engine: start, HTTP requests over a Unix socket, heartbeat, and shutdown.

The server listens at a Unix socket in a private folder that no other user of the node can reach. A
port would be open to all users, and the servers' access keys protect only some of their routes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import math
import os
import select
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf import process_tuning
from rlinf.engines.engine_plugins import server_launcher
from rlinf.errors import DataError, RlinfError

POLL_S = 0.1
"""Interval at which a starting server is checked."""
LIVENESS_INTERVAL_S = 10.0
"""Time without a response before the server is probed, and interval between probes."""
LIVENESS_TIMEOUT_S = 30.0
"""Timeout of one probe. SGLang needs 20 s to report a failure."""
LOG_TAIL_LINES = 15
"""Number of last lines of a server's log in an error message."""
log = logging.getLogger(__name__)


class ServerError(RlinfError):
    """A server did not start or died repeatedly; the message has the end of its log."""


class ServerUnavailable(Exception):
    """A request got no response, because the server or its engine died."""


class _UnixHTTPConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class ServerProcess:
    """One server process; its methods are thread-safe."""

    def __init__(
        self,
        python: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        socket_path: Path,
        log_path: Path,
        timeout_s: float,
        heartbeat_route: str = "/health",
        heartbeat_timeout_s: float = math.inf,
    ) -> None:
        """
        Args:
            python: The interpreter.
            module: The module to run with ``arguments``.
            environment: Environment variables, in addition to those of this process.
            socket_path: The Unix socket where the server will listen.
            log_path: The log file; output is appended.
            timeout_s: Timeout of one response.
            heartbeat_route: The route that answers while the server is alive.
            heartbeat_timeout_s: A server without a heartbeat for this time is killed.
        """
        self._socket_path, self._log_path, self._timeout_s = socket_path, log_path, timeout_s
        self._heartbeat_route, self._heartbeat_timeout_s = heartbeat_route, heartbeat_timeout_s
        self._probe_lock = threading.Lock()
        self._last_response, self._first_failure = time.monotonic(), math.inf
        """Monotonic times of the last response and of the first probe that failed since then."""
        self._thread_local = threading.local()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_offset = log_path.stat().st_size if log_path.exists() else 0
        """Size of the log before the server starts, bytes."""
        launcher = str(Path(server_launcher.__file__))
        reader, self._pipe = os.pipe()  # the server exits when this process closes its end
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with log_path.open("ab") as stream:
            try:
                self._process = subprocess.Popen(
                    [python, launcher, str(reader), module, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    pass_fds=[reader],
                    start_new_session=True,
                    env={**inherited, **process_tuning.child_environment(), **environment},
                )
            finally:
                os.close(reader)
        self.pid = self._process.pid
        self._kill = weakref.finalize(self, _kill, self._process, self._pipe)

    def wait_ready(self, route: str, timeout_s: float) -> None:
        """Wait until a route answers.

        Raises:
            ServerError: The server exited or did not answer within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.is_alive:
                self._fail(f"ended with exit code {self._process.returncode} before it was ready")
            with contextlib.suppress(ServerUnavailable):
                self.get(route, min(LIVENESS_TIMEOUT_S, max(POLL_S, deadline - time.monotonic())))
                return
            if time.monotonic() > deadline:
                self.close()
                self._fail(f"did not answer within {timeout_s:g} s")
            time.sleep(POLL_S)

    @property
    def is_alive(self) -> bool:
        """Whether the main process of the server runs."""
        return self._process.poll() is None

    def get(self, route: str, timeout_s: float | None = None) -> Any:
        """Send a GET request and return the response; raises as :meth:`post`.

        Args:
            timeout_s: Timeout of a separate connection; None: use the thread's connection.
        """
        if timeout_s is None:
            return self._request("GET", route, None, check_heartbeat=False)
        connection = _UnixHTTPConnection(self._socket_path, timeout_s)
        try:
            connection.request("GET", route)
            response = connection.getresponse()
            return _parse_response(route, response.status, response.read())
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnavailable(f"{route}: {error or type(error).__name__}") from None
        finally:
            connection.close()

    def post(self, route: str, body: Any = None, *, check_heartbeat: bool = False) -> Any:
        """Send a POST request with a JSON body and return the response.

        Args:
            check_heartbeat: Kill the server if its heartbeat stops during the wait.

        Raises:
            DataError: The server rejected the request.
            ServerUnavailable: There was no response.
        """
        return self._request("POST", route, body, check_heartbeat=check_heartbeat)

    def close(self) -> None:
        """Kill the server with its process group. Idempotent."""
        self._kill()

    def log_tail(self) -> str:
        """Return the last lines of the log, after up to three earlier error lines."""
        with self._log_path.open("rb") as file:
            file.seek(self._log_offset)
            lines = file.read().decode(errors="replace").splitlines()
        # After a crash, a server often logs many lines about its shutdown.
        start = next((i for i, line in enumerate(lines) if "Traceback" in line), None)
        tail = lines[-LOG_TAIL_LINES:]
        traceback = [] if start is None else lines[start:-LOG_TAIL_LINES]
        errors = [line for line in traceback if "Error:" in line]
        return "\n".join([*errors[-3:], *tail])

    def _fail(self, problem: str) -> None:
        log_tail = self.log_tail()
        raise ServerError(f"the server {problem}; end of its log {self._log_path}:\n{log_tail}")

    def _request(self, method: str, route: str, body: Any, *, check_heartbeat: bool) -> Any:
        headers = {"Content-Type": "application/json"}
        payload = None if body is None else json.dumps(body)
        connection, is_reused = getattr(self._thread_local, "connection", None), True
        if connection is None:
            connection, is_reused = _UnixHTTPConnection(self._socket_path, self._timeout_s), False
            self._thread_local.connection = connection
        while True:
            try:
                connection.request(method, route, payload, headers)
                if check_heartbeat:
                    self._wait_response(connection.sock)
                response = connection.getresponse()
                content = response.read()
                break
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                # Servers close idle connections; a dead server accepts no new connection.
                if not is_reused or isinstance(error, TimeoutError):
                    raise ServerUnavailable(f"{route}: {error or type(error).__name__}") from None
                is_reused = False
        self._last_response, self._first_failure = time.monotonic(), math.inf
        return _parse_response(route, response.status, content)

    def _wait_response(self, connection: socket.socket) -> None:
        """Wait until a response begins.

        Raises:
            TimeoutError: There was no response in time.
        """
        poller, deadline = select.poll(), time.monotonic() + self._timeout_s
        poller.register(connection, select.POLLIN)
        while not poller.poll(1000 * min(LIVENESS_INTERVAL_S, self._timeout_s)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {self._timeout_s:g} s")
            self._probe()

    def _probe(self) -> None:
        """Probe the server, in one thread at a time, and kill it if it has no heartbeat."""
        if not self._probe_lock.acquire(blocking=False):
            return
        try:
            start = time.monotonic()
            if start - self._last_response < LIVENESS_INTERVAL_S:
                return
            try:
                self.get(self._heartbeat_route, min(LIVENESS_TIMEOUT_S, self._heartbeat_timeout_s))
            except ServerUnavailable:
                self._first_failure = min(self._first_failure, start)
            else:
                self._last_response, self._first_failure = time.monotonic(), math.inf
            if (
                time.monotonic() - self._first_failure >= self._heartbeat_timeout_s
                and self.is_alive
            ):
                log.warning(
                    "killing a server without a heartbeat for %g s", self._heartbeat_timeout_s
                )
                self.close()
        finally:
            self._probe_lock.release()


def _parse_response(route: str, status: int, content: bytes) -> Any:
    """Return the content of a response; raises as :meth:`ServerProcess.post`."""
    if status >= 500:
        raise ServerUnavailable(f"{route}: {status} {content[:300].decode(errors='replace')}")
    if status >= 400:
        reason = content[:1000].decode(errors="replace")
        raise DataError(f"the server rejects {route} ({status}): {reason}")
    try:
        return json.loads(content) if content.strip() else None
    except ValueError:
        return content.decode(errors="replace")


def _kill(process: subprocess.Popen[bytes], pipe: int) -> None:
    """Kill a server's process group, even if its main process has already exited."""
    server_launcher.kill_group(process.pid)
    process.wait()
    os.close(pipe)
