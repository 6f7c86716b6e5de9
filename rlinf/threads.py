"""Threads that serve others: one that fails ends its process at once, with the cause.

Whoever waits for such a thread would wait in silence for ever, here or in another process; a
process that ended is noticed, named and replaced.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

from rlinf.errors import storage_error

log = logging.getLogger("rlinf")


def serve(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run ``work`` in a thread of its own, which does not keep the process alive.

    When it raises, the process ends with exit code 1, or that of ``storage_error``.
    """

    def run() -> None:
        try:
            work()
        except BaseException as error:
            if not sys.is_finalizing():
                end_process(name, error)
            raise

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def end_process(name: str, error: BaseException) -> None:
    """Say why and end, whatever the other threads are doing."""
    exhausted = storage_error(error)
    if exhausted is None:
        log.critical("the thread %r failed, so this process ends", name, exc_info=error)
    print(f"error: {exhausted or f'{name}: {error!r}'}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1 if exhausted is None else exhausted.exit_code)


class Malformed:
    """Counts messages of a kind that were dropped; the log tells of the first one.

    Args:
        what: the end that received them, for the log.
    """

    def __init__(self, what: str) -> None:
        self.count = 0
        self._what = what

    def drop(self, error: BaseException) -> None:
        self.count += 1
        if self.count == 1:
            log.warning(
                "%s: dropped a message that makes no sense (%r); further ones are only counted: a "
                "process of this run is broken or of another version",
                self._what,
                error,
            )
