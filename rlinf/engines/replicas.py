"""Like servers of one engine: asked as one, each replaced by itself when it dies."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlinf.engines.server_process import ServerError, ServerProcess, ServerUnavailable

PREFIX_BLOCK = 16
"""Tokens: prefixes are known at multiples of it, and whole."""
MIN_PREFIX_SHARE = 0.5
"""A prefix that is known counts where it is so much of a request: a system message that all have in
common would else draw everything to one server."""
MAX_PREFIXES = 1 << 18
"""Prefixes that are remembered; those that were used longest ago are forgotten."""


class PrefixRouter:
    """Loads of servers and the prefixes they hold; may be used by several threads."""

    def __init__(self, count: int, max_load_imbalance: int) -> None:
        """
        Args:
            count: of servers.
            imbalance: by how many requests the one that holds a prefix may be above the least
                loaded one.
        """
        self._lock, self._imbalance = threading.Lock(), max_load_imbalance
        self.loads = [0] * count
        """Requests under way at each."""
        self._holders: OrderedDict[int, int] = OrderedDict()

    def assign(self, tokens: Sequence[int], usable: Collection[int]) -> int:
        """The number of the server for a request, which counts as under way there.

        Args:
            tokens: what it asks to be read.
            usable: numbers of the servers that are up; at least one.
        """
        with self._lock:
            marks = list(_marks(tokens))
            least = min(usable, key=lambda number: (self.loads[number], number))
            chosen = self._holder(marks, len(tokens), usable)
            if chosen is None or self.loads[chosen] - self.loads[least] > self._imbalance:
                chosen = least
            self._remember(marks, chosen)
            self.loads[chosen] += 1
            return chosen

    def release(self, number: int, tokens: Sequence[int] = ()) -> None:
        """A request is no more under way; the server holds these tokens from now on."""
        with self._lock:
            self.loads[number] -= 1
            self._remember(list(_marks(tokens)), number)

    def forget(self, number: int | None = None) -> None:
        """A server holds nothing any more; None: none does."""
        with self._lock:
            for mark in [m for m, at in self._holders.items() if number in (None, at)]:
                del self._holders[mark]

    def _holder(
        self, marks: Sequence[tuple[int, int]], length: int, usable: Collection[int]
    ) -> int | None:
        for covered, mark in reversed(marks):
            if covered < MIN_PREFIX_SHARE * length:
                return None
            holder = self._holders.get(mark)
            if holder in usable:
                return holder
        return None

    def _remember(self, marks: Sequence[tuple[int, int]], number: int) -> None:
        for _, mark in marks:
            self._holders[mark] = number
            self._holders.move_to_end(mark)
        while len(self._holders) > MAX_PREFIXES:
            self._holders.popitem(last=False)


def _marks(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Lengths of prefixes and a hash of each, the shortest first; each has the one before in it."""
    mark = 0
    for start in range(0, len(tokens), PREFIX_BLOCK):
        block = tokens[start : start + PREFIX_BLOCK]
        mark = hash((mark, *block))
        yield start + len(block), mark


log = logging.getLogger(__name__)


class Replicas:
    """Some servers under the same weights.

    Weights, starts and ends are one thread's affair; :meth:`ask` may be called in any.
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
            imbalance: see :class:`rlinf.engines.replicas.PrefixRouter`.
            begin: starts the server of a number.
            ready: waits until it is up; raises ServerError.
        """
        self.router = PrefixRouter(count, max_load_imbalance)
        self._begin, self._ready = start_server, wait_server
        self._lock = threading.Lock()
        self._up: dict[int, ServerProcess] = {}
        self._dead: dict[int, ServerProcess] = {}
        """Those that did not answer, and have not been replaced."""
        self._coming: dict[int, ServerProcess] = {}
        """Those that are not up yet."""
        self._starting: dict[int, threading.Thread] = {}
        self._failed: ServerError | None = None
        self._last: ServerProcess | None = None
        self._count = count

    def __len__(self) -> int:
        return self._count

    @property
    def running(self) -> list[ServerProcess]:
        """Those that are asked, by number."""
        with self._lock:
            return [self._up[number] for number in sorted(self._up)]

    def request(
        self, tokens: Sequence[int], route: str, body: Any, read: Callable[[Any], Sequence[int]]
    ) -> Any:
        """What one of them answers to a request that it reads ``tokens`` for.

        Args:
            read: of an answer, the tokens that were added.

        Raises:
            Gone: it died, or none is up.
            DataError: it refused the request.
        """
        with self._lock:
            if not self._up:
                raise ServerUnavailable("no server is up")
            number = self.router.assign(tokens, self._up.keys())
            process = self._up[number]
        held: Sequence[int] = ()
        try:
            answer = process.post(route, body, check_heartbeat=True)
            held = [*tokens, *read(answer)]
            return answer
        except ServerUnavailable:
            with self._lock:
                # A later one under this number has nothing to do with it.
                if self._up.get(number) is process:
                    self._dead[number] = self._last = self._up.pop(number)
            raise
        finally:
            self.router.release(number, held)

    def for_each(self, work: Callable[[ServerProcess], None]) -> None:
        """Do something with those that are up; one that dies of it is left to :meth:`revive`."""
        for process in self.running:
            with contextlib.suppress(ServerUnavailable):
                work(process)

    def start(self, update: Callable[[ServerProcess], None] | None = None) -> None:
        """Have all of them up, side by side.

        Args:
            update: what is done with those that are up already; one that dies of it is started
                again. None: all are started anew.

        Raises:
            ServerError: one did not come up; none is then.
        """
        self.wait_ready()
        if update is None:
            self.close()
        self._bury()
        self.router.forget()

        def serve(number: int) -> None:
            process = self._up.get(number)
            if process is not None and update is not None:
                try:
                    update(process)
                    return
                except ServerUnavailable:
                    process.close()
            self._bring_up(number)

        try:
            with ThreadPoolExecutor(self._count, "replica") as pool:
                list(pool.map(serve, range(self._count)))
        except BaseException:
            self.close()
            raise

    def restart_failed(self) -> None:
        """Replace those that died: while others are up, beside them; what they took with them is to
        be asked of those.

        Raises:
            ServerError: none is up, and none comes up.
        """
        for number in self._bury():
            self.router.forget(number)
            thread = threading.Thread(
                target=self._replace, args=(number,), name=f"replica-{number}", daemon=True
            )
            with self._lock:
                self._starting[number] = thread
            thread.start()
        while not self.running:
            with self._lock:
                threads = list(self._starting.values())
            if not threads:
                raise self._failed or ServerError("no server is up")
            threads[0].join()

    def wait_ready(self) -> None:
        """Wait for those that are being started."""
        while True:
            with self._lock:
                threads = list(self._starting.values())
            if not threads:
                return
            threads[0].join()

    def log_tail(self) -> str:
        """The end of the log of the one that died last."""
        if self._last is None:
            return ""
        return self._last.log_tail()

    def close(self) -> None:
        """End all of them; again does no harm."""
        with self._lock:
            coming = list(self._coming.values())
        for process in coming:
            process.close()  # a thread that waits for it hears that it ended
        self.wait_ready()
        self._bury()
        for process in self.running:
            process.close()
        self._up.clear()
        self.router.forget()

    def _bury(self) -> list[int]:
        """End those that died, with what is left of them: whoever waits for an answer hears it."""
        with self._lock:
            dead, self._dead = self._dead, {}
        for process in dead.values():
            process.close()
        return sorted(dead)

    def _bring_up(self, number: int) -> None:
        process = self._begin(number)
        with self._lock:
            self._coming[number] = process
        try:
            self._ready(process)
            with self._lock:
                self._up[number] = process
        except BaseException:
            process.close()
            raise
        finally:
            with self._lock:
                del self._coming[number]

    def _replace(self, number: int) -> None:
        try:
            self._bring_up(number)
        except ServerError as error:
            log.warning("server %d of %d does not come up again: %s", number, self._count, error)
            self._failed = error
        except Exception as error:  # told to whoever waits for it
            self._failed = ServerError(f"server {number} was not started again: {error!r}")
            log.warning("%s", self._failed)
        finally:
            with self._lock:
                del self._starting[number]
