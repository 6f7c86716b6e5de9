"""Threads that serve others: one that fails ends its process at once, with the cause.

Whoever waits for such a thread would wait in silence for ever, here or in another process; a
process that ended is noticed, named and replaced.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlinf.errors import to_resource_error

log = logging.getLogger("rlinf")


def start_service_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run ``work`` in a thread of its own, which does not keep the process alive.

    When it raises, the process ends with exit code 1, or that of ``to_resource_error``.
    """

    def run() -> None:
        try:
            work()
        except BaseException as error:
            if not sys.is_finalizing():
                exit_process(name, error)
            raise

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def exit_process(name: str, error: BaseException) -> None:
    """Say why and end, whatever the other threads are doing."""
    exhausted = to_resource_error(error)
    if exhausted is None:
        log.critical("the thread %r failed, so this process ends", name, exc_info=error)
    print(f"error: {exhausted or f'{name}: {error!r}'}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1 if exhausted is None else exhausted.exit_code)


class BackgroundWorker:
    """Does one piece of work after another in a thread of its own.

    Args:
        name: of the thread.
        expected: what may go wrong in the work; it is logged, and those who wait for a result take
            it elsewhere. Anything else is a fault of the program and ends the process.
    """

    def __init__(self, name: str, expected: tuple[type[Exception], ...]) -> None:
        self._name, self._expected = name, expected
        self._thread = ThreadPoolExecutor(1, name)

    def submit(self, what: str, work: Callable[..., None], *arguments: Any) -> None:
        """Have something done; returns at once. After :meth:`close` nothing is.

        Args:
            what: for the log, when it fails.
        """
        with contextlib.suppress(RuntimeError):  # closed
            self._thread.submit(self._do, what, work, *arguments)

    def close(self, *, wait: bool = True) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=wait, cancel_futures=True)

    def _do(self, what: str, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except self._expected as error:
            log.warning("%s: %s; it is read from disk instead", what, error)
        except BaseException as error:
            if not sys.is_finalizing():
                exit_process(f"{self._name}: {what}", error)


class MalformedCounter:
    """Counts messages of a kind that were dropped; the log tells of the first one.

    Args:
        what: the end that received them, for the log.
    """

    def __init__(self, what: str) -> None:
        self.count = 0
        self._what = what

    def count_dropped(self, error: BaseException) -> None:
        self.count += 1
        if self.count == 1:
            log.warning(
                "%s: dropped a message that makes no sense (%r); further ones are only counted: a "
                "process of this run is broken or of another version",
                self._what,
                error,
            )
