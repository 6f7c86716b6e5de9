"""A server process of an engine: started, asked over a socket of its own, ended with its group.

It takes requests at a socket of the file system, in a private folder, where no other user of the
node reaches it: a port would be open to all, with a guard that covers some of a server's routes.
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
LIVENESS_INTERVAL_S = 10.0
"""Without an answer after which it is asked whether it is alive, and then again and again."""
LIVENESS_TIMEOUT_S = 30.0
"""The longest that such a question waits. SGLang takes 20 s to say no."""
LOG_TAIL_LINES = 15
log = logging.getLogger(__name__)


class ServerError(RlinfError):
    """A server did not come up, or died again and again; the end of its log is in the message."""


class ServerUnavailable(Exception):
    """A request was not answered: the server, or its engine, is not there any more."""


class _Local(http.client.HTTPConnection):
    """HTTP over a Unix domain socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class ServerProcess:
    """One start of a server; methods may be called from several threads."""

    def __init__(
        self,
        python: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        socket_path: Path,
        log: Path,
        timeout_s: float,
        heartbeat_route: str = "/health",
        heartbeat_timeout_s: float = math.inf,
    ) -> None:
        """
        Args:
            python: its interpreter.
            module: what is run, with its ``arguments``.
            variables: of its environment, besides those of this process.
            address: the socket where it will listen.
            log: where what it prints is added.
            timeout_s: for one answer.
            pulse: the route that answers while it is alive.
            heartbeat_timeout_s: one that is watched, and says nothing for so long, is ended.
        """
        self._address, self._log, self._timeout_s = socket_path, log, timeout_s
        self._pulse, self._silent_s = heartbeat_route, heartbeat_timeout_s
        self._watching = threading.Lock()
        self._heard, self._silent = time.monotonic(), math.inf
        """When it answered last, and since when it did not when it was asked."""
        self._own = threading.local()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._begin = log.stat().st_size if log.exists() else 0
        reading, self._pipe = os.pipe()
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with log.open("ab") as stream:
            try:
                self._process = subprocess.Popen(
                    [python, str(Path(server_launcher.__file__)), str(reading), module, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    pass_fds=[reading],
                    start_new_session=True,
                    env={**inherited, **process_tuning.child_environment(), **environment},
                )
            finally:
                os.close(reading)
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self._process, self._pipe)

    def wait_ready(self, route: str, deadline_s: float) -> None:
        """Until a route answers.

        Raises:
            ServerError: it ended, or did not answer by the deadline; with the end of its log.
        """
        until = time.monotonic() + deadline_s
        while True:
            if not self.is_alive:
                self._fail(f"ended with exit code {self._process.returncode} before it was up")
            with contextlib.suppress(ServerUnavailable):
                self.get(route, min(LIVENESS_TIMEOUT_S, max(POLL_S, until - time.monotonic())))
                return
            if time.monotonic() > until:
                self.close()
                self._fail(f"did not answer within {deadline_s:g} s")
            time.sleep(POLL_S)

    @property
    def is_alive(self) -> bool:
        """Whether its first process runs."""
        return self._process.poll() is None

    def get(self, route: str, timeout_s: float | None = None) -> Any:
        """What a route answers; raises as :meth:`post`.

        Args:
            timeout_s: asked apart from all else, for so long; None: as ever.
        """
        if timeout_s is None:
            return self._ask("GET", route, None, watched=False)
        connection = _Local(self._address, timeout_s)
        try:
            connection.request("GET", route)
            response = connection.getresponse()
            return _said(route, response.status, response.read())
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnavailable(f"{route}: {error or type(error).__name__}") from None
        finally:
            connection.close()

    def post(self, route: str, body: Any = None, *, check_heartbeat: bool = False) -> Any:
        """What a route answers to a JSON body.

        Args:
            watched: while it waits, one that has become silent is ended.

        Raises:
            DataError: it refused the request.
            Gone: no answer came.
        """
        return self._ask("POST", route, body, watched=check_heartbeat)

    def close(self) -> None:
        """Kill it with its group; again does no harm."""
        self._end()

    def log_tail(self) -> str:
        """The last lines of its log."""
        with self._log.open("rb") as file:
            file.seek(self._begin)
            lines = file.read().decode(errors="replace").splitlines()
        # A crash is often told before a long farewell.
        first = next((i for i, line in enumerate(lines) if "Traceback" in line), None)
        last = lines[-LOG_TAIL_LINES:]
        causes = [] if first is None else [x for x in lines[first:-LOG_TAIL_LINES] if "Error:" in x]
        return "\n".join([*causes[-3:], *last])

    def _fail(self, what: str) -> None:
        raise ServerError(f"the server {what}; the end of its log {self._log}:\n{self.log_tail()}")

    def _ask(self, method: str, route: str, body: Any, *, watched: bool) -> Any:
        headers = {"Content-Type": "application/json"}
        text = None if body is None else json.dumps(body)
        connection, used = getattr(self._own, "connection", None), True
        if connection is None:
            connection, used = _Local(self._address, self._timeout_s), False
            self._own.connection = connection
        while True:
            try:
                connection.request(method, route, text, headers)
                if watched:
                    self._await(connection.sock)
                response = connection.getresponse()
                answer = response.read()
                break
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                # A server ends connections that were idle for a while; one that is dead takes none.
                if not used or isinstance(error, TimeoutError):
                    raise ServerUnavailable(f"{route}: {error or type(error).__name__}") from None
                used = False
        self._heard, self._silent = time.monotonic(), math.inf
        return _said(route, response.status, answer)

    def _await(self, connection: socket.socket) -> None:
        """Wait until an answer begins.

        Raises:
            TimeoutError: none came.
        """
        ready, until = select.poll(), time.monotonic() + self._timeout_s
        ready.register(connection, select.POLLIN)
        while not ready.poll(1000 * min(LIVENESS_INTERVAL_S, self._timeout_s)):
            if time.monotonic() > until:
                raise TimeoutError(f"no answer within {self._timeout_s:g} s")
            self._watch()

    def _watch(self) -> None:
        """Ask whether it is alive, once for all who wait. They hear it if it is ended."""
        if not self._watching.acquire(blocking=False):
            return
        try:
            began = time.monotonic()
            if began - self._heard < LIVENESS_INTERVAL_S:
                return
            try:
                self.get(self._pulse, min(LIVENESS_TIMEOUT_S, self._silent_s))
            except ServerUnavailable:
                self._silent = min(self._silent, began)
            else:
                self._heard, self._silent = time.monotonic(), math.inf
            if time.monotonic() - self._silent >= self._silent_s and self.is_alive:
                log.warning("a server has said nothing for %g s, and is ended", self._silent_s)
                self.close()
        finally:
            self._watching.release()


def _said(route: str, status: int, answer: bytes) -> Any:
    """What an answer says; raises as :meth:`ServerProcess.post`."""
    if status >= 500:
        raise ServerUnavailable(f"{route}: {status} {answer[:300].decode(errors='replace')}")
    if status >= 400:
        said = answer[:1000].decode(errors="replace")
        raise DataError(f"the server refuses {route} ({status}): {said}")
    try:
        return json.loads(answer) if answer.strip() else None
    except ValueError:
        return answer.decode(errors="replace")


def _end(process: subprocess.Popen[bytes], pipe: int) -> None:
    """Kill a server's whole group: its first process may be gone while others are there."""
    server_launcher.kill_group(process.pid)
    process.wait()
    os.close(pipe)
