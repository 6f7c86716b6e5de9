"""Like servers of one engine: asked as one, each replaced by itself when it dies."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlinf.engines.process import Gone, ServerError, ServerProcess
from rlinf.engines.routing import Router

log = logging.getLogger(__name__)


class Replicas:
    """Some servers under the same weights.

    Weights, starts and ends are one thread's affair; :meth:`ask` may be called in any.
    """

    def __init__(
        self,
        count: int,
        imbalance: int,
        begin: Callable[[int], ServerProcess],
        ready: Callable[[ServerProcess], None],
    ) -> None:
        """
        Args:
            imbalance: see :class:`rlinf.engines.routing.Router`.
            begin: starts the server of a number.
            ready: waits until it is up; raises ServerError.
        """
        self.router = Router(count, imbalance)
        self._begin, self._ready = begin, ready
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
    def up(self) -> list[ServerProcess]:
        """Those that are asked, by number."""
        with self._lock:
            return [self._up[number] for number in sorted(self._up)]

    def ask(
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
                raise Gone("no server is up")
            number = self.router.take(tokens, self._up.keys())
            process = self._up[number]
        held: Sequence[int] = ()
        try:
            answer = process.post(route, body, watched=True)
            held = [*tokens, *read(answer)]
            return answer
        except Gone:
            with self._lock:
                # A later one under this number has nothing to do with it.
                if self._up.get(number) is process:
                    self._dead[number] = self._last = self._up.pop(number)
            raise
        finally:
            self.router.done(number, held)

    def each(self, work: Callable[[ServerProcess], None]) -> None:
        """Do something with those that are up; one that dies of it is left to :meth:`revive`."""
        for process in self.up:
            with contextlib.suppress(Gone):
                work(process)

    def start(self, update: Callable[[ServerProcess], None] | None = None) -> None:
        """Have all of them up, side by side.

        Args:
            update: what is done with those that are up already; one that dies of it is started
                again. None: all are started anew.

        Raises:
            ServerError: one did not come up; none is then.
        """
        self.settle()
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
                except Gone:
                    process.close()
            self._bring_up(number)

        try:
            with ThreadPoolExecutor(self._count, "replica") as pool:
                list(pool.map(serve, range(self._count)))
        except BaseException:
            self.close()
            raise

    def revive(self) -> None:
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
        while not self.up:
            with self._lock:
                threads = list(self._starting.values())
            if not threads:
                raise self._failed or ServerError("no server is up")
            threads[0].join()

    def settle(self) -> None:
        """Wait for those that are being started."""
        while True:
            with self._lock:
                threads = list(self._starting.values())
            if not threads:
                return
            threads[0].join()

    def tail(self) -> str:
        """The end of the log of the one that died last."""
        if self._last is None:
            return ""
        return self._last.tail()

    def close(self) -> None:
        """End all of them; again does no harm."""
        with self._lock:
            coming = list(self._coming.values())
        for process in coming:
            process.close()  # a thread that waits for it hears that it ended
        self.settle()
        self._bury()
        for process in self.up:
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
