"""Warning signals and the end of the job: they set a flag, and the work decides when to stop.

Slurm sends USR2 some time before the wall-time limit or a preemption (NCCL owns USR1) and TERM at
the end. A handler does nothing else: Python runs it between bytecodes, possibly in the middle of a
write. Where the signal does not come, the clock sets the flag (:mod:`slurm.deadline`).

Python drops an interrupt that comes in a finalizer or in a callback of a weak reference, such as
its import system has: it is raised again where the flag is looked at.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from slurm.client import WARNINGS
from slurm.deadline import stop_in

SHARE = 0.75
"""Of the time until work should stop: a stage that is stopped later had the time that there was."""
log = logging.getLogger("rlinf")


class StopFlag:
    """Context manager that turns the warning signals, and the job's end coming near, into a flag.

    Outside the main thread, where Python allows no handlers, the end alone sets it.
    """

    def __init__(self) -> None:
        self._set = self._dropped = False
        self._began = 0.0
        self._stop_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def is_set(self) -> bool:
        """Whether the allocation is about to end.

        Raises:
            KeyboardInterrupt: one came and was dropped; in the main thread.
        """
        if self._dropped and threading.current_thread() is threading.main_thread():
            self._dropped = False
            raise KeyboardInterrupt
        if not self._set and self._stop_at is not None and time.monotonic() >= self._stop_at:
            self._set = True
            log.warning("this job's time is nearly up and no signal came yet: stopping")
        return self._set

    def time_is_up(self) -> bool:
        """Whether the flag is there because the job's time is nearly over, and not for a preemption
        say; a signal may come early. Only where the end is known."""
        if not self.is_set() or self._stop_at is None:
            return False
        return time.monotonic() - self._began > SHARE * (self._stop_at - self._began)

    def __enter__(self) -> StopFlag:
        left = stop_in()
        self._began = time.monotonic()
        self._stop_at = None if left is None else self._began + left

        def handle(number: int, frame: FrameType | None) -> None:
            self._set = True

        self._unraisable = sys.unraisablehook
        sys.unraisablehook = self._drop
        for number in WARNINGS:
            try:
                self._previous[number] = signal.signal(number, handle)
            except ValueError:
                break
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        sys.unraisablehook = self._unraisable

    def _drop(self, lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            self._dropped = True
        else:
            self._unraisable(lost)
