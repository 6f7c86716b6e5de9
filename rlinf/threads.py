"""Service threads: one that fails ends its process at once, with the cause.

Otherwise other threads and processes would wait for the failed thread forever. A process that ended
is noticed, reported and replaced.
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
    """Run ``work`` in a daemon thread.

    If it raises, the process ends with exit code 1, or that of
    :func:`rlinf.errors.to_resource_error`.
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
    """Log the reason and end the process at once, without waiting for other threads."""
    exhausted = to_resource_error(error)
    if exhausted is None:
        log.critical("the thread %r failed, so this process ends", name, exc_info=error)
    print(f"error: {exhausted or f'{name}: {error!r}'}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1 if exhausted is None else exhausted.exit_code)


class WakeupEvent:
    """An event that ends the wait of a ``zmq.Poller``, in which it is registered like a file."""

    def __init__(self) -> None:
        self._file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._file

    def set(self) -> None:
        """End the current wait, or the next one; any thread may call this, also after close."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._file, 1)

    def clear(self) -> None:
        """Reset the event after the wait that it ended."""
        os.eventfd_read(self._file)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self._file)


class BackgroundWorker:
    """Runs tasks one after another in its own thread.

    Args:
        name: name of the thread.
        expected: errors that a task may raise. They are logged, and consumers read the result from
            disk instead. Any other error is a bug and ends the process.
    """

    def __init__(self, name: str, expected: tuple[type[Exception], ...]) -> None:
        self._name, self._expected = name, expected
        self._thread = ThreadPoolExecutor(1, name)

    def submit(self, description: str, work: Callable[..., None], *arguments: Any) -> None:
        """Enqueue a task and return at once. After :meth:`close` tasks are ignored.

        Args:
            description: name of the task in the log if it fails.
        """
        with contextlib.suppress(RuntimeError):  # closed
            self._thread.submit(self._run, description, work, *arguments)

    def close(self, *, wait: bool = True) -> None:
        """Start no further tasks."""
        self._thread.shutdown(wait=wait, cancel_futures=True)

    def _run(self, description: str, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except self._expected as error:
            log.warning("%s: %s; it is read from disk instead", description, error)
        except BaseException as error:
            if not sys.is_finalizing():
                exit_process(f"{self._name}: {description}", error)


class MalformedCounter:
    """Counts dropped messages and logs the first one.

    Args:
        receiver: name of the receiving end, for the log.
    """

    def __init__(self, receiver: str) -> None:
        self.count = 0
        self._receiver = receiver

    def count_dropped(self, error: BaseException) -> None:
        """Count a message that was dropped because of ``error``."""
        self.count += 1
        if self.count == 1:
            log.warning(
                "%s: dropped a malformed message (%r); further ones are only counted: a process of "
                "this run is broken or has another version",
                self._receiver,
                error,
            )
