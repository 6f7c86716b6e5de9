"""The watchdog of stages: ends an attempt that is alive but makes no progress.

Heartbeats show that a process lives, also if its stage is in a deadlock or an endless loop. So each
attempt has a deadline from one completed step (:mod:`rlinf.progress`) to the next. The time in
which a stage waits for an input or for the device does not count.

At the deadline the stacks of all threads of all ranks are written to the log. Then the stage's
thread is interrupted, so that the attempt fails with :class:`rlinf.errors.NoProgressError` and is
retried. A thread that is blocked outside Python cannot be interrupted: then the process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rlinf.errors import EXIT_NO_PROGRESS, NoProgressError
from rlinf.progress import PROGRESS

if TYPE_CHECKING:
    from stages.rank_reports import AttemptRanks

TIMEOUT_VARIABLE = "RLINF_PROGRESS_TIMEOUT_MIN"
"""Environment variable with ``cluster.progress_timeout_min``; 0: no deadline."""
DEFAULT_TIMEOUT_MIN = 60.0
CHECK_INTERVAL_S = 5.0
"""Maximum seconds between two checks. A check counts no more time than this, because the process
may have been suspended."""
INTERRUPT_TIMEOUT_S = 20.0
"""Seconds in which an interrupted thread must leave the stage; then its process ends."""
STOP_TIMEOUT_S = 5.0
"""Seconds to wait for the end of the watchdog's thread, which may write to a slow filesystem."""
ARRIVAL_TIMEOUT_S = 1.0
"""Seconds to wait for an interrupt that is on its way; code that caught it has ended it before."""
STDERR = 2
"""The file descriptor of the log, also if ``sys.stderr`` is replaced."""
log = logging.getLogger("rlinf")


class _Interrupt(BaseException):
    """Raised in the thread of a stage without progress. User code rarely catches it."""


def timeout_from_environment() -> float:
    """Return the deadline of this process in seconds; 0: there is none."""
    return 60 * float(os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_MIN))


@contextlib.contextmanager
def watch_progress(
    name: str,
    timeout_s: float,
    is_waiting: Callable[[], bool],
    ranks: AttemptRanks | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> Iterator[None]:
    """Watch the progress of the stage that this thread runs inside the scope.

    Args:
        name: the node, such as ``rollout/3``, for messages.
        timeout_s: seconds from one step to the next; 0: no deadline.
        is_waiting: whether the stage waits for an input or the device.
        ranks: the ranks of the attempt, if there are several. The stage has made progress if one
            of them has.
        report: called with the reason before the process ends because its thread is blocked.

    Raises:
        NoProgressError: there was no progress within the deadline.
    """
    if not timeout_s:
        yield
        return
    watchdog = _Watchdog(name, timeout_s, is_waiting, ranks, report)
    has_received = False
    try:
        watchdog.start()
        yield
    except _Interrupt:
        has_received = True
        raise NoProgressError(watchdog.message) from None
    finally:
        watchdog.stop(has_received=has_received)


def write_stacks() -> None:
    """Write the stacks of all threads of this process to its log."""
    sys.stderr.flush()
    faulthandler.dump_traceback(STDERR, all_threads=True)


class _Watchdog:
    """The thread that watches one attempt; see :func:`watch_progress`."""

    def __init__(
        self,
        name: str,
        timeout_s: float,
        is_waiting: Callable[[], bool],
        ranks: AttemptRanks | None,
        report: Callable[[str], None],
    ) -> None:
        self._timeout_s, self._is_waiting = timeout_s, is_waiting
        self._ranks, self._report = ranks, report
        self._stage_thread = threading.get_ident()
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._was_sent = False
        """Whether the stage's thread was interrupted."""
        self.message = (
            f"{name}: no progress for {timeout_s / 60:.3g} min (cluster.progress_timeout_min): no "
            "token, step, micro-batch or record. The log has the stacks of all threads"
        )
        self._thread = threading.Thread(target=self._run, name=f"watchdog of {name}", daemon=True)

    def start(self) -> None:
        """Start watching."""
        PROGRESS.mark()
        if self._ranks is not None:
            self._ranks.report_progress()
        self._thread.start()

    def stop(self, *, has_received: bool) -> None:
        """Stop watching. The stage has ended, so an interrupt that is on its way has no effect.

        It must arrive. CPython 3.11 cannot take it back without a flag that stays set for ever,
        which slows all threads down and lets profilers hang.

        Args:
            has_received: whether the interrupt ended the stage.
        """
        try:
            with self._lock:
                self._stopped.set()
            deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
            while self._was_sent and not has_received and time.monotonic() < deadline:
                time.sleep(0.001)
        except _Interrupt:
            self._stopped.set()
        if self._thread.is_alive():
            # The thread refers to the stage, whose tensors must be freed at once.
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        interval_s = min(CHECK_INTERVAL_S, self._timeout_s / 4)
        idle_s, last_progress, last_check = 0.0, PROGRESS.last, time.monotonic()
        while not self._stopped.wait(interval_s):
            now, progress = time.monotonic(), PROGRESS.last
            if progress != last_progress or self._is_waiting():
                idle_s = 0.0
                if self._ranks is not None:
                    self._ranks.report_progress()
            else:
                idle_s += min(now - last_check, 2 * interval_s)
            last_progress, last_check = progress, now
            if self._ranks is not None and self._ranks.is_stalled():
                break
            if idle_s > self._timeout_s and (
                self._ranks is None or not self._ranks.has_progressed(self._timeout_s)
            ):
                break
        else:
            return
        self._end_attempt()

    def _end_attempt(self) -> None:
        log.error("%s", self.message)
        if self._ranks is None:
            write_stacks()
        else:
            self._ranks.mark_stalled()
            # The end of one rank ends the others, so all write their stacks before.
            if self._stopped.wait(2 * CHECK_INTERVAL_S):
                return
        with self._lock:
            if self._stopped.is_set():
                return
            self._was_sent = True
            _interrupt(self._stage_thread)
        if self._stopped.wait(INTERRUPT_TIMEOUT_S):
            return
        self._report(self.message)
        print(f"error: {self.message}", file=sys.stderr, flush=True)
        os._exit(EXIT_NO_PROGRESS)


def _interrupt(thread: int) -> None:
    """Raise :class:`_Interrupt` in a thread when it next executes Python code.

    See ``PyThreadState_SetAsyncExc`` of Python's C API.
    """
    error = ctypes.py_object(_Interrupt)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
