"""Replicas: identical servers of one engine, and the router that distributes requests.

A server caches the keys and values of prefixes. The samples of a group share their prompt, and the
turns of a dialogue share the earlier turns. So the router sends a request to the server that has
cached its prefix, unless that server is too busy. A server that dies is restarted while others run.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlinf.engines.server_process import ServerError, ServerProcess, ServerUnavailable
from rlinf.progress import PROGRESS

log = logging.getLogger(__name__)

PREFIX_BLOCK = 16
"""Length of a prefix: a multiple of this number of tokens, or the full request."""
MIN_PREFIX_SHARE = 0.5
"""A cached prefix matters only if it is at least this share of a request. Otherwise a common system
message would send all requests to one server."""
MAX_PREFIXES = 1 << 18
"""Number of prefixes to remember; the least recently used ones are evicted."""


class PrefixRouter:
    """Chooses a server for each request by cached prefix and load; thread-safe."""

    def __init__(self, count: int, max_load_imbalance: int) -> None:
        """
        Args:
            count: Number of servers.
            max_load_imbalance: Maximum number of requests that the server with the prefix may have
                in excess of the least loaded server.
        """
        self._lock, self._max_imbalance = threading.Lock(), max_load_imbalance
        self.loads = [0] * count
        """Number of running requests per server."""
        self._server_of_prefix: OrderedDict[int, int] = OrderedDict()
        """Server index by the hash of a prefix, least recently used first."""

    def assign(self, tokens: Sequence[int], usable: Collection[int]) -> int:
        """Choose the server for a request, add the request to its load, and return its index.

        Args:
            tokens: The context tokens of the request.
            usable: Indices of the running servers; at least one.
        """
        with self._lock:
            prefixes = list(_prefix_hashes(tokens))
            idlest = min(usable, key=lambda index: (self.loads[index], index))
            chosen = self._server_with_prefix(prefixes, len(tokens), usable)
            if chosen is None or self.loads[chosen] - self.loads[idlest] > self._max_imbalance:
                chosen = idlest
            self._remember(prefixes, chosen)
            self.loads[chosen] += 1
            return chosen

    def release(self, server: int, tokens: Sequence[int] = ()) -> None:
        """Remove a finished request from the load; the server has cached ``tokens``."""
        with self._lock:
            self.loads[server] -= 1
            self._remember(list(_prefix_hashes(tokens)), server)

    def forget(self, server: int | None = None) -> None:
        """Forget the cached prefixes of a server; None: of all servers."""
        with self._lock:
            servers = self._server_of_prefix
            for prefix in [p for p, cached_by in servers.items() if server in (None, cached_by)]:
                del servers[prefix]

    def _server_with_prefix(
        self, prefixes: Sequence[tuple[int, int]], length: int, usable: Collection[int]
    ) -> int | None:
        for prefix_length, prefix in reversed(prefixes):
            if prefix_length < MIN_PREFIX_SHARE * length:
                return None
            server = self._server_of_prefix.get(prefix)
            if server in usable:
                return server
        return None

    def _remember(self, prefixes: Sequence[tuple[int, int]], server: int) -> None:
        for _, prefix in prefixes:
            self._server_of_prefix[prefix] = server
            self._server_of_prefix.move_to_end(prefix)
        while len(self._server_of_prefix) > MAX_PREFIXES:
            self._server_of_prefix.popitem(last=False)


def _prefix_hashes(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield length and hash of each prefix, shortest first."""
    prefix = 0
    for start in range(0, len(tokens), PREFIX_BLOCK):
        block = tokens[start : start + PREFIX_BLOCK]
        prefix = hash((prefix, *block))
        yield start + len(block), prefix


class Replicas:
    """Several servers with equal weights.

    Only one thread may start, update and stop servers; :meth:`request` is thread-safe.
    """

    def __init__(
        self,
        count: int,
        max_load_imbalance: int,
        start_server: Callable[[int], ServerProcess],
        wait_server: Callable[[ServerProcess], None],
    ) -> None:
        """
        Args:
            count: Number of servers.
            max_load_imbalance: See :class:`PrefixRouter`.
            start_server: Starts the server with the given index.
            wait_server: Waits until a server is ready; raises ServerError.
        """
        self.router = PrefixRouter(count, max_load_imbalance)
        self._start_server, self._wait_server = start_server, wait_server
        self._lock = threading.Lock()
        self._running: dict[int, ServerProcess] = {}
        self._dead: dict[int, ServerProcess] = {}
        """Servers that stopped responding and whose restart has not begun."""
        self._starting: dict[int, ServerProcess] = {}
        """Servers that are not ready yet."""
        self._restart_threads: dict[int, threading.Thread] = {}
        """Threads that restart dead servers."""
        self._restart_error: ServerError | None = None
        self._last_dead: ServerProcess | None = None
        self._count = count

    def __len__(self) -> int:
        return self._count

    @property
    def running(self) -> list[ServerProcess]:
        """The running servers, by index."""
        with self._lock:
            return [self._running[index] for index in sorted(self._running)]

    def request(
        self, tokens: Sequence[int], route: str, body: Any, parse: Callable[[Any], Sequence[int]]
    ) -> Any:
        """Send a request to one of the servers and return its response.

        Args:
            tokens: The context tokens of the request, for routing.
            parse: Returns the new tokens of a response.

        Raises:
            ServerUnavailable: The server died, or no server is running.
            DataError: The server rejected the request.
        """
        with self._lock:
            if not self._running:
                raise ServerUnavailable("no server is running")
            index = self.router.assign(tokens, self._running.keys())
            process = self._running[index]
        cached: Sequence[int] = ()
        try:
            response = process.post(route, body, check_heartbeat=True)
            PROGRESS.mark()
            cached = [*tokens, *parse(response)]
            return response
        except ServerUnavailable:
            with self._lock:
                # A restarted server with this index is not marked as dead.
                if self._running.get(index) is process:
                    self._dead[index] = self._last_dead = self._running.pop(index)
            raise
        finally:
            self.router.release(index, cached)

    def for_each(self, work: Callable[[ServerProcess], None]) -> None:
        """Call a function for each running server; :meth:`restart_failed` handles dead ones."""
        for process in self.running:
            with contextlib.suppress(ServerUnavailable):
                work(process)

    def start(self, update: Callable[[ServerProcess], None] | None = None) -> None:
        """Start or update all servers concurrently.

        Args:
            update: Called for each running server; a server that dies is restarted. None: all
                servers are restarted.

        Raises:
            ServerError: A server did not start; all servers are then stopped.
        """
        self.wait_ready()
        if update is None:
            self.close()
        self._stop_dead()
        self.router.forget()

        def serve(index: int) -> None:
            process = self._running.get(index)
            if process is not None and update is not None:
                try:
                    update(process)
                    return
                except ServerUnavailable:
                    process.close()
            self._launch(index)

        try:
            with ThreadPoolExecutor(self._count, "replica") as pool:
                list(pool.map(serve, range(self._count)))
        except BaseException:
            self.close()
            raise

    def restart_failed(self) -> None:
        """Restart dead servers in the background while others run.

        The caller sends the lost requests again. If no server is running, this waits for one.

        Raises:
            ServerError: No server is running, and none starts.
        """
        for index in self._stop_dead():
            self.router.forget(index)
            thread = threading.Thread(
                target=self._restart, args=(index,), name=f"replica-{index}", daemon=True
            )
            with self._lock:
                self._restart_threads[index] = thread
            thread.start()
        while not self.running:
            with self._lock:
                threads = list(self._restart_threads.values())
            if not threads:
                raise self._restart_error or ServerError("no server is running")
            threads[0].join()

    def wait_ready(self) -> None:
        """Wait for the servers that are being restarted."""
        while True:
            with self._lock:
                threads = list(self._restart_threads.values())
            if not threads:
                return
            threads[0].join()

    def log_tail(self) -> str:
        """Return the end of the log of the server that died last."""
        if self._last_dead is None:
            return ""
        return self._last_dead.log_tail()

    def close(self) -> None:
        """Stop all servers. Idempotent."""
        with self._lock:
            starting = list(self._starting.values())
        for process in starting:
            process.close()  # ends the thread that waits for the server
        self.wait_ready()
        self._stop_dead()
        for process in self.running:
            process.close()
        self._running.clear()
        self.router.forget()

    def _stop_dead(self) -> list[int]:
        """Kill the processes of dead servers, so that requests to them fail; return the indices."""
        with self._lock:
            dead, self._dead = self._dead, {}
        for process in dead.values():
            process.close()
        return sorted(dead)

    def _launch(self, index: int) -> None:
        process = self._start_server(index)
        with self._lock:
            self._starting[index] = process
        try:
            self._wait_server(process)
            with self._lock:
                self._running[index] = process
        except BaseException:
            process.close()
            raise
        finally:
            with self._lock:
                del self._starting[index]

    def _restart(self, index: int) -> None:
        try:
            self._launch(index)
        except ServerError as error:
            log.warning("server %d of %d did not restart: %s", index, self._count, error)
            self._restart_error = error
        except Exception as error:  # restart_failed raises it in the waiting thread
            self._restart_error = ServerError(f"server {index} did not restart: {error!r}")
            log.warning("%s", self._restart_error)
        finally:
            with self._lock:
                del self._restart_threads[index]
